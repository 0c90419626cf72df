"""A train step with a reference policy: the gradient of a KL term, its coefficient, and where the reference is."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.one_rank import one_rank, policy_of
from support.train_steps import (
    VERSION,
    another_policy,
    assert_same_gradient,
    is_the_policy_s,
    ragged_groups,
    replaced,
    spied_step,
    step_config,
    with_equal_rewards,
    with_turns,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from areal_rloo.errors import ModelError
from areal_rloo.learner.building import build_rank
from areal_rloo.models.loading import Reference, load_policy
from areal_rloo.trajectory import Group, Trajectory


def _slow_logprobs(model: PreTrainedModel, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    prompt, tokens = trajectory.prompt_tokens.tolist(), trajectory.completion.tokens.tolist()
    row = torch.tensor([[*prompt, *tokens]])
    logits = model(row).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(tokens)), tokens]


@pytest.mark.parametrize("correction", ["weight", "none"])
@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_a_kl_in_the_loss_adds_its_gradient_over_the_tokens_in_the_loss(
    tiny_folders: dict[str, Path], microbatch_tokens: int, correction: str
) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()
    kl = f"algorithm.kl={{coefficient: 0.3, placement: loss, estimator: k3, correction: {correction}}}"
    config = step_config(kl, f"learner.microbatch_tokens={microbatch_tokens}")
    (plain,), _ = spied_step(folder, groups, step_config())
    (gradient,), result = spied_step(folder, groups, config, another_policy(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.load_state_dict(another_policy(folder).state_dict())
    terms = []
    for trajectory in (t for group in groups for t in group.trajectories):
        current = _slow_logprobs(model, trajectory, 0.8)
        frozen = _slow_logprobs(reference, trajectory, 0.8).detach()
        fresh = torch.from_numpy(VERSION - trajectory.completion.versions <= config.algorithm.max_staleness)
        behaviour = torch.tensor(trajectory.completion.behaviour_logprobs)
        weight = torch.exp(current.detach() - behaviour).clamp(max=5.0) if correction == "weight" else 1.0
        terms.append((weight * (torch.exp(frozen - current) - 1 + current - frozen))[fresh])
    (0.3 * torch.cat(terms).mean()).backward()
    expected = {name: plain[name] + p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradient(gradient, expected)
    assert result.numbers["reference_kl_k3"] > 0


def test_a_kl_in_the_reward_lowers_rewards_by_the_divergence(
    tiny_folders: dict[str, Path],
) -> None:
    folder, groups = tiny_folders["qwen2"], ragged_groups()
    reference = another_policy(folder)
    slow = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    slow.load_state_dict(reference.state_dict())
    lowered = []
    for group in groups:
        trajectories = []
        for t in group.trajectories:
            divergence = torch.tensor(t.completion.behaviour_logprobs) - _slow_logprobs(slow, t, 0.8).detach()
            reward = t.reward - 0.3 * float(divergence.double().sum())
            trajectories.append(Trajectory(t.group_id, t.sample_index, t.prompt_tokens, t.completion, reward))
        lowered.append(Group(group.group_id, group.deadline, tuple(trajectories)))
    (gradient,), _ = spied_step(folder, groups, step_config("algorithm.kl.coefficient=0.3"), reference)
    (expected,), _ = spied_step(folder, lowered, step_config())
    assert_same_gradient(gradient, expected)


def test_a_kl_in_the_loss_reaches_trajectories_without_an_advantage(tiny_folders: dict[str, Path]) -> None:
    """The gradient of the KL does not depend on the rewards: the difference of a step with and without the KL."""
    folder, reference = tiny_folders["qwen2"], another_policy(tiny_folders["qwen2"])
    config = step_config("algorithm.kl={coefficient: 0.3, placement: loss, estimator: k2}")
    (equal,), _ = spied_step(folder, with_equal_rewards(ragged_groups()), config, reference)
    (different,), _ = spied_step(folder, ragged_groups(), config, reference)
    (plain,), _ = spied_step(folder, ragged_groups(), step_config())
    assert_same_gradient(equal, {name: different[name] - plain[name] for name in equal})


def test_the_kl_controller_ignores_skipped_steps(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen2"]
    config = step_config("algorithm.kl.coefficient=0.2", "algorithm.kl.adaptive={target: 1e-6, horizon: 100}")
    train_step = one_rank(folder, config, reference=another_policy(folder))
    groups = ragged_groups()
    num = sum(len(group.trajectories) for group in groups)
    first = train_step.step(groups, policy_version=VERSION)
    assert first.numbers["kl_coefficient"] == 0.2
    direction = 0.2 if first.numbers["reference_kl_k1"] > 0 else -0.2
    after = 0.2 * (1 + direction * num / 100)
    assert train_step.kl_coefficient == pytest.approx(after)
    with torch.no_grad():
        next(train_step.team.own.policy.parameters()).fill_(torch.nan)
    skipped = train_step.step(groups, policy_version=VERSION)
    assert skipped.updates.num_skipped == 1
    assert np.isnan(skipped.numbers["gradient_norm"])
    assert np.isfinite(skipped.reference.divergence)
    assert train_step.kl_coefficient == pytest.approx(after)


@pytest.mark.parametrize(
    ("adaptive", "saved", "expected"),
    [("null", 0.1, 0.3), ("{target: 1e-2, horizon: 100}", 0.1, 0.1), ("{target: 1e-2, horizon: 100}", 0.0, 0.3)],
)
def test_only_an_adapted_kl_coefficient_outlives_the_config(
    tiny_folders: dict[str, Path], adaptive: str, saved: float, expected: float
) -> None:
    folder = tiny_folders["qwen2"]
    config = step_config("algorithm.kl.coefficient=0.3", f"algorithm.kl.adaptive={adaptive}")
    train_step = one_rank(folder, config, reference=another_policy(folder))
    train_step.resume(saved)
    assert train_step.kl_coefficient == expected


def test_a_refreshed_reference_has_no_divergence(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen2"]
    config = step_config("algorithm.kl.coefficient=0.2", "model.reference.refresh_every_n_versions=3")
    model, reference = load_policy(str(folder), device=torch.device("cpu")), another_policy(folder)
    train_step = one_rank(model, config, reference=reference)
    before = [parameter.clone() for parameter in model.parameters()]
    train_step.step(ragged_groups(), policy_version=2)
    assert not torch.equal(next(reference.parameters()), before[0])
    now = [parameter.clone() for parameter in model.parameters()]
    train_step.step(ragged_groups(), policy_version=3)
    assert all(torch.equal(own, theirs) for own, theirs in zip(reference.parameters(), now, strict=True))


class _Moves(torch.nn.Linear):
    """A module that records the devices of every move."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.places: list[str] = []

    def to(self, device: torch.device) -> "_Moves":  # type: ignore[override]
        self.places.append(str(device))
        return self


@pytest.mark.parametrize(("offload", "home"), [(True, "cpu"), (False, "cuda")])
def test_an_offloaded_reference_is_on_its_device_only_while_it_is_used(offload: bool, home: str) -> None:
    moves = _Moves()
    reference = Reference(moves, device=torch.device("cuda"), offload=offload)  # type: ignore[arg-type]
    assert moves.places[-1] == home
    with reference.loaded():
        assert moves.places[-1] == "cuda"
    assert moves.places[-1] == home


@pytest.mark.gpu
def test_an_offloaded_reference_leaves_no_weights_on_the_gpu(tiny_folders: dict[str, Path]) -> None:
    cuda = torch.device("cuda")
    reference = Reference(policy_of(tiny_folders["qwen2"]), device=cuda, offload=True)
    with reference.loaded() as policy:
        assert all(parameter.is_cuda for parameter in policy.parameters())
    assert not any(parameter.is_cuda for parameter in reference.policy.parameters())


def test_tokens_by_others_do_not_change_the_kl(tiny_folders: dict[str, Path]) -> None:
    """Behaviour logprobs of 0 beside a reference's would be a large divergence, were they the policy's."""
    groups = with_turns(ragged_groups())
    silenced = replaced(
        groups,
        lambda t: msgspec.structs.replace(
            t,
            completion=msgspec.structs.replace(
                t.completion,
                behaviour_logprobs=np.where(
                    [is_the_policy_s(t.completion, i) for i in range(len(t.completion.tokens))],
                    t.completion.behaviour_logprobs,
                    np.float32(0),
                ),
            ),
        ),
    )
    for placement, estimator in (("reward", "k1"), ("loss", "k3")):
        config = step_config(
            "algorithm.kl.coefficient=0.1",
            f"algorithm.kl.placement={placement}",
            f"algorithm.kl.estimator={estimator}",
        )
        frozen = another_policy(tiny_folders["qwen2"])
        (one,), first = spied_step(tiny_folders["qwen2"], groups, config, frozen)
        (other,), second = spied_step(tiny_folders["qwen2"], silenced, config, frozen)
        assert_same_gradient(one, other)
        assert first.numbers["reference_kl_k1"] == second.numbers["reference_kl_k1"]


def test_a_reference_with_another_vocabulary_is_refused(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, num_key_value_heads=1, **shape)).save_pretrained(tmp_path / "other")
    config = step_config("algorithm.kl.coefficient=0.1", f"model.reference.path={tmp_path / 'other'}")
    with pytest.raises(ModelError, match="other has a vocabulary of 64, expected the policy's"):
        build_rank(config, model_path=str(tiny_folders["qwen2"]), device=torch.device("cpu"))
