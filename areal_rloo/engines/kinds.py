"""The kinds of servers by the name of the engine."""

from __future__ import annotations

from typing import Literal

from areal_rloo.engines.server import ServerKind
from areal_rloo.engines.sglang import SGLang
from areal_rloo.engines.vllm import VLLM


def kind_of(engine: Literal["sglang", "vllm"]) -> ServerKind:
    return SGLang() if engine == "sglang" else VLLM()
