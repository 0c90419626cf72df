"""What rank 0 tells the learner's ranks to compute, and what they answer; it tells itself in the same words.

Score ─► Scores        Train ─► Trained        RefreshReference | GatherWeights | SaveShards ─► Done        Stop
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_rloo.learner.packing import Microbatch

Times = dict[str, float]
"""Seconds by part of a step: reference, proximal, forward, backward, optimizer."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Logprobs of the targets of these rows under the reference policy."""

    microbatches: list[Microbatch]


class Train(msgspec.Struct, frozen=True, tag="train"):
    """An optimizer step for each minibatch; columns are those of `RowLoss`."""

    minibatches: list[list[Microbatch]]
    kl_coefficient: float


class RefreshReference(msgspec.Struct, frozen=True, tag="refresh_reference"):
    """The reference takes the policy's weights of this moment."""


class GatherWeights(msgspec.Struct, frozen=True, tag="gather_weights"):
    """Send this rank's part of the weights to rank 0."""


class SaveShards(msgspec.Struct, frozen=True, tag="save_shards"):
    """Write this rank's part of a checkpoint into a folder that is there."""

    folder: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The run is over."""


Command = Score | Train | RefreshReference | GatherWeights | SaveShards | Stop


class Scores(msgspec.Struct, frozen=True, tag="scores"):
    """By microbatch [num_targets] float32, in CPU memory."""

    logprobs: list[Tensor]


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    """What a rank did with its share of each minibatch.

    Attributes:
        stepped: by minibatch, whether everything was finite, on all ranks.
        gradient_norms: by minibatch, of all ranks together, before clipping.
        losses: by minibatch, the sum over this rank's rows.
        outcomes: by minibatch, of this rank's tokens; fields of TokenOutcomes.
        times: seconds.
    """

    stepped: list[bool]
    gradient_norms: list[float]
    losses: list[float]
    outcomes: list[dict[str, Tensor]]
    times: Times


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


Answer = Scores | Trained | Done


def encode(message: Command | Answer) -> bytes:
    return _encoder.encode(message)


def decode_command(message: bytes) -> Command:
    command: Command = _commands.decode(message)
    return command


def decode_answer(message: bytes) -> Answer:
    answer: Answer = _answers.decode(message)
    return answer


def _tensor_to_plain(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    assert isinstance(value, Tensor), f"no other type travels: {type(value).__name__}"
    array = value.contiguous().numpy()
    return array.dtype.str, array.shape, array.tobytes()


def _tensor_from_plain(kind: type, plain: Any) -> Tensor:
    assert kind is Tensor, f"no other type travels: {kind.__name__}"
    dtype, shape, data = plain
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=dtype).reshape(shape))


_encoder = msgspec.msgpack.Encoder(enc_hook=_tensor_to_plain)
_commands = msgspec.msgpack.Decoder(Command, dec_hook=_tensor_from_plain)
_answers = msgspec.msgpack.Decoder(Answer, dec_hook=_tensor_from_plain)
