"""All ranks of the learner, as rank 0 sees them: it tells each what to do, does its own share, and hears the others."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_rloo.learner.commands import Answer, Command, GatherWeights, SaveShards, Stop, decode_answer, encode
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.weights.manifest import empty_buckets, views


class Team:
    """Rank 0 and those that follow it.

    Attributes:
        own: this process's rank.
    """

    def __init__(self, own: LearnerRank) -> None:
        assert own.ranks.rank == 0, "rank 0 decides"
        self.own = own

    @property
    def num_ranks(self) -> int:
        return self.own.ranks.num

    @property
    def has_reference(self) -> bool:
        return self.own.reference is not None

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self.own.schedule.get_last_lr()[0])

    @property
    def num_optimizer_steps(self) -> int:
        """Taken so far."""
        return int(self.own.schedule.last_epoch)

    def tell(self, commands: Sequence[Command]) -> list[Answer]:
        """What each rank answers to its command; all of one kind.

        Raises:
            TrainingError: a rank is gone.
        """
        first, *others = commands
        self.own.ranks.hand_out([encode(command) for command in others])
        own = self.own.obey(first)
        return [own, *map(decode_answer, self.own.ranks.answers())]

    def gather_weights(self, buckets: Sequence[Tensor]) -> None:
        """The whole weights of this moment into buckets, laid out as the rank's manifest says."""
        self.own.ranks.hand_out([encode(GatherWeights())] * (self.num_ranks - 1))
        self.own.weights(buckets)
        self.own.ranks.answers()

    def whole_weights(self) -> dict[str, Tensor]:
        """A copy of the weights of this moment in CPU memory, adapters merged in, by Hugging Face name."""
        buckets = empty_buckets(self.own.manifest, torch.device("cpu"))
        self.gather_weights(buckets)
        return {name: _alone(tensor) for name, tensor in views(self.own.manifest, buckets)}

    def save_shards(self, folder: Path) -> Future[Any]:
        """Begin to write the state of all ranks of this moment; the future ends when it is on the disk."""
        self.own.ranks.hand_out([encode(SaveShards(str(folder)))] * (self.num_ranks - 1))
        written = self.own.save(folder)
        self.own.ranks.answers()
        return written

    def stop(self) -> None:
        """Let the others go."""
        self.own.ranks.hand_out([encode(Stop())] * (self.num_ranks - 1))


def _alone(part: Tensor) -> Tensor:
    """The same memory as a storage of its own: safetensors refuses parts of a larger one."""
    return torch.from_numpy(part.flatten().view(torch.uint8).numpy()).view(part.dtype).view(part.shape)
