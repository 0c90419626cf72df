"""From a config to one rank of the learner: load, add adapters, shard, and make ready to be asked."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.config import Config
from areal_rloo.errors import ConfigError, ModelError
from areal_rloo.learner.adapters import add_adapters
from areal_rloo.learner.parallel import Ranks, Sharding, fill_shards, shard
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.loading import empty_policy, fill_buffers, load_policy
from areal_rloo.models.policy import Policy
from areal_rloo.models.reference import Reference


def build_rank(
    config: Config,
    *,
    model_path: str,
    device: torch.device,
    ranks: Ranks | None = None,
) -> LearnerRank:
    """A rank with the weights of a model folder; every rank calls it at the same time.

    Args:
        config: of the run.
        model_path: of the policy, and of the reference policy where the config says `initial`.
        device: of this rank.
        ranks: all of them; None for the only one.

    Raises:
        ModelError: a model cannot be loaded, or does not fit the other; says which and what to do.
        ConfigError: an option that this device has no use for.
    """
    ranks = ranks or Ranks()
    learner = config.learner
    offload = learner.offload == "parameters"
    sharding = Sharding.over(ranks, device, replicas=learner.num_replicas, offload=offload)
    policy = _policy(model_path, config, device=device, ranks=ranks, sharding=sharding, trained=True)
    reference = _reference(model_path, config, device=device, ranks=ranks, sharding=sharding)
    settings = config.model.reference
    if reference is not None and settings is not None and _vocabulary(reference.policy) != _vocabulary(policy):
        raise ModelError(
            f"model.reference.path: {settings.path} has a vocabulary of "
            f"{_vocabulary(reference.policy)}, expected the policy's {_vocabulary(policy)}; both must share a tokenizer"
        )
    return LearnerRank(policy, config, device=device, reference=reference, ranks=ranks, sharding=sharding)


def _policy(
    path: str, config: Config, *, device: torch.device, ranks: Ranks, sharding: Sharding | None, trained: bool
) -> Policy:
    dtype = computation_dtype(config.model)
    whole = load_policy(path, device=device if sharding is None else torch.device("cpu")) if ranks.rank == 0 else None
    causal = whole if whole is not None and sharding is None else empty_policy(path)
    for model in (whole, causal if causal is not whole else None):
        if model is not None and trained:
            _prepare(model, config, device)
    policy = Policy(causal, temperature=config.rollout.sampling.temperature, dtype=dtype)
    if sharding is not None:
        named = () if whole is None else whole.named_parameters(prefix="causal")
        values: dict[str, Tensor] = dict(named)
        if whole is not None:
            causal.generation_config = whole.generation_config  # an empty model knows what its config says alone
        shard(policy, sharding, dtype=dtype)
        policy.to_empty(device="cpu" if sharding.offload else device)
        fill_buffers(causal, device)
        fill_shards(policy, values, sharding)
    return policy


def _prepare(causal: PreTrainedModel, config: Config, device: torch.device) -> None:
    """What is different about a policy that is trained."""
    learner = config.learner
    if learner.kernels == "liger":
        _use_liger(causal, device)
    if learner.lora is not None:
        add_adapters(causal, learner.lora)
    if learner.gradient_checkpointing:
        # Its name before transformers 5.23 still stands, and warns.
        enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        causal.train()  # transformers looks; dropout stays off, as loading left it
    if learner.compile:
        for layer in causal.base_model.layers:  # type: ignore[union-attr]
            layer.compile(dynamic=True)


def _use_liger(causal: PreTrainedModel, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError("learner.kernels: expected torch on a CPU, got liger, whose kernels are for GPUs")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ModelError("learner.kernels: liger needs liger-kernel; pip install 'areal_rloo[liger]'") from error
    _apply_liger_kernel_to_instance(causal, cross_entropy=False, fused_linear_cross_entropy=False)


def _reference(
    model_path: str, config: Config, *, device: torch.device, ranks: Ranks, sharding: Sharding | None
) -> Reference | None:
    """The frozen policy of the KL term, where there is one."""
    settings = config.model.reference
    if settings is None or config.algorithm.kl.coefficient == 0:
        return None
    path = model_path if settings.path == "initial" else settings.path
    policy = _policy(path, config, device=device, ranks=ranks, sharding=sharding, trained=False)
    # Sharded parameters that lie in CPU memory go to the device by themselves, a layer at a time.
    place = device if sharding is None or not sharding.offload else torch.device("cpu")
    return Reference(policy, device=place, offload=settings.offload)


def _vocabulary(policy: Policy) -> int:
    return int(policy.causal.config.vocab_size)
