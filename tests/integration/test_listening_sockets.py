"""All sockets that the processes of a run listen on, and all places where a key could show."""

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.local_runs import Run
from support.strangers import AGENT, processes_of, scraped

from areal_rloo.config import is_loopback

LONG = "learner.num_train_steps=10000"
IPV6 = ("wire.host=::1", "weights.transport=collective") if socket.has_dualstack_ipv6() else ()
TWO_RANKS = ("learner.num_ranks=2", "weights.transport=collective")


def _listening(run: Run) -> Iterator[tuple[str, str, int]]:
    """Yield the process, the host and the port of each TCP socket that listens, and of each bound UDP socket."""
    for process in processes_of(run.process.pid):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or (not connection.raddr and connection.status == "NONE"):
                yield " ".join(process.cmdline()[:4]), connection.laddr.ip, connection.laddr.port


def _socket_files(run: Run) -> set[Path]:
    paths = [
        connection.laddr for process in processes_of(run.process.pid) for connection in process.net_connections("unix")
    ]
    return {Path(str(path)) for path in paths if str(path).startswith("/")}


def _is_private(folder: Path) -> bool:
    found = folder.stat()
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _drain(run: Run) -> None:
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output


@pytest.mark.parametrize(
    ("options", "uses_tcp"),
    [((), False), ((*TWO_RANKS, "rollout.num_workers=2"), False), (("wire.transport=tcp", *IPV6), True)],
    ids=["one_rank", "two_ranks_and_collectives", "tcp_and_ipv6"],
)
def test_a_run_on_one_host_listens_on_loopback_and_private_folders(
    start: Callable[..., Run], options: tuple[str, ...], uses_tcp: bool
) -> None:
    run = start(LONG, *options)
    run.wait_for(lambda: len(run.records()) >= 1)
    listening = list(_listening(run))
    assert listening, "the metrics at least"
    assert [entry for entry in listening if not is_loopback(entry[1])] == []
    files = _socket_files(run)
    assert any(path.parent.name.startswith("areal_rloo-wire-") for path in files) != uses_tcp
    assert [path for path in files if not _is_private(path.parent)] == []
    folders = {path.parent for path in files}
    _drain(run)
    assert [folder for folder in folders if folder.exists()] == [], "nothing is left behind"


# Notes the key of each session, and sends it to the endpoint like any agent.
@pytest.mark.parametrize("episode", [pytest.param("single_turn", marks=pytest.mark.rare), "agent"])
def test_the_keys_of_a_run_show_nowhere(start: Callable[..., Run], tmp_path: Path, episode: str) -> None:
    """Neither the two keys of the wire, nor those of the sessions of agents."""
    (tmp_path / "agent.py").write_text(AGENT)
    options = (f"rollout.episode.agent={tmp_path / 'agent.py'}:solve",) if episode == "agent" else ()
    run = start(LONG, "wire.transport=tcp", "telemetry.log_level=debug", f"rollout.episode.type={episode}", *options)
    run.wait_for(lambda: len(run.records()) >= 1)
    keys = [path.read_bytes() for path in (run.folder / "keys").glob("*.secret")]
    assert [len(key) for key in keys] == [40, 40]
    shown: dict[str, bytes] = {}
    for process in processes_of(run.process.pid):
        for name in ("cmdline", "environ"):
            shown[f"{name} of {process.pid}"] = Path(f"/proc/{process.pid}/{name}").read_bytes()
    for _, host, port in _listening(run):
        for name, value in scraped((host, port)).items():
            shown.setdefault(f"the metrics at {port}", b"")
            shown[f"the metrics at {port}"] += f"{name} {value}\n".encode()
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    shown["the output"] = output.encode()
    shown |= {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    shown = {where: content for where, content in shown.items() if Path(where).parent.name != "keys"}
    for name in ("config.yaml", "report.html", "logs/rollout-0.log"):
        assert str(run.folder / name) in shown
    assert any(where.startswith("the metrics at") for where in shown)
    if episode == "agent":
        of_sessions = (tmp_path / "session_keys").read_bytes().split()
        assert len(of_sessions) >= 16
        keys += of_sessions
    assert [where for where, content in shown.items() if any(key in content for key in keys)] == []


def test_a_killed_launcher_leaves_no_socket_in_the_way(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=40", "checkpoint.every_n_steps=1")
    run.wait_for_checkpoint(2)
    old = {path.parent for path in _socket_files(run) if path.parent.name.startswith("areal_rloo-wire-")}
    run.process.kill()
    run.process.wait()
    again = start("learner.num_train_steps=6", "launcher.drain_timeout_s=30", "--resume")
    code, output = again.wait()
    assert code == 0, output
    assert len(old) == 1
    assert [folder for folder in old if folder.exists()] == []
