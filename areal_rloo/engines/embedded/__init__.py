"""The embedded engine: pure torch, CPU and CUDA on one code path, in the rollout worker's own process."""

from areal_rloo.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
