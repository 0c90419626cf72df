"""A real Ray cluster of two nodes on this host, in a process of its own, so that no test process imports ray.

`ray_cluster` is a context manager: it runs this file as a child, which starts a head and a second node, prints one line
of JSON with the addresses, and then waits for its stdin to close. The test waits for that line. At the end it closes
stdin and waits for the child, which kills every process of the cluster before it ends; what outlived even that is
looked for by the session's folder, killed, and named. The nodes have addresses of their own, as two hosts would: this
host's and 127.0.0.2.
"""

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from areal_rloo.ports import ReservedPorts

STOP_TIMEOUT_S = 20
OBJECT_STORE_BYTES = 100 * 2**20
SECOND_ADDRESS = "127.0.0.2"
PR_SET_CHILD_SUBREAPER = 36
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports home, and no question about them
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a busy test host is not one out of memory
}


@dataclass(frozen=True)
class RayCluster:
    """A running cluster: `address` is for `--address`, `dashboard` (may be empty) for `ray job submit`."""

    address: str
    dashboard: str
    folder: Path  # of Ray's sessions: <folder>/ray/session_latest/logs has a log of every process
    environment: dict[str, str]
    process: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """Return the cluster's live processes: daemons, agents, workers and their children, also orphans."""
        return [child for child in self.process.children(recursive=True) if child.is_running()]


@contextlib.contextmanager
def ray_cluster(folder: Path, num_cpus: int = 4, *, dashboard: bool = False) -> Iterator[RayCluster]:
    """Start two nodes of `num_cpus` CPUs each; the cluster's output goes to `folder`/ray_cluster.log."""
    # Ray puts unix sockets deep in this folder, and the path of a socket has at most 107 bytes.
    sessions = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**inherited, **QUIET, "PATH": scripts, "RAY_TMPDIR": str(sessions)}
    log = folder / "ray_cluster.log"
    command = [sys.executable, __file__, f"--num-cpus={num_cpus}", *(["--dashboard"] if dashboard else [])]
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert line, f"the Ray cluster did not start: {log.read_text()}"
        yield RayCluster(
            **json.loads(line), folder=sessions, environment=environment, process=psutil.Process(child.pid)
        )
    finally:
        with child:  # closes its pipes, then waits
            pass
        left = _kill_what_is_left(sessions)
        shutil.rmtree(sessions, ignore_errors=True)
    assert not left, f"these outlived their Ray cluster and were killed: {left}"


def _kill_what_is_left(sessions: Path) -> list[str]:
    """Processes that have the sessions' folder in their command or environment, and what these started.

    Ray's agents and workers overwrite both with a title, so that only their parents show whose they are.
    """
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(sessions) in " ".join(process.cmdline()) or process.environ().get("RAY_TMPDIR") == str(sessions):
                for each in (*process.children(recursive=True), process):
                    left.append(f"{each.pid} {each.name()}")
                    each.kill()
    return left


def _serve(num_cpus: int, with_dashboard: bool) -> None:
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    # Ray waits for the dashboard before it starts the first node: let the nodes start meanwhile, which takes as long.
    start_api_server = Node.start_api_server
    starting: list[Future[None]] = []

    def start_in_background(node: Node, **options: Any) -> None:
        if with_dashboard:
            starting.append(executor.submit(start_api_server, node, **options))

    Node.start_api_server = start_in_background
    # Orphans become our children, so that none escapes, and none stays a zombie where process 1 does not collect them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Without shutdown_at_exit Ray does not tie its processes to the life of the thread that started them.
    cluster = Cluster(shutdown_at_exit=False)
    each: dict[str, Any] = {
        "num_cpus": num_cpus,
        "object_store_memory": OBJECT_STORE_BYTES,
        "dashboard_agent_listen_port": 0,
    }
    with ReservedPorts(1) as reserved, ThreadPoolExecutor(1) as executor:
        (dashboard_port,) = reserved.ports
        cluster.add_node(
            **each,
            no_monitor=True,  # nothing is scaled here
            include_dashboard=with_dashboard,
            dashboard_host="127.0.0.1",
            dashboard_port=dashboard_port,
        )
        cluster.add_node(**each, node_ip_address=SECOND_ADDRESS)
        for future in starting:
            future.result()
    dashboard = f"http://127.0.0.1:{dashboard_port}" if with_dashboard else ""
    print(json.dumps({"address": cluster.address, "dashboard": dashboard}), flush=True)  # noqa: T201
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        _collect()


def _collect() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_all_children() -> None:
    """Kill until no process is left, because the list of processes misses a child that is forked meanwhile."""
    ends_s = time.monotonic() + STOP_TIMEOUT_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < ends_s:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.02)
        _collect()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-cpus", type=int, required=True)
    parser.add_argument("--dashboard", action="store_true")
    arguments = parser.parse_args()
    try:
        _serve(arguments.num_cpus, arguments.dashboard)
    except BaseException:
        traceback.print_exc()  # here, since os._exit below prints nothing
        raise
    finally:
        _kill_all_children()
        os._exit(0)  # the cluster's own exit hooks would look for processes that are gone


if __name__ == "__main__":
    main()
