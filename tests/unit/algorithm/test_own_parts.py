"""The user's functions in place of parts of the algorithm: each is tried on random numbers, wrong ones are refused."""

from pathlib import Path

import msgspec
import pytest
import torch

from areal_rloo.algorithm.own_parts import load_own_loss, load_own_parts, main
from areal_rloo.config import AlgorithmConfig, BehaviourWeightConfig, LossConfig
from areal_rloo.errors import ConfigError, UserError

WRONG_LOSSES = {
    "return (current_logprobs * advantages).mean()": r"returned a tensor \[\] of float32, expected a tensor \[num_to",
    "return current_logprobs[1:]": r"returned a tensor \[11\] of float32",
    "return current_logprobs.double()": r"of float64, expected a tensor \[num_tokens=12\] of float32",
    "pass": "returned a value of the type NoneType",
    "return current_logprobs * float('nan')": "returned nan for random logprobs, expected finite numbers",
    "return current_logprobs.detach() * advantages": "returned a loss without a gradient to current_logprobs",
    "return 0 * current_logprobs": "has the gradient 0 for every token",
    "return (current_logprobs - current_logprobs.detach()).abs().sqrt()": "has a gradient that is not finite",
    "return current_logprobs + current_logprobs.mean()": "depends on other tokens; rows are packed and cut",
    "m = current_logprobs.mean(); return current_logprobs + (m - m.detach())": "depends on other tokens",  # gradients
    "return current_logprobs * (advantages - advantages.mean())": "depends on other tokens",
    "return current_logprobs / current_logprobs.detach().mean()": "depends on other tokens",
    "return current_logprobs * torch.rand(len(advantages))": "returned other numbers for the same tokens",
    "return current_logprobs * advantages.clamp_(-0.1, 0.1)": "changes its arguments; clone them first",
    "return current_logprobs.nothing": r"raised AttributeError: .* \(.*mine.py:3\)$",
    "raise SystemExit(3)": "raised SystemExit: 3",
}
WRONG_OF_SAMPLES = {
    "return rewards[:3]": r"returned a tensor \[3\] of float64, expected a tensor \[num_samples=14\] of float32 or ",
    "return (rewards > 0).long()": r"returned a tensor \[14\] of int64",
    "return rewards.tolist()": "returned a value of the type list",
    "return (rewards - rewards.mean()).abs() / rewards.std()": "returned nan, expected finite numbers",  # equal rewards
    "return rewards.cumsum(0).abs()": "depends on the order of the samples; find the samples of a group by group_ids",
    "return torch.rand(len(rewards))": "returned other numbers for the same samples",
    "return rewards / 0": "returned .*inf, expected finite numbers",
}


def _mine(folder: Path, header: str, body: str) -> str:
    (folder / "mine.py").write_text(f"import torch\n{header}:\n    {body}\n")
    return f"{folder / 'mine.py'}:f"


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("body", WRONG_LOSSES)
def test_a_wrong_loss_is_refused_with_its_fault(tmp_path: Path, body: str) -> None:
    path = _mine(tmp_path, "def f(current_logprobs, advantages)", body)
    with pytest.raises(UserError, match=rf"^algorithm\.loss\.kind: .*mine.py:f .*{WRONG_LOSSES[body]}"):
        load_own_loss(LossConfig(kind=path))


@pytest.mark.parametrize("key", ["advantages", "sample_weights"])
@pytest.mark.parametrize("body", WRONG_OF_SAMPLES)
def test_a_wrong_function_of_samples_is_refused(tmp_path: Path, body: str, key: str) -> None:
    path = _mine(tmp_path, "def f(rewards)", body)
    with pytest.raises(UserError, match=rf"^algorithm\.{key}: .*mine.py:f .*{WRONG_OF_SAMPLES[body]}"):
        load_own_parts(msgspec.structs.replace(AlgorithmConfig(), **{key: path}))


def test_negative_weights_are_refused_and_negative_advantages_are_not(tmp_path: Path) -> None:
    path = _mine(tmp_path, "def f(rewards)", "return rewards")
    with pytest.raises(UserError, match=r"sample_weights: .*:f returned -[0-9.]+, expected numbers of at least 0"):
        load_own_parts(AlgorithmConfig(sample_weights=path))
    rewards = torch.tensor([0.0, -1.0], dtype=torch.float64)
    advantages = load_own_parts(AlgorithmConfig(advantages=path)).advantages
    assert advantages is not None
    assert torch.equal(advantages(rewards, torch.tensor([0, 0]), torch.tensor([1, 1])), rewards)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        ("async def f(current_logprobs)", "is async; leave out async"),
        (
            "def f(logprobs)",
            "has the parameter 'logprobs', which nothing fills; known names: current_logprobs, ",
        ),
        ("def f(current_logprobs, /)", "has the parameter 'current_logprobs' before a '/'"),
        ("def g(current_logprobs)", "has no function 'f'"),
        ("class f", "is a class"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(tmp_path: Path, header: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.loss\.kind: .*{fault}"):
        load_own_loss(LossConfig(kind=_mine(tmp_path, header, "pass")))


def test_a_function_gets_the_values_that_it_names(tmp_path: Path) -> None:
    body = "return -current_logprobs * rest['advantages'] * scale * (len(rest) == 4)"
    path = _mine(tmp_path, "def f(current_logprobs, scale=3, **rest)", body)
    loss = load_own_loss(LossConfig(kind=path))
    assert loss is not None
    ones = torch.ones(2)
    others = {"proximal_logprobs": ones, "behaviour_logprobs": ones, "advantages": ones, "config": LossConfig()}
    assert loss(current_logprobs=2 * ones, **others).tolist() == [-6, -6]  # type: ignore[arg-type]
    assert load_own_loss(LossConfig()) is None
    assert load_own_parts(AlgorithmConfig()) == (None, None)


@pytest.mark.parametrize(("rule", "warns"), [("clamp", True), ("ignore", False)])
def test_a_weight_that_is_applied_twice_is_said(
    tmp_path: Path, rule: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    header = "def f(current_logprobs, behaviour_logprobs, advantages)"
    path = _mine(tmp_path, header, "return -(current_logprobs - behaviour_logprobs).exp() * advantages")
    load_own_loss(LossConfig(kind=path, behaviour_weight=BehaviourWeightConfig(rule=rule)))  # type: ignore[arg-type]
    assert ("behaviour_weight.rule=ignore" in caplog.text) == warns


def test_the_process_before_a_start_prints_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for body, code in (("return -current_logprobs", 0), ("return 0 * current_logprobs", 2)):
        kind = _mine(tmp_path, "def f(current_logprobs)", body)
        algorithm = AlgorithmConfig(loss=LossConfig(kind=kind))
        assert main([msgspec.json.encode(algorithm).decode()]) == code
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed == f"algorithm.loss.kind: {kind} has the gradient 0 for every token ({tmp_path / 'mine.py'}:2)"
