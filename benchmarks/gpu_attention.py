"""GPU check: attention of packed rows by flash attention and in padded blocks: equal numbers, times and memory.

    python -m benchmarks.gpu_attention [--device cpu --small]

Heads of the 1.5B shape. The reference is float64, each sequence alone. `flash` is the path of bfloat16 on a GPU,
`blocks` that of float32. A CPU has no flash attention: there `blocks` alone is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.models.attention import PackedLayout, packed_attention
from benchmarks.gpu_part import GIB, Part, run
from benchmarks.peaks import Peak, finish

_REPEATS = 5
_LIMITS = {"flash": 2e-2, "blocks": 1e-4}  # relative error against float64: of the rounding to the dtype


class _Grouped(torch.nn.Module):
    """The attention module of transformers, as far as `packed_attention` reads the module."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


def check(part: Part) -> None:
    heads, kv_heads, width = (4, 2, 16) if part.small else (12, 2, 128)
    rows = [[9, 30, 4], [50], [7] * 12] if part.small else [[1024] * 8, [4000, 3000, 900, 100], [64] * 128]
    paths = {"flash": torch.bfloat16, "blocks": torch.float32} if part.on_gpu else {"blocks": torch.float32}
    if not part.on_gpu:
        part.notes.append("A CPU has no flash attention; only the blocks were compared.")
    for lengths in rows:
        exact = tuple(
            torch.randn(1, num, sum(lengths), width, device=part.device).bfloat16()
            for num in (heads, kv_heads, kv_heads)
        )
        expected = _with_gradients(partial(_alone, lengths), [tensor.double() for tensor in exact])
        layout = PackedLayout.of_lengths(lengths, part.device)
        attend = partial(_packed, _Grouped(heads // kv_heads), layout)
        for name, dtype in paths.items():
            tensors = [tensor.to(dtype) for tensor in exact]
            peak = Peak(part.device)
            peak.restart()
            given = _with_gradients(attend, tensors)
            beyond = peak.num_bytes
            error = max(_relative(one, other) for one, other in zip(given, expected, strict=True))
            part.row(
                "attention",
                path=name,
                sequences=len(lengths),
                tokens=sum(lengths),
                largest_relative_error=float(f"{error:.3g}"),
                forward_and_backward_ms=round(1e3 * _median(attend, tensors), 3),
                peak_gib=round(beyond / GIB, 3),
            )
            part.check(error < _LIMITS[name], f"{name}, {len(lengths)} sequences: error {error:.2g}")


def _packed(module: _Grouped, layout: PackedLayout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return packed_attention(module, q, k, v, None, packed=layout, scaling=q.shape[-1] ** -0.5)[0]


def _alone(lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally in each sequence alone, the obvious way: [1, num_tokens, num_heads, head_dim]."""
    parts = []
    for one in zip(*(rows.split(list(lengths), dim=2) for rows in (q, k, v)), strict=True):
        wide = [rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1) for rows in one]
        scores = wide[0] @ wide[1].transpose(2, 3) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        parts.append(F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ wide[2])
    return torch.cat(parts, dim=2).transpose(1, 2)


def _with_gradients(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients of a fixed function of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.double() * weights).sum(), leaves)]


def _relative(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected.double()).norm() / expected.double().norm())


def _median(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        _with_gradients(attend, tensors)
        finish(tensors[0].device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    run(check)
