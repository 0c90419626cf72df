"""The learner's ranks: what one of them has to know of the others for a batch that is spread over them.

A norm needs the values of the whole batch, and a mean over tokens the count of all of them: a few numbers a trajectory,
gathered from every rank, so that each computes the same from the same. All ranks call the same methods in the same
order, and each waits for the others.
"""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor


class Ranks:
    """This process among the learner's ranks; without a process group, the only one."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """`group`: of the learner's ranks, on a backend for tensors in CPU memory."""
        self._group = group

    def gather(self, values: Tensor) -> tuple[Tensor, slice]:
        """The values of every rank, in the order of the ranks, and where one's own lie among them.

        Args:
            values: [num_own, ...] in CPU memory; `num_own` may differ between ranks, the rest may not.

        Returns:
            [num_all, ...], and the slice of it that is `values`.
        """
        if self._group is None:
            return values, slice(None)
        size = torch.distributed.get_world_size(self._group)
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
        torch.distributed.all_gather(counts, torch.tensor([len(values)]), group=self._group)
        lengths = [int(count) for count in counts]
        padded = values.new_zeros(max(lengths), *values.shape[1:])
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(size)]
        torch.distributed.all_gather(parts, padded, group=self._group)
        start = sum(lengths[: torch.distributed.get_rank(self._group)])
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]), slice(start, start + len(values))

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a tensor in CPU memory, of one shape everywhere."""
        if self._group is None:
            return values
        summed = values.clone()
        torch.distributed.all_reduce(summed, group=self._group)
        return summed
