"""The two ends of the wire over real sockets."""

import asyncio
import multiprocessing
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import zmq

from areal_rloo.errors import PreflightError
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Drain, Goodbye, Refusal, TrajectoryAck, TrajectoryBatch, Welcome
from areal_rloo.wire.security import CurveKeys, load_keys, make_keys

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

LIMITS = Limits(max_message_bytes=2**22)


def _trajectory(group_id: int, index: int = 0) -> Trajectory:
    arrays = (np.ones(4, np.int32), -np.ones(4, np.float32), np.zeros(4, np.int32))
    return Trajectory(group_id, index, np.ones(2, np.int32), Completion(*arrays, "stop"), 1.0)


def _worker(port: int, **options: object) -> WorkerChannel:
    values = {"worker_id": "w", "incarnation": "1", "limits": LIMITS, "max_unacked": 100, "keys": None, **options}
    return WorkerChannel(f"tcp://127.0.0.1:{port}", **values)  # type: ignore[arg-type]


async def _all_acknowledged(worker: WorkerChannel) -> None:
    """Wait until the learner has acknowledged everything; another task must receive meanwhile."""
    while worker.statistics().unacknowledged:  # noqa: ASYNC110 - the timeout is the scenario's
        await asyncio.sleep(0.01)


def _run(scenario: Callable[[LearnerChannel], Awaitable[None]], keys: CurveKeys | None = None) -> None:
    async def main() -> None:
        learner = LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=keys)
        try:
            async with asyncio.timeout(30):
                await scenario(learner)
        finally:
            learner.close()

    asyncio.run(main())


def test_messages_go_both_ways() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port)
        await worker.send(Goodbye("w"))
        peer, message = await learner.receive()
        assert message == Goodbye("w")
        assert learner.send(peer, Welcome("x", 3))
        assert await worker.receive() == Welcome("x", 3)
        await worker.close()

    _run(scenario)


def test_ready_trajectories_share_messages_and_acks_free_the_outbox() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port)
        receiving = asyncio.create_task(worker.receive())
        for index in range(50):
            await worker.push(_trajectory(index))
        received, num_messages = [], 0
        while len(received) < 50:
            peer, message = await learner.receive()
            assert isinstance(message, TrajectoryBatch)
            received += [t.group_id for t in message.trajectories]
            num_messages += 1
            learner.send(peer, TrajectoryAck((message.batch_id,)))
        assert received == list(range(50))
        assert num_messages < 25
        await _all_acknowledged(worker)
        assert worker.unacknowledged() == []
        receiving.cancel()
        await worker.close()

    _run(scenario)


def test_the_trajectories_of_a_sample_travel_in_the_same_message() -> None:
    """The learner receives all trajectories of the sample or none."""

    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port, max_unacked=10_000)
        receiving = asyncio.create_task(worker.receive())
        for index in range(60):
            await worker.push(*(_trajectory(index) for _ in range(1 + index % 7)))
        assert worker.unacknowledged().count((0, 0)) == 1
        counts: dict[int, int] = {}
        while len(counts) < 60:
            peer, message = await learner.receive()
            assert isinstance(message, TrajectoryBatch)
            groups = [trajectory.group_id for trajectory in message.trajectories]
            assert not counts.keys() & set(groups)
            counts |= {group: groups.count(group) for group in groups}
            learner.send(peer, TrajectoryAck((message.batch_id,)))
        assert counts == {index: 1 + index % 7 for index in range(60)}
        await _all_acknowledged(worker)
        receiving.cancel()
        await worker.close()

    _run(scenario)


def test_messages_in_flight_are_bounded_and_the_rest_is_batched() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port)
        receiving = asyncio.create_task(worker.receive())
        sizes, last = [], ("", 0)

        async def receive_one() -> None:
            nonlocal last
            peer, message = await learner.receive()
            assert isinstance(message, TrajectoryBatch)
            sizes.append(len(message.trajectories))
            last = (peer, message.batch_id)

        for index in range(16):
            await worker.push(_trajectory(index))
            await receive_one()  # so each goes alone
        for index in range(16, 40):
            await worker.push(_trajectory(index))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive_one(), 0.2)
        learner.send(last[0], TrajectoryAck((1,)))
        await receive_one()
        assert sizes == [1] * 16 + [24]
        assert len(worker.unacknowledged()) == 39
        receiving.cancel()
        await worker.close()

    _run(scenario)


def test_a_large_trajectory_is_sent_alone() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port)  # LIMITS: 4 MiB a message, so batches of 2 MiB
        num = 200_000
        arrays = (np.ones(num, np.int32), -np.ones(num, np.float32), np.zeros(num, np.int32))
        for index in range(4):
            await worker.push(Trajectory(index, 0, np.ones(2, np.int32), Completion(*arrays, "stop"), 1.0))
        for _ in range(4):
            _, message = await learner.receive()
            assert isinstance(message, TrajectoryBatch)
            assert len(message.trajectories) == 1
        await worker.close()

    _run(scenario)


def test_push_blocks_while_too_many_samples_are_unacknowledged() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port, max_unacked=3)
        receiving = asyncio.create_task(worker.receive())
        for index in range(3):
            await worker.push(_trajectory(index))
        blocked = asyncio.create_task(worker.push(_trajectory(3)))
        await asyncio.sleep(0.1)
        assert not blocked.done()
        peer, message = await learner.receive()
        assert isinstance(message, TrajectoryBatch)
        learner.send(peer, TrajectoryAck((message.batch_id,)))
        await blocked
        receiving.cancel()
        await worker.close()

    _run(scenario)


def test_a_restarted_learner_gets_all_unacknowledged_trajectories() -> None:
    async def main() -> None:
        first = LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=None)
        port = first.port
        worker = _worker(port, resend_after_s=0.5)
        receiving = asyncio.create_task(worker.receive())
        for index in range(20):
            await worker.push(_trajectory(index))
        await first.receive()
        first.close()  # nothing was acknowledged
        await asyncio.sleep(0.2)
        second = LearnerChannel.bind("127.0.0.1", port, limits=LIMITS, keys=None)
        for index in range(20, 30):
            await worker.push(_trajectory(index))
        seen: set[int] = set()
        async with asyncio.timeout(20):
            while len(seen) < 30:
                peer, message = await second.receive()
                assert isinstance(message, TrajectoryBatch)
                seen |= {t.group_id for t in message.trajectories}
                second.send(peer, TrajectoryAck((message.batch_id,)))
        await _all_acknowledged(worker)
        assert worker.statistics().resent > 0
        receiving.cancel()
        await worker.close()
        second.close()

    asyncio.run(main())


def _push_for_ever(port: int) -> None:
    async def main() -> None:
        worker = _worker(port, incarnation="killed")
        for index in range(10**9):
            await worker.push(_trajectory(index))
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_worker_killed_while_sending_leaves_whole_messages() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_push_for_ever, args=(learner.port,))
        process.start()
        await learner.receive()
        assert process.pid is not None
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        worker = _worker(learner.port, incarnation="next")
        await worker.push(_trajectory(-5))
        while True:
            _, message = await learner.receive()
            assert isinstance(message, TrajectoryBatch)
            if message.trajectories[0].group_id == -5:
                break
        assert learner.statistics().refused == 0
        await worker.close()

    _run(scenario)


def test_invalid_messages_are_counted_and_do_not_stall_other_peers() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        vandal = zmq.Context.instance().socket(zmq.DEALER)
        vandal.connect(f"tcp://127.0.0.1:{learner.port}")
        for number in range(500):
            vandal.send_multipart([bytes([number % 256]) * (number % 50), b"x"])
        worker = _worker(learner.port)
        await worker.send(Goodbye("w"))
        assert (await learner.receive())[1] == Goodbye("w")
        while learner.statistics().refused < 500:
            await asyncio.wait([asyncio.create_task(_ignored(learner))], timeout=0.05)
        assert vandal.poll(2000)
        assert b"refusal" in vandal.recv()
        vandal.close(0)
        await worker.close()

    _run(scenario)


async def _ignored(learner: LearnerChannel) -> None:
    try:
        async with asyncio.timeout(0.04):
            await learner.receive()
    except TimeoutError:
        return


def test_a_message_to_a_lost_peer_is_only_counted() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        assert not learner.send(b"nobody".hex(), Drain())
        assert learner.statistics().unroutable == 1

    _run(scenario)


def test_under_curve_the_messages_of_a_peer_without_the_key_are_lost(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")

    async def scenario(learner: LearnerChannel) -> None:
        stranger = _worker(learner.port, incarnation="plain")
        forger = _worker(learner.port, incarnation="forged", keys=_forged(tmp_path))
        worker = _worker(learner.port, keys=load_keys(tmp_path / "keys", end="worker"))
        await stranger.send(Goodbye("stranger"))
        await forger.send(Goodbye("forger"))
        await asyncio.sleep(0.3)
        await worker.send(Goodbye("w"))
        assert (await learner.receive())[1] == Goodbye("w")
        for channel in (stranger, forger, worker):
            await channel.close()

    _run(scenario, keys=load_keys(tmp_path / "keys", end="learner"))


def _forged(folder: Path) -> CurveKeys:
    """Return the right server key with a client key that the learner does not know."""
    own = load_keys(folder / "other", end="worker")
    return CurveKeys(own.public, own.secret, load_keys(folder / "keys", end="worker").peer_public)


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}
    (tmp_path / "keys" / "learner.secret").chmod(0o644)
    with pytest.raises(PreflightError, match="others can read"):
        load_keys(tmp_path / "keys", end="learner")


def test_an_open_address_without_keys_and_a_taken_port_are_refused() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        with pytest.raises(PreflightError, match="needs CURVE"):
            LearnerChannel.bind("0.0.0.0", 0, limits=LIMITS, keys=None)
        with pytest.raises(PreflightError, match=r"wire\.port: cannot bind"):
            LearnerChannel.bind("127.0.0.1", learner.port, limits=LIMITS, keys=None)

    _run(scenario)


def test_an_unreadable_message_is_answered_with_the_reason() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = _worker(learner.port)
        await worker._socket.send_multipart([b"\x92\x05\x80"])  # wire version 5
        receiving = asyncio.create_task(_ignored_for_ever(learner))
        message = await worker.receive()
        assert isinstance(message, Refusal)
        assert "wire version 5" in message.detail
        receiving.cancel()
        await worker.close()

    _run(scenario)


async def _ignored_for_ever(learner: LearnerChannel) -> None:
    while True:
        await learner.receive()
