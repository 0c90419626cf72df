"""Read the rows that `areal-rloo generate` writes: rows in, trajectories out."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from areal_rloo.errors import DataError
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Completion, FinishReason, Trajectory, is_reward

_Token = Annotated[int, Meta(ge=0, lt=2**31)]
_Tokens = Annotated[list[_Token], Meta(min_length=1)]


class SavedSample(msgspec.Struct, frozen=True):
    """The part of a row that training reads (`stages.generate.Row`)."""

    prompt_token_ids: _Tokens
    token_ids: _Tokens
    completion: str
    logprobs: list[float]
    reward: float
    spans: list[Annotated[int, Meta(ge=1)]] = []
    source: str = ""
    item_index: Annotated[int, Meta(ge=0)] = 0
    sample_index: Annotated[int, Meta(ge=0)] = 0
    finish_reason: FinishReason = "stop"


def read_sample(row: dict[str, Any], where: str, *, vocab_size: int) -> SavedSample:
    """Check a row.

    Raises:
        DataError: a field is missing or wrong; names the place and the field.
    """
    try:
        sample = msgspec.convert(row, SavedSample)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: expected a row of areal-rloo generate: {error}") from error
    num, largest = len(sample.token_ids), max(*sample.prompt_token_ids, *sample.token_ids)
    for field, expected, got in (
        ("logprobs", f"{num} numbers, one for each of token_ids", len(sample.logprobs)),
        ("spans", f"a sum of {num}, the number of token_ids", sum(sample.spans) or num),
    ):
        if got != num:
            raise DataError(f"{where}: expected {expected} in the field '{field}', got {got}")
    if largest >= vocab_size:
        raise DataError(
            f"{where}: expected tokens below {vocab_size}, the vocabulary of model.path, got {largest}; take a model "
            "with the tokenizer of the samples"
        )
    if not is_reward(sample.reward) or not all(map(math.isfinite, sample.logprobs)):
        raise DataError(f"{where}: expected finite numbers in the fields 'logprobs' and 'reward'")
    return sample


def check_tokenizer(sample: SavedSample, where: str, chat: ChatFormat) -> None:
    """Raise DataError if the tokens of a sample are not those of its text."""
    if (text := "".join(chat.pieces(sample.token_ids))) != sample.completion:
        raise DataError(
            f"{where}: the tokenizer of model.path decodes token_ids to {text[:60]!r}, expected the completion "
            f"{sample.completion[:60]!r}; take a model with the tokenizer of the samples, or rows of texts"
        )


def trajectory_of(sample: SavedSample, *, group_id: int = 0) -> Trajectory:
    """Make a trajectory whose tokens have version 0."""
    completion = Completion(
        np.array(sample.token_ids, np.int32),
        np.array(sample.logprobs, np.float32),
        np.zeros(len(sample.token_ids), np.int32),
        sample.finish_reason,
        tuple(sample.spans),
    )
    prompt = np.array(sample.prompt_token_ids, np.int32)
    return Trajectory(group_id, sample.sample_index, prompt, completion, sample.reward)
