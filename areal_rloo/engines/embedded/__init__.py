"""The embedded engine: pure torch, for CPU and CUDA, in the rollout worker's own process.

From the outside in: `engine` runs the thread, `scheduler` gives cache rows to `requests`, `cache` stores keys and
values, `batch` decodes, `recorded` replays the steps of a GPU, `sampling` chooses tokens, `transformer` is the forward
pass and `decode_attention` the attention of its steps, `parameters` are the weights, `families` are the switches of
each model family.
"""

from areal_rloo.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
