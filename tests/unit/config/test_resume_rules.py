"""The effect of each changed option on a resume: every key has a rule, and every change is named."""

import re
from typing import Any

import pytest

from areal_rloo.config import load_config
from areal_rloo.config.options import groups
from areal_rloo.config.resume import changes, rules, shown

_LOSES = re.compile(r"\b(drops?|refuses?|(is|are) (dropped|refused|aborted))\b")


# Keys without the positions in lists and the names in mappings.
_MEANINGS = {
    ".".join(part for part in option.key.split(".") if part not in ("N", "NAME")): option.meaning
    for group in groups()
    for option in group.options
}


def test_every_key_of_the_config_has_exactly_one_rule() -> None:
    assert sorted(rules()) == sorted(_MEANINGS)


def test_every_rule_but_exact_says_what_follows() -> None:
    for key, rule in rules().items():
        assert (rule.effect == "exact") == (rule.words == ""), key


def test_a_key_whose_meaning_says_that_samples_are_lost_is_not_exact() -> None:
    lossy = [key for key, meaning in _MEANINGS.items() if _LOSES.search(meaning)]
    assert {"rollout.reward_memory_bytes", "rollout.episode.timeout_s", "wire.max_attempts"} <= set(lossy)
    assert [key for key in lossy if rules()[key].effect == "exact"] == []


@pytest.mark.parametrize(
    "key",
    [
        *("data.train.rewards.device", "data.train.rewards.batch_size", "rollout.sglang.request_timeout_s"),
        *("rollout.num_reward_workers", "rollout.num_async_rewards", "rollout.episode.num_agents"),
        *("wire.heartbeat_timeout_s", "wire.stall_timeout_s", "wire.max_message_bytes"),
        *("checkpoint.partial_rollouts", "launcher.cores_per_host", "launcher.gpus_per_host"),
    ],
)
def test_a_key_that_changes_samples_or_their_order_is_not_exact(key: str) -> None:
    assert rules()[key].effect == "allowed"


def test_equal_configs_have_no_changes() -> None:
    config = load_config("quickstart.yaml")
    assert changes(config, config) == []


@pytest.mark.parametrize(
    ("override", "key", "values", "effect"),
    [
        ("learner.optimizer.learning_rate=5e-5", "learner.optimizer.learning_rate", "1e-06 -> 5e-05", "allowed"),
        ("learner.groups_per_step=64", "learner.groups_per_step", "32 -> 64", "allowed"),
        ("learner.lora={rank: 4}", "learner.lora", 'null -> {"rank": 4, "alpha": 32, "targets"', "refused"),
        ("data.train={task: math}", "data.train.task", "arithmetic -> math", "refused"),
        ("data.train=[{}, {name: b}]", "data.train", "[", "refused"),
        ("data.train.rewards=[{task: math}]", "data.train.rewards", "[] -> [", "allowed"),
        ("data.eval={task: math}", "data.eval", "[] -> [", "allowed"),
        ("launcher.slurm.arguments={qos: high}", "launcher.slurm.arguments", '{} -> {"qos": "high"}', "exact"),
        ("model.reference.refresh_every_n_versions=5", "model.reference.refresh_every_n_versions", "null", "allowed"),
    ],
)
def test_a_change_is_named_with_both_values(tmp_path: Any, override: str, key: str, values: str, effect: str) -> None:
    (tmp_path / "empty.yaml").write_text("# all defaults")
    found = changes(load_config(str(tmp_path / "empty.yaml")), load_config(str(tmp_path / "empty.yaml"), [override]))
    assert [(change.key, change.rule.effect) for change in found] == [(key, effect)]
    assert found[0].values.startswith(values)


def test_a_preset_changes_each_key_that_it_sets() -> None:
    before = load_config("quickstart.yaml")
    found = {change.key for change in changes(before, load_config("quickstart.yaml", ["algorithm.preset=dr_grpo"]))}
    assert {"algorithm.preset", "algorithm.loss.aggregation", "algorithm.adv_norm.mean_leave1out"} <= found


def test_a_reference_that_begins_to_be_refreshed_is_refused() -> None:
    refreshed = ["model.reference.refresh_every_n_versions=5"]
    before = load_config("quickstart.yaml", refreshed)
    (change,) = changes(before, load_config("quickstart.yaml", [*refreshed, "algorithm.kl.coefficient=0.1"]))
    assert (change.key, change.rule.effect) == ("algorithm.kl.coefficient", "refused")


def test_the_line_of_a_change_names_key_values_and_step() -> None:
    before = load_config("quickstart.yaml", ["learner.optimizer.learning_rate=1e-4"])
    (change,) = changes(before, load_config("quickstart.yaml", ["learner.optimizer.learning_rate=5e-5"]))
    words = "resume: learner.optimizer.learning_rate 0.0001 -> 5e-05 from step 40 on; the moments go on"
    assert change.line(40) == words


def test_long_values_are_shortened_to_a_line() -> None:
    assert len(shown("many words\n" * 100)) == 60
    assert shown("") == "''"


@pytest.mark.parametrize(
    ("before", "now", "effects"),
    [
        ([], ["overlong_prompts=filter"], {"allowed"}),
        ([], ["max_prompt_tokens=999", "overlong_prompts=truncate_left"], {"allowed"}),
        ([], ["max_prompt_tokens=9"], {"refused"}),
        (["overlong_prompts=filter"], ["overlong_prompts=filter", "max_prompt_tokens=999"], {"refused"}),
        (["overlong_prompts=truncate_left"], [], {"refused"}),
    ],
)
def test_a_run_that_met_a_long_prompt_may_go_on_with_another_rule(
    before: list[str], now: list[str], effects: set[str]
) -> None:
    """Under `error`, all prompts under way are within the limit."""
    one, other = (load_config("quickstart.yaml", [f"data.{each}" for each in overrides]) for overrides in (before, now))
    assert {change.rule.effect for change in changes(one, other)} == effects
