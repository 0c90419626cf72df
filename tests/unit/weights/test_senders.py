"""The senders of both transports, in a single process: segments and stores left behind."""

import asyncio
import contextlib
import errno
import gc
import os
import shutil
import socket
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.broadcasting import MANIFEST, tensors_of
from support.full_disk import disk_of
from support.patience import eventually

from areal_rloo.errors import WeightsError
from areal_rloo.weights import shared_memory
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.manifest import empty_buckets, gather, views
from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender

pytestmark = pytest.mark.usefixtures("no_blocked_loop")


def test_a_reader_maps_the_segments_of_a_restarted_learner(tmp_path: Path) -> None:
    """The reader maps the segments of the first learner under their names."""
    reader = SharedMemoryReader()
    for version in (1, 2):
        sender = SharedMemorySender(MANIFEST, tmp_path / "segments")
        buckets = asyncio.run(sender.stage())
        gather(MANIFEST, tensors_of(version), buckets)
        taken = reader.take(asyncio.run(sender.offer(buckets, ["w"])), MANIFEST)
        assert all(torch.equal(one, other) for one, other in zip(taken, buckets, strict=True))


def test_a_segment_given_up_is_unmapped_before_the_next_offer(tmp_path: Path) -> None:
    sender = SharedMemorySender(MANIFEST, tmp_path / "segments")

    async def give_up() -> "weakref.ref[torch.Tensor]":
        buckets = await sender.stage()
        await sender.offer(buckets, ["w"])
        sender.lost("w")
        sender.release(buckets)
        return weakref.ref(buckets[0])

    assert asyncio.run(give_up())() is None
    sender.close()


def test_a_member_lost_during_setup_leaves_no_group_of_one_rank() -> None:
    sender = CollectiveSender(MANIFEST, host="127.0.0.1", device=torch.device("cpu"), timeout_s=1.0)

    async def scenario() -> None:
        buckets = await sender.stage()
        offer = await sender.offer(buckets, ["a"])
        sender.lost("a")
        assert offer.world_size == 2
        with pytest.raises(WeightsError):
            await sender.send(buckets)

    asyncio.run(scenario())
    sender.close()


def test_a_worker_of_several_devices_has_as_many_ranks() -> None:
    sender = CollectiveSender(MANIFEST, host="127.0.0.1", device=torch.device("cpu"), timeout_s=1.0, ranks_per_worker=2)
    offer = asyncio.run(sender.offer([], ["b", "a"]))
    assert (offer.ranks, offer.world_size) == ({"a": 1, "b": 3}, 5)
    sender.close()


def test_a_failed_broadcast_closes_its_store_at_once() -> None:
    """Other ranks wait in the store until it closes; the garbage collector may come much later."""
    sender = CollectiveSender(MANIFEST, host="127.0.0.1", device=torch.device("cpu"), timeout_s=1.0)

    async def fail() -> int:
        buckets = await sender.stage()
        offer = await sender.offer(buckets, ["a"])
        with pytest.raises(WeightsError):
            await sender.send(buckets)
        return offer.port

    gc.disable()
    try:
        port = asyncio.run(fail())

        def is_closed() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                return True
            return False

        eventually(is_closed, "the store still listens")
    finally:
        gc.enable()
    sender.close()


@contextmanager
def small_memory(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory of this size."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", folder]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounts no file system")
    try:
        yield folder
    finally:
        gc.collect()  # a mapped segment keeps the file system busy
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_segment_has_all_its_memory_before_the_first_write(tmp_path: Path) -> None:
    """A write to a page that a full file system in memory cannot give is SIGBUS."""
    with small_memory(tmp_path / "memory", 4 * MANIFEST.total_bytes) as memory:
        sender = SharedMemorySender(MANIFEST, memory)
        before = shutil.disk_usage(memory).free
        buckets = asyncio.run(sender.stage())
        assert before - shutil.disk_usage(memory).free >= MANIFEST.total_bytes
        with contextlib.suppress(OSError), (memory / "of another program").open("wb") as file:
            file.write(bytes(8 * MANIFEST.total_bytes))
        gather(MANIFEST, tensors_of(1), buckets)
        del buckets
        sender.close()


def test_full_shared_memory_is_waited_for_until_freed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_memory(tmp_path / "memory", 2 * MANIFEST.total_bytes) as memory:
        sender = SharedMemorySender(MANIFEST, memory, look_every_s=0.01)
        (memory / "of another program").write_bytes(bytes(MANIFEST.total_bytes * 3 // 2))

        async def free_later() -> None:
            waiting = asyncio.create_task(sender.stage())
            while not sender.missing_bytes:  # noqa: ASYNC110 - the sender has no event
                await asyncio.sleep(0.01)
            assert not waiting.done()
            (memory / "of another program").unlink()
            await waiting

        asyncio.run(free_later())
        assert "bytes of shared memory" in caplog.text and "remove files there" in caplog.text
        assert sender.missing_bytes == 0
        sender.close()


def test_the_wait_for_shared_memory_can_be_given_up(tmp_path: Path) -> None:
    sender = SharedMemorySender(MANIFEST, tmp_path, look_every_s=0.01)
    with disk_of(1000), pytest.raises(WeightsError, match="bytes of shared memory"):
        asyncio.run(sender.stage(lambda: sender.missing_bytes > 0))
    sender.close()


def test_a_segment_that_cannot_be_mapped_is_removed_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*arguments: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(shared_memory, "_map", refuses)
    sender = SharedMemorySender(MANIFEST, tmp_path, patience_s=0.05, look_every_s=0.01)
    with pytest.raises(WeightsError, match="Cannot allocate memory"):
        asyncio.run(sender.stage())
    assert not list(sender._scratch.path.glob("segment-*"))
    sender.close()


def test_shared_memory_full_for_too_long_is_an_error(tmp_path: Path) -> None:
    sender = SharedMemorySender(MANIFEST, tmp_path, patience_s=0.05, look_every_s=0.01)
    with disk_of(1000), pytest.raises(WeightsError, match=r"needs \d+ bytes of shared memory, \d+ are free"):
        asyncio.run(sender.stage())
    assert not list(sender._scratch.path.glob("segment-*")), "a refused segment is left"
    sender.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_gathered_weights_are_whole_before_they_are_published(tmp_path: Path, pinned: bool) -> None:
    tensors = [(name, tensor.cuda()) for name, tensor in tensors_of(1)]
    sender = SharedMemorySender(MANIFEST, tmp_path)
    buckets = empty_buckets(MANIFEST, torch.device("cpu"), pinned=True) if pinned else asyncio.run(sender.stage())
    torch.cuda._sleep(10**9)  # the copies wait for this kernel
    gather(MANIFEST, [(name, tensor + 1) for name, tensor in tensors], buckets)
    assert all(bool((tensor == 2).all()) for _, tensor in views(MANIFEST, buckets))
    sender.close()
