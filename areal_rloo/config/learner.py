"""The section `learner`: devices, batches, memory and optimizer. docs/learner.md has their costs in memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from areal_rloo.config.algorithm import LossConfig
from areal_rloo.config.section import (
    AutoRanks,
    AutoSteps,
    AutoTokens,
    Count,
    CountOrNone,
    ManyCount,
    Natural,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Share,
)

MOST_BETA = 0.99  # bfloat16 has 8 bits of precision: adding less than 1/256 of a number has no effect


class OptimizerConfig(Section, frozen=True):
    learning_rate: NonNegative = 1e-6  # of AdamW, after the warmup; 0 trains nothing: a control run
    betas: tuple[Share, Share] = (0.9, 0.95)  # decay of the first and of the second moment
    eps: PositiveFloat = 1e-8  # added to the root of the second moment
    weight_decay: NonNegative = 0.0  # decoupled from the gradient; on matrices alone, unless decay_all
    decay_all: bool = False  # true: weight decay also on norms, biases and embeddings
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after the warmup
    warmup_steps: Natural = 0  # optimizer steps (minibatches) in which the rate rises from 0
    warmup_share: Share = 0.0  # in place of warmup_steps: their share of all optimizer steps, rounded up
    final_share: Share = 0.0  # of learning_rate, at the end of a linear or cosine schedule
    max_grad_norm: PositiveFloat = 1.0  # a longer gradient is scaled to this norm
    state_dtype: Literal["float32", "bfloat16"] = "float32"  # of both moments: 8 or 4 bytes a parameter


class LoraConfig(Section, frozen=True):
    """Train low-rank adapters instead of the weights (arXiv:2106.09685).

    By default, a version for the embedded engine is the adapters alone, and for a server the merged weights, rounded to
    `model.dtype`. With `publish: adapters`, the worker of a server gets the adapters and merges them.
    """

    rank: PositiveInt = 16  # inner size of an adapter
    alpha: PositiveInt = 32  # the product of an adapter is scaled by alpha / rank
    targets: tuple[str, ...] | None = None  # names of linear layers; null: all but the head
    # What a version is: the adapters, or merged weights; auto: adapters for the embedded engine.
    publish: Literal["auto", "adapters", "merged"] = "auto"

    def adapts(self, name: str) -> bool:
        """Return True if the linear layers of this name get adapters."""
        return self.targets is None or name in self.targets


class LearnerConfig(Section, frozen=True):
    device: Literal["auto", "cpu", "cuda"] = "auto"  # of the ranks; auto: GPUs if there are any
    # Processes, each on an own device, that share weights, gradients and states. auto: a quarter of the GPUs.
    num_ranks: AutoRanks = 1
    num_replicas: Count = 1  # copies of the policy among the ranks; each is sharded over num_ranks / num_replicas
    num_threads: CountOrNone = 0  # CPU threads of a rank; 0: an equal share of the cores
    num_train_steps: AutoSteps = 100  # length of the run; auto: the steps of data.num_epochs
    groups_per_step: ManyCount = 32  # prompts of a train step, each with algorithm.group_size completions
    num_minibatches: PositiveInt = 1  # parts of a batch, with an optimizer step each
    num_epochs_per_batch: PositiveInt = 1  # passes over a batch, all in the same order of minibatches
    # End the train step before a minibatch on which the policy is further from the proximal policy, or from the
    # behaviour policy if loss.decoupled is false: k3 in nats a token. null: never.
    target_kl: PositiveFloat | None = None
    # Of a forward and backward pass on a rank; auto: the fastest that fits by the estimate.
    microbatch_tokens: AutoTokens = 8192
    # Keep only the input of each layer, and compute the layer twice; auto: if the memory needs it.
    gradient_checkpointing: bool | Literal["auto"] = False
    offload: Literal["none", "optimizer", "parameters"] = "none"  # kept in CPU memory between uses
    compile: bool = False  # torch.compile of each layer
    kernels: Literal["torch", "liger"] = "torch"  # of norms, rotations and activations; liger needs a GPU
    lora: LoraConfig | None = None  # train adapters; null: all weights
    max_skipped_steps: Natural = 3  # non-finite steps in a row before the run stops
    collective_timeout_s: Seconds = 600.0  # a rank that does not respond for this long ends the run
    peak_flops: PositiveFloat | None = None  # of a rank's device, for the MFU; null: from the data sheet, if known
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a train step, unless `target_kl` ends the train step."""
        return self.num_minibatches * self.num_epochs_per_batch


def learner_mistakes(learner: LearnerConfig, loss: LossConfig) -> Iterator[str]:
    """Check dependent options; give the text of each error."""
    if learner.num_minibatches > learner.groups_per_step:
        yield (
            f"learner.num_minibatches: expected at most learner.groups_per_step={learner.groups_per_step}, "
            f"got {learner.num_minibatches}"
        )
    if learner.target_kl is not None and learner.updates_per_step == 1:
        yield (
            f"learner.target_kl: expected null with a single optimizer step for a batch, got {learner.target_kl}; set "
            "learner.num_epochs_per_batch or learner.num_minibatches above 1"
        )
    if learner.target_kl is not None and loss.decoupled and not loss.recomputes:
        yield (
            f"learner.target_kl: expected null with algorithm.loss.proximal={loss.proximal}, got {learner.target_kl}; "
            "the divergence needs the logprobs of the proximal policy; set algorithm.loss.proximal=recompute"
        )
    if learner.num_ranks % learner.num_replicas:
        yield (
            f"learner.num_replicas: expected a divisor of learner.num_ranks={learner.num_ranks}, got "
            f"{learner.num_replicas}; every copy needs the same number of ranks"
        )
    if learner.optimizer.schedule == "constant" and learner.optimizer.final_share != 0:
        yield (
            f"learner.optimizer.final_share: expected 0 with schedule=constant, got {learner.optimizer.final_share}, "
            "which a constant rate does not read; set learner.optimizer.schedule=linear or cosine"
        )
    if learner.optimizer.warmup_steps > 0 and learner.optimizer.warmup_share > 0:
        yield (
            f"learner.optimizer.warmup_share: expected 0 with warmup_steps={learner.optimizer.warmup_steps}, got "
            f"{learner.optimizer.warmup_share}; leave one of the two out"
        )
    if learner.optimizer.decay_all and learner.optimizer.weight_decay == 0:
        yield (
            "learner.optimizer.decay_all: expected false with weight_decay=0, which shrinks nothing, got true; set "
            "learner.optimizer.weight_decay"
        )
    if learner.optimizer.state_dtype == "bfloat16" and learner.optimizer.betas[1] > MOST_BETA:
        yield (
            f"learner.optimizer.betas: expected a second beta of at most {MOST_BETA} with state_dtype=bfloat16, got "
            f"{learner.optimizer.betas[1]}; rounding would cancel the updates of the second moment"
        )
