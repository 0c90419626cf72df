"""Build a rank of the learner from a config, and the broadcaster of its weights.

A rank: load the model, add adapters, shard, and load the reference.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.config import Config
from areal_rloo.errors import ConfigError, ModelError, install
from areal_rloo.files import memory_folder, remove_abandoned
from areal_rloo.learner.adapters import add_adapters
from areal_rloo.learner.costs import memory_explained
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.parallel.sharding import Sharding, fill_shards, shard
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.models.device import check_flash
from areal_rloo.models.equality import check_equality
from areal_rloo.models.files import computation_dtype, model_folder
from areal_rloo.models.folder import read_config
from areal_rloo.models.loading import Reference, decoder_layers, empty_policy, load_policy
from areal_rloo.models.policy import Policy
from areal_rloo.models.sizes import Sizes
from areal_rloo.models.stored import difference_of_shapes, digest_of_files, stored_parameters
from areal_rloo.weights.broadcast import Broadcaster, SendTransport
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.fingerprint import Sampler
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender


def build_rank(
    config: Config, *, model_path: str, device: torch.device, ranks: Ranks | None = None, resumes: bool = False
) -> LearnerRank:
    """Build a rank with the weights of a model; every rank calls this at the same time.

    `model_path` is that of the policy, and of the reference policy if the config says `initial`. `resumes`: the run had
    enough memory before. Raises ModelError if a model cannot be loaded or the vocabularies differ, ConfigError or
    PreflightError if an option does not work on this device, and as `memory_explained` does.
    """
    check_flash(device, computation_dtype(config.model))
    ranks = ranks or Ranks()
    sizes = Sizes.of(read_config("model.path", model_folder(model_path, weights=ranks.rank == 0)))
    if sizes is None:  # refused below
        return _build(config, model_path, device, ranks)
    with memory_explained((sizes, None), config, device, late=resumes, work="the model with its optimizer"):
        return _build(config, model_path, device, ranks)


def build_broadcaster(config: Config, rank: LearnerRank, *, device: torch.device, same_host: bool) -> Broadcaster:
    """Build the broadcaster of a rank's weights; `same_host`: all workers are here."""
    manifest, timeout_s = rank.manifest, config.weights.timeout_s
    transport: SendTransport
    sampler: Sampler | None = None
    if config.weights_transport(same_host=same_host) == "shared_memory":
        remove_abandoned()  # under Slurm and Ray, the launcher may be on another host
        transport = SharedMemorySender(manifest, memory_folder())
    else:
        merges = config.publishes_adapters and config.rollout.server is not None  # in the workers, on CPUs
        to_cpus = merges or config.rollout.device == "cpu"
        transport = CollectiveSender(
            manifest,
            host=config.wire.host,
            device=torch.device("cpu") if to_cpus else device,
            timeout_s=timeout_s,
            ranks_per_worker=1 if merges else config.rollout.tensor_parallel,
        )
        if config.rollout.server is not None and not merges:  # servers have the buckets: no worker can check the bytes
            on_cpu = config.rollout.device == "cpu" and not config.rollout.server_urls
            sampler = Sampler(("sha256",) if on_cpu else ("sha256", "tiles"), config.rollout.tensor_parallel)
    offers = Offers(together=transport.needs_all, timeout_s=timeout_s, call_timeout_s=2 * config.wire.heartbeat_s)
    return Broadcaster(manifest=manifest, transport=transport, offers=offers, sampler=sampler)


def _build(config: Config, model_path: str, device: torch.device, ranks: Ranks) -> LearnerRank:
    learner, settings = config.learner, config.model.reference
    offload = learner.offload == "parameters"
    sharding = Sharding.over(ranks, device, replicas=learner.num_replicas, offload=offload)
    reference, paths = None, [model_path]
    if settings is not None and config.algorithm.kl.coefficient > 0 and settings.path != "initial":
        paths.append(settings.path)
    paths = [str(model_folder(path, weights=ranks.rank == 0)) for path in paths]
    if ranks.rank == 0:
        for path in dict.fromkeys(paths):
            check_equality(path, context_tokens=config.context_tokens)
        stored = stored_parameters("model.path", Path(paths[0]))  # a server would refuse every update
    policy = _policy(paths[0], config, device=device, ranks=ranks, sharding=sharding, trained=True)
    if settings is not None and config.algorithm.kl.coefficient > 0:
        frozen = _policy(paths[-1], config, device=device, ranks=ranks, sharding=sharding, trained=False)
        own, other = policy.causal.config.vocab_size, frozen.causal.config.vocab_size
        if own != other:
            raise ModelError(
                f"model.reference.path: {settings.path} has a vocabulary of {other}, expected the policy's {own}; both "
                "must share a tokenizer"
            )
        # FSDP moves offloaded parameters to the device itself, a layer at a time.
        place = device if sharding is None or not sharding.offload else torch.device("cpu")
        reference = Reference(frozen, device=place, offload=settings.offload)
    rank = LearnerRank(policy, config, device=device, reference=reference, ranks=ranks, sharding=sharding)
    if ranks.rank == 0:
        rank.base = digest_of_files(Path(paths[0]))
        if config.publishes_adapters:
            rank.manifest = msgspec.structs.replace(rank.manifest, base=rank.base)
    if ranks.rank == 0 and not config.publishes_adapters:
        published = {spec.name: spec.shape for spec in rank.manifest.tensors}
        difference = difference_of_shapes({name: tensor.shape for name, tensor in stored.items()}, published)
        if difference is not None:
            raise ModelError(f"model.path: {model_path}: the weights to publish do not fit the files: {difference}")
    return rank


def _policy(
    path: str, config: Config, *, device: torch.device, ranks: Ranks, sharding: Sharding | None, trained: bool
) -> Policy:
    """Load a policy; in shards, rank 0 loads the whole weights and spreads them over empty models."""
    dtype = computation_dtype(config.model)
    whole = load_policy(path, device=device if sharding is None else torch.device("cpu")) if ranks.rank == 0 else None
    causal = whole if whole is not None and sharding is None else empty_policy(path)
    reference, lora = config.model.reference, config.learner.lora
    refreshed = reference is not None and reference.refresh_every_n_versions is not None
    for model in {id(model): model for model in (whole, causal) if model is not None}.values():
        if trained:
            _prepare(model, config, device)
        elif refreshed and lora is not None:  # bfloat16 would round the policy's change in merged weights
            add_adapters(model, lora)
    policy = Policy(causal, temperature=config.rollout.sampling.temperature, dtype=dtype)
    if sharding is not None:
        values: dict[str, Tensor] = {}
        if whole is not None:
            values = dict(chain(whole.named_parameters(prefix="causal"), whole.named_buffers(prefix="causal")))
            causal.generation_config = whole.generation_config  # an empty model has only its config
        shard(policy, sharding, dtype=dtype)
        policy.to_empty(device="cpu" if sharding.offload else device)
        fill_shards(policy, values, sharding)
    return policy


def _prepare(causal: PreTrainedModel, config: Config, device: torch.device) -> None:
    """Apply the options that only a trained policy has."""
    learner = config.learner
    if learner.kernels == "liger":
        _use_liger(causal, device)
    if learner.lora is not None:
        add_adapters(causal, learner.lora)
    if learner.gradient_checkpointing:
        # Before transformers 5.23 the method had another name, which still exists and warns.
        enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        causal.train()  # transformers checks this flag; dropout stays off
    if learner.compile:
        for layer in decoder_layers(causal):
            layer.compile(dynamic=True)


def _use_liger(causal: PreTrainedModel, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError("learner.kernels: expected torch on a CPU, got liger, whose kernels need a GPU")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ModelError(f"learner.kernels: liger needs liger-kernel; {install('liger')}") from error
    _apply_liger_kernel_to_instance(causal, cross_entropy=False, fused_linear_cross_entropy=False)
