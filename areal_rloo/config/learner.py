"""The section `learner`: where and how the policy is trained, and the checks that need more than one option.

docs/learner.md says what each costs and gives, in memory and time.
"""

from __future__ import annotations

from typing import Literal

from areal_rloo.config.section import (
    AutoInt,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
)
from areal_rloo.errors import ConfigError

_MOST_BETA = 0.99  # bfloat16 has 8 bits: what is less than 1/256 of a number leaves it as it is


class OptimizerConfig(Section, frozen=True):
    learning_rate: PositiveFloat = 1e-6
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    max_grad_norm: PositiveFloat = 1.0
    state_dtype: Literal["float32", "bfloat16"] = "float32"  # of the two moments: 8 or 4 bytes a parameter


class LoraConfig(Section, frozen=True):
    """Train low-rank adapters instead of the weights (arXiv:2106.09685); engines get weights with them merged in."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32  # the adapters' product counts alpha / rank
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LearnerConfig(Section, frozen=True):
    device: str = "auto"  # auto | cpu | cuda
    # Processes, each on a device of its own, that share weights, gradients and states; auto: a quarter of the GPUs.
    num_ranks: AutoInt = 1
    num_replicas: PositiveInt = 1  # copies of the policy among the ranks; each is sharded over num_ranks / num_replicas
    num_threads: NonNegativeInt = 0  # CPU threads of a rank; 0: its share of the cores
    num_train_steps: PositiveInt = 100
    groups_per_step: PositiveInt = 32
    num_minibatches: PositiveInt = 1
    microbatch_tokens: PositiveInt = 8192  # of one forward and backward on one rank
    gradient_checkpointing: bool = False  # compute each layer twice, and keep its input alone in between
    offload: Literal["none", "optimizer", "parameters"] = "none"  # what lies in CPU memory while it is not used
    compile: bool = False  # torch.compile of each layer
    kernels: Literal["torch", "liger"] = "torch"  # of norms, rotations and activations; liger needs a GPU
    lora: LoraConfig | None = None  # null: all weights are trained
    max_skipped_steps: NonNegativeInt = 3  # non-finite steps in a row before the run stops
    collective_timeout_s: PositiveFloat = 600.0  # after which a rank that does not take part ends the run
    peak_flops: PositiveFloat | None = None  # of a rank's device, for the MFU; null: of the GPU's data sheet, if known
    optimizer: OptimizerConfig = OptimizerConfig()


def validate_learner(learner: LearnerConfig) -> None:
    """Check what no single field can check.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    if learner.num_minibatches > learner.groups_per_step:
        raise ConfigError(
            f"learner.num_minibatches: expected at most learner.groups_per_step={learner.groups_per_step}, "
            f"got {learner.num_minibatches}"
        )
    if learner.num_ranks % learner.num_replicas:
        raise ConfigError(
            f"learner.num_replicas: expected a divisor of learner.num_ranks={learner.num_ranks}, got "
            f"{learner.num_replicas}; each copy is sharded over as many ranks as the others"
        )
    if learner.optimizer.state_dtype == "bfloat16" and learner.optimizer.betas[1] > _MOST_BETA:
        raise ConfigError(
            f"learner.optimizer.betas: expected a second one of at most {_MOST_BETA} with state_dtype=bfloat16, got "
            f"{learner.optimizer.betas[1]}; what a step adds to the second moment would be rounded away"
        )
