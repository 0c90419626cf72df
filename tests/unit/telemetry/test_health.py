"""The symptoms of a run that does not learn: each is said when it begins, again after twice the time, and when over."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_rloo.config import load_config
from areal_rloo.telemetry.health import SYMPTOMS, Health
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

Make = Callable[..., TrainRecord]


def _health(*changes: str) -> Health:
    return Health(load_config("quickstart.yaml", list(changes)))


def _said(health: Health, records: Sequence[Record]) -> list[str]:
    return [line for record in records for line in health.look(record)]


def _steps(make: Make, numbers: Mapping[str, Any], *, first: int, last: int) -> list[TrainRecord]:
    """Give the records of steps. A pair of numbers is the value of the first and of the last step."""
    records = []
    for step in range(first, last + 1):
        way = (step - first) / max(1, last - first)
        at = {name: x[0] + way * (x[1] - x[0]) if isinstance(x, tuple) else x for name, x in numbers.items()}
        records.append(make(num_train_steps=step, policy_version=step, **at))
    return records


# For each symptom: the numbers of steps that show it, how many it takes, and a part of the line.
SHOWN: dict[str, tuple[dict[str, Any], int, str]] = {
    "nothing_trained": ({"trained_tokens": 0, "masked_token_share": 0.3}, 3, "30 % are past algorithm.max_staleness=1"),
    "no_signal": (
        {"zero_variance_group_share": 1.0, "advantage_abs_mean": 0.0, "reward_mean": 0.0, "gradient_norm": 0.0},
        3,
        "mean reward 0",
    ),
    "no_gradient": ({"gradient_norm": 0.0}, 3, "the gradient is 0"),
    "weights_late": ({"weights_behind": 4}, 3, "4 versions behind"),
    "truncated": ({"truncated_share": 0.95}, 3, "95 % of the completions"),
    "stale": ({"masked_token_share": 0.6}, 5, "60 % of the tokens"),
    "always_clipped": ({"gradient_norm": 50.0}, 20, "median 50"),
    "mismatch": ({"mismatch_abs_mean": 0.2}, 5, "0.2 nats a token"),
    "longer": ({"completion_tokens_mean": (40.0, 400.0), "truncated_share": 0.5}, 20, "within 20 steps"),
}
# Likewise, after ten healthy steps.
SHOWN_LATER: dict[str, tuple[dict[str, Any], int, str]] = {
    "entropy_collapse": ({"entropy": 0.001}, 5, "from 0.14 to 0.001"),
    "reward_fell": ({"reward_mean": 0.1}, 4, "from 0.5 (step 5)"),
}


@pytest.mark.parametrize(("name", "later"), [*((n, False) for n in SHOWN), *((n, True) for n in SHOWN_LATER)])
def test_a_symptom_is_said_once_when_enough_steps_show_it(name: str, later: bool, make_train_record: Make) -> None:
    numbers, num_steps, words = (SHOWN_LATER if later else SHOWN)[name]
    health = _health("algorithm.max_staleness=1")
    first = 11 if later else 1
    assert _said(health, _steps(make_train_record, {}, first=1, last=first - 1)) == []
    steps = _steps(make_train_record, numbers, first=first, last=first + num_steps - 1)
    assert _said(health, steps[:-1]) == []
    assert health.present == []
    (line,) = _said(health, steps[-1:])
    assert line.startswith(f"health: {name}: ")
    assert words in line
    assert [symptom.name for symptom in health.present] == [name]
    assert {n for n, value in health.statistics().symptom.items() if value} == {name}
    later_steps = _steps(make_train_record, {}, first=first + num_steps, last=first + num_steps + 40)
    assert _said(health, later_steps) == [f"health: {name} is over"]
    assert set(health.statistics().symptom.values()) == {0}


@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_a_fall_from_a_solved_task_is_a_fall(spread: float, make_train_record: Make) -> None:
    """All rewards were equal, so the best steps have no spread."""
    health = _health()
    solved = {"reward_mean": 1.0, "reward_std": 0.0}
    assert _said(health, _steps(make_train_record, solved, first=1, last=30)) == []
    fallen = _steps(make_train_record, {"reward_mean": 0.2, "reward_std": spread}, first=31, last=36)
    assert [line.partition(": the")[0] for line in _said(health, fallen)] == ["health: reward_fell"]


def test_a_symptom_that_lasts_is_said_again_after_twice_the_time(make_train_record: Make) -> None:
    health = _health()
    lines: dict[int, str] = {}
    for record in _steps(make_train_record, {"truncated_share": 1.0}, first=1, last=100):
        lines |= dict.fromkeys([record.policy_version] if (said := health.look(record)) else [], *said)
    assert [*lines] == [3, 23, 43, 83]
    assert lines[83].startswith("health: for 80 steps, truncated: 100 % of the completions end at the token limit; ")


@pytest.mark.parametrize(
    "numbers",
    [
        {"zero_variance_group_share": 1.0},  # with a mean over the batch, equal groups have advantages
        {"entropy": (0.14, 0.001), "reward_mean": (0.5, 0.9)},  # a solved task
        {"completion_tokens_mean": (40.0, 400.0)},  # longer reasoning, within the limit
        {"gradient_norm": 2.0},  # above the limit of 1
        {"mismatch_abs_mean": math.nan, "entropy": math.nan, "gradient_norm": math.nan},
        {"truncated_share": 0.8, "masked_token_share": 0.4, "weights_behind": 3},
    ],
)
def test_a_healthy_run_says_nothing(numbers: dict[str, Any], make_train_record: Make) -> None:
    health = _health("algorithm.max_staleness=1")
    assert _said(health, _steps(make_train_record, numbers, first=1, last=60)) == []


def test_a_single_step_or_two_show_no_symptom(make_train_record: Make) -> None:
    health = _health()
    for first in (1, 4, 7, 10):
        numbers = {"trained_tokens": 0, "zero_variance_group_share": 1.0, "advantage_abs_mean": math.nan}
        assert _said(health, _steps(make_train_record, numbers, first=first, last=first + 1)) == []
        assert _said(health, _steps(make_train_record, {}, first=first + 2, last=first + 2)) == []


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ((0.5, 0.9, 0.7, 0.72), True),  # 3 standard errors of 0.9 with 200 prompts are 0.064
        ((0.5, 0.9, 0.7, 0.85), False),  # one alone can be chance
        ((0.5, 0.9, 0.84, 0.84), False),
        ((0.9, 0.5), False),
        ((1.0, 0.97, 0.95), True),  # 1 error in 200 counts as the least spread
    ],
)
def test_a_fallen_accuracy_needs_two_evaluations(
    accuracies: tuple[float, ...], said: bool, eval_record: EvalRecord
) -> None:
    health = _health()
    records = [
        msgspec.structs.replace(eval_record, accuracy=accuracy, policy_version=10 * index)
        for index, accuracy in enumerate(accuracies)
    ]
    lines = _said(health, records)
    assert [line.partition(": the")[0] for line in lines] == ["health: accuracy_fell"] * said
    if said:
        assert f"go back to the checkpoint of version {10 * accuracies.index(max(accuracies))}" in lines[0]


def test_an_accuracy_of_another_set_is_compared_anew(eval_record: EvalRecord) -> None:
    changed = {"accuracy": 0.1, "num_prompts": 50}
    others = [msgspec.structs.replace(eval_record, policy_version=5 + index, **changed) for index in range(3)]
    assert _said(_health(), [eval_record, *others]) == []


def test_a_learner_that_went_back_takes_its_steps_back(make_train_record: Make) -> None:
    health = _health()
    bad = {"truncated_share": 1.0}
    assert _said(health, _steps(make_train_record, bad, first=1, last=2)) == []
    assert _said(health, _steps(make_train_record, {}, first=2, last=2)) == []
    assert _said(health, _steps(make_train_record, bad, first=2, last=2)) == []
    assert len(_said(health, _steps(make_train_record, bad, first=3, last=3))) == 1


def test_the_document_names_every_symptom_in_order() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "health.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == SYMPTOMS


def test_every_symptom_is_in_the_metric_and_shown_by_a_test() -> None:
    assert {*SHOWN, *SHOWN_LATER, "accuracy_fell"} == set(SYMPTOMS)
    assert set(_health().statistics().symptom) == set(SYMPTOMS)
