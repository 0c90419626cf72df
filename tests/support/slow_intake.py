"""The numbers and orders that the intake keeps up to date, computed anew from all live groups."""

from collections import Counter

from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Ledger


def differences(ledger: Ledger, buffer: Buffer, leasing: Leasing) -> list[str]:
    """Name what differs from the live groups."""
    found = []
    groups = ledger.groups.values()
    is_here = [bool(sample.trajectories) for group in groups for sample in group.samples.values()]
    counts = ledger.counts()
    if (counts.buffered, counts.in_flight) != (is_here.count(True), is_here.count(False)):
        found.append(f"{is_here.count(True)} samples are buffered, {is_here.count(False)} in flight, not {counts}")
    if (num_due := Counter(group.deadline for group in groups)) != ledger.num_due:
        found.append(f"the deadlines are {num_due}, not {ledger.num_due}")
    ready = {group.group_id for group in groups if group.complete and not group.in_training}
    if ready != (kept := {group.group_id for group in (*buffer._ready, *buffer._new)}) or len(kept) != buffer.num_ready:
        found.append(f"the groups {sorted(ready)} are ready, not {sorted(kept)}")
    waiting = {group.group_id for group in groups if group.waiting}
    if left := waiting - {group.group_id for group in leasing._queue}:
        found.append(f"the groups {sorted(left)} wait for a lease, and are in no queue")
    return found


def missed_leases(leasing: Leasing, policy_version: int, published: int) -> list[str]:
    """Name what could be leased after `grants`, by a look at all groups and all workers."""
    missed = []
    workers = leasing.fleet.alive
    room = {name for name, worker in workers.items() if worker.free_samples > 0}
    least = leasing.config.wire.max_attempts - 1
    for group in leasing.ledger.groups.values():
        samples = [group.samples[index] for index in group.waiting]
        last = {s.leases[-1].worker_id for s in samples if s.leases and 0 < least <= s.num_attempts}
        others = {name for name, worker in workers.items() if worker.gets_leases} - last
        if samples and room & (others or room):
            missed.append(f"group {group.group_id} waits, and {sorted(room & (others or room))} have room")
    algorithm, learner = leasing.config.algorithm, leasing.config.learner
    ahead = min(published + algorithm.max_staleness - policy_version, algorithm.pipeline_depth)
    num_steps = min(ahead + 1, learner.num_train_steps - policy_version)
    if room and len(leasing.ledger.groups) < num_steps * learner.groups_per_step and not leasing.stream.exhausted:
        missed.append(f"another group could be admitted, and {sorted(room)} have room")
    return missed
