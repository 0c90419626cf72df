"""What the learner's ranks say to each other, beside the collectives of sharded parameters.

Rank 0 knows the batch and decides; the others are told what to compute and say what came of it. Messages are bytes,
over Gloo in CPU memory, and everybody takes part in the same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from areal_rloo.errors import TrainingError, first_line
from areal_rloo.weights.collective import address_towards

_PATIENCE = timedelta(days=30)  # of one who waits to be told: a batch may take as long as it takes
_TAG_SIZE, _TAG_BODY = 1, 2


class RankLostError(TrainingError):
    """Another rank ended, or takes no part; what is wrong stands in its own log."""


class Ranks:
    """This process among the learner's ranks; without a process group, the only one.

    Attributes:
        rank: of this process; 0 decides.
        num: of processes.
        files: the group in which checkpoints are agreed upon, on a thread of its own; None for the only process.
    """

    def __init__(
        self,
        rank: int = 0,
        num: int = 1,
        *,
        orders: dist.ProcessGroup | None = None,
        answers: dist.ProcessGroup | None = None,
        files: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.num = num
        self.files = files
        self._orders = orders
        self._answers = answers

    @classmethod
    def meet(cls, address: str, *, rank: int, num: int, device: torch.device, timeout_s: float) -> Ranks:
        """Wait for the others.

        Args:
            address: host:port where rank 0 listens.
            rank, num: of this process, and of all.
            device: of the collectives of parameters: NCCL on CUDA, Gloo on the CPU.
            timeout_s: of the meeting, and of every collective.

        Raises:
            TrainingError: they did not come in time.
        """
        _use_interface_towards(address.rpartition(":")[0])
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device.index or 0)  # the launcher shows each rank its own GPU and no other
        try:
            dist.init_process_group(
                backend,
                init_method=f"tcp://{address}",
                rank=rank,
                world_size=num,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise TrainingError(
                f"learner rank {rank} of {num} did not meet the others at {address} within {timeout_s:g} s: "
                f"{first_line(error)}"
            ) from error
        orders = dist.new_group(backend="gloo", timeout=_PATIENCE)
        answers = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        files = dist.new_group(backend="gloo", timeout=_PATIENCE)  # the slowest disk may take as long as it takes
        return cls(rank, num, orders=orders, answers=answers, files=files)

    def hand_out(self, messages: Sequence[bytes]) -> None:
        """Rank 0: a message to each of the others, in their order."""
        assert len(messages) == self.num - 1, "one for each of the others"
        sent = [self._send(message, rank, self._orders) for rank, message in enumerate(messages, start=1)]
        for rank, works in enumerate(sent, start=1):
            self._finish(works, rank)

    def take(self) -> bytes:
        """All but rank 0: wait for the next message.

        Raises:
            RankLostError: rank 0 is gone.
        """
        return self._receive(0, self._orders)

    def answer(self, message: bytes) -> None:
        """All but rank 0: the answer to what was taken."""
        self._finish(self._send(message, 0, self._answers), 0)

    def answers(self) -> list[bytes]:
        """Rank 0: what the others answered, in their order.

        Raises:
            RankLostError: one of them is gone; says which.
        """
        return [self._receive(rank, self._answers) for rank in range(1, self.num)]

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a tensor in CPU memory, of one shape everywhere."""
        if self._answers is None:
            return values
        summed = values.clone()
        try:
            dist.all_reduce(summed, group=self._answers)
        except RuntimeError as error:
            raise RankLostError(f"a learner rank is gone: {first_line(error)}") from error
        return summed

    def close(self) -> None:
        """Leave; nothing waits for the others."""
        if self._orders is not None:
            self._orders = self._answers = self.files = None
            dist.destroy_process_group()

    def _send(self, message: bytes, rank: int, group: dist.ProcessGroup | None) -> list[dist.Work | None]:
        size, body = torch.tensor([len(message)]), torch.frombuffer(bytearray(message + b"\0"), dtype=torch.uint8)
        return [
            dist.isend(tensor, group=group, group_dst=rank, tag=tag)
            for tensor, tag in ((size, _TAG_SIZE), (body, _TAG_BODY))
        ]

    def _finish(self, works: Sequence[dist.Work | None], rank: int) -> None:
        for work in works:
            assert work is not None, "this process is of the group"
            try:
                work.wait()
            except RuntimeError as error:
                raise self._gone(rank, error) from error

    def _receive(self, rank: int, group: dist.ProcessGroup | None) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, group=group, group_src=rank, tag=_TAG_SIZE)
            body = torch.empty(int(size) + 1, dtype=torch.uint8)  # a tensor is not empty
            dist.recv(body, group=group, group_src=rank, tag=_TAG_BODY)
        except RuntimeError as error:
            raise self._gone(rank, error) from error
        return body[:-1].numpy().tobytes()

    def _gone(self, rank: int, error: Exception) -> RankLostError:
        return RankLostError(
            f"learner rank {rank} does not answer rank {self.rank}: {first_line(error)}; its own log says why"
        )


def _use_interface_towards(host: str) -> None:
    """Let Gloo listen where the others come from; it would otherwise guess from the machine's name."""
    own = address_towards(host)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
