"""Test the chunked token loss against whole logits in float64 and against the recomputing path."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.one_rank import policy_of
from torch import Tensor

from areal_rloo.algorithm.loss import policy_loss
from areal_rloo.config import BehaviourWeightConfig, LossConfig
from areal_rloo.models import policy
from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.head import LogitForm
from areal_rloo.models.policy import TokenLogprobs, chosen_logprobs, loss_of_tokens

VOCABULARY = 37


def _inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, 8, dtype=torch.float64, requires_grad=True)
    return hidden, head, torch.randint(0, VOCABULARY, (11,)), torch.randn(11, dtype=torch.float64)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("chunk", [1, 3, 11, 50])
@pytest.mark.parametrize("form", [LogitForm(0.7), LogitForm(0.7, scale=0.4), LogitForm(0.7, scale=1.3, cap=2.0)])
def test_loss_and_gradients_equal_those_of_whole_logits(
    form: LogitForm, entropy: Literal["none", "value", "gradient"], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "chunk_logits", lambda *, on_gpu: chunk * VOCABULARY)
    hidden, head, targets, factor = _inputs()

    def token_loss(given: TokenLogprobs, part: slice) -> Tensor:
        loss = -(factor[part] * given.logprobs.exp() ** 2).sum()
        return loss + (0.3 * factor[part] * given.entropy).sum() if entropy == "gradient" else loss

    loss, said = loss_of_tokens(hidden, head, targets, form, token_loss, entropy=entropy)
    (2 * loss).backward()
    by_hidden, by_head = hidden.grad, head.grad

    hidden, head, *_ = _inputs()
    logits = hidden @ head.T * form.scale
    logits = logits if form.cap is None else form.cap * torch.tanh(logits / form.cap)
    log_p = (logits / form.temperature).log_softmax(-1)
    expected = TokenLogprobs(log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
    expected_loss = token_loss(expected, slice(None))
    (2 * expected_loss).backward()
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=0, atol=1e-12, check_stride=False)
    torch.testing.assert_close(by_hidden, hidden.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_head, head.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(said.logprobs, expected.logprobs.detach(), rtol=0, atol=1e-12)
    if entropy != "none":
        torch.testing.assert_close(said.entropy, expected.entropy.detach(), rtol=0, atol=1e-12)
    recomputed = chosen_logprobs(*_inputs()[:3], form).logprobs
    torch.testing.assert_close(recomputed, expected.logprobs, rtol=0, atol=1e-12)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets, _ = _inputs()
    loss, _ = loss_of_tokens(hidden, head.detach(), targets, LogitForm(), lambda given, part: given.logprobs.sum())
    loss.backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_bfloat16_hidden_states_give_float32_logprobs() -> None:
    hidden, head, targets, _ = (t.detach() for t in _inputs())
    narrow, weights = hidden.bfloat16().requires_grad_(), head.bfloat16().float().requires_grad_()
    loss, said = loss_of_tokens(narrow, weights, targets, LogitForm(), lambda given, part: given.logprobs.sum())
    loss.backward()
    assert (said.logprobs.dtype, narrow.grad.dtype, weights.grad.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    exact = narrow.detach().double().requires_grad_()
    exact_head = weights.detach().double().requires_grad_()
    log_p = (exact @ exact_head.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    log_p.sum().backward()
    torch.testing.assert_close(said.logprobs.double(), log_p.detach(), rtol=0, atol=1e-5)  # the product is not rounded
    torch.testing.assert_close(narrow.grad.double(), exact.grad, rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(weights.grad.double(), exact_head.grad, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_logits_are_not_rounded_at_a_low_temperature(device: str) -> None:
    """At temperature 0.1, rounded logits are wrong by 0.3 nats."""
    torch.manual_seed(0)
    hidden = torch.randn(50, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(VOCABULARY, 64, device=device).bfloat16().float().requires_grad_()
    targets = torch.randint(0, VOCABULARY, (50,), device=device)
    exact, exact_head = (values.detach().double().requires_grad_() for values in (hidden, head))
    log_p = (exact @ exact_head.T / 0.1).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    log_p.sum().backward()
    for given in (
        chosen_logprobs(hidden, head, targets, LogitForm(0.1)).logprobs,
        loss_of_tokens(hidden, head, targets, LogitForm(0.1), lambda given, part: given.logprobs.sum())[1].logprobs,
    ):
        torch.testing.assert_close(given.detach().double(), log_p.detach(), rtol=1e-5, atol=1e-3)
    chosen_logprobs(hidden, head, targets, LogitForm(0.1)).logprobs.sum().backward()
    for gradient, expected in ((hidden.grad, exact.grad), (head.grad, exact_head.grad)):
        assert gradient is not None and expected is not None
        assert float((gradient.double() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(decoupled=False, dual_clip=3.0),
        LossConfig(kind="cispo", entropy_coefficient=0.01),
        LossConfig(kind="reinforce", behaviour_weight=BehaviourWeightConfig(rule="mask", upper=1.1)),
    ],
)
@pytest.mark.parametrize("folder", ["qwen2", "llama"])
def test_policy_gradient_equals_the_recomputing_path(
    config: LossConfig, folder: str, tiny_folders: dict[str, Path]
) -> None:
    assert config.of_tokens
    torch.manual_seed(1)
    lengths, device = [9, 4], torch.device("cpu")
    tokens = torch.randint(3, 200, (sum(lengths),))
    asked: dict[str, Any] = {
        "input_ids": tokens,
        "layout": PackedLayout.of_lengths(lengths, device),
        "predicts": torch.tensor([2, 3, 4, 5, 6, 7, 9, 10, 11]),
        "targets": torch.tensor([3, 90, 5, 6, 7, 8, 10, 11, 12]),
        "entropy": "value" if config.entropy_coefficient == 0 else "gradient",
    }
    index = torch.tensor([0] * 6 + [1] * 3)
    behaviour, proximal = -4 * torch.rand(9) - 3, -4 * torch.rand(9) - 3
    advantages, weights = torch.randn(9), torch.rand(9) * (torch.rand(9) > 0.2)

    def loss(given: TokenLogprobs, part: slice = slice(None)) -> Tensor:
        return policy_loss(
            behaviour_logprobs=behaviour[part],
            proximal_logprobs=proximal[part],
            current_logprobs=given.logprobs,
            entropy=given.entropy,
            advantages=advantages[part],
            token_weights=weights[part],
            staleness=torch.zeros_like(index[part]),
            sequence_index=index[part],
            config=config,
        ).loss

    one, other = (policy_of(tiny_folders[folder], temperature=0.9) for _ in range(2))
    at_once, *_ = one(token_loss=loss, **asked)
    at_once.backward()
    expected = loss(TokenLogprobs(*other(**asked)))
    expected.backward()
    torch.testing.assert_close(at_once.detach(), expected.detach())
    for (name, parameter), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_sequence_level_losses_are_not_split_into_chunks() -> None:
    assert not LossConfig(ratio_level="sequence_mean").of_tokens
    for rule in ("mask", "clamp", "none"):
        assert not LossConfig(behaviour_weight=BehaviourWeightConfig(rule=rule, level="sequence")).of_tokens
    assert LossConfig(behaviour_weight=BehaviourWeightConfig(rule="ignore", level="sequence", upper=None)).of_tokens
