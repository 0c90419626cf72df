"""All ranks of the learner, as rank 0 sees them: a `Team` sends each rank a command and collects the answers.

    Score ─► Scores     Train ─► Trained     RefreshReference | GatherWeights | SaveShards | FreeMemory ─► Done     Stop

Rank 0 executes the same commands itself. The other ranks wait for commands in `follow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_rloo.learner.packing import Microbatch
from areal_rloo.learner.parallel.files import has_room
from areal_rloo.learner.parallel.sharding import local
from areal_rloo.learner.rank import LearnerRank, Trained
from areal_rloo.weights.manifest import empty_buckets, views


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Compute the logprobs of the targets of these rows under the reference policy."""

    microbatches: list[Microbatch]


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Take an optimizer step for each minibatch."""

    minibatches: list[list[Microbatch]]
    kl_coefficient: float


class RefreshReference(msgspec.Struct, frozen=True, tag="refresh_reference"):
    """Copy the current weights of the policy into the reference."""


class GatherWeights(msgspec.Struct, frozen=True, tag="gather_weights"):
    """Send this rank's part of the weights to rank 0, with adapters apart or as the engines get them."""

    apart: bool


class SaveShards(msgspec.Struct, frozen=True, tag="save_shards"):
    """Write this rank's part of a checkpoint into an existing folder."""

    folder: str


class FreeMemory(msgspec.Struct, frozen=True, tag="free_memory"):
    """Free the memory that only a step needs: gradients, and memory that torch keeps for the next step."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the run."""


Command = Score | Train | RefreshReference | GatherWeights | SaveShards | FreeMemory | Stop


class Scores(msgspec.Struct, frozen=True, tag="scores"):
    """Logprobs by microbatch, [num_targets] float32 each, in CPU memory."""

    logprobs: list[Tensor]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Confirm a command without results."""


Answer = Scores | Trained | Done


class TrainCommands(NamedTuple):
    """A `Train` for each rank, encoded for the others."""

    own: Train
    others: list[bytearray]


class Team:
    """Rank 0 (`own`) and the ranks that follow its commands. Every method raises TrainingError if a rank is gone."""

    def __init__(self, own: LearnerRank) -> None:
        assert own.ranks.rank == 0, "only rank 0 gives commands"
        self.own = own

    @property
    def num_ranks(self) -> int:
        return self.own.ranks.num

    @property
    def has_reference(self) -> bool:
        return self.own.reference is not None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.own.schedule.get_last_lr()[0])

    @property
    def num_optimizer_steps(self) -> int:
        return int(self.own.schedule.last_epoch)

    def score(self, microbatches: Sequence[list[Microbatch]]) -> list[list[Tensor]]:
        """Give the logprobs of the targets under the reference policy; rows and logprobs by rank."""
        answers = self._tell([Score(of_rank) for of_rank in microbatches])
        return [answer.logprobs for answer in answers if isinstance(answer, Scores)]

    def train_commands(self, minibatches: Sequence[Sequence[list[Microbatch]]], kl_coefficient: float) -> TrainCommands:
        """Encode the commands to take an optimizer step for each minibatch, given by rank. Safe on any thread."""
        own, *others = [Train(list(of_rank), kl_coefficient) for of_rank in zip(*minibatches, strict=True)]
        return TrainCommands(own, [_encode(command) for command in others])

    def train(self, commands: TrainCommands) -> list[Trained]:
        """Let the ranks execute the commands; return the answers by rank."""
        answers = self._execute(commands.own, commands.others)
        return [answer for answer in answers if isinstance(answer, Trained)]

    def refresh_reference(self) -> None:
        self._tell([RefreshReference()] * self.num_ranks)

    def gather_weights(self, buckets: Sequence[Tensor]) -> None:
        """Copy the current whole weights into buckets, laid out as in the manifest of the rank."""
        self._gather(buckets, apart=False)

    def whole_weights(self) -> dict[str, Tensor]:
        """Copy the current weights to CPU memory, by Hugging Face name, with adapters apart."""
        manifest = self.own.apart_manifest
        buckets = empty_buckets(manifest, torch.device("cpu"))
        self._gather(buckets, apart=True)
        return {name: _own_storage(tensor) for name, tensor in views(manifest, buckets)}

    def weights_to_write(self) -> tuple[dict[str, Tensor], bool]:
        """Return `whole_weights`; or the weights of this rank themselves, if they are whole and memory has no room.

        The second value is True for the weights themselves. They change with the next step.
        """
        own, policy = self.own, self.own.policy
        weights = {name: local(weight.detach()) for name, weight in policy.causal.named_parameters()}
        specs = {spec.name: getattr(torch, spec.dtype) for spec in own.apart_manifest.tensors}
        whole = self.num_ranks == 1 and {name: weight.dtype for name, weight in weights.items()} == specs
        return (weights, True) if whole and not has_room(weights.values()) else (self.whole_weights(), False)

    def save_shards(self, folder: Path) -> Future[Any]:
        """Start writing the current state of all ranks; the future completes when all files are on disk."""
        self._tell_others(SaveShards(str(folder)))
        written = self.own.save(folder)
        self.own.ranks.answers()
        return written

    def free_memory(self) -> None:
        """Free the memory of all devices that only a step needs."""
        self._tell([FreeMemory()] * self.num_ranks)

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        self._tell_others(Stop())

    def _gather(self, buckets: Sequence[Tensor], *, apart: bool) -> None:
        self._tell_others(GatherWeights(apart))
        self.own.weights(buckets, apart=apart)
        self.own.ranks.answers()

    def _tell(self, commands: Sequence[Command]) -> list[Answer]:
        """Send a command to each rank, all of the same kind, and return the answers by rank."""
        own, *others = commands
        return self._execute(own, [_encode(command) for command in others])

    def _execute(self, own: Command, others: Sequence[bytearray]) -> list[Answer]:
        self.own.ranks.hand_out(others)
        answer = _obey(self.own, own)
        return [answer, *map(_decode_answer, self.own.ranks.answers())]

    def _tell_others(self, command: Command) -> None:
        self.own.ranks.hand_out([_encode(command)] * (self.num_ranks - 1))


def follow(rank: LearnerRank) -> None:
    """Execute the commands of rank 0 until Stop; the main loop of every other rank."""
    while not isinstance(command := _decode_command(rank.ranks.take()), Stop):
        rank.ranks.answer(_encode(_obey(rank, command)))
    rank.finish_saving()


def _obey(rank: LearnerRank, command: Command) -> Answer:
    match command:
        case Score():
            return Scores(rank.score(command.microbatches))
        case Train():
            return rank.train(command.minibatches, command.kl_coefficient)
        case RefreshReference():
            rank.refresh_reference()
        case GatherWeights():
            rank.weights(apart=command.apart)
        case SaveShards():
            rank.save(Path(command.folder))
        case FreeMemory():
            rank.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()  # nothing without CUDA
        case Stop():
            raise AssertionError("Stop ends `follow` and is not executed")
        case _:
            assert_never(command)
    return Done()


def _own_storage(part: Tensor) -> Tensor:
    """View a part of a larger storage as a separate storage, without a copy; safetensors refuses shared storages."""
    return torch.from_numpy(part.flatten().view(torch.uint8).numpy()).view(part.dtype).view(part.shape)


def _encode(message: Command | Answer) -> bytearray:
    encoded = bytearray()
    _encoder.encode_into(message, encoded)
    return encoded


def _tensor_to_plain(value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    assert isinstance(value, Tensor), f"unexpected type in a message: {type(value).__name__}"
    array = value.contiguous().numpy()
    return array.dtype.str, array.shape, array.data


def _tensor_from_plain(kind: type, plain: Any) -> Tensor:
    assert kind is Tensor, f"unexpected type in a message: {kind.__name__}"
    dtype, shape, data = plain
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=dtype).reshape(shape))


_encoder = msgspec.msgpack.Encoder(enc_hook=_tensor_to_plain)
_decode_command: Callable[[memoryview], Command] = msgspec.msgpack.Decoder(Command, dec_hook=_tensor_from_plain).decode
_decode_answer: Callable[[memoryview], Answer] = msgspec.msgpack.Decoder(Answer, dec_hook=_tensor_from_plain).decode
