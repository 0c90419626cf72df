"""One train step against a 40-line synchronous reference: the gradient does not depend on how it is computed."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from one_rank import one_rank, policy_of
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from areal_rloo.config import PRESETS, Config, load_config
from areal_rloo.errors import ModelError
from areal_rloo.learner.packing import plan_rows
from areal_rloo.learner.train_step import StepResult
from areal_rloo.models.loading import load_policy
from areal_rloo.models.reference import Reference
from areal_rloo.trajectory import Completion, Group, Trajectory

VERSION = 3


def _config(*overrides: str) -> Config:
    return load_config(
        "quickstart.yaml",
        [
            "learner.optimizer.max_grad_norm=1e9",
            "learner.num_minibatches=1",
            "rollout.sampling.temperature=0.8",
            *overrides,
        ],
    )


def _groups(seed: int = 0, *, num_groups: int = 5) -> list[Group]:
    """Ragged groups of random tokens; some tokens are past the bound of eta = 2."""
    rng = np.random.default_rng(seed)
    groups = []
    for group_id in range(num_groups):
        prompt = rng.integers(2, 200, rng.integers(1, 9)).astype(np.int32)
        trajectories = []
        for index in range(int(rng.integers(2, 5))):
            num = int(rng.integers(1, 30))
            completion = Completion(
                rng.integers(2, 200, num).astype(np.int32),
                -rng.random(num, dtype=np.float32) * 0.2 - 4.5,
                np.sort(rng.integers(0, VERSION + 1, num)).astype(np.int32),
                "stop",
            )
            trajectories.append(Trajectory(group_id, index, prompt, completion, float(rng.random())))
        groups.append(Group(group_id, 5, tuple(trajectories)))
    return groups


def _is_the_policy_s(completion: Completion, index: int) -> bool:
    """Whether the policy wrote this token, counted span by span."""
    for number, length in enumerate(completion.spans):
        if index < length:
            return number % 2 == 0
        index -= length
    return True


def _reference_gradient(folder: Path, groups: list[Group], config: Config) -> dict[str, torch.Tensor]:
    """RLOO with the decoupled loss, one sequence at a time, straight from the equations."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    terms, num_tokens = [], 0
    for group in groups:
        rewards = {trajectory.sample_index: trajectory.reward for trajectory in group.trajectories}
        for trajectory in group.trajectories:
            others = [reward for index, reward in rewards.items() if index != trajectory.sample_index]
            advantage = trajectory.reward - sum(others) / len(others)
            prompt, completion = trajectory.prompt_tokens.tolist(), trajectory.completion
            logits = model(torch.tensor([[*prompt, *completion.tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / config.rollout.sampling.temperature).log_softmax(-1)
            for t, token in enumerate(completion.tokens.tolist()):
                if VERSION - completion.versions[t] > config.algorithm.max_staleness:
                    continue
                if not _is_the_policy_s(completion, t):
                    continue
                current = logprobs[t, token]
                weight = min(float(torch.exp(current.detach() - float(completion.behaviour_logprobs[t]))), 5.0)
                ratio = torch.exp(current - current.detach())
                terms.append(-weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
                num_tokens += 1
    (torch.stack(terms).sum() / num_tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class _Spy(torch.optim.SGD):
    """An optimizer that keeps the gradients of its last step and moves nothing."""

    def __init__(self, parameters: list[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__([p for _, p in parameters], lr=0.0)
        self.named = parameters
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.gradients.append({name: p.grad.clone() for name, p in self.named if p.grad is not None})


def _step(
    folder: Path, groups: list[Group], config: Config, frozen: PreTrainedModel | None = None
) -> tuple[list[dict[str, torch.Tensor]], StepResult]:
    model = load_policy(str(folder), device=torch.device("cpu"))
    train_step = one_rank(model, config, reference=frozen)
    spy = _Spy(list(model.named_parameters()))
    train_step.team.own.optimizer = spy
    train_step.team.own.schedule = torch.optim.lr_scheduler.LambdaLR(spy, lambda step: 1.0)
    result = train_step.step(groups, policy_version=VERSION)
    return spy.gradients, result


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    scale = max(float(gradient.abs().max()) for gradient in other.values())
    assert scale > 0
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=2e-6 * scale, msg=name)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("microbatch_tokens", [128, 256, 8192])
def test_the_gradient_is_that_of_the_synchronous_reference_for_any_microbatching(
    tiny_folders: dict[str, Path], name: str, microbatch_tokens: int
) -> None:
    config, groups = _config(f"learner.microbatch_tokens={microbatch_tokens}"), _groups()
    (gradient,), result = _step(tiny_folders[name], groups, config)
    _assert_same(gradient, _reference_gradient(tiny_folders[name], groups, config))
    assert result.num_stale_tokens > 0


def _another_policy(folder: Path) -> PreTrainedModel:
    model = load_policy(str(folder), device=torch.device("cpu")).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _slow_logprobs(model: PreTrainedModel, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    prompt, tokens = trajectory.prompt_tokens.tolist(), trajectory.completion.tokens.tolist()
    row = torch.tensor([[*prompt, *tokens]])
    logits = model(row).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[range(len(tokens)), tokens]


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_a_kl_in_the_loss_adds_its_gradient_over_the_tokens_in_the_loss(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    folder, groups = tiny_folders["qwen2"], _groups()
    kl = ("algorithm.kl.coefficient=0.3", "algorithm.kl.placement=loss", "algorithm.kl.estimator=k3")
    config = _config(*kl, f"learner.microbatch_tokens={microbatch_tokens}")
    (plain,), _ = _step(folder, groups, _config())
    (gradient,), result = _step(folder, groups, config, _another_policy(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference.load_state_dict(_another_policy(folder).state_dict())
    terms = []
    for trajectory in (t for group in groups for t in group.trajectories):
        current = _slow_logprobs(model, trajectory, 0.8)
        frozen = _slow_logprobs(reference, trajectory, 0.8).detach()
        fresh = torch.from_numpy(VERSION - trajectory.completion.versions <= config.algorithm.max_staleness)
        terms.append((torch.exp(frozen - current) - 1 + current - frozen)[fresh])
    (0.3 * torch.cat(terms).mean()).backward()
    expected = {name: plain[name] + p.grad for name, p in model.named_parameters() if p.grad is not None}
    _assert_same(gradient, expected)
    assert result.reference_kl_k3 > 0


def test_a_kl_in_the_reward_is_the_same_as_rewards_less_the_behaviour_policy_s_divergence(
    tiny_folders: dict[str, Path],
) -> None:
    folder, groups = tiny_folders["qwen2"], _groups()
    reference = _another_policy(folder)
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
    (gradient,), _ = _step(folder, groups, _config("algorithm.kl.coefficient=0.3"), reference)
    (expected,), _ = _step(folder, lowered, _config())
    _assert_same(gradient, expected)


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_a_sequence_level_ratio_is_of_whole_trajectories_for_any_microbatching(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    """At ratio 1 the gradient of a product is the sum of its factors'; the tiny bound makes all weights equal."""
    equal_weights = "algorithm.loss.behaviour_weight.upper=1e-9"
    product = _config(
        *("algorithm.loss.ratio_level=sequence_sum", "algorithm.loss.aggregation=seq_mean_token_mean", equal_weights),
        *(f"learner.microbatch_tokens={microbatch_tokens}", "algorithm.max_staleness=9"),
    )
    total = _config("algorithm.loss.aggregation=seq_mean_token_sum", equal_weights, "algorithm.max_staleness=9")
    (gradient,), _ = _step(tiny_folders["qwen2"], _groups(), product)
    (expected,), _ = _step(tiny_folders["qwen2"], _groups(), total)
    _assert_same(gradient, expected)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_s_gradient_depends_on_the_microbatches(tiny_folders: dict[str, Path], preset: str) -> None:
    folder, gradients = tiny_folders["qwen2"], []
    for microbatch_tokens in (128, 8192):
        config = _config(f"algorithm.preset={preset}", f"learner.microbatch_tokens={microbatch_tokens}")
        frozen = _another_policy(folder) if config.algorithm.kl.coefficient > 0 else None
        gradients += _step(folder, _groups(), config, frozen)[0]
    _assert_same(*gradients)


def test_the_order_of_trajectories_and_groups_does_not_matter(tiny_folders: dict[str, Path]) -> None:
    config, groups = _config(), _groups()
    (expected,), _ = _step(tiny_folders["qwen2"], groups, config)
    rng = random.Random(0)
    shuffled = [Group(g.group_id, g.deadline, tuple(rng.sample(g.trajectories, len(g.trajectories)))) for g in groups]
    rng.shuffle(shuffled)
    (gradient,), _ = _step(tiny_folders["qwen2"], shuffled, config)
    _assert_same(gradient, expected)


def test_proximal_logprobs_of_later_minibatches_are_those_of_the_steps_beginning(tiny_folders: dict[str, Path]) -> None:
    """With a frozen model they equal the current ones, so every ratio is 1 in both minibatches."""
    gradients, result = _step(tiny_folders["qwen2"], _groups(), _config("learner.num_minibatches=2"))
    assert len(gradients) == 2
    assert result.policy.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert result.policy.ratio_max == pytest.approx(1.0, abs=1e-4)


def test_the_second_minibatch_is_clipped_against_the_weights_before_the_first(tiny_folders: dict[str, Path]) -> None:
    config = _config("learner.num_minibatches=2", "learner.optimizer.learning_rate=1e-2")
    train_step = one_rank(tiny_folders["qwen2"], config)
    result = train_step.step(_groups(), policy_version=VERSION)
    assert result.num_optimizer_steps == 2
    assert result.policy.ratio_max > 1.1


def _with_equal_rewards(groups: list[Group]) -> list[Group]:
    return [
        Group(
            g.group_id,
            g.deadline,
            tuple(Trajectory(t.group_id, t.sample_index, t.prompt_tokens, t.completion, 0.7) for t in g.trajectories),
        )
        for g in groups
    ]


def test_a_step_on_equal_rewards_moves_no_weight(tiny_folders: dict[str, Path]) -> None:
    (gradient,), _ = _step(tiny_folders["qwen2"], _with_equal_rewards(_groups()), _config())
    assert all(torch.count_nonzero(g) == 0 for g in gradient.values())


def test_a_kl_in_the_loss_reaches_trajectories_without_an_advantage(tiny_folders: dict[str, Path]) -> None:
    """The KL's gradient does not depend on the rewards: it is what a step has more with it than without."""
    folder, reference = tiny_folders["qwen2"], _another_policy(tiny_folders["qwen2"])
    config = _config("algorithm.kl={coefficient: 0.3, placement: loss, estimator: k2}")
    (equal,), _ = _step(folder, _with_equal_rewards(_groups()), config, reference)
    (different,), _ = _step(folder, _groups(), config, reference)
    (plain,), _ = _step(folder, _groups(), _config())
    _assert_same(equal, {name: different[name] - plain[name] for name in equal})


def test_a_gradient_that_is_not_finite_is_not_stepped_on(tiny_folders: dict[str, Path]) -> None:
    groups = _groups()
    trajectory = groups[0].trajectories[0]
    trajectory.completion.behaviour_logprobs[:] = np.nan
    config = _config("algorithm.loss.behaviour_weight.rule=none", "algorithm.max_staleness=9")
    gradients, result = _step(tiny_folders["qwen2"], groups, config)
    assert gradients == []
    assert (result.num_optimizer_steps, result.num_skipped) == (0, 1)


def test_rows_are_full_hold_everything_once_and_never_pass_the_budget() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths, num_ranks = rng.integers(1, 100, rng.integers(1, 60)).tolist(), int(rng.integers(1, 5))
        by_rank = plan_rows(lengths, 128, num_ranks=num_ranks)
        assert len({len(rows) for rows in by_rank}) == 1, "no rank has a row more than another"
        rows = [row for rows in by_rank for row in rows]
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        sizes = sorted(sum(lengths[index] for index in row) for row in rows)
        assert sizes[-1] <= 128
        least = -(-sum(lengths) // 128)  # first-fit decreasing is within 11/9 of the fewest
        assert len(rows) <= -(-(11 * least // 9 + 1) // num_ranks) * num_ranks


def test_the_ranks_rows_hold_about_as_many_tokens() -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1, 256).astype(int).clip(1, 4000).tolist()
    for num_ranks in (2, 4, 8):
        by_rank = plan_rows(lengths, 8192, num_ranks=num_ranks)
        for rows in zip(*by_rank, strict=True):
            sizes = [sum(lengths[index] for index in row) for row in rows]
            assert max(sizes) <= 1.05 * min(sizes)


def _replaced(groups: list[Group], change: Callable[[Trajectory], Trajectory]) -> list[Group]:
    return [Group(g.group_id, g.deadline, tuple(change(t) for t in g.trajectories)) for g in groups]


def _truncated_evenly(groups: list[Group]) -> list[Group]:
    """Every second trajectory of a group ended at the token limit."""

    def change(t: Trajectory) -> Trajectory:
        reason = "length" if t.sample_index % 2 else "stop"
        completion = msgspec.structs.replace(t.completion, finish_reason=reason)
        return msgspec.structs.replace(t, completion=completion)

    return _replaced(groups, change)


def test_masked_truncated_completions_leave_the_loss_and_stay_in_their_group_s_mean(
    tiny_folders: dict[str, Path],
) -> None:
    """Which is what a version past the bound does to all their tokens."""

    def stale(t: Trajectory) -> Trajectory:
        if t.completion.finish_reason != "length":
            return t
        versions = np.full_like(t.completion.versions, -9)
        return msgspec.structs.replace(t, completion=msgspec.structs.replace(t.completion, versions=versions))

    folder, groups = tiny_folders["qwen2"], _truncated_evenly(_groups())
    (masked,), result = _step(folder, groups, _config("algorithm.rewards.mask_truncated=true"))
    (expected,), without = _step(folder, _replaced(groups, stale), _config())
    _assert_same(masked, expected)
    assert result.num_truncated_tokens > 0
    assert result.num_tokens == without.num_tokens
    assert sum(result.staleness_tokens.values()) == result.num_tokens


def test_a_shaped_reward_is_the_same_as_a_task_that_gave_it(tiny_folders: dict[str, Path]) -> None:
    folder, groups = tiny_folders["qwen2"], _truncated_evenly(_groups())
    config = _config("algorithm.rewards.truncated_penalty=0.5", "algorithm.rewards.scale=2")
    (gradient,), _ = _step(folder, groups, config)

    def given(t: Trajectory) -> Trajectory:
        penalty = 0.5 * (t.completion.finish_reason == "length")
        return msgspec.structs.replace(t, reward=2 * (t.reward - penalty))

    (expected,), _ = _step(folder, _replaced(groups, given), _config())
    _assert_same(gradient, expected)


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_an_entropy_bonus_adds_the_gradient_of_the_whole_distribution_s_entropy(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    folder, groups = tiny_folders["qwen2"], _with_equal_rewards(_groups())
    config = _config("algorithm.loss.entropy_coefficient=0.3", f"learner.microbatch_tokens={microbatch_tokens}")
    (gradient,), result = _step(folder, groups, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    terms = []
    for trajectory in (t for group in groups for t in group.trajectories):
        prompt, tokens = trajectory.prompt_tokens.tolist(), trajectory.completion.tokens.tolist()
        logprobs = (model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        fresh = torch.from_numpy(VERSION - trajectory.completion.versions <= config.algorithm.max_staleness)
        terms.append(-(logprobs.exp() * logprobs).sum(-1)[fresh])
    mean = torch.cat(terms).mean()
    (-0.3 * mean).backward()
    _assert_same(gradient, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert result.policy.entropy == pytest.approx(float(mean.detach()), rel=1e-5)


def _real_step(folder: Path, *overrides: str, groups: list[Group] | None = None) -> StepResult:
    """With an optimizer that moves the weights far in its first minibatch."""
    config = _config("learner.num_minibatches=2", "learner.optimizer.learning_rate=1e-2", *overrides)
    train_step = one_rank(folder, config)
    return train_step.step(groups or _groups(), policy_version=VERSION)


def test_reused_proximal_logprobs_are_the_current_ones_in_every_minibatch(tiny_folders: dict[str, Path]) -> None:
    result = _real_step(tiny_folders["qwen2"], "algorithm.loss.proximal=reuse")
    assert result.policy.ratio_max == 1.0
    assert result.policy.proximal_kl_k3 == 0.0
    assert _real_step(tiny_folders["qwen2"]).policy.proximal_kl_k3 > 1e-4


def test_interpolated_proximal_logprobs_lie_between_behaviour_and_current(tiny_folders: dict[str, Path]) -> None:
    """Of fresh tokens they are the behaviour policy's, so that the second minibatch has no behaviour_weight but 1."""
    folder = tiny_folders["qwen2"]

    def fresh(t: Trajectory) -> Trajectory:
        versions = np.full_like(t.completion.versions, VERSION)
        return msgspec.structs.replace(t, completion=msgspec.structs.replace(t.completion, versions=versions))

    groups = _replaced(_groups(), fresh)
    weight = "algorithm.loss.behaviour_weight.rule=none"
    interpolated = _real_step(folder, "algorithm.loss.proximal=interpolate", weight, groups=groups).policy
    recomputed = _real_step(folder, weight, groups=groups).policy
    assert interpolated.behaviour_weight_mean != pytest.approx(recomputed.behaviour_weight_mean, rel=1e-3)
    assert interpolated.mismatch_abs_mean == pytest.approx(recomputed.mismatch_abs_mean), "the first minibatch is exact"
    stale = _real_step(folder, "algorithm.loss.proximal=interpolate", weight).policy
    assert 0 < stale.proximal_kl_k3 < stale.behaviour_kl_k3


def test_the_kl_coefficient_follows_its_controller_only_after_a_step_that_was_taken(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen2"]
    config = _config("algorithm.kl.coefficient=0.2", "algorithm.kl.adaptive={target: 1e-6, horizon: 100}")
    train_step = one_rank(folder, config, reference=_another_policy(folder))
    groups = _groups()
    num = sum(len(group.trajectories) for group in groups)
    first = train_step.step(groups, policy_version=VERSION)
    assert first.kl_coefficient == 0.2
    direction = 0.2 if first.reference_kl_k1 > 0 else -0.2
    after = 0.2 * (1 + direction * num / 100)
    assert train_step.kl_coefficient == pytest.approx(after)
    with torch.no_grad():
        next(train_step.team.own.policy.parameters()).fill_(torch.nan)
    skipped = train_step.step(groups, policy_version=VERSION)
    assert skipped.num_skipped == 1
    assert np.isnan(skipped.gradient_norm)
    assert np.isfinite(skipped.reference_divergence)
    assert train_step.kl_coefficient == pytest.approx(after)


def test_a_reference_is_refreshed_at_every_nth_version_and_then_has_no_divergence(
    tiny_folders: dict[str, Path],
) -> None:
    folder = tiny_folders["qwen2"]
    config = _config("algorithm.kl.coefficient=0.2", "model.reference.refresh_every_n_versions=3")
    model, reference = load_policy(str(folder), device=torch.device("cpu")), _another_policy(folder)
    train_step = one_rank(model, config, reference=reference)
    before = [parameter.clone() for parameter in model.parameters()]
    train_step.step(_groups(), policy_version=2)
    assert not torch.equal(next(reference.parameters()), before[0])
    now = [parameter.clone() for parameter in model.parameters()]
    train_step.step(_groups(), policy_version=3)
    assert all(torch.equal(own, theirs) for own, theirs in zip(reference.parameters(), now, strict=True))


class _Moves(torch.nn.Linear):
    """Notes where it was asked to go."""

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


@pytest.mark.parametrize("preset", PRESETS)
def test_a_batch_with_nothing_in_the_loss_has_no_gradient_and_claims_nothing(
    tiny_folders: dict[str, Path], preset: str
) -> None:
    """Every token past the bound, under every preset."""

    def stale(t: Trajectory) -> Trajectory:
        versions = np.full_like(t.completion.versions, -9)
        return msgspec.structs.replace(t, completion=msgspec.structs.replace(t.completion, versions=versions))

    folder = tiny_folders["qwen2"]
    config = _config(f"algorithm.preset={preset}")
    frozen = _another_policy(folder) if config.algorithm.kl.coefficient > 0 else None
    (gradient,), result = _step(folder, _replaced(_groups(), stale), config, frozen)
    assert all(torch.count_nonzero(g) == 0 for g in gradient.values())
    assert (result.loss, result.num_tokens, result.gradient_norm) == (0.0, 0, 0.0)
    assert np.isnan(result.policy.entropy)
    assert np.isnan(result.advantage_mean)


@pytest.mark.parametrize("preset", PRESETS)
def test_logprobs_of_minus_ten_thousand_and_huge_rewards_give_a_finite_step(
    tiny_folders: dict[str, Path], preset: str
) -> None:
    folder, groups = tiny_folders["qwen2"], _groups()
    for index, trajectory in enumerate(t for group in groups for t in group.trajectories):
        trajectory.completion.behaviour_logprobs[::2] = -1e4 if index % 2 else -0.0
    groups = _replaced(groups, lambda t: msgspec.structs.replace(t, reward=t.reward * 1e300))
    config = _config(f"algorithm.preset={preset}")
    frozen = _another_policy(folder) if config.algorithm.kl.coefficient > 0 else None
    (gradient,), result = _step(folder, groups, config, frozen)
    assert all(bool(torch.isfinite(g).all()) for g in gradient.values())
    assert result.num_optimizer_steps == 1
    assert result.num_limited_rewards == sum(len(group.trajectories) for group in groups)


def test_a_model_whose_logprobs_would_be_others_is_refused_with_the_architectures_there_are(tmp_path: Path) -> None:
    """Gemma caps its logits, which the hidden states and the head alone do not show."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 16,
    }
    Gemma2ForCausalLM(Gemma2Config(vocab_size=64, num_key_value_heads=1, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is a gemma2 model; expected one of qwen2, qwen3, llama"):
        load_policy(str(tmp_path), device=torch.device("cpu"))


def _with_turns(groups: list[Group], seed: int = 1) -> list[Group]:
    """The same tokens, cut into turns of the policy and of others, some samples with two trajectories."""
    rng = np.random.default_rng(seed)

    def cut(trajectory: Trajectory) -> Trajectory:
        num = len(trajectory.completion.tokens)
        ends = sorted({*rng.integers(1, num + 1, 3).tolist(), num})
        spans = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        completion = msgspec.structs.replace(trajectory.completion, spans=spans)
        return msgspec.structs.replace(trajectory, completion=completion)

    def doubled(group: Group) -> Group:
        first, *others = (cut(trajectory) for trajectory in group.trajectories)
        again = msgspec.structs.replace(others[-1], sample_index=first.sample_index, reward=first.reward)
        return msgspec.structs.replace(group, trajectories=(first, again, *others))

    return [doubled(group) for group in groups]


@pytest.mark.parametrize("microbatch_tokens", [128, 8192])
def test_tokens_of_tools_and_users_have_no_gradient_and_a_sample_counts_once_however_many_trajectories_it_has(
    tiny_folders: dict[str, Path], microbatch_tokens: int
) -> None:
    config, groups = _config(f"learner.microbatch_tokens={microbatch_tokens}"), _with_turns(_groups())
    (gradient,), result = _step(tiny_folders["qwen2"], groups, config)
    _assert_same(gradient, _reference_gradient(tiny_folders["qwen2"], groups, config))
    counted = [
        sum(_is_the_policy_s(t.completion, i) for i in range(len(t.completion.tokens)))
        for group in groups
        for t in group.trajectories
    ]
    assert result.num_tokens + result.num_stale_tokens == sum(counted)
    assert [len(mask) for mask in result.masks] == [len(t.completion.tokens) for g in groups for t in g.trajectories]


def test_what_others_say_changes_no_kl(tiny_folders: dict[str, Path]) -> None:
    """Behaviour logprobs of 0 beside a reference's would be a large divergence, were they the policy's."""
    groups = _with_turns(_groups())
    silenced = _replaced(
        groups,
        lambda t: msgspec.structs.replace(
            t,
            completion=msgspec.structs.replace(
                t.completion,
                behaviour_logprobs=np.where(
                    [_is_the_policy_s(t.completion, i) for i in range(len(t.completion.tokens))],
                    t.completion.behaviour_logprobs,
                    np.float32(0),
                ),
            ),
        ),
    )
    for placement, estimator in (("reward", "k1"), ("loss", "k3")):
        config = _config(
            "algorithm.kl.coefficient=0.1",
            f"algorithm.kl.placement={placement}",
            f"algorithm.kl.estimator={estimator}",
        )
        frozen = _another_policy(tiny_folders["qwen2"])
        (one,), first = _step(tiny_folders["qwen2"], groups, config, frozen)
        (other,), second = _step(tiny_folders["qwen2"], silenced, config, frozen)
        _assert_same(one, other)
        assert first.reference_kl_k1 == second.reference_kl_k1


def test_rewards_of_single_tokens_stand_at_their_tokens_and_add_up_to_the_trajectory_s(
    tiny_folders: dict[str, Path],
) -> None:
    config = _config(
        "algorithm.returns=token", "algorithm.discount=0.5", "algorithm.adv_norm.mean_level=none",
        "algorithm.adv_norm.mean_leave1out=false", "algorithm.max_staleness=3",
    )  # fmt: skip
    rewards = np.array([0, 2, 0, 1], np.float32)
    completion = Completion(
        np.array([5, 6, 7, 8], np.int32), np.full(4, -4.5, np.float32), np.full(4, VERSION, np.int32), "stop"
    )
    trajectories = tuple(
        Trajectory(0, index, np.array([3], np.int32), completion, 4.0, {}, given)
        for index, given in enumerate((rewards, None))
    )
    _, result = _step(tiny_folders["qwen2"], [Group(0, 9, trajectories)], config)
    # Of the 4 the tokens earned 3; the last token has the other 1. Returns are discounted by half a token.
    assert result.advantages[0].tolist() == [0 + 0.5 * (2 + 0.5 * (0 + 0.5 * 2)), 2 + 0.5 * (0 + 0.5 * 2), 1.0, 2.0]
    assert result.advantages[1].tolist() == [0.5, 1.0, 2.0, 4.0]
