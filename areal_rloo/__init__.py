"""areal_rloo: asynchronous, decoupled actor-learner RL post-training of language models."""

__version__ = "0.1.0"
