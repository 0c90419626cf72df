"""The next batch is prepared during a step: with the same results to the bit, and only if exactly this batch comes."""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.one_rank import one_rank
from support.train_steps import VERSION, another_policy, ragged_groups, step_config

from areal_rloo.decoding import from_json
from areal_rloo.learner.ahead import Ahead
from areal_rloo.learner.train_step import Prepared, StepResult, TrainStep
from areal_rloo.telemetry.trace import FOLDER_NAME, Beginning, Span, traced
from areal_rloo.trajectory import Group

PATIENCE_S = 60.0
NUM_STEPS = 4
OPTIONS = {
    "rloo": [],
    "returns_of_tokens": ["algorithm.preset=reinforce_plus_plus", "algorithm.kl.coefficient=0"],
    "minibatches": ["learner.num_minibatches=3", "learner.microbatch_tokens=128"],
}
OWN_NORM = "def norm(rewards, group_ids, num_tokens):\n    return rewards - rewards.mean()\n"
Batches = dict[int, list[Group]]
Upcoming = Callable[[int], Sequence[Group] | None]


def _batches() -> Batches:
    """A batch for each version from VERSION on."""
    return {VERSION + seed: ragged_groups(seed) for seed in range(NUM_STEPS)}


def _train_step(folder: Path, *options: str, **parts: Any) -> TrainStep:
    return one_rank(folder, step_config("learner.optimizer.learning_rate=1e-3", *options), **parts)


def _outcome(step: TrainStep, result: StepResult) -> tuple[str, list[bytes]]:
    """All numbers of a step, and the bytes of the weights afterwards."""
    return repr(dict(result.numbers)), [p.detach().numpy().tobytes() for p in step.team.own.policy.parameters()]


def _plain(folder: Path, batches: Batches, *options: str) -> list[tuple[str, list[bytes]]]:
    step = _train_step(folder, *options)
    return [_outcome(step, step.step(batch, policy_version=version)) for version, batch in batches.items()]


class _Noted(TrainStep):
    """Notes which versions it prepares on which thread. A step waits for the preparation of the next, if told to."""

    waits = False

    def __init__(self, step: TrainStep) -> None:
        self.__dict__.update(step.__dict__)
        self.here: list[int] = []
        self.elsewhere: list[int] = []
        self._thread, self._ended = threading.current_thread(), threading.Semaphore(0)

    def prepare(self, groups: Sequence[Group], *, policy_version: int, track: str = "training") -> Prepared:
        is_here = threading.current_thread() is self._thread
        (self.here if is_here else self.elsewhere).append(policy_version)
        try:
            return super().prepare(groups, policy_version=policy_version, track=track)
        finally:
            if not is_here:
                self._ended.release()

    def train(self, prepared: Prepared, *, started_s: float) -> StepResult:
        if self.waits:
            assert self._ended.acquire(timeout=PATIENCE_S)
        return super().train(prepared, started_s=started_s)


@contextmanager
def _ahead(step: TrainStep, upcoming: Upcoming) -> Iterator[tuple[_Noted, Ahead]]:
    noted = _Noted(step)
    ahead = Ahead(noted, upcoming)
    yield noted, ahead
    ahead.close()


def _run(noted: _Noted, ahead: Ahead, batches: Batches, *, waits: bool) -> list[tuple[str, list[bytes]]]:
    outcomes = []
    for version, batch in batches.items():
        last = version == max(batches)
        noted.waits = waits and not last
        outcomes.append(_outcome(noted, ahead.step(batch, policy_version=version, last=last)))
    return outcomes


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_batches_prepared_ahead_are_the_same_to_the_bit(tiny_folders: dict[str, Path], name: str) -> None:
    folder, batches = tiny_folders["qwen2"], _batches()
    with _ahead(_train_step(folder, *OPTIONS[name]), batches.get) as (noted, ahead):
        outcomes = _run(noted, ahead, batches, waits=True)
    assert outcomes == _plain(folder, batches, *OPTIONS[name])
    assert noted.here == [VERSION]
    assert noted.elsewhere == [VERSION + 1, VERSION + 2, VERSION + 3]


def _copied(batch: list[Group]) -> list[Group]:
    made = [tuple(msgspec.structs.replace(t, reward=t.reward + 1) for t in group.trajectories) for group in batch]
    return [msgspec.structs.replace(group, trajectories=each) for group, each in zip(batch, made, strict=True)]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda batch: batch[::-1], id="another_order"),
        pytest.param(lambda batch: batch[1:], id="fewer_groups"),
        pytest.param(_copied, id="other_trajectories"),
    ],
)
def test_what_was_prepared_for_another_batch_is_thrown_away(
    tiny_folders: dict[str, Path], wrong: Callable[[list[Group]], list[Group]]
) -> None:
    folder, batches = tiny_folders["qwen2"], _batches()
    with _ahead(_train_step(folder), lambda version: wrong(batches[version])) as (noted, ahead):
        outcomes = _run(noted, ahead, batches, waits=True)
    assert outcomes == _plain(folder, batches)
    assert noted.here == list(batches)
    assert noted.elsewhere == list(batches)[1:]


def test_a_step_that_repeats_its_version_is_prepared_anew(tiny_folders: dict[str, Path]) -> None:
    """After a step that was not finite, the next batch is trained at the same version."""
    folder, batches = tiny_folders["qwen2"], _batches()
    first, second, *_ = batches.values()
    expected = _train_step(folder)
    outcomes = [_outcome(expected, expected.step(batch, policy_version=VERSION)) for batch in (first, second)]
    with _ahead(_train_step(folder), lambda _: second) as (noted, ahead):
        noted.waits = True
        found = [_outcome(noted, ahead.step(b, policy_version=VERSION, last=False)) for b in (first, second)]
    assert found == outcomes
    assert noted.here == [VERSION, VERSION]


def test_a_batch_that_completes_during_the_step_is_prepared_ahead(tiny_folders: dict[str, Path]) -> None:
    batches, looks = _batches(), itertools.count()
    with _ahead(
        _train_step(tiny_folders["qwen2"]), lambda version: None if next(looks) % 4 < 3 else batches[version]
    ) as (noted, ahead):
        _run(noted, ahead, batches, waits=True)
    assert noted.elsewhere == list(batches)[1:]


def test_without_a_batch_the_thread_looks_until_the_end_of_the_step_alone(tiny_folders: dict[str, Path]) -> None:
    folder, batches, looked = tiny_folders["qwen2"], _batches(), []

    def nothing(version: int) -> None:
        looked.append(version)

    with _ahead(_train_step(folder), nothing) as (noted, ahead):
        outcomes = _run(noted, ahead, batches, waits=False)
    assert outcomes == _plain(folder, batches)
    assert noted.here == list(batches) and noted.elsewhere == []
    assert sorted(set(looked)) == list(batches)[1:]


@pytest.mark.parametrize("comes", [True, False])
def test_an_error_of_the_thread_ends_the_run_only_if_the_same_batch_comes(
    tiny_folders: dict[str, Path], comes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, (first, second, *_) = tiny_folders["qwen2"], _batches().values()
    broken = [msgspec.structs.replace(group, trajectories=(None, *group.trajectories)) for group in second]
    with _ahead(_train_step(folder), lambda _: broken) as (noted, ahead):
        noted.waits = True
        ahead.step(first, policy_version=VERSION, last=False)
        noted.waits = False
        with pytest.raises(AttributeError) if comes else contextlib.nullcontext():
            ahead.step(broken if comes else second, policy_version=VERSION + 1, last=True)
        assert noted.elsewhere == noted.here[1:] == [VERSION + 1]
    assert f"version {VERSION + 1} was not prepared ahead: AttributeError" in caplog.text


def test_a_reference_and_own_functions_are_not_used_ahead(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    folder, batches = tiny_folders["qwen2"], _batches()
    (tmp_path / "own.py").write_text(OWN_NORM)
    of_user = _train_step(folder, f"algorithm.advantages={tmp_path}/own.py:norm")
    with_reference = _train_step(folder, "algorithm.kl.coefficient=0.1", reference=another_policy(folder))
    for step in (of_user, with_reference):
        looked: list[int] = []
        with _ahead(step, looked.append) as (noted, ahead):
            ahead.step(batches[VERSION], policy_version=VERSION, last=False)
        assert noted.here == [VERSION]
        assert looked == noted.elsewhere == []


def test_the_trace_has_the_work_ahead_on_a_track_of_its_own(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    batches = _batches()
    step = _train_step(tiny_folders["qwen2"])
    with traced(tmp_path, "learner", on=True), _ahead(step, batches.get) as (noted, ahead):
        _run(noted, ahead, batches, waits=True)
    lines = (tmp_path / FOLDER_NAME / "learner.jsonl").read_bytes().splitlines()
    spans = [line for line in (from_json(line, Beginning | Span) for line in lines) if isinstance(line, Span)]
    tracks = {"training": 1, "preparation": NUM_STEPS - 1}
    for name in ("reference", "packing"):
        assert Counter(each.track for each in spans if each.name == name) == tracks
