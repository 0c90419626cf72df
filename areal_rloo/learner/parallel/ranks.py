"""Send commands and answers between the learner's ranks, beside the collectives of sharded parameters.

Rank 0 has the batch and sends commands; the other ranks execute them and answer. Messages are bytes in CPU memory, sent
over Gloo. All ranks make the same calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from areal_rloo.errors import TrainingError, first_line
from areal_rloo.ports import address_towards
from areal_rloo.weights.rendezvous import join_store, serve_store

_PATIENCE = timedelta(days=30)  # while waiting for a command: a batch may take any time
_TAG_SIZE, _TAG_BODY = 1, 2


class RankLostError(TrainingError):
    """Another rank ended or does not respond; the log of that rank has the reason."""


@dataclass(eq=False, slots=True)
class Ranks:
    """This process among the learner's ranks; without process groups, the only rank."""

    rank: int = 0  # of this process; rank 0 commands
    num: int = 1  # of processes
    _orders: dist.ProcessGroup | None = None
    _answers: dist.ProcessGroup | None = None
    files: dist.ProcessGroup | None = None  # for checkpoints, used on a separate thread

    @classmethod
    def meet(cls, address: str, *, rank: int, num: int, device: torch.device, timeout_s: float) -> Ranks:
        """Connect to the other ranks; raises TrainingError if they do not connect in time.

        Args:
            address: host:port where rank 0 listens.
            device: of parameter collectives: NCCL on CUDA, Gloo on the CPU.
            timeout_s: of the rendezvous and of every collective.
        """
        timeout = timedelta(seconds=timeout_s)
        parts = urlsplit(f"tcp://{address}")
        host, port = parts.hostname or "", parts.port or 0
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device.index or 0)  # the launcher makes only its own GPU visible to each rank
        try:
            _use_interface_towards(host)
            store = (serve_store if rank == 0 else join_store)(host, port, timeout_s=timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=timeout)
        except (RuntimeError, OSError) as error:
            raise TrainingError(
                f"learner rank {rank} of {num} did not connect to the other ranks at {address} within {timeout_s:g} s: "
                f"{first_line(error)}"
            ) from error
        patience = (_PATIENCE, timeout, _PATIENCE)  # orders, answers, and files: a slow disk may take any time
        return cls(rank, num, *(dist.new_group(backend="gloo", timeout=longest) for longest in patience))

    def hand_out(self, messages: Sequence[bytearray]) -> None:
        """Rank 0: send a message to each of the other ranks, in rank order."""
        assert len(messages) == self.num - 1, "expected a message for each other rank"
        sent = [self._send(message, rank, self._orders) for rank, message in enumerate(messages, start=1)]
        for rank, works in enumerate(sent, start=1):
            self._finish(works, rank)

    def take(self) -> memoryview:
        """Other ranks: wait for the next message; raises RankLostError if rank 0 ended."""
        return self._receive(0, self._orders)

    def answer(self, message: bytearray) -> None:
        """Other ranks: answer the message taken last."""
        self._finish(self._send(message, 0, self._answers), 0)

    def answers(self) -> list[memoryview]:
        """Rank 0: wait for the answers of the other ranks, in rank order; raises RankLostError if a rank ended."""
        return [self._receive(rank, self._answers) for rank in range(1, self.num)]

    def tell_of_writing(self, problem: str) -> list[str]:
        """Give rank 0 the problems of all ranks, and each other rank the own problem; a problem is a text, maybe empty.

        Call this on the thread that has written a part of a checkpoint. Raises RankLostError if a rank ended.
        """
        if self.files is None:
            return [problem]
        if self.rank > 0:
            self._finish(self._send(bytearray(problem.encode()), 0, self.files), 0)
            return [problem]
        return [problem, *(bytes(self._receive(rank, self.files)).decode() for rank in range(1, self.num))]

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor in CPU memory over all ranks; the same shape on each."""
        if self._answers is None:
            return values
        summed = values.clone()
        try:
            dist.all_reduce(summed, group=self._answers)
        except RuntimeError as error:
            raise RankLostError(f"a learner rank ended: {first_line(error)}") from error
        return summed

    def close(self) -> None:
        """Leave the process group without waiting for other ranks."""
        if self._orders is not None:
            self._orders = self._answers = self.files = None
            dist.destroy_process_group()

    def _send(self, message: bytearray, rank: int, group: dist.ProcessGroup | None) -> list[dist.Work | None]:
        size = torch.tensor([len(message)])
        body = torch.frombuffer(message or bytearray(1), dtype=torch.uint8)  # an empty tensor cannot be sent
        return [
            dist.isend(tensor, group=group, group_dst=rank, tag=tag)
            for tensor, tag in ((size, _TAG_SIZE), (body, _TAG_BODY))
        ]

    def _finish(self, works: Sequence[dist.Work | None], rank: int) -> None:
        for work in works:
            assert work is not None, "this process is not in the group"
            try:
                work.wait()
            except RuntimeError as error:
                raise self._gone(rank, error) from error

    def _receive(self, rank: int, group: dist.ProcessGroup | None) -> memoryview:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, group=group, group_src=rank, tag=_TAG_SIZE)
            body = torch.empty(max(1, int(size)), dtype=torch.uint8)
            dist.recv(body, group=group, group_src=rank, tag=_TAG_BODY)
        except RuntimeError as error:
            raise self._gone(rank, error) from error
        return body.numpy().data[: int(size)]

    def _gone(self, rank: int, error: Exception) -> RankLostError:
        return RankLostError(
            f"learner rank {rank} does not answer rank {self.rank}: {first_line(error)}; the log of that rank says why"
        )


def _use_interface_towards(host: str) -> None:
    """Make Gloo listen on the interface towards `host`; otherwise Gloo guesses from the name of the machine."""
    own = address_towards(host)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
