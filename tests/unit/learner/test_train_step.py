"""One train step against a 40-line synchronous reference: the gradient does not depend on how it is computed."""

import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.one_rank import one_rank
from support.train_steps import (
    VERSION,
    another_policy,
    assert_same_gradient,
    ragged_groups,
    reference_gradient,
    replaced,
    spied_step,
    step_config,
    with_equal_rewards,
)
from transformers import AutoModelForCausalLM

from areal_rloo.algorithm.behaviour_weight import interpolated_proximal
from areal_rloo.config import PRESETS
from areal_rloo.learner.train_step import StepResult
from areal_rloo.trajectory import Group, Trajectory


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("microbatch_tokens", [128, 256, 8192])
def test_the_gradient_equals_the_synchronous_reference(
    tiny_folders: dict[str, Path], name: str, microbatch_tokens: int
) -> None:
    config, groups = step_config(f"learner.microbatch_tokens={microbatch_tokens}"), ragged_groups()
    (gradient,), result = spied_step(tiny_folders[name], groups, config)
    assert_same_gradient(gradient, reference_gradient(tiny_folders[name], groups, config))
    assert result.masks.num_stale > 0


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_a_sequence_level_ratio_covers_whole_trajectories(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    """At ratio 1 the gradient of a product is the sum of its factors'; the tiny bound makes all weights equal."""
    equal_weights = "algorithm.loss.behaviour_weight.upper=1e-9"
    product = step_config(
        *("algorithm.loss.ratio_level=sequence_sum", "algorithm.loss.aggregation=seq_mean_token_mean", equal_weights),
        *(f"learner.microbatch_tokens={microbatch_tokens}", "algorithm.max_staleness=9"),
    )
    total = step_config("algorithm.loss.aggregation=seq_mean_token_sum", equal_weights, "algorithm.max_staleness=9")
    (gradient,), _ = spied_step(tiny_folders["qwen2"], ragged_groups(), product)
    (expected,), _ = spied_step(tiny_folders["qwen2"], ragged_groups(), total)
    assert_same_gradient(gradient, expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_s_gradient_depends_on_the_microbatches(tiny_folders: dict[str, Path], preset: str) -> None:
    folder, gradients = tiny_folders["qwen2"], []
    for microbatch_tokens in (128, 8192):
        config = step_config(f"algorithm.preset={preset}", f"learner.microbatch_tokens={microbatch_tokens}")
        frozen = another_policy(folder) if config.algorithm.kl.coefficient > 0 else None
        gradients += spied_step(folder, ragged_groups(), config, frozen)[0]
    assert_same_gradient(*gradients)


def test_the_order_of_trajectories_and_groups_does_not_matter(tiny_folders: dict[str, Path]) -> None:
    config, groups = step_config(), ragged_groups()
    (expected,), _ = spied_step(tiny_folders["qwen2"], groups, config)
    rng = random.Random(0)
    shuffled = [Group(g.group_id, g.deadline, tuple(rng.sample(g.trajectories, len(g.trajectories)))) for g in groups]
    rng.shuffle(shuffled)
    (gradient,), _ = spied_step(tiny_folders["qwen2"], shuffled, config)
    assert_same_gradient(gradient, expected)


def test_later_minibatches_use_proximal_logprobs_of_the_step_start(tiny_folders: dict[str, Path]) -> None:
    """With a frozen model they equal the current ones, so every ratio is 1 in both minibatches."""
    gradients, result = spied_step(tiny_folders["qwen2"], ragged_groups(), step_config("learner.num_minibatches=2"))
    assert len(gradients) == 2
    assert result.numbers["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert result.numbers["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_the_second_minibatch_is_clipped_against_the_first_weights(tiny_folders: dict[str, Path]) -> None:
    config = step_config("learner.num_minibatches=2", "learner.optimizer.learning_rate=1e-2")
    train_step = one_rank(tiny_folders["qwen2"], config)
    result = train_step.step(ragged_groups(), policy_version=VERSION)
    assert result.updates.num_optimizer_steps == 2
    assert result.numbers["ratio_max"] > 1.1


def test_a_gradient_that_is_not_finite_is_not_stepped_on(tiny_folders: dict[str, Path]) -> None:
    groups = ragged_groups()
    trajectory = groups[0].trajectories[0]
    trajectory.completion.behaviour_logprobs[:] = np.nan
    config = step_config("algorithm.loss.behaviour_weight.rule=none", "algorithm.max_staleness=9")
    gradients, result = spied_step(tiny_folders["qwen2"], groups, config)
    assert gradients == []
    assert (result.updates.num_optimizer_steps, result.updates.num_skipped) == (0, 1)


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_an_entropy_bonus_adds_the_gradient_of_the_full_entropy(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    folder, groups = tiny_folders["qwen2"], with_equal_rewards(ragged_groups())
    config = step_config("algorithm.loss.entropy_coefficient=0.3", f"learner.microbatch_tokens={microbatch_tokens}")
    (gradient,), result = spied_step(folder, groups, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    terms = []
    for trajectory in (t for group in groups for t in group.trajectories):
        prompt, tokens = trajectory.prompt_tokens.tolist(), trajectory.completion.tokens.tolist()
        logprobs = (model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        fresh = torch.from_numpy(VERSION - trajectory.completion.versions <= config.algorithm.max_staleness)
        terms.append(-(logprobs.exp() * logprobs).sum(-1)[fresh])
    mean = torch.cat(terms).mean()
    (-0.3 * mean).backward()
    assert_same_gradient(gradient, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert result.numbers["entropy"] == pytest.approx(float(mean.detach()), rel=1e-5)


def _real_step(folder: Path, *overrides: str, groups: list[Group] | None = None) -> StepResult:
    """Use an optimizer that moves the weights far in the first minibatch."""
    config = step_config("learner.num_minibatches=2", "learner.optimizer.learning_rate=1e-2", *overrides)
    train_step = one_rank(folder, config)
    return train_step.step(groups or ragged_groups(), policy_version=VERSION)


def test_reused_proximal_logprobs_are_the_current_ones_in_every_minibatch(tiny_folders: dict[str, Path]) -> None:
    result = _real_step(tiny_folders["qwen2"], "algorithm.loss.proximal=reuse")
    assert result.numbers["ratio_max"] == 1.0
    assert _real_step(tiny_folders["qwen2"]).numbers["ratio_max"] > 1.01


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ((), True),
        (("algorithm.loss.proximal=reuse",), False),
        (("algorithm.loss.proximal=interpolate",), False),
        (("algorithm.loss.decoupled=false",), False),
        (("algorithm.loss.proximal=reuse", "learner.num_minibatches=1"), True),  # 0: the step begins there
    ],
)
def test_a_divergence_from_unknown_proximal_logprobs_is_absent(
    options: tuple[str, ...], known: bool, tiny_folders: dict[str, Path]
) -> None:
    numbers = _real_step(tiny_folders["qwen2"], *options).numbers
    assert [math.isnan(numbers[name]) for name in ("proximal_kl_k1", "proximal_kl_k3")] == [not known] * 2
    assert math.isfinite(numbers["mismatch_abs_mean"])


def test_interpolated_proximal_logprobs_lie_between_behaviour_and_current(tiny_folders: dict[str, Path]) -> None:
    """Of fresh tokens they are the behaviour policy's, so that the second minibatch has no behaviour_weight but 1."""
    folder = tiny_folders["qwen2"]

    def fresh(t: Trajectory) -> Trajectory:
        versions = np.full_like(t.completion.versions, VERSION)
        return msgspec.structs.replace(t, completion=msgspec.structs.replace(t.completion, versions=versions))

    groups = replaced(ragged_groups(), fresh)
    weight = "algorithm.loss.behaviour_weight.rule=none"
    interpolated = _real_step(folder, "algorithm.loss.proximal=interpolate", weight, groups=groups).numbers
    recomputed = _real_step(folder, weight, groups=groups).numbers
    assert interpolated["behaviour_weight_mean"] != pytest.approx(recomputed["behaviour_weight_mean"], rel=1e-3)
    assert interpolated["mismatch_abs_mean"] == pytest.approx(recomputed["mismatch_abs_mean"]), (
        "the first minibatch is exact"
    )
    stale = _real_step(folder, "algorithm.loss.proximal=interpolate", weight).numbers
    assert 1.0 < stale["ratio_max"] < _real_step(folder, "algorithm.loss.decoupled=false").numbers["ratio_max"]


@pytest.mark.parametrize("skips_second", [False, True])
def test_a_minibatch_interpolates_by_the_optimizer_steps_before(
    skips_second: bool, tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = one_rank(
        tiny_folders["qwen2"], step_config("learner.num_minibatches=4", "algorithm.loss.proximal=interpolate")
    )
    shares: list[float] = []

    def seen(*logprobs: torch.Tensor, progress: float) -> torch.Tensor:
        broken = skips_second and not shares  # a loss that is not finite has no optimizer step
        if progress not in shares:
            shares.append(progress)
        return interpolated_proximal(*logprobs, progress=progress) * (math.nan if broken else 1)

    monkeypatch.setattr("areal_rloo.learner.packing.interpolated_proximal", seen)
    step.step(ragged_groups(), policy_version=VERSION)
    assert shares == ([0.25, 0.5] if skips_second else [0.25, 0.5, 0.75])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_without_a_token_in_the_loss_has_no_gradient(tiny_folders: dict[str, Path], preset: str) -> None:
    """Every token past the bound, under every preset."""

    def stale(t: Trajectory) -> Trajectory:
        versions = np.full_like(t.completion.versions, -9)
        return msgspec.structs.replace(t, completion=msgspec.structs.replace(t.completion, versions=versions))

    folder = tiny_folders["qwen2"]
    config = step_config(f"algorithm.preset={preset}")
    frozen = another_policy(folder) if config.algorithm.kl.coefficient > 0 else None
    (gradient,), result = spied_step(folder, replaced(ragged_groups(), stale), config, frozen)
    assert all(torch.count_nonzero(g) == 0 for g in gradient.values())
    assert (result.numbers["loss"], result.masks.num_tokens, result.numbers["gradient_norm"]) == (0.0, 0, 0.0)
    assert np.isnan(result.numbers["entropy"])
    assert np.isnan(result.numbers["advantage_mean"])
