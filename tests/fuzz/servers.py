"""Fuzz the answers of servers: completions, features and digests."""

from __future__ import annotations

import msgspec
from fuzz.targets import Target
from support.server_answers import ANSWERS, READERS

from areal_rloo.decoding import from_json
from areal_rloo.errors import ConfigError, DecodeError, EngineError


def _try_answer(content: bytes) -> None:
    try:
        answer = from_json(content, dict[str, object])
    except DecodeError:
        return
    for read in READERS.values():
        try:
            read(answer)
        except (EngineError, ConfigError) as error:
            assert len(str(error)) < 3000, "a message is for the log"


TARGETS = {"server_answers": Target(_try_answer, lambda: [msgspec.json.encode(answer) for answer in ANSWERS.values()])}
