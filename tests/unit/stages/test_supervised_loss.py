"""The loss of sft is cross entropy: against plain loops, whatever the rows, spans and the options of RL."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.one_rank import CPU, one_rank, policy_of
from support.train_steps import (
    VERSION,
    assert_same_gradient,
    is_the_policy_s,
    ragged_groups,
    spied_step,
    step_config,
)
from transformers import AutoModelForCausalLM

from areal_rloo.config import Config
from areal_rloo.models.loading import load_policy
from areal_rloo.stages.held_out import measure
from areal_rloo.stages.sft import supervised
from areal_rloo.trajectory import Completion, Group, Trajectory


def demonstrations(seed: int = 0) -> list[Group]:
    """One example a group, with reward 1 and behaviour logprobs 0; every second has a span of a user."""

    def example(number: int, trajectory: Trajectory) -> Trajectory:
        num = len(trajectory.completion.tokens)
        completion = msgspec.structs.replace(
            trajectory.completion,
            behaviour_logprobs=np.zeros(num, np.float32),
            versions=np.full(num, VERSION, np.int32),
            spans=(1, num - 2, 1) if number % 2 and num > 2 else (),
        )
        return msgspec.structs.replace(trajectory, completion=completion, reward=1.0)

    return [
        Group(number, 5, (example(number, group.trajectories[0]),))
        for number, group in enumerate(ragged_groups(seed, num_groups=7))
    ]


def cross_entropy(model: torch.nn.Module, examples: list[Trajectory]) -> torch.Tensor:
    """The mean over all learned tokens, an example at a time, by the logits of transformers."""
    losses = []
    for example in examples:
        prompt, tokens = example.prompt_tokens.tolist(), example.completion.tokens.tolist()
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        by_token = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="none")
        losses += [loss for t, loss in enumerate(by_token) if is_the_policy_s(example.completion, t)]
    return torch.stack(losses).mean()


OF_RL = ("algorithm.preset=grpo", "algorithm.loss.aggregation=seq_mean_token_mean", "algorithm.rewards.scale=7")


@pytest.mark.parametrize("overrides", [(), ("learner.microbatch_tokens=128", *OF_RL)])
def test_the_gradient_is_that_of_cross_entropy(overrides: tuple[str, ...], tiny_folders: dict[str, Path]) -> None:
    """In one row or several; the temperature of the config (0.8) and the options of RL have no effect."""
    folder, groups = tiny_folders["qwen2"], demonstrations()
    config = supervised(step_config(*overrides))
    (gradient,), result = spied_step(folder, groups, config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss = cross_entropy(model, [group.trajectories[0] for group in groups])
    loss.backward()
    assert_same_gradient(gradient, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert result.numbers["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert result.numbers["trained_tokens"] < sum(len(g.trajectories[0].completion.tokens) for g in groups)


def _all_tokens(teacher: torch.Tensor, *, weighted: bool) -> list[Group]:
    """A completion of each token of the vocabulary after one prompt, with the logprob of the teacher."""
    groups = []
    for token, logprob in enumerate(teacher.tolist()):
        arrays = np.array([token], np.int32), np.array([logprob], np.float32), np.array([VERSION], np.int32)
        weight = float(np.exp(logprob)) if weighted else 1.0
        groups.append(
            Group(token, 5, (Trajectory(token, 0, np.array([70, 80], np.int32), Completion(*arrays, "stop"), weight),))
        )
    return groups


def test_the_expected_gradient_on_a_teacher_is_that_of_the_forward_kl(tiny_folders: dict[str, Path]) -> None:
    """Brute force: the gradients for all tokens, weighted by the teacher, against autograd through KL(teacher || p)."""
    folder, config = tiny_folders["qwen2"], supervised(step_config())
    prompt = torch.tensor([[70, 80]])
    teacher = _logprobs(folder, prompt)
    (gradient,), _ = spied_step(folder, _all_tokens(teacher, weighted=True), config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    own = model(prompt).logits[0, -1].log_softmax(-1)
    (teacher.exp() * (teacher - own)).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradient({name: each * len(teacher) for name, each in gradient.items()}, expected)


def _logprobs(folder: Path, prompt: torch.Tensor) -> torch.Tensor:
    """The logprobs of another model after a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        logprobs: torch.Tensor = model(prompt).logits[0, -1].log_softmax(-1)
    return logprobs


def test_the_recorded_kl_is_the_mean_distance_to_the_teacher(tiny_folders: dict[str, Path]) -> None:
    folder, config = tiny_folders["qwen2"], supervised(step_config())
    prompt = torch.tensor([[70, 80]])
    teacher = _logprobs(folder, prompt)
    train_step = one_rank(folder, config)
    result = train_step.step(_all_tokens(teacher, weighted=False), policy_version=VERSION)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(prompt).logits[0, -1].log_softmax(-1)
    assert result.numbers["behaviour_kl_k1"] == pytest.approx((teacher - own).mean().item(), abs=1e-5)


@pytest.mark.parametrize("row_tokens", [8192, 128])
def test_held_out_numbers_are_those_of_a_plain_loop(row_tokens: int, tiny_folders: dict[str, Path]) -> None:
    folder, examples = tiny_folders["qwen2"], [group.trajectories[0] for group in demonstrations(1)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    examples.append(_greedy(model, examples[0]))
    config: Config = step_config(f"learner.microbatch_tokens={row_tokens}")
    found = measure(policy_of(load_policy(str(folder), device=CPU), temperature=0.8), examples, config, CPU)
    right, whole = [], []
    for example in examples:
        prompt, tokens = example.prompt_tokens.tolist(), example.completion.tokens.tolist()
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        own = [best[t] == tokens[t] for t in range(len(tokens)) if is_the_policy_s(example.completion, t)]
        right += own
        whole.append(all(own))
    with torch.no_grad():
        assert found.loss == pytest.approx(float(cross_entropy(model, examples)), rel=1e-6)
    assert (found.num_tokens, found.num_examples) == (len(right), 8)
    assert found.token_accuracy == sum(right) / len(right) > 0
    assert found.example_accuracy == sum(whole) / 8 > 0


def _greedy(model: torch.nn.Module, example: Trajectory) -> Trajectory:
    """An example whose completion is the greedy one, also where a user wrote."""
    tokens = example.prompt_tokens.tolist()
    for _ in range(4):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    new = np.array(tokens[len(example.prompt_tokens) :], np.int32)
    completion = Completion(new, np.zeros(4, np.float32), np.zeros(4, np.int32), "stop", (1, 2, 1))
    return msgspec.structs.replace(example, completion=completion)
