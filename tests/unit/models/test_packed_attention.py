"""Compare attention within a packed row with a slow reference, for windows, caps, groups and scales."""

import math

import pytest
import torch
from torch import Tensor

from areal_rloo.models import attention, capped_attention
from areal_rloo.models.attention import PackedLayout, packed_attention

LENGTHS = [9, 3, 30, 1, 12, 9]


def _slow(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, cap: float | None) -> Tensor:
    """Attend token by token: [num_tokens, num_heads, head_dim] from tensors of the same order."""
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    share = q.shape[1] // k.shape[1]
    begin = 0
    for length in LENGTHS:
        for at in range(begin, begin + length):
            first = begin if window is None else max(begin, at - window + 1)
            for head in range(q.shape[1]):
                scores = k[first : at + 1, head // share] @ q[at, head] * scale
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                out[at, head] = scores.softmax(0) @ v[first : at + 1, head // share]
        begin += length
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 29, 64])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("chunk", [100, 2**24])
def test_a_packed_row_attends_as_each_sequence_alone(
    num_kv_heads: int, window: int | None, cap: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_attention, "_CHUNK_SCORES", chunk)
    generator = torch.Generator().manual_seed(0)
    shapes = (4, num_kv_heads, num_kv_heads)
    leaves = [torch.randn(sum(LENGTHS), num, 6, dtype=torch.float64, generator=generator) for num in shapes]
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    scale = 1.3 / math.sqrt(6)
    given = packed_attention(
        torch.nn.Module(),
        *(rows.transpose(0, 1)[None] for rows in (q, k, v)),
        None,
        packed=PackedLayout.of_lengths(LENGTHS, torch.device("cpu")),
        scaling=scale,
        sliding_window=window,
        softcap=cap,
    )[0][0]
    expected = _slow(q, k, v, scale=scale, window=window, cap=cap)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
    weights = torch.randn(given.shape, dtype=torch.float64, generator=generator)
    ours = torch.autograd.grad((given * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for gradient, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


def test_capped_scores_of_bfloat16_are_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (8 * torch.randn(1, 2, 40, 16, generator=generator) for _ in range(3))
    layout = PackedLayout.of_lengths([40], torch.device("cpu"))
    low = [rows.bfloat16() for rows in (q, k, v)]

    def attended(rows: list[Tensor]) -> Tensor:
        return packed_attention(torch.nn.Module(), *rows, None, packed=layout, scaling=0.25, softcap=50.0)[0]

    exact = attended([rows.double() for rows in low])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = attended(low)
    assert given.dtype == torch.bfloat16
    assert float((given.double() - exact).norm() / exact.norm()) < 0.004


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, *bounds: Tensor | int, scale: float, window_size: tuple[int, int]
) -> Tensor:
    """Stand in for torch's call, with the limits of the kernel (mha_varlen_fwd of flash-attention)."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    assert all(rows.is_contiguous() for rows in (q, k, v))
    return _slow(q, k, v, scale=scale, window=None if window_size[0] < 0 else window_size[0] + 1, cap=None)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (100, 100), (96, 64), (24, 40)])
@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_gets_heads_that_the_kernel_takes(
    head_dim: int, value_dim: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", _kernel, raising=False)
    monkeypatch.setattr(attention, "_VARLEN_KNOWS_GQA", False, raising=False)
    generator = torch.Generator().manual_seed(0)
    heads = ((4, head_dim), (2, head_dim), (2, value_dim))
    q, k, v = (torch.randn(sum(LENGTHS), *head, dtype=torch.float64, generator=generator) for head in heads)
    layout = PackedLayout.of_lengths(LENGTHS, torch.device("cpu"))
    given = attention._flash(q, k, v, layout, attention._Scores(head_dim**-0.5, window, None, True))
    rows = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    expected = packed_attention(torch.nn.Module(), *rows, None, packed=layout, sliding_window=window)[0][0]
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)


def test_wider_heads_than_the_kernel_takes_go_in_blocks() -> None:
    assert attention._flash_width(torch.empty(1, 1, 250), torch.empty(1, 1, 256)) == attention._FLASH_HEAD
    assert attention._flash_width(torch.empty(1, 1, 257), torch.empty(1, 1, 64)) > attention._FLASH_HEAD
