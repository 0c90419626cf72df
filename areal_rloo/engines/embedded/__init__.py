"""The embedded engine: pure torch, the same code on CPU and CUDA, in the rollout worker's own process.

`engine` runs the engine's thread. `requests` holds a request's states (waiting, placed) and the queue. `scheduler`
gives and takes cache rows. `cache` stores keys and values, and finds cached prompt beginnings. `batch` decodes,
`sampling` chooses tokens. `transformer` is the forward pass of prompts and of decode steps, `parameters` the weights.
"""

from areal_rloo.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
