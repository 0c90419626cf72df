"""Several passes over a batch, against a synchronous reference; and the divergence that ends them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.one_rank import one_rank
from support.train_steps import VERSION, ragged_groups, step_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_rloo.config import Config
from areal_rloo.learner.train_step import StepResult
from areal_rloo.trajectory import Group, Trajectory

FAR = "learner.optimizer.learning_rate=3e-3"  # so far that later passes are clipped


def logprobs_of(model: PreTrainedModel, trajectory: Trajectory, temperature: float) -> Tensor:
    prompt, tokens = trajectory.prompt_tokens.tolist(), trajectory.completion.tokens.tolist()
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def advantages_of(groups: list[Group]) -> list[float]:
    """RLOO: the reward less the mean reward of the others in the group."""
    advantages = []
    for group in groups:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        advantages += [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    return advantages


def trained_slowly(folder: Path, groups: list[Group], config: Config) -> dict[str, Tensor]:
    """Give the weights after all passes: a sequence at a time, proximal logprobs of the start of the step."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss, settings, temperature = config.algorithm.loss, config.learner.optimizer, config.rollout.sampling.temperature
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0)
    trajectories, advantages = [t for group in groups for t in group.trajectories], advantages_of(groups)
    with torch.no_grad():
        proximal = [logprobs_of(model, trajectory, temperature) for trajectory in trajectories]
    order = np.random.default_rng([config.run.seed, VERSION]).permutation(len(trajectories))
    for share in np.array_split(order, config.learner.num_minibatches) * config.learner.num_epochs_per_batch:
        total, num_tokens = torch.zeros(()), 0
        for index in share.tolist():
            completion = trajectories[index].completion
            fresh = torch.from_numpy(VERSION - completion.versions <= config.algorithm.max_staleness)
            behaviour = torch.from_numpy(completion.behaviour_logprobs)
            current = logprobs_of(model, trajectories[index], temperature)
            anchor = proximal[index] if loss.decoupled else behaviour
            ratio, weight = (current - anchor).exp(), (anchor - behaviour).exp().clamp(max=5.0)
            clipped = ratio.clamp(1 - loss.eps_low, 1 + loss.eps_high)
            objective = weight * torch.minimum(ratio * advantages[index], clipped * advantages[index])
            total, num_tokens = total - objective[fresh].sum(), num_tokens + int(fresh.sum())
        optimizer.zero_grad()
        (total / num_tokens).backward()
        optimizer.step()
    return dict(model.named_parameters())


def trained(folder: Path, *overrides: str) -> tuple[StepResult, dict[str, Tensor]]:
    step = one_rank(folder, step_config(FAR, *overrides))
    result = step.step(ragged_groups(), policy_version=VERSION)
    return result, dict(step.team.own.policy.causal.named_parameters())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_passes_over_a_batch_equal_the_reference_loop(
    tiny_folders: dict[str, Path], num_minibatches: int, decoupled: bool
) -> None:
    options = [
        *(f"learner.num_minibatches={num_minibatches}", "learner.num_epochs_per_batch=3"),
        *([] if decoupled else ["algorithm.loss.decoupled=false"]),
    ]
    result, weights = trained(tiny_folders["qwen2"], *options)
    expected = trained_slowly(tiny_folders["qwen2"], ragged_groups(), step_config(FAR, *options))
    assert result.updates.num_optimizer_steps == 3 * num_minibatches
    assert result.numbers["ratio_clipped_share"] > 0.05, "the clip must matter"
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-4, msg=name)


def test_a_single_pass_is_the_default_and_changes_nothing(tiny_folders: dict[str, Path]) -> None:
    once, weights = trained(tiny_folders["qwen2"], "learner.num_minibatches=2")
    same, again = trained(tiny_folders["qwen2"], "learner.num_minibatches=2", "learner.num_epochs_per_batch=1")
    assert once.updates.numbers["loss"] == same.updates.numbers["loss"]
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())


def test_the_rate_decays_over_the_optimizer_steps_of_all_passes(tiny_folders: dict[str, Path]) -> None:
    linear = ("learner.optimizer.schedule=linear", "learner.num_train_steps=1", "learner.num_epochs_per_batch=4")
    step = one_rank(tiny_folders["qwen2"], step_config(*linear))
    step.step(ragged_groups(), policy_version=VERSION)
    assert step.team.num_optimizer_steps == 4
    assert step.team.learning_rate == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("decoupled", ["true", "false"])
def test_a_policy_past_the_target_ends_the_passes(
    tiny_folders: dict[str, Path], decoupled: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("learner.num_epochs_per_batch=9", f"algorithm.loss.decoupled={decoupled}")
    caplog.set_level("INFO")
    free, _ = trained(tiny_folders["qwen2"], *options)
    limited, weights = trained(tiny_folders["qwen2"], *options, "learner.target_kl=0.02")
    taken = limited.updates.num_optimizer_steps
    assert free.updates.num_optimizer_steps == 9
    assert 1 <= taken < 9
    assert f"learner.target_kl ended the train step after {taken} of 9 minibatches" in caplog.text
    shorter, expected = trained(tiny_folders["qwen2"], f"learner.num_epochs_per_batch={taken}", options[1])
    assert shorter.updates.numbers["loss"] == limited.updates.numbers["loss"]
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_the_first_minibatch_is_trained_whatever_the_target(tiny_folders: dict[str, Path]) -> None:
    """With decoupled=false the behaviour policy may be far away before the first optimizer step."""
    options = ("algorithm.loss.decoupled=false", "learner.num_epochs_per_batch=2", "learner.target_kl=1e-9")
    result, _ = trained(tiny_folders["qwen2"], *options)
    assert (result.updates.num_optimizer_steps, result.updates.num_skipped) == (1, 0)
