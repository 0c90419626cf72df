"""The embedded engine: pure torch, the same code on CPU and CUDA, in the rollout worker's own process.

engine ─► requests, scheduler ─► cache ─► batch ─► sampling, transformer ─► parameters
"""

from areal_rloo.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
