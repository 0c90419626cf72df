"""Judge a run by its files and by the processes that are left: lost samples, doubled samples, stale tokens, orphans.

In: the folder of a drained run whose trajectories.jsonl has every trained trajectory, and the newest checkpoint. The
ledger's own counts are compared with these records, sample by sample and prompt by prompt.
"""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from support.processes import command_of

from areal_rloo.config import load_config
from areal_rloo.intake.prompts import PromptStreamState
from areal_rloo.intake.saved_ledger import LedgerState
from areal_rloo.launcher.run_folder import newest_checkpoint
from areal_rloo.learner.checkpoint_folder import folder_of
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryRecord, read_trajectories

SampleId = tuple[int, int]  # group, sample


class _State(msgspec.Struct):
    """The part of a checkpoint that the verdict needs."""

    policy_version: int
    ledger: LedgerState
    stream: PromptStreamState


@dataclass(slots=True)
class Verdict:
    """Counts of damage, and a line for each kind that was found."""

    num_lost: int = 0  # samples
    num_doubled: int = 0  # samples
    num_past_bound: int = 0  # tokens
    orphans: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.num_lost or self.num_doubled or self.num_past_bound or self.orphans or self.findings)

    def __str__(self) -> str:
        return (
            f"{self.num_lost} samples lost, {self.num_doubled} samples trained twice, {self.num_past_bound} tokens "
            f"trained past the bound, {len(self.orphans)} orphans"
        )


@dataclass(slots=True)
class _Samples:
    """The samples of all records, by outcome, and the prompt of each group."""

    trained: Counter[SampleId] = field(default_factory=Counter)
    dropped: Counter[SampleId] = field(default_factory=Counter)
    stale: set[int] = field(default_factory=set)  # groups with a sample dropped for its age
    prompts: dict[int, tuple[str, int, int]] = field(default_factory=dict)  # by group: source, epoch, item


def judge(folder: Path) -> Verdict:
    """Judge the records of a drained run."""
    verdict = Verdict()
    config = load_config(str(folder / "config.yaml"))
    newest = newest_checkpoint(folder)
    if newest is None:
        verdict.findings.append("no checkpoint")
        return verdict
    encoded = (folder_of(folder) / newest / "state.msgpack").read_bytes()
    state = msgspec.msgpack.decode(encoded, type=_State)
    _judge_steps(folder, config.algorithm.max_staleness, state, verdict)
    samples = _samples(folder, config.algorithm.max_staleness, verdict)
    _judge_samples(samples, state.ledger, config.algorithm.group_size, verdict)
    for source in config.data.train_sources:
        if source.num_prompts is not None:
            _judge_prompts(samples, state, source.label, source.num_prompts, verdict)
    return verdict


def _judge_steps(folder: Path, max_staleness: int, state: _State, verdict: Verdict) -> None:
    """Check the lines of metrics.jsonl. A full disk may leave lines out, but repeats none."""
    last = 0
    for record in read_records(folder / "metrics.jsonl"):
        if not isinstance(record, TrainRecord):
            continue
        step = record.num_train_steps
        if not record.ledger.balanced:
            verdict.num_lost += abs(record.ledger.imbalance)
            verdict.findings.append(f"step {step}: the ledger is unbalanced: {record.ledger}")
        past = sum(count for staleness, count in record.staleness_tokens.items() if staleness > max_staleness)
        if past or record.staleness_max > max_staleness:
            verdict.num_past_bound += past or 1
            verdict.findings.append(f"step {step}: {past} tokens past the bound, staleness {record.staleness_max}")
        if step <= last:
            verdict.findings.append(f"metrics.jsonl: step {step} after step {last}")
        last = step
    if last > state.policy_version:
        verdict.findings.append(f"metrics.jsonl: step {last} is newer than the checkpoint {state.policy_version}")


def _samples(folder: Path, max_staleness: int, verdict: Verdict) -> _Samples:
    samples = _Samples()
    for record in read_trajectories(folder / FILE_NAME):
        samples.prompts[record.group_id] = (record.source, record.epoch, record.item_index)
        if record.part_index == 0:
            outcomes = samples.trained if record.dropped is None else samples.dropped
            outcomes[record.group_id, record.sample_index] += 1
        if record.dropped == "stale":
            samples.stale.add(record.group_id)
        past = 0 if record.dropped else _stale_tokens(record, max_staleness) - record.num_masked_tokens
        if past > 0 or (record.staleness or 0) > max_staleness:
            verdict.num_past_bound += max(1, past)
            verdict.findings.append(f"sample {record.name}: {past} tokens past the bound in the loss")
    return samples


def _stale_tokens(record: TrajectoryRecord, max_staleness: int) -> int:
    return sum(count for version, count in record.versions if record.policy_version - version > max_staleness)


def _judge_samples(samples: _Samples, ledger: LedgerState, group_size: int, verdict: Verdict) -> None:
    """Check that every admitted sample has a single place: trained, dropped, or live in the checkpoint.

    The records miss some drops: of a drain, and of more than 256 between two steps. The ledger counts these.
    """
    live = {(group.group_id, sample.sample_index) for group in ledger.groups for sample in group.samples}
    twice = sum(count - 1 for count in samples.trained.values())
    both = len(samples.trained.keys() & (samples.dropped.keys() | live))
    if twice or both:
        verdict.num_doubled += twice + both
        verdict.findings.append(f"{twice} samples trained twice, {both} trained and also dropped or live")
    admitted = {(group, index) for group in range(ledger.admitted_groups) for index in range(group_size)}
    known = samples.trained.keys() | samples.dropped.keys() | live
    missing = sorted(admitted - known)
    num_unrecorded = max(0, sum(ledger.dropped.values()) - len(samples.dropped))
    if len(missing) > num_unrecorded:
        verdict.num_lost += len(missing) - num_unrecorded
        verdict.findings.append(f"samples without an outcome: {missing[:8]}, drops without a record: {num_unrecorded}")
    if strangers := sorted(known - admitted):
        verdict.findings.append(f"samples that were never admitted: {strangers[:8]}")
    num_trained = len(samples.trained)
    if num_trained != ledger.trained or ledger.admitted != len(admitted):
        verdict.findings.append(
            f"the ledger has {ledger.trained} samples trained and {ledger.admitted} admitted, the records have "
            f"{num_trained} and {len(admitted)}"
        )


def _judge_prompts(samples: _Samples, state: _State, source: str, num_prompts: int, verdict: Verdict) -> None:
    """Check that an epoch has every prompt at most once, and that no epoch before the last misses a prompt.

    The prompt of a group that is dropped whole for its age comes again, in another group.
    """
    groups = {group: place for group, place in samples.prompts.items() if place[0] == source}
    groups |= {group.group_id: (source, group.epoch, group.item_index) for group in state.ledger.groups}
    used = {group.group_id for group in state.ledger.groups} | {group for group, _ in samples.trained}
    num_groups = Counter(place for group, place in groups.items() if group in used or group not in samples.stale)
    if twice := [place for place, count in num_groups.items() if count > 1]:
        verdict.num_doubled += len(twice)
        verdict.findings.append(f"prompts of several groups: {twice[:8]}")
    last = max((epoch for _, epoch, _ in num_groups), default=0)
    expected = {(source, epoch, item) for epoch in range(last) for item in range(num_prompts)}
    num_unrecorded = state.ledger.admitted_groups - len(groups)
    missing = sorted(expected - num_groups.keys() - {(source, *place) for place in state.stream.returned})
    if len(missing) > num_unrecorded:
        verdict.num_lost += len(missing) - num_unrecorded
        verdict.findings.append(f"prompts skipped: {missing[:8]}")


def left_processes(known: Collection[int], among: Iterable[psutil.Process] | None = None) -> list[str]:
    """List the processes beside the known ones; a zombie is left to its parent."""
    commands = {p.pid: command_of(p) for p in (psutil.process_iter() if among is None else among) if p.pid not in known}
    return [f"process {pid}: {' '.join(command)[:120]}" for pid, command in commands.items() if command]


def left_files(run_folder: Path, memory: Iterable[Path]) -> list[str]:
    """List what a run must not leave: files in folders for memory and scratch, half-written files, and sockets.

    torch keeps a folder for compiled code among the files of the user.
    """
    left = [path for folder in memory for path in folder.iterdir() if not path.name.startswith("torchinductor_")]
    return [f"file {path}" for path in (*left, *_unfinished(run_folder))]


def _unfinished(run_folder: Path) -> Iterator[Path]:
    for path in run_folder.rglob("*"):
        hidden = path.name.startswith((".unfinished-", ".replaced-", ".removed-")) or path.name.endswith(".unfinished")
        if hidden or stat.S_ISSOCK(path.lstat().st_mode):
            yield path
