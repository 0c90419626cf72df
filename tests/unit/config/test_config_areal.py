"""Sections in AReaL's spelling: translation, defaults and refusals."""

from pathlib import Path

import torch
from support.configs_to_load import refusal, write

from areal_rloo.algorithm.normalization import normalize
from areal_rloo.config import PRESETS, BehaviourWeightConfig, NormConfig, load_config


def test_areal_rejection_sampling_keeps_areal_defaults(tmp_path: Path) -> None:
    def weight(text: str, *overrides: str) -> BehaviourWeightConfig:
        return load_config(write(tmp_path, text), overrides).algorithm.loss.behaviour_weight

    theirs = "actor: {rejection_sampling: {metric: kl_k3, level: sequence, agg: max, upper: 0.5}}"
    assert weight(theirs) == BehaviourWeightConfig(
        rule="mask", level="sequence", metric="k3", aggregate="max", upper=0.5
    )
    assert weight("actor: {rejection_sampling: {upper: 2.0}}") == BehaviourWeightConfig(rule="mask", upper=2.0)
    assert weight("actor: {rejection_sampling: null}").rule == "none"
    overrides = ["actor.rejection_sampling.action=mask", "actor.rejection_sampling.metric=kl_k2"]
    assert weight("", *overrides) == BehaviourWeightConfig(rule="mask", metric="k2")
    assert weight("", "actor.rejection_sampling={metric: kl_k3}") == BehaviourWeightConfig(rule="mask", metric="k3")
    assert weight("", "actor.rejection_sampling=null").rule == "none"


def test_areal_norms_keep_areal_defaults(tmp_path: Path) -> None:
    """In AReaL's section, absent keys get AReaL's defaults, not the values of our preset."""
    expected = NormConfig(mean_level="group", std_level="batch", over="tokens", eps=1e-5)
    text = "actor: {adv_norm: {mean_level: group}, reward_norm: null}"
    algorithm = load_config(write(tmp_path, text)).algorithm
    assert algorithm.adv_norm == expected
    assert algorithm.reward_norm == NormConfig()
    for preset in PRESETS:
        overrides = [f"algorithm.preset={preset}", "algorithm.returns=trajectory", "actor.adv_norm={mean_level: group}"]
        assert load_config(write(tmp_path, "algorithm: {discount: 1.0}"), overrides).algorithm.adv_norm == expected
    one_key = load_config(write(tmp_path, ""), ["actor.adv_norm.std_level=batch"]).algorithm.adv_norm
    assert one_key == NormConfig(mean_level="group", mean_leave1out=True, std_level="batch")


def test_areals_example_gives_the_advantages_of_areals_code() -> None:
    """A mean and a deviation over tokens: samples of equal rewards get an advantage if wrong answers are longer."""
    algorithm = load_config("gsm8k_rloo_areal.yaml").algorithm
    rewards = torch.tensor([1.0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1], dtype=torch.float64)
    lengths, groups = torch.where(rewards > 0, 100, 900), torch.arange(12) // 4
    left_out = normalize(10 * (rewards - 0.5), groups, lengths, algorithm.reward_norm)
    of_tokens = left_out.repeat_interleave(lengths)
    expected = (left_out - of_tokens.mean()) / (of_tokens.std() + 1e-5)
    found = normalize(left_out, groups, lengths, algorithm.adv_norm)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert found.abs().min() > 0.1


def test_areal_group_size_sets_ours_or_is_refused_if_different(tmp_path: Path) -> None:
    """AReaL's gsm8k_rloo.yaml writes group_size as an interpolation of `gconfig.n_samples`."""
    section = "actor: {{reward_norm: {{mean_level: group, mean_leave1out: true, std_level: null, group_size: {0}}}}}\n"
    shipped = load_config(write(tmp_path, section.format("'${gconfig.n_samples}'"))).algorithm
    assert shipped.reward_norm == NormConfig(mean_level="group", mean_leave1out=True, eps=1e-5)
    assert load_config(write(tmp_path, section.format(4))).algorithm.group_size == 4
    assert load_config(write(tmp_path, section.format(4) + "algorithm: {group_size: 4}")).algorithm.group_size == 4
    assert load_config(write(tmp_path, ""), ["actor.adv_norm.group_size=5"]).algorithm.group_size == 5
    message = refusal(write(tmp_path, section.format(4) + "algorithm: {group_size: 8}"))
    assert message.startswith("actor.reward_norm.group_size: expected algorithm.group_size=8, got 4")


def test_areal_keys_are_translated(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "actor: {adv_norm: {mean_level: batch, std_level: batch}}"))
    assert config.algorithm.adv_norm.mean_level == "batch"
    assert config.algorithm.adv_norm.std_level == "batch"
    assert config.algorithm.adv_norm.over == "tokens", "AReaL's code norms the advantages of tokens"
    rloo = load_config(write(tmp_path, "actor: {adv_norm: {mean_level: group, mean_leave1out: true, std_level: null}}"))
    assert rloo.algorithm.adv_norm.over == "trajectories", "as in AReaL's documents"
    config = load_config("quickstart.yaml", ["actor.adv_norm.std_level=batch"])
    assert config.algorithm.adv_norm.std_level == "batch"


def test_areal_keys_combine_with_our_keys_or_an_empty_section(tmp_path: Path) -> None:
    alias = "actor: {adv_norm: {mean_level: batch}}\n"
    assert load_config(write(tmp_path, alias + "algorithm:\n")).algorithm.adv_norm.mean_level == "batch"
    assert load_config(write(tmp_path, alias + "algorithm: {group_size: 3}")).algorithm.group_size == 3
    assert "unknown key 'actor'" in refusal(write(tmp_path, alias + "algorithm: 3"))


def test_other_keys_of_areal_actor_section_are_unknown(tmp_path: Path) -> None:
    assert "unknown key 'actor" in refusal(write(tmp_path, "actor: {path: x}"))
