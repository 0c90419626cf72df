"""What the tests of a train step share: ragged groups, the gradient of one step, and the slow reference for it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from support.one_rank import one_rank
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_rloo.config import Config, load_config
from areal_rloo.learner.advantages import Masks
from areal_rloo.learner.train_step import StepResult
from areal_rloo.models.loading import load_policy
from areal_rloo.trajectory import Completion, Group, Trajectory

VERSION = 3


def step_config(*overrides: str) -> Config:
    return load_config(
        "quickstart.yaml",
        [
            "learner.optimizer.max_grad_norm=1e9",
            "learner.num_minibatches=1",
            "rollout.sampling.temperature=0.8",
            *overrides,
        ],
    )


def ragged_groups(seed: int = 0, *, num_groups: int = 5) -> list[Group]:
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


def masks_of(of_tokens: list[Tensor]) -> Masks:
    """Masks of a batch without staleness and truncation."""
    counts = torch.tensor([int(mask.sum()) for mask in of_tokens])
    return Masks(of_tokens, [0] * len(of_tokens), counts, 0, Counter({0: int(counts.sum())}))


def is_the_policy_s(completion: Completion, index: int) -> bool:
    """Whether the policy wrote this token, counted span by span."""
    for number, length in enumerate(completion.spans):
        if index < length:
            return number % 2 == 0
        index -= length
    return True


def reference_gradient(folder: Path, groups: list[Group], config: Config) -> dict[str, torch.Tensor]:
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
                if not is_the_policy_s(completion, t):
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


def spied_step(
    folder: Path, groups: list[Group], config: Config, frozen: PreTrainedModel | None = None
) -> tuple[list[dict[str, torch.Tensor]], StepResult]:
    model = load_policy(str(folder), device=torch.device("cpu"))
    train_step = one_rank(model, config, reference=frozen)
    spy = _Spy(list(model.named_parameters()))
    train_step.team.own.optimizer = spy
    train_step.team.own.schedule = torch.optim.lr_scheduler.LambdaLR(spy, lambda step: 1.0)
    result = train_step.step(groups, policy_version=VERSION)
    return spy.gradients, result


def assert_same_gradient(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    scale = max(float(gradient.abs().max()) for gradient in other.values())
    assert scale > 0
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=2e-6 * scale, msg=name)


def another_policy(folder: Path) -> PreTrainedModel:
    model = load_policy(str(folder), device=torch.device("cpu")).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def with_equal_rewards(groups: list[Group]) -> list[Group]:
    return [
        Group(
            g.group_id,
            g.deadline,
            tuple(Trajectory(t.group_id, t.sample_index, t.prompt_tokens, t.completion, 0.7) for t in g.trajectories),
        )
        for g in groups
    ]


def replaced(groups: list[Group], change: Callable[[Trajectory], Trajectory]) -> list[Group]:
    return [Group(g.group_id, g.deadline, tuple(change(t) for t in g.trajectories)) for g in groups]


def with_turns(groups: list[Group], seed: int = 1) -> list[Group]:
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


def long_trajectory(num_tokens: int, index: int = 0) -> Trajectory:
    rng = np.random.default_rng(index)
    num = num_tokens - 1
    completion = Completion(
        rng.integers(2, 200, num).astype(np.int32),
        np.full(num, -5, np.float32),
        np.zeros(num, np.int32),
        "stop",
    )
    return Trajectory(0, index, np.array([3], np.int32), completion, float(index % 2))


def long_group(num_tokens: int) -> Group:
    return Group(0, 1, tuple(long_trajectory(num_tokens, index) for index in range(2)))
