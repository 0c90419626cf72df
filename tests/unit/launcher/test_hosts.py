"""Ports and GPUs of several runs on a host; hosts from the config and from Slurm."""

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pynvml
import pytest
from support.nvml import MIB, play_driver

from areal_rloo.config import LauncherConfig
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.hosts import (
    ClaimedGpus,
    capped,
    described_hosts,
    host_to_show,
    list_gpus,
    real_host,
    this_host,
)
from areal_rloo.launcher.placement import Host
from areal_rloo.launcher.slurm.job import counts_per_node
from areal_rloo.ports import ReservedPorts

GPUS = Host("n", "127.0.0.1", 8, ("0", "1", "2", "3"), 2**30)


def test_a_reserved_port_is_unique_and_can_be_reused_by_the_run() -> None:
    with ReservedPorts(3) as one, ReservedPorts(3) as other:
        assert len({*one.ports, *other.ports}) == 6
        for _ in range(2):  # a learner, and the one that begins anew
            with socket.socket() as learner:
                learner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ and torch do
                learner.bind(("127.0.0.1", one.ports[0]))
                learner.listen()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", one.ports[0]))


def test_a_run_keeps_its_gpus_until_its_process_dies(tmp_path: Path) -> None:
    one, other = ClaimedGpus(tmp_path / "gpus"), ClaimedGpus(tmp_path / "gpus")
    assert one.claim(GPUS).gpu_ids == ("0", "1", "2", "3")
    one.keep(("0", "2"))
    assert other.claim(GPUS).gpu_ids == ("1", "3")
    other.close()
    killed = (
        "import os, sys; from pathlib import Path\n"
        "from areal_rloo.launcher.hosts import ClaimedGpus; from areal_rloo.launcher.placement import Host\n"
        "claimed = ClaimedGpus(Path(sys.argv[1])).claim(Host('n', '', 1, ('1', '3'))); print(claimed.gpu_ids)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-uc", killed, str(tmp_path / "gpus")], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (-9, "('1', '3')")
    assert other.claim(GPUS).gpu_ids == ("1", "3")
    one.close()
    other.close()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_gpu_locks_are_written_into_no_linked_folder(tmp_path: Path, kind: str) -> None:
    home, name = tmp_path / "home", tmp_path / "gpus"
    home.mkdir()
    if kind == "link":
        name.symlink_to(home)
    else:
        name.touch()
    with pytest.raises(PreflightError, match=f"{name}: expected a folder, for the locks of GPUs; remove this"):
        ClaimedGpus(name).claim(GPUS)
    assert not list(home.iterdir())


def test_a_run_waits_while_another_run_chooses_gpus(tmp_path: Path) -> None:
    one, other = ClaimedGpus(tmp_path / "gpus"), ClaimedGpus(tmp_path / "gpus")
    assert len(one.claim(GPUS).gpu_ids) == 4
    threading.Timer(0.2, one.keep, [("0", "1")]).start()
    assert other.claim(GPUS).gpu_ids == ("2", "3")
    one.close()
    other.close()


def test_a_host_is_capped_by_the_config() -> None:
    capped_to = capped(GPUS, LauncherConfig(cores_per_host=2, gpus_per_host=1, memory_per_host=1000))
    assert (capped_to.num_cores, capped_to.gpu_ids, capped_to.memory_bytes) == (2, ("0",), 1000)
    assert capped(GPUS, LauncherConfig()) == GPUS
    with pytest.raises(PreflightError, match=r"gpus_per_host: expected 6 GPUs on n, which has 4, 2 too few"):
        capped(GPUS, LauncherConfig(gpus_per_host=6))


def test_a_dry_run_shows_described_gpus_and_a_start_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    one = LauncherConfig(memory_per_gpu=24 * 2**30, cores_per_host=300, memory_per_host=2**50)
    shown, words = host_to_show(one)
    assert (shown.gpu_ids, shown.gpu_bytes, shown.num_cores, shown.memory_bytes) == (("0",), 24 * 2**30, 300, 2**50)
    assert re.search(
        r"GPUs described, not found: 1 of 24\.0 GiB \(26 GB\); \S+ has 0, so a start here is refused", words
    )
    with pytest.raises(PreflightError, match=r"launcher\.memory_per_gpu: expected a GPU on .*, which has none"):
        real_host(one)
    several = LauncherConfig(gpus_per_host=8)
    shown, words = host_to_show(several)
    assert (len(shown.gpu_ids), shown.num_cores) == (8, this_host(LauncherConfig()).num_cores)
    assert "8 of unknown memory (launcher.memory_per_gpu)" in words
    with pytest.raises(PreflightError, match=r"launcher\.gpus_per_host: expected 8 GPUs"):
        real_host(several)
    assert host_to_show(LauncherConfig()) == (this_host(LauncherConfig()), "")


def test_found_gpus_are_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    fewer = LauncherConfig(gpus_per_host=1, memory_per_gpu=24 * 2**30)
    assert host_to_show(fewer) == (this_host(fewer), "")
    assert real_host(fewer) == this_host(fewer)
    shown, words = host_to_show(LauncherConfig(gpus_per_host=4))
    assert (len(shown.gpu_ids), " has 2, so" in words) == (4, True)


def test_this_host_has_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert this_host(LauncherConfig()).gpu_ids == ("3", "5")
    for hidden in ("-1", "3,-1,5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert this_host(LauncherConfig()).gpu_ids == (("3",) if "3" in hidden else ()), "as CUDA reads it"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = this_host(LauncherConfig())
    assert (here.gpu_ids, here.num_cores) == ((), len(os.sched_getaffinity(0)))


def test_a_driver_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, hangs=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("areal_rloo.launcher.hosts._DRIVER_TIMEOUT_S", 0.2)
    with pytest.raises(PreflightError, match="gpus: the NVIDIA driver does not answer"):
        this_host(LauncherConfig())


def test_this_host_has_the_gpus_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, 0, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_host(LauncherConfig()).gpu_ids == ("0", "1")


def test_a_driver_before_510_lists_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, 7, 0, before_510=True)
    assert [gpu.used_bytes // MIB for gpu in list_gpus() or ()] == [7, 0]


def test_a_driver_that_is_not_loaded_means_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play_driver(monkeypatch, error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_host(LauncherConfig()).gpu_ids == ()


def test_described_hosts_follow_the_config() -> None:
    hosts = described_hosts(LauncherConfig(num_hosts=16, gpus_per_host=8, cores_per_host=96))
    assert len(hosts) == 16
    assert sum(len(host.gpu_ids) for host in hosts) == 128
    assert {host.num_cores for host in hosts} == {96}
    memory_alone = described_hosts(LauncherConfig(num_hosts=2, memory_per_gpu=80 * 2**30))
    assert [len(host.gpu_ids) for host in memory_alone] == [1, 1]


def test_no_gpu_is_described_if_the_config_says_none() -> None:
    none = LauncherConfig(gpus_per_host=0, memory_per_gpu=80 * 2**30)
    assert host_to_show(none)[0].gpu_ids == described_hosts(none)[0].gpu_ids == ()


@pytest.mark.parametrize(
    ("written", "counts"), [("4", [4]), ("4(x2)", [4, 4]), ("8,4(x3),2", [8, 4, 4, 4, 2]), ("16(x1)", [16])]
)
def test_slurm_s_core_counts_are_parsed(written: str, counts: list[int]) -> None:
    assert counts_per_node(written) == counts
