"""Engines turn token ids into completions.

`base` defines the requests, the `Engine` protocol and the checks that all engines share. `embedded` computes in the
worker's own process with pure torch. `server` drives a server process over HTTP; `sglang` and `vllm` hold the calls of
these servers, and `kinds` finds them by name. `installed` finds the Python of a server, without torch.
"""

from typing import TYPE_CHECKING

from areal_rloo.exports import exports_of

if TYPE_CHECKING:
    from areal_rloo.engines.base import Engine, EngineStatistics, GenerationRequest, SamplingParameters
    from areal_rloo.engines.embedded import EmbeddedEngine

__all__ = [
    "EmbeddedEngine",
    "Engine",
    "EngineStatistics",
    "GenerationRequest",
    "SamplingParameters",
]

__getattr__ = exports_of(__name__)
