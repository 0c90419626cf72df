"""A train step with the user's functions: equal functions give equal bits, and weights scale gradients."""

from pathlib import Path

import pytest
import torch
from support.train_steps import VERSION, ragged_groups, spied_step, step_config

from areal_rloo.errors import UserError
from areal_rloo.learner.advantages import Samples, loss_masks
from areal_rloo.learner.own_weights import own_factors

MINE = """
import torch

def ppo(current_logprobs, proximal_logprobs, advantages, config):
    ratio = (current_logprobs - proximal_logprobs).exp()
    clipped = ratio.clamp(1 - config.eps_low, 1 + config.eps_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)

def rloo(rewards, group_ids):
    return torch.stack([reward - others(rewards, group_ids, i) for i, reward in enumerate(rewards)])

def doubled(rewards, group_ids):
    return 2 * rloo(rewards, group_ids)

def others(rewards, group_ids, i):
    same = [rewards[j] for j in range(len(rewards)) if j != i and group_ids[j] == group_ids[i]]
    return sum(same) / len(same) if same else rewards[i]

def first_group(group_ids):
    return (group_ids == 0).double()

def mixed(group_ids):
    return 0.25 + 1.5 * (group_ids == 0).double()

def ones(rewards):
    return torch.ones_like(rewards)

def fails_later(current_logprobs, advantages):
    if len(current_logprobs) != 12 and len(current_logprobs) != 6:
        raise ValueError("not these tokens")
    return -current_logprobs * advantages
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("learner.num_minibatches=3",),
        ("algorithm.loss.decoupled=false",),
        ("algorithm.loss.behaviour_weight.level=sequence",),
        ("algorithm.kl.coefficient=0.1", "algorithm.kl.placement=loss", "algorithm.kl.estimator=k3"),
        ("algorithm.loss.entropy_coefficient=0.1",),
    ],
)
def test_an_own_ppo_gives_the_bits_of_the_built_in(
    tiny_folders: dict[str, Path], mine: str, more: tuple[str, ...]
) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()
    frozen = None
    if any("kl" in option for option in more):
        from support.train_steps import another_policy

        frozen = another_policy(folder)
    expected, _ = spied_step(folder, groups, step_config(*more), frozen)
    own, result = spied_step(folder, groups, step_config(f"algorithm.loss.kind={mine}:ppo", *more), frozen)
    for before, after in zip(expected, own, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert result.updates.numbers["ratio_clipped_share"] == 0, "only the function knows"


def test_own_advantages_scale_the_gradient_and_weights_of_one_do_not(tiny_folders: dict[str, Path], mine: str) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()
    (expected,), _ = spied_step(folder, groups, step_config())
    options = (f"algorithm.advantages={mine}:doubled", f"algorithm.sample_weights={mine}:ones")
    (own,), _ = spied_step(folder, groups, step_config(*options))
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], 2 * gradient, rtol=1e-5, atol=1e-7)


def test_a_weight_scales_the_gradient_of_its_samples(tiny_folders: dict[str, Path], mine: str) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()

    def gradient(function: str | None) -> dict[str, torch.Tensor]:
        options = [] if function is None else [f"algorithm.sample_weights={mine}:{function}"]
        return spied_step(folder, groups, step_config(*options))[0][0]

    whole, first, mixed = gradient(None), gradient("first_group"), gradient("mixed")
    for name in whole:
        torch.testing.assert_close(mixed[name], 0.25 * whole[name] + 1.5 * first[name], rtol=1e-4, atol=1e-7)
        assert not torch.equal(mixed[name], whole[name])


def test_the_weights_function_sees_each_sample_once() -> None:
    groups = ragged_groups()
    samples = Samples([trajectory for group in groups for trajectory in group.trajectories])
    config = step_config().algorithm
    masks = loss_masks(samples, policy_version=VERSION, config=config)
    seen: list[torch.Tensor] = []

    def function(*values: torch.Tensor) -> torch.Tensor:
        seen.extend(values)
        return torch.arange(len(samples), dtype=torch.float64)

    factors = own_factors(function, samples, masks, VERSION)
    rewards, group_ids, num_tokens, staleness = seen
    for index, trajectory in enumerate(samples.trajectories):
        fresh = [VERSION - int(v) for v in trajectory.completion.versions if VERSION - v <= config.max_staleness]
        sample = int(samples.number[index])
        assert (float(rewards[sample]), int(group_ids[sample])) == (trajectory.reward, trajectory.group_id)
        assert int(num_tokens[sample]) == len(fresh)
        assert float(staleness[sample]) == pytest.approx(sum(fresh) / max(1, len(fresh)))
        assert float(factors[index]) == sample


def test_a_function_that_raises_later_ends_the_step_with_its_traceback(
    tiny_folders: dict[str, Path], mine: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = step_config(f"algorithm.loss.kind={mine}:fails_later")
    with pytest.raises(UserError, match=r"kind: .*fails_later raised ValueError: not these tokens \(.*mine.py:\d+\)"):
        spied_step(tiny_folders["qwen2"], ragged_groups(), config)
    assert 'raise ValueError("not these tokens")' in caplog.text
