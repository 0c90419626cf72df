"""Engines turn token ids into completions.

`base` defines the requests, the `Engine` protocol and the checks that all engines share. `embedded` computes in the
worker's own process with pure torch. `server` drives a server process over HTTP; `sglang` and `vllm` hold the calls of
these servers, and `kinds` finds them by name. `installed` finds the Python of a server, without torch.
"""

from areal_rloo.engines.base import Engine, EngineStatistics, GenerationRequest, SamplingParameters

__all__ = ["Engine", "EngineStatistics", "GenerationRequest", "SamplingParameters"]
