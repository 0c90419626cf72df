"""Which groups are worth training on: by the deviation of their rewards, and by a function of the user's."""

import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_rloo.config import AlgorithmConfig, Config, LearnerConfig
from areal_rloo.errors import UserError
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.group_filter import load_group_filter
from areal_rloo.intake.ledger import Grant, Ledger
from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.queues import GroupQueue
from areal_rloo.trajectory import Completion, Group, Item, Trajectory

GROUPS_PER_STEP = 3


class _Bench:
    def __init__(
        self,
        *,
        group_filter: Callable[[Group], bool] | None = None,
        note: Callable[[Group], None] | None = None,
        **algorithm: Any,
    ) -> None:
        self.ledger = Ledger()
        self.buffer = Buffer(
            self.ledger,
            config=Config(
                algorithm=AlgorithmConfig(**algorithm), learner=LearnerConfig(groups_per_step=GROUPS_PER_STEP)
            ),
            give_back=lambda epoch, index: pytest.fail("the prompt of a group that says nothing is not tried again"),
            group_filter=group_filter,
            note=note,
        )

    def complete(self, *rewards: float) -> int:
        """Deliver a group with these rewards; return the id."""
        group = self.ledger.admit(
            Prompt(0, 0, (1,), Item("?")), group_size=len(rewards), admission_version=0, deadline=9
        )
        for index, reward in enumerate(rewards):
            completion = Completion(np.array([2]), np.array([-1.0], np.float32), np.array([0]), "stop")
            group.samples[index].lease(Grant(1, "rollout-0", 0))
            made = Trajectory(group.group_id, index, np.array([1]), completion, reward)
            self.buffer.settle(self.ledger.finish((group.group_id, index), [made]))
        return group.group_id

    def dropped(self) -> dict[str, int]:
        counts = self.ledger.counts()
        assert counts.balanced
        return counts.dropped


def test_equal_rewards_are_kept_unless_min_reward_std_is_set() -> None:
    bench = _Bench()
    kept = bench.complete(1.0, 1.0)
    assert kept in bench.ledger.groups
    assert bench.dropped() == {}


def test_groups_below_min_reward_std_are_dropped_and_replaced() -> None:
    bench = _Bench(min_reward_std=0.3)
    bench.complete(1.0, 1.0, 1.0)
    bench.complete(1.0, 0.5, 1.0)  # deviation 0.236
    kept = bench.complete(1.0, 0.0, 1.0)
    assert list(bench.ledger.groups) == [kept]
    assert bench.dropped() == {"low_reward_std": 6}
    assert bench.ledger.totals.dropped_groups == 2


def test_a_curriculum_notes_each_complete_group_once_also_a_dropped_one() -> None:
    noted: list[Group] = []
    bench = _Bench(min_reward_std=0.3, note=noted.append)
    bench.complete(1.0, 1.0)
    bench.complete(1.0, 0.0)
    assert bench.dropped() == {"low_reward_std": 2}
    assert [[sample.reward for sample in group.samples] for group in noted] == [[1.0, 1.0], [1.0, 0.0]]


def test_a_group_filter_decides_on_whole_groups() -> None:
    seen: list[Group] = []

    def keep(group: Group) -> bool:
        seen.append(group)
        return group.trajectories[0].reward > 0.5

    bench = _Bench(group_filter=keep)
    bench.complete(0.0, 1.0)
    kept = bench.complete(1.0, 0.0)
    assert list(bench.ledger.groups) == [kept]
    assert [len(group.trajectories) for group in seen] == [2, 2]
    assert bench.dropped() == {"group_filter": 2}


def test_a_raising_filter_drops_the_group_and_ends_the_run_if_persistent() -> None:
    def keep(group: Group) -> bool:
        return group.trajectories[0].reward / group.trajectories[1].reward > 0

    bench = _Bench(group_filter=keep)
    bench.complete(1.0, 0.0)
    bench.complete(1.0, 0.0)
    bench.complete(1.0, 1.0)
    bench.complete(1.0, 0.0)
    bench.complete(1.0, 0.0)
    assert bench.dropped() == {"group_filter_error": 8}
    with pytest.raises(UserError, match=r"ZeroDivisionError: .* \(.*test_buffer\.py:\d+\)"):
        bench.complete(1.0, 0.0)


@pytest.mark.parametrize("by_function", [False, True])
def test_a_run_ends_after_batches_of_refused_groups_in_place_of_one(by_function: bool) -> None:
    """A reward that never differs would make the learner wait for ever."""
    differ: Callable[[Group], bool] = lambda group: len({sample.reward for sample in group.samples}) > 1  # noqa: E731
    options = {"group_filter": differ} if by_function else {"min_reward_std": 0.1}
    bench = _Bench(**options, max_filtered_batches=2)
    for _ in range(2):
        for _ in range(5):
            bench.complete(0.0, 0.0)
        for _ in range(GROUPS_PER_STEP):
            bench.complete(0.0, 1.0)
        assert bench.buffer.take(0, is_last=lambda: False) is not None
        bench.buffer.trained()
    for _ in range(5):
        bench.complete(1.0, 1.0)
    key = "algorithm.group_filter" if by_function else "algorithm.min_reward_std=0.1"
    expected = f"{key}: 6 groups were refused since the last batch, which reaches algorithm.max_filtered_batches=2; "
    with pytest.raises(UserError, match=f"^{re.escape(expected)}"):
        bench.complete(1.0, 1.0)
    assert sum(bench.dropped().values()) == 2 * 16


def test_groups_refused_beside_a_whole_batch_end_no_run() -> None:
    """During a long train step, the workers go on: what is refused then keeps nobody waiting."""
    bench = _Bench(min_reward_std=0.1, max_filtered_batches=2)
    for _ in range(GROUPS_PER_STEP):
        bench.complete(0.0, 1.0)
    for _ in range(100):
        bench.complete(0.0, 0.0)
    assert bench.buffer.take(0, is_last=lambda: False) is not None
    with pytest.raises(UserError, match="6 groups were refused"):
        for _ in range(2 * GROUPS_PER_STEP):
            bench.complete(0.0, 0.0)


def test_without_a_limit_every_group_can_be_refused() -> None:
    bench = _Bench(min_reward_std=0.1, max_filtered_batches=0)
    for _ in range(100):
        bench.complete(0.0, 0.0)
    assert bench.dropped() == {"low_reward_std": 200}


def test_a_filter_that_exits_drops_the_group_and_later_fails_the_run() -> None:
    def keep(group: Group) -> bool:
        sys.exit(0)

    bench = _Bench(group_filter=keep)
    bench.complete(1.0, 0.0)
    bench.complete(1.0, 0.0)
    assert bench.dropped() == {"group_filter_error": 4}
    with pytest.raises(UserError, match=r"algorithm\.group_filter: SystemExit"):
        bench.complete(1.0, 0.0)


def test_a_filter_without_a_return_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "filters.py"
    path.write_text("def keep(group):\n    group.samples\n")
    bench = _Bench(group_filter=load_group_filter(f"{path}:keep"))
    bench.complete(1.0, 0.0)
    bench.complete(1.0, 0.0)
    assert bench.dropped() == {"group_filter_error": 4}
    expected = f"algorithm.group_filter: {path}:keep returned None, expected True or False ({path}:1)"
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        bench.complete(1.0, 0.0)


@pytest.mark.parametrize("policy", ["mask", "drop", "wait"])
def test_a_group_past_the_bound_is_dropped_and_its_prompt_returns(policy: str) -> None:
    given_back: list[tuple[int, int]] = []
    bench = _Bench(max_staleness=2, stale_tokens=policy)
    bench.buffer._give_back = lambda epoch, item_index: given_back.append((epoch, item_index))
    for _ in range(GROUPS_PER_STEP):
        bench.complete(1.0, 0.0)  # at version 0
    assert bench.buffer.take(10, is_last=lambda: False) is None
    assert bench.dropped() == {"stale": 2 * GROUPS_PER_STEP}
    assert given_back == [(0, 0)] * GROUPS_PER_STEP


def test_a_look_for_a_batch_that_is_not_there_sorts_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner looks 20 times a second, at any number of ready groups."""
    bench, sorted_groups = _Bench(), []
    first_of = GroupQueue.first_of
    monkeypatch.setattr(GroupQueue, "first_of", lambda *given: sorted_groups.append(0) or first_of(*given))
    for _ in range(GROUPS_PER_STEP - 1):
        bench.complete(1.0, 0.0)
        assert bench.buffer.upcoming(0) is None
    bench.complete(1.0, 0.0)
    assert bench.buffer.upcoming(10) is None, "past the deadlines"
    assert not sorted_groups
    upcoming = bench.buffer.upcoming(9)
    assert upcoming is not None and [group.trajectories[0].group_id for group in upcoming] == [0, 1, 2]
    assert len(sorted_groups) == 1


def test_a_trained_step_is_freed_group_by_group_as_others_arrive() -> None:
    bench = _Bench(group_size=4)
    for _ in range(GROUPS_PER_STEP):
        bench.complete(0.0, 1.0, 0.0, 1.0)
    batch = bench.buffer.take(0, is_last=lambda: False)
    assert batch is not None
    held = [weakref.ref(group.trajectories[0].completion.tokens) for group in batch]
    bench.buffer.trained()
    del batch
    left = []
    for _ in range(11):
        bench.buffer.free(1)
        left.append(sum(each() is not None for each in held))
    assert left == [3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0], "five samples for each four that arrive, as whole groups"
