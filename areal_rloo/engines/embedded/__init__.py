"""The embedded engine: pure torch, the same code on CPU and CUDA, in the rollout worker's own process.

From the outside in: `engine` runs the thread, `scheduler` gives cache rows to `requests`, `cache` stores keys and
values, `batch` decodes, `sampling` chooses tokens, `transformer` is the forward pass, `parameters` are the weights,
`families` are the switches of each model family.
"""

from areal_rloo.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
