"""The symptoms of a run that does not learn: each is said when it begins, again after twice the time, and when over."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_rloo.config import load_config
from areal_rloo.telemetry.health import SYMPTOMS, Breaks, Health
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
    "reward_fell": ({"reward_mean": 0.1}, 5, "from 0.5 (step 5)"),
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
    ("name", "numbers", "words"),
    [
        ("truncated", {"truncated_share": 1.0}, ", 2 % in step 1; lower learner.optimizer.learning_rate"),
        ("truncated", {"truncated_share": 1.0}, "limit; raise rollout.sampling.max_new_tokens"),
        ("no_signal", {}, "(mean reward 0, 0.5 in step 1), so the advantages are 0; lower learner.optimizer.learning_"),
        ("no_signal", {}, "(mean reward 0), so the advantages are 0; look at trajectories"),
        ("no_signal", {"reward_mean": 0.7}, "(mean reward 0.7), so the advantages are 0; look at trajectories"),
    ],
)
def test_a_remedy_depends_on_the_first_step(
    name: str, numbers: dict[str, Any], words: str, make_train_record: Make
) -> None:
    """A policy that a learning rate has broken ends no completion, and earns no reward, but did so before."""
    shown = {**SHOWN[name][0], **numbers}
    healthy = _steps(make_train_record, {"truncated_share": 0.02}, first=1, last=1)
    first = len(healthy) + 1 if "in step 1" in words else 1
    (line,) = _said(_health(), [*healthy[: first - 1], *_steps(make_train_record, shown, first=first, last=first + 2)])
    assert words in line


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            0.001,
            "by 1.6 nats a token at the same version, and by 0.001 in the first step; if the policy got worse, too",
        ),
        (math.nan, "by 2 nats a token at the same version; compare their dtypes"),
        (2.0, "by 2 nats a token at the same version; compare their dtypes"),
    ],
)
def test_a_mismatch_after_the_first_step_may_be_a_huge_rate(first: float, words: str, make_train_record: Make) -> None:
    begin, *steps = _steps(make_train_record, {"mismatch_abs_mean": 2.0}, first=1, last=5)
    (line,) = _said(_health(), [msgspec.structs.replace(begin, mismatch_abs_mean=first), *steps])
    assert words in line


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
        ((0.5, 0.9, 0.7, 0.72), True),  # 4 standard errors of the difference are 0.15
        ((0.5, 0.9, 0.7, 0.85), False),  # one alone can be chance
        ((0.5, 0.9, 0.8, 0.8), False),
        ((0.9, 0.5), False),
        ((1.0, 0.9, 0.9), True),
        ((1.0, 0.98, 0.97), False),
    ],
)
def test_a_fallen_accuracy_needs_two_evaluations(
    accuracies: tuple[float, ...], said: bool, eval_record: EvalRecord
) -> None:
    health = _health()
    records = [
        msgspec.structs.replace(
            eval_record, accuracy=accuracy, reward=accuracy, reward_error=error, policy_version=10 * index
        )
        for index, accuracy in enumerate(accuracies)
        for error in [math.sqrt(accuracy * (1 - accuracy) / eval_record.num_prompts)]
    ]
    lines = _said(health, records)
    assert [line.partition(": the")[0] for line in lines] == ["health: accuracy_fell"] * said
    if said:
        best = 10 * accuracies.index(max(accuracies))
        assert (f"move the checkpoints after version {best} away" in lines[0]) == (best > 0)


def test_an_accuracy_of_another_set_is_compared_anew(eval_record: EvalRecord) -> None:
    changed = {"accuracy": 0.1, "reward": 0.1, "num_prompts": 50}
    others = [msgspec.structs.replace(eval_record, policy_version=5 + index, **changed) for index in range(3)]
    assert _said(_health(), [eval_record, *others]) == []


def _evaluations(record: EvalRecord, *accuracies: float, first: int = 0, **numbers: Any) -> list[EvalRecord]:
    replace = msgspec.structs.replace
    return [
        replace(record, accuracy=math.nan, reward=a, policy_version=first + i, **numbers)
        for i, a in enumerate(accuracies)
    ]


def test_the_scale_of_rewards_does_not_count(eval_record: EvalRecord) -> None:
    """Rewards of 0 to 100, and of -1 and 1: the measured error tells a fall from chance."""
    scattered = _evaluations(eval_record, 50, 40, 41, reward_error=3.5)
    assert _said(_health(), scattered) == []
    assert len(_said(_health(), _evaluations(eval_record, 50, 30, 29, reward_error=3.5))) == 1
    assert len(_said(_health(), _evaluations(eval_record, 0.5, -0.5, -0.6, accuracy_error=0.05))) == 1


def test_each_evaluation_set_has_its_own_fall(eval_record: EvalRecord) -> None:
    health = _health("data.eval=[{task: arithmetic, name: math}, {task: arithmetic, name: words}]")
    for version, (math_accuracy, word_accuracy) in enumerate([(0.9, 0.9), (0.3, 0.9), (0.3, 0.9), (0.9, 0.9)]):
        for name, accuracy in (("math", math_accuracy), ("words", word_accuracy)):
            lines = _said(health, _evaluations(eval_record, accuracy, first=version, name=name))
            began, over = (version, name) == (2, "math"), (version, name) == (3, "math")
            assert [line.partition(": the")[0] for line in lines] == (
                ["health: accuracy_fell"] if began else ["health: accuracy_fell is over on math"] if over else []
            )
            assert health.statistics().symptom["accuracy_fell"] == (version == 2)


@pytest.mark.parametrize("changed", [{"num_prompts": 10}, {"policy_version": 50}])
def test_a_fall_on_a_set_that_changed_is_forgotten(changed: dict[str, Any], eval_record: EvalRecord) -> None:
    health = Health(load_config("quickstart.yaml", []), Breaks(evaluations={"arithmetic": [40]}))
    assert len(_said(health, _evaluations(eval_record, 0.9, 0.3, 0.3))) == 1
    _said(health, [msgspec.structs.replace(eval_record, **{"policy_version": 39, **changed})])
    assert health.present == []


def test_a_set_that_is_measured_no_more_has_no_fall(eval_record: EvalRecord) -> None:
    health = _health()
    assert _said(health, _evaluations(eval_record, 0.9, 0.3, 0.3, name="of an earlier config")) == []
    assert health.present == []


def test_few_prompts_tell_no_fall(eval_record: EvalRecord) -> None:
    assert _said(_health(), _evaluations(eval_record, 1.0, 0.0, 0.0, num_prompts=10, reward_error=0.0)) == []


@pytest.mark.parametrize(("groups", "group_size"), [(1, 8), (2, 4), (8, 8), (48, 8), (512, 8)])
@pytest.mark.parametrize("success", [0.02, 0.5, 0.97])
def test_chance_alone_shows_no_symptom(
    groups: int, group_size: int, success: float, make_train_record: Make, eval_record: EvalRecord
) -> None:
    """2,000 steps of a policy that does not change, with 40 evaluations; each prompt has a difficulty of its own."""
    rng = np.random.default_rng(groups)
    health = _health(
        f"learner.groups_per_step={groups}", f"algorithm.group_size={group_size}", "learner.num_minibatches=1"
    )
    for step in range(1, 2001 if groups <= 48 else 501):
        chance = rng.beta(success, 1 - success, size=(groups, 1))
        rewards = (rng.random((groups, group_size)) < chance).astype(float)
        equal = (rewards == rewards[:, :1]).all(axis=1).mean()
        truncated = (rng.random((groups, group_size)) < 0.3 + 0.4 * chance).mean()
        record = make_train_record(
            policy_version=step,
            num_train_steps=step,
            reward_mean=rewards.mean(),
            reward_std=rewards.std(),
            zero_variance_group_share=equal,
            advantage_abs_mean=0.0 if equal == 1 else 0.2,
            gradient_norm=0.0 if equal == 1 else 0.5,
            truncated_share=truncated,
            completion_tokens_mean=rng.lognormal(5, 1, size=(groups, group_size)).mean(),
            entropy=0.14 * rng.lognormal(0, 0.2),
        )
        said = health.look(record)
        if step % 50 == 0:
            rights = rng.random(50) < success
            error = rights.std(ddof=1) / math.sqrt(50)
            said += _said(health, _evaluations(eval_record, rights.mean(), first=step, reward_error=error))
        if success != 0.5:  # then, 100 groups in a row do teach nothing at times
            said = [line for line in said if "no_signal" not in line]
        assert said == [], step


def test_a_solved_symptom_is_over_after_five_steps_and_no_earlier(make_train_record: Make) -> None:
    """A share that swings around a limit is one symptom, not a line at every other step."""
    health = _health()
    swinging = [
        make_train_record(policy_version=step, num_train_steps=step, masked_token_share=float(step % 2))
        for step in range(1, 20)  # the mean of five steps is 0.6, 0.4, 0.6, ...
    ]
    assert [line.partition(": 60 %")[0] for line in _said(health, swinging)] == ["health: stale"]
    assert _said(health, _steps(make_train_record, {}, first=20, last=23)) == []
    assert _said(health, _steps(make_train_record, {}, first=24, last=24)) == ["health: stale is over"]


def test_a_learner_that_went_back_forgets_a_better_reward(make_train_record: Make, eval_record: EvalRecord) -> None:
    """The launcher lives longer than its learners: the best values of lost steps are lost, too."""
    health = _health()
    _said(health, _steps(make_train_record, {"reward_mean": 0.1}, first=1, last=10))
    _said(health, _steps(make_train_record, {"reward_mean": 0.9}, first=11, last=30))
    _said(health, _evaluations(eval_record, 0.2, 0.95, first=29))
    again = _steps(make_train_record, {"reward_mean": 0.1}, first=11, last=60)
    assert _said(health, again) == []
    assert _said(health, _evaluations(eval_record, 0.2, 0.21, 0.22, first=58)) == []


def test_a_symptom_stays_while_there_are_too_few_steps_to_judge(make_train_record: Make) -> None:
    """After the learner went back, an emptied window must not say that all is well."""
    health = _health()
    assert len(_said(health, _steps(make_train_record, {"gradient_norm": 50.0}, first=11, last=30))) == 1
    assert _said(health, _steps(make_train_record, {"gradient_norm": 50.0}, first=11, last=25)) == []
    assert [symptom.name for symptom in health.present] == ["always_clipped"]
    assert _said(health, _steps(make_train_record, {"gradient_norm": 50.0}, first=26, last=29)) == []
    assert [symptom.name for symptom in health.present] == ["always_clipped"]


def test_rewards_are_not_compared_over_a_change_of_the_rewards(make_train_record: Make) -> None:
    steps = [
        *_steps(make_train_record, {"reward_mean": 0.9}, first=1, last=20),
        *_steps(make_train_record, {"reward_mean": 0.1}, first=21, last=50),
    ]
    assert [line.partition(": the")[0] for line in _said(_health(), steps)] == [
        "health: reward_fell",
        "health: for 20 steps, reward_fell",
    ]
    assert _said(Health(load_config("quickstart.yaml", []), Breaks(rewards=[20])), steps) == []
    assert len(_said(Health(load_config("quickstart.yaml", []), Breaks(rewards=[50])), steps)) == 2


def test_accuracies_are_not_compared_over_a_change_of_their_set(eval_record: EvalRecord) -> None:
    records = _evaluations(eval_record, 0.9, 0.9, 0.1, 0.1, 0.1)
    assert len(_said(_health(), records)) == 1
    for name, num in (("arithmetic", 0), ("another", 1)):
        health = Health(load_config("quickstart.yaml", []), Breaks(evaluations={name: [1]}))
        assert len(_said(health, records)) == num


def test_an_infinite_gradient_is_as_good_as_none(make_train_record: Make) -> None:
    """The file has null for it, so the launcher and the report cannot know it."""
    for norm in (math.inf, math.nan):
        assert _said(_health(), _steps(make_train_record, {"gradient_norm": norm}, first=1, last=60)) == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1e308])
def test_a_reward_that_no_run_has_raises_nothing(wrong: float, make_train_record: Make) -> None:
    """A damaged metrics.jsonl must not end a learner that resumes."""
    health = _health()
    for step in _steps(
        make_train_record, {"reward_mean": wrong, "reward_std": wrong, "entropy": wrong}, first=1, last=30
    ):
        health.look(step)
    assert health.statistics().symptom


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["algorithm.preset=rloo_trl"], "so only the KL to the reference trains; look at trajectories"),
        (["algorithm.preset=grpo"], None),  # the KL is in the loss, and no part of the advantages
        (["algorithm.preset=reinforce_plus_plus"], None),  # the mean of the batch: groups differ
    ],
)
def test_equal_rewards_are_no_signal_also_beside_a_kl_in_the_reward(
    options: list[str], words: str | None, make_train_record: Make
) -> None:
    numbers = {"zero_variance_group_share": 1.0, "advantage_abs_mean": 0.02, "reward_mean": 0.0}
    lines = _said(
        _health(*options, "algorithm.kl.coefficient=0.05"), _steps(make_train_record, numbers, first=1, last=3)
    )
    assert [words in line for line in lines if words] == ([True] if words else [])
    assert (lines == []) == (words is None)
