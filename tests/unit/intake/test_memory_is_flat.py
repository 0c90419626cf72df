"""Nothing that is keyed by a sample outlives the sample, on the learner and on the worker."""

from collections import deque
from collections.abc import Iterator

import numpy as np
from support.intakes import LEARNER, make_intake, make_offers
from support.workers import make_protocol

from areal_rloo.intake.fleet import MOST_WORKERS
from areal_rloo.intake.intake import Intake
from areal_rloo.rollout.protocol import EngineState, WorkerProtocol
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.messages import Duty, Goodbye, Hello, Work
from areal_rloo.wire.peers import MOST_PEERS

SMALL = (
    "learner.groups_per_step=8",
    "algorithm.group_size=4",
    "algorithm.max_staleness=2",
    "wire.heartbeat_s=1",
    "learner.num_train_steps=1000",
)


def _trajectory(lease: wire.Lease, duty: Duty, version: int) -> Trajectory:
    tokens = np.arange(3, dtype=np.int32)
    completion = Completion(tokens, np.zeros(3, np.float32), np.full(3, version, np.int32), "stop")
    reward = float(duty.sample_index)
    return Trajectory(duty.group_id, duty.sample_index, np.array(lease.prompt_tokens, np.int32), completion, reward)


def _step(intake: Intake, worker: WorkerProtocol, version: int) -> None:
    """Train a step at this version; the worker follows every message at once."""
    engine = EngineState(version, version, wire.Work(generated_tokens=version))
    to_worker: deque[wire.LearnerMessage] = deque()
    for turn in range(1000):
        now_s = float(100 * version + turn)
        for message in worker.poll(now_s, engine):
            to_worker.extend(outgoing.message for outgoing in intake.handle("peer", message, now_s))
        while to_worker:
            for lease in worker.handle(to_worker.popleft(), engine).start:
                for duty in lease.duties:
                    worker.finish(duty, [_trajectory(lease, duty, max(version, lease.min_version))], num_bytes=100)
        to_worker.extend(outgoing.message for outgoing in intake.tick(now_s))
        if intake.take_batch() is not None:
            to_worker.extend(outgoing.message for outgoing in intake.commit(version + 1, evaluate=False))
            while to_worker:
                for lease in worker.handle(to_worker.popleft(), engine).start:
                    for duty in lease.duties:
                        worker.finish(duty, [_trajectory(lease, duty, max(version, lease.min_version))], num_bytes=100)
            return
    raise AssertionError(f"no batch at version {version}: {intake.describe(now_s)}")


def _sizes(root: object) -> dict[str, int]:
    """Return the length of every container that our objects reach, by path."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def walk(path: str, value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict | set | list | deque):
            found[path] = len(value)
        if type(value).__module__.startswith("areal_rloo.") and not isinstance(value, type):
            for name, child in _attributes(value):
                walk(f"{path}.{name}", child)

    walk(type(root).__name__, root)
    return found


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    names = {*getattr(value, "__dict__", ()), *getattr(value, "__struct_fields__", ())}
    for kind in type(value).__mro__:
        names |= {*kind.__dict__.get("__slots__", ())}
    yield from ((name, getattr(value, name)) for name in sorted(names) if hasattr(value, name))


def test_containers_are_as_long_after_5000_samples_as_after_1000() -> None:
    intake, worker = make_intake(make_offers(), *SMALL), make_protocol(capacity_samples=64)
    sizes: list[dict[str, int]] = []
    for version in range(160):
        _step(intake, worker, version)
        if version in (31, 159):
            sizes.append({**_sizes(intake), **_sizes(worker)})
    assert intake.ledger.counts().trained == 160 * 32
    assert len(sizes[0]) > 20, "the walk finds too few containers"
    grown = {path: (sizes[0][path], size) for path, size in sizes[1].items() if size > 1.5 * sizes[0].get(path, 0) + 8}
    assert grown == {}


def test_workers_that_come_and_go_without_end_are_forgotten() -> None:
    """All but their work."""
    intake = make_intake(make_offers())
    num = 3 * MOST_PEERS
    for number in range(num):
        peer, begun, ended = f"peer-{number}", Work(1.0, 10), Work(2.0, 17)
        intake.handle(peer, Hello(f"w-{number}", "1", 0, 0, None, 1, 0, (), begun), 0.0)
        intake.handle(peer, Goodbye(LEARNER, ended), 0.0)
    assert max(_sizes(intake.fleet).values()) <= MOST_PEERS + 1  # the last was alive
    assert (intake.fleet.work().idle_s, intake.fleet.work().generated_tokens) == (num, 7 * num)


def test_more_workers_than_the_limit_are_refused_and_the_others_go_on() -> None:
    """A crowd with other names keeps out no process that replaces an earlier process, and every refusal is counted."""
    intake = make_intake(make_offers())
    intake.handle("honest", Hello("honest", "1", 8, 0, None, 1, 0, (), Work()), 0.0)
    for number in range(MOST_WORKERS + 4):
        replies = intake.handle(f"peer-{number}", Hello(f"w-{number}", "1", 0, 0, None, 1, 0, (), Work()), 0.0)
    assert [type(reply.message) for reply in replies] == [wire.Refusal]
    assert len(intake.fleet.alive) == MOST_WORKERS
    assert intake.fleet.statistics(0.0).refused_workers == {"too_many": 5}
    replies = intake.handle("peer-0", Hello("w-0", "1", 0, 0, None, 2, 0, (), Work()), 1.0)
    assert isinstance(replies[0].message, wire.Welcome)
    intake.disconnected("honest", 1.0)
    replies = intake.handle("honest again", Hello("honest", "2", 8, 0, None, 1, 0, (), Work()), 1.0)
    assert [type(reply.message) for reply in [*replies, *intake.tick(1.0)]] == [wire.Welcome, wire.Leases]
    assert intake.fleet.statistics(0.0).refused_workers == {"too_many": 5}
