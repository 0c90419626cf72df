"""The faults of a soak. Each strikes a part of the run, and may heal later.

A fault returns a `Blow`, or None if nothing can be struck now, for example because the learner is starting.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import psutil
import zmq
from chaos import sockets
from chaos.soaked_run import HANGING_ENGINE, HEARTBEAT_TIMEOUT_S, MEMORY, NUM_WORKERS, SLOW_REWARDS, SoakedRun

from areal_rloo.launcher.run_folder import newest_checkpoint
from areal_rloo.waiting import wait_until
from areal_rloo.wire.messages import WIRE_VERSION
from areal_rloo.wire.security import load_keys

DRAIN_S = 120.0
_LARGE_DISK = "size=4g"


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault that struck. `heal` is called after `lasts_s`."""

    words: str
    lasts_s: float = 0.0
    heal: Callable[[], object] | None = None


Strike = Callable[[SoakedRun, Random], Blow | None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault.

    Attributes:
        weight: how often, relative to the others.
        alone: every other fault heals before.
    """

    name: str
    weight: int
    strike: Strike
    alone: bool = False


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _some_seconds(chance: Random) -> float:
    """Choose a time, in half of the cases longer than the heartbeat timeout."""
    return chance.uniform(0.1, 0.8) if chance.random() < 0.5 else chance.uniform(1.2, 2.5) * HEARTBEAT_TIMEOUT_S


def _named(processes: Iterable[psutil.Process]) -> str:
    return ", ".join(str(process.pid) for process in processes)


def kill_of(group: Callable[[SoakedRun], list[psutil.Process]], number: signal.Signals, how_many: int = 1) -> Strike:
    """Make a fault that sends a signal to processes of a group."""

    def strike(run: SoakedRun, chance: Random) -> Blow | None:
        found = group(run)
        if len(found) < how_many:
            return None
        victims = chance.sample(sorted(found, key=lambda process: process.pid), how_many)
        send(victims, number)
        return Blow(f"{number.name} to {_named(victims)}")

    return strike


def stop_of(group: Callable[[SoakedRun], list[psutil.Process]]) -> Strike:
    """Make a fault that stops a process for some time."""

    def strike(run: SoakedRun, chance: Random) -> Blow | None:
        found = group(run)
        if not found:
            return None
        victim = chance.choice(sorted(found, key=lambda process: process.pid))
        lasts_s = _some_seconds(chance)
        send([victim], signal.SIGSTOP)
        return Blow(f"SIGSTOP to {victim.pid}", lasts_s, lambda: send([victim], signal.SIGCONT))

    return strike


def kill_learner_and_worker(run: SoakedRun, chance: Random) -> Blow | None:
    if not run.learners() or not run.workers():
        return None
    victims = [*run.learners(), chance.choice(run.workers())]
    send(victims, signal.SIGKILL)
    return Blow(f"SIGKILL to {_named(victims)}")


def kill_launcher(run: SoakedRun, chance: Random) -> Blow | None:
    """Kill the launcher, and start it again with --resume, which needs a checkpoint."""
    if newest_checkpoint(run.folder) is None:
        return None
    pid = run.launcher.pid
    run.launcher.kill()
    run.launcher.wait()
    time.sleep(chance.uniform(0, 3))
    run.start(resume=True)
    return Blow(f"SIGKILL to {pid}, then --resume")


def drain_by(group: Callable[[SoakedRun], list[psutil.Process]]) -> Strike:
    """Make a fault that drains the run by a SIGTERM to a process of a group, and resumes the run.

    A learner that has no handler of signals yet dies, and the launcher starts another.
    """

    def strike(run: SoakedRun, chance: Random) -> Blow | None:
        victims = group(run) if _is_ready(run) else []
        if not victims:
            return None
        before = {process.pid for process in run.learners()}
        send(victims, signal.SIGTERM)
        wait_until(
            lambda: run.launcher.poll() is not None or bool({process.pid for process in run.learners()} - before),
            timeout_s=DRAIN_S,
            look_every_s=0.1,
        )
        code = run.launcher.poll()
        if code is None:
            return Blow(f"SIGTERM to {_named(victims)}")
        if code:
            raise RuntimeError(f"a drain by SIGTERM to {_named(victims)} ended with code {code}")
        run.start(resume=True)
        return Blow(f"SIGTERM to {_named(victims)}, then --resume")

    return strike


def slow_rewards(run: SoakedRun, chance: Random) -> Blow | None:
    mark = run.work / SLOW_REWARDS
    mark.touch()
    return Blow("every reward takes up to a second", chance.uniform(3, 10), lambda: mark.unlink(missing_ok=True))


def hang_engine(run: SoakedRun, chance: Random) -> Blow | None:
    """Let the engine of a worker hang with all requests; the worker's watchdog must end the worker."""
    mark = run.work / HANGING_ENGINE
    if not run.workers() or mark.exists():
        return None
    mark.touch()
    return Blow("the next step of an engine never returns")


def _of_wire(run: SoakedRun, chance: Random) -> list[socket.socket]:
    """Borrow both ends of the connection of a worker, in random order."""
    port, workers, learners = run.port(), run.workers(), run.learners()
    if port is None or not workers or not learners:
        return []
    ours = sockets.connections(chance.choice(workers).pid, port)
    names = {end.getsockname() for end in ours}
    theirs = [end for end in sockets.connections(learners[0].pid, port) if end.getpeername() in names]
    ends = [*ours, *theirs]
    chance.shuffle(ends)
    return ends


def cut_connection(run: SoakedRun, chance: Random) -> Blow | None:
    ends = _of_wire(run, chance)
    for end in ends[:1]:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    return Blow("the connection of a worker is reset") if ends else None


def silence_connection(run: SoakedRun, chance: Random) -> Blow | None:
    """Let packets of a worker, or of the learner to the worker, or of both, disappear."""
    ends = _of_wire(run, chance)[: chance.choice((1, 2))]
    for end in ends:
        try:
            sockets.silence(end)
        except PermissionError:  # in a namespace of a user without root's rights
            return None
    words = f"the connection of a worker is silent, {len(ends)} directions"
    return Blow(words, _some_seconds(chance), lambda: [sockets.let_through(end) for end in ends]) if ends else None


def slow_connection(run: SoakedRun, chance: Random) -> Blow | None:
    ends, rate = _of_wire(run, chance), chance.choice((3_000, 20_000, 100_000))
    for end in ends:
        sockets.slow_down(end, rate)
    words = f"the connection of a worker sends {rate} bytes/s"
    return Blow(words, chance.uniform(2, 15), lambda: [sockets.slow_down(end) for end in ends]) if ends else None


def scale(run: SoakedRun, chance: Random) -> Blow | None:
    number = chance.choice([number for number in (1, 2, 3) if number != len(run.workers())])
    run.scale(number)
    return Blow(f"--workers {number}", chance.uniform(3, 20), lambda: run.scale(NUM_WORKERS))


def garbage(run: SoakedRun, chance: Random) -> Blow | None:
    """Send random bytes to the port, some of them after the greeting of ZeroMQ."""
    port = run.port()
    if port is None:
        return None
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as peer:
        peer.sendall(chance.choice((b"", greeting)) + chance.randbytes(chance.choice((10, 1000, 100_000))))
    return Blow("random bytes to the port of the wire")


def strange_peer(run: SoakedRun, chance: Random) -> Blow | None:
    """Speak ZeroMQ, with another wire version or with frames that are no message; half of the peers have keys."""
    port = run.port()
    if port is None:
        return None
    other = msgspec.msgpack.encode((WIRE_VERSION + 1, {"type": "hello", "worker_id": "rollout-0"}))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 500
        if chance.random() < 0.5:
            keys = load_keys(run.folder / "keys", end="worker")
            peer.curve_publickey, peer.curve_secretkey = keys.public, keys.secret
            peer.curve_serverkey = keys.peer_public
        peer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(chance.choice((1, 50))):
            frames = [other] if chance.random() < 0.5 else [chance.randbytes(20) for _ in range(chance.choice((1, 5)))]
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(frames, zmq.NOBLOCK)
    return Blow("a peer of another wire version")


def full_disk(run: SoakedRun, chance: Random) -> Blow | None:
    if not _is_ready(run):
        return None
    resize(run.work / "disk", f"size={shutil.disk_usage(run.work / 'disk').used + chance.choice((0, 2_000_000))}")
    return Blow("the disk is full", chance.uniform(3, 20), lambda: free_disk(run))


def free_disk(run: SoakedRun) -> None:
    resize(run.work / "disk", _LARGE_DISK)


def full_memory(run: SoakedRun, chance: Random) -> Blow | None:
    """Fill /dev/shm, which belongs to the soak alone."""
    if not _is_ready(run):
        return None
    resize(MEMORY, f"size={max(4096, shutil.disk_usage(MEMORY).used)}")
    return Blow("/dev/shm is full", chance.uniform(3, 20), free_memory)


def free_memory() -> None:
    resize(MEMORY, _LARGE_DISK)


def resize(mount: Path, option: str) -> None:
    """Change the size of a mounted tmpfs."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(mount)], check=True)


def few_descriptors(run: SoakedRun, chance: Random) -> Blow | None:
    """Leave a process the descriptors that the process has, and a few more."""
    if not _is_ready(run):
        return None
    victim = chance.choice([*run.workers(), *run.learners(), *_launchers(run)])
    try:
        soft, hard = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
        few = max(int(name) for name in os.listdir(f"/proc/{victim.pid}/fd")) + chance.choice((1, 2, 8))  # noqa: PTH208
        resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (few, hard))
    except OSError:
        return None

    def heal() -> None:
        with contextlib.suppress(OSError):
            resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (soft, hard))

    return Blow(f"{victim.pid} has {few} descriptors", chance.uniform(2, 15), heal)


def _is_ready(run: SoakedRun) -> bool:
    """Return whether the launcher has started a learner that trains: a start on a full disk is refused, which is right.

    A learner of a killed launcher may still drain beside the next launcher.
    """
    parents = {parent.pid for learner in run.learners() for parent in _parents(learner)}
    return run.launcher.pid in parents and run.num_record_bytes() > 0


def _parents(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.parents()
    return []


def _launchers(run: SoakedRun) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(run.launcher.pid)]
    return []


def two_at_once(run: SoakedRun, chance: Random) -> Blow | None:
    """Strike with two kinds of faults at the same moment."""
    kinds = [fault for fault in _SINGLE_FAULTS if not fault.alone]
    blows = [blow for fault in chance.sample(kinds, 2) if (blow := fault.strike(run, chance)) is not None]
    heals = [blow.heal for blow in blows if blow.heal is not None]
    if not blows:
        return None
    words, lasts_s = " + ".join(blow.words for blow in blows), max(blow.lasts_s for blow in blows)
    return Blow(words, lasts_s, (lambda: [heal() for heal in heals]) if heals else None)


_SINGLE_FAULTS = (
    Fault("kill worker", 6, kill_of(SoakedRun.workers, signal.SIGKILL)),
    Fault("kill two workers", 2, kill_of(SoakedRun.workers, signal.SIGKILL, 2)),
    Fault("terminate worker", 3, kill_of(SoakedRun.workers, signal.SIGTERM)),
    Fault("stop worker", 5, stop_of(SoakedRun.workers)),
    Fault("kill learner", 3, kill_of(SoakedRun.learners, signal.SIGKILL)),
    Fault("stop learner", 3, stop_of(SoakedRun.learners)),
    Fault("kill learner and worker", 1, kill_learner_and_worker),
    Fault("stop launcher", 2, stop_of(_launchers)),
    Fault("terminate learner", 1, drain_by(SoakedRun.learners), alone=True),
    Fault("kill launcher", 1, kill_launcher, alone=True),
    Fault("terminate launcher", 1, drain_by(_launchers), alone=True),
    Fault("kill reward", 4, kill_of(SoakedRun.rewards, signal.SIGKILL)),
    Fault("stop reward", 2, stop_of(SoakedRun.rewards)),
    Fault("terminate reward", 2, kill_of(SoakedRun.rewards, signal.SIGTERM)),
    Fault("slow reward", 2, slow_rewards),
    Fault("hang engine", 1, hang_engine),
    Fault("kill keeper", 2, kill_of(SoakedRun.keepers, signal.SIGKILL)),
    Fault("stop keeper", 2, stop_of(SoakedRun.keepers)),
    Fault("cut connection", 4, cut_connection),
    Fault("silent connection", 5, silence_connection),
    Fault("slow connection", 4, slow_connection),
    Fault("scale", 2, scale),
    Fault("garbage", 2, garbage),
    Fault("strange peer", 2, strange_peer),
    Fault("full disk", 2, full_disk),
    Fault("full memory", 2, full_memory),
    Fault("few descriptors", 2, few_descriptors),
)
FAULTS = (*_SINGLE_FAULTS, Fault("two at once", 4, two_at_once))
