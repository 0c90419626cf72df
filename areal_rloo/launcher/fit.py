"""Replaces the word `auto` in a config: the number of processes, and the fastest learner options within the memory.

    hosts, config ─► counts ─► place ─► rows and checkpointing ─► the engine's share ─► a config without `auto`

Counts are judged before memory. A plan too large for a GPU is refused, with tried remedies. Pure functions on the
estimate of `learner/memory.py`, apart from `model_sizes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from areal_rloo.config import Config, validate
from areal_rloo.engines.installed import package_of
from areal_rloo.errors import ModelError, PreflightError, UserError
from areal_rloo.launcher.count_remedies import Plan, count_advice, more_gpus, unused_gpus
from areal_rloo.launcher.engine_memory import (
    cache_words,
    few_cached,
    given_options,
    has_no_cache,
    least_bytes,
    num_cached,
    reserved,
    with_cache,
    with_rollout,
)
from areal_rloo.launcher.host_memory import host_parts
from areal_rloo.launcher.placement import Host, Placement, TooFewError, gpus_each, place, shares_gpus, with_counts
from areal_rloo.launcher.remedies import ENGINE, RANK, Needs, TooLargeError, advice
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, estimate, in_gib, in_words
from areal_rloo.models.folder import cached_folder, num_parameters, read_config
from areal_rloo.models.sizes import SHIPPED, Sizes

_MOST_ROW = 32_768  # tokens; longer rows make a GPU no faster
_GOOD_ROW = 8_192  # shorter rows leave a GPU waiting for memory
_UNKNOWN_ROW = 8_192  # if the memory or the model is unknown
_ON_A_HOST = 8  # GPUs, in advice
_MARGIN = 1.1  # of the estimate, for the choices of `auto`

Planned = Callable[[Config, Sequence[Host], Sizes | None], Config]
"""Replace every `auto`, or raise a UserError."""


def model_sizes(config: Config, environment: Mapping[str, str]) -> Sizes | None:
    """Read the sizes of the policy; None if the model was never downloaded, or config.json lacks a size.

    Parameters are counted in the headers of the weights, if they are here. The models of the shipped configs need no
    download.
    """
    path = config.model.path
    if path == "tiny":
        return Sizes.of_tiny(config.model.tiny)
    folder = Path(path) if Path(path).is_dir() else cached_folder(path, environment)
    if folder is None:
        return SHIPPED.get(path)
    try:
        sizes = Sizes.of(read_config("model.path", folder))
    except ModelError:
        return None  # the doctor's check of the model reports the error
    if sizes is not None:
        with contextlib.suppress(ModelError):  # without weights, or with damaged ones
            return replace(sizes, counted=num_parameters(folder))
    return sizes


def resolved(config: Config, hosts: Sequence[Host], model: Sizes | None) -> Config:
    """Replace every `auto`. With `learner.num_ranks: auto`, as many GPUs learn as the model needs.

    Raises:
        ConfigError: the numbers do not fit the rest of the config.
        PreflightError: the hosts have too few GPUs, or a rank of the learner or an engine does not fit into a GPU.
    """
    try:
        return planned(config, hosts, model)
    except TooLargeError as error:  # what is hardly enough is advice only if nothing is better
        raise PreflightError(f"{error}; {_advice(error, config, hosts, model, (planned_well, planned))}") from error
    except TooFewError as error:
        raise PreflightError(f"{error}; {count_advice(config, model, hosts, _plan_for(model))}") from error


def _advice(
    refusal: TooLargeError,
    config: Config,
    hosts: Sequence[Host],
    model: Sizes | None,
    ways: Sequence[Planned],
    gain: Callable[[Config], str] | None = None,
) -> str:
    """Name the changes, and the GPUs, with an accepted plan by the first possible way to plan."""
    assert model is not None, "a model of unknown size is not too large"
    num_gpus = sum(len(host.gpu_ids) for host in hosts)

    def needs_by(plan: Planned) -> Callable[[Config], Needs]:
        def needs(changed: Config) -> Needs:
            num_ranks = plan(changed, hosts, model).learner.num_ranks
            return _least_needs(_with(changed, num_ranks=num_ranks), model)

        return needs

    options = (advice(refusal, config, model, num_gpus, needs_by(way), gain) for way in ways)
    more = (", or ".join(more_gpus(config, hosts, _plan_for(model, way), most=_ON_A_HOST)) for way in ways)
    found = (next(filter(None, several), "") for several in (options, more))
    return ", or ".join(filter(None, found)) or "take a smaller model, or GPUs with more memory"


def few_words(config: Config, hosts: Sequence[Host], model: Sizes | None) -> str:
    """Warn of a planned cache with room for few of the slots, with advice; empty if there is enough, or no plan."""

    def gain(changed: Config) -> str:
        assert model is not None, "a cache of an unknown model is not small"
        return f"{num_cached(planned_well(changed, hosts, model), model, _gpu_bytes(hosts))} of full length"

    with contextlib.suppress(UserError):
        try:
            planned_well(config, hosts, model)
        except TooLargeError as error:
            return f"{error}; {_advice(error, config, hosts, model, [planned_well], gain)}"
    return ""


def unused_words(config: Config, placement: Placement, model: Sizes | None) -> str:
    """Name the unused GPUs of a plan, with the counts that use them, for a config as the user wrote it; else empty."""
    return unused_gpus(config, placement, _plan_for(model))


def _plan_for(model: Sizes | None, plan: Planned | None = None) -> Plan:
    return lambda config, hosts: place((plan or planned)(config, hosts, model), hosts)


def _least_needs(config: Config, model: Sizes) -> Needs:
    """Return the bytes of a rank and of an engine, with the smallest choices for `auto`."""
    return {RANK: _needed(_choices(config)[-1], model), ENGINE: least_bytes(config, model)}


def planned(config: Config, hosts: Sequence[Host], model: Sizes | None) -> Config:
    """Resolve with the first way to share devices with a good cache, else with the last way within the memory.

    Raises:
        UserError: as `resolved`, without advice for memory.
    """
    found, refusal = None, None
    for way in _ways_to_share(config, hosts):
        try:
            found = _resolved(with_rollout(config, share_devices=way), hosts, model)
        except TooLargeError as error:
            refusal = error
            continue
        if config.rollout.embedded.cache_tokens is not None or _has_cache(found):
            break
    if found is None:
        assert refusal is not None, "there is at least a way"
        raise refusal
    return found


def planned_well(config: Config, hosts: Sequence[Host], model: Sizes | None) -> Config:
    """Resolve, and refuse a plan with a cache for few of the slots, or above a known memory of a host.

    Raises:
        UserError: as `planned`; TooLargeError also for such a cache, PreflightError for such a host.
    """
    found, gpu_bytes = planned(config, hosts, model), _gpu_bytes(hosts)
    least = min(host.memory_bytes for host in hosts)
    if model is not None and least:
        needed = sum(host_parts(found, place(found, hosts), model, model.num_parameters).values())
        if needed > least:
            raise PreflightError(f"host memory: {needed / GIB:.1f} GiB are needed, of {least / GIB:.1f}")
    if model is None or not gpu_bytes or not gpus_each(config, hosts)[1] or given_options(config):
        return found  # the user chose the cache, or it is unknown
    if words := few_cached(found, model, gpu_bytes):
        raise TooLargeError(words, ENGINE, _least_needs(_with(config, num_ranks=found.learner.num_ranks), model))
    return found


def _ways_to_share(config: Config, hosts: Sequence[Host]) -> list[str]:
    """List the possible values of rollout.share_devices, the best first.

    Raises:
        PreflightError: no such way is possible here.
    """
    asked, each = config.rollout.share_devices, gpus_each(config, hosts)
    if asked in ("auto", "never") and not shares_gpus(config, hosts):
        return ["never"]
    ways: list[str] = [asked]
    if asked == "auto":
        ways = ["side_by_side", "in_turns"] if config.rollout.engine == "embedded" else ["side_by_side"]
    key = "rollout.share_devices: expected never"
    if len(hosts) > 1:
        raise PreflightError(
            f"{key} on {len(hosts)} hosts, got {asked}; weights reach a shared device by memory of the host, and turns "
            "are of a host; set it to never, or launcher.num_hosts=1"
        )
    if asked == "side_by_side" and each == (0, 0):
        raise PreflightError(
            f"{key} or in_turns without a GPU, got {asked}; on CPUs, learner and workers have cores of their own, or "
            "take turns; set it to auto"
        )
    if config.weights.transport == "collective":  # with `auto`; `validate` refuses all other values
        raise PreflightError(
            f"weights.transport: expected auto or shared_memory on a single GPU, which learner and engine share with "
            f"rollout.share_devices={asked}, got collective; NCCL connects no two processes on a GPU; set "
            "weights.transport=auto"
        )
    if each[0] != each[1]:
        raise PreflightError(
            f"{key} with {each[0]} GPUs for each learner rank and {each[1]} for each worker, got {asked}; set "
            "learner.device and rollout.device to the same device"
        )
    return ways


def _has_cache(config: Config) -> bool:
    """Return True if an embedded engine beside a learner has a cache for half contexts, or an unknown memory."""
    cache = config.rollout.embedded.cache_tokens
    return cache is None or 2 * cache >= config.rollout.num_slots * config.context_tokens


def _resolved(config: Config, hosts: Sequence[Host], model: Sizes | None) -> Config:
    """Resolve a config with a known way to share devices.

    Raises:
        TooLargeError: a rank of the learner or an engine does not fit into a GPU.
        PreflightError: the hosts have too few GPUs.
    """
    validate(config)
    if model is not None:
        _check_parallel(config, model)
    counted = with_counts(config, hosts)
    place(counted, hosts)
    rank_gpus, worker_gpus = gpus_each(config, hosts)
    if model is not None and not worker_gpus:
        _check_heads(config, model)
    gpu_bytes, shared = _gpu_bytes(hosts), shares_gpus(config, hosts)
    device_bytes = gpu_bytes if rank_gpus else _host_share(counted, hosts)
    if model is None:
        return _unknown(counted)
    if not rank_gpus or not gpu_bytes:
        on_gpu = rank_gpus > 0
        found = _fitted(counted, model, device_bytes, on_gpu=on_gpu) if device_bytes else _unknown(counted)
    elif shared:
        found = _beside_engine(counted, model, gpu_bytes)
    else:
        found = _alone(config, counted, hosts, model)
    if worker_gpus and gpu_bytes and (words := has_no_cache(found, model, gpu_bytes)):
        raise TooLargeError(words, ENGINE, _least_needs(counted, model))
    return with_cache(found, model, gpu_bytes) if worker_gpus and gpu_bytes else found


def _check_parallel(config: Config, model: Sizes) -> None:
    """Raise PreflightError if a server of this run cannot spread the model over `rollout.tensor_parallel` GPUs."""
    rollout = config.rollout
    if rollout.server is None or rollout.server_urls:
        return
    heads, kv_heads, inner = model.num_heads, model.num_kv_heads, model.intermediate_size
    divisors = [num for num in range(1, heads + 1) if heads % num == inner % num == 0]
    fit = [num for num in divisors if kv_heads % num == 0 or num % kv_heads == 0]
    if rollout.tensor_parallel not in fit:
        raise PreflightError(
            f"rollout.tensor_parallel: expected {' or '.join(map(str, fit))}, got {rollout.tensor_parallel}; a server "
            f"gives each GPU as many of the {heads} heads of the model, of its {kv_heads} heads of keys and of its "
            f"{inner} inner numbers (intermediate_size)"
        )


def _check_heads(config: Config, model: Sizes) -> None:
    """Raise PreflightError if a server of this run on a CPU has no attention for the heads of the model."""
    if config.rollout.engine == "embedded" or config.rollout.server_urls:
        return
    package = package_of(config.rollout.engine)
    if not package.cpu_heads or model.head_dim in package.cpu_heads:
        return
    change = "rollout.engine=embedded"
    nums = [num for num in range(1, model.hidden_size) if model.hidden_size / num in package.cpu_heads]
    if config.model.path == "tiny" and nums:
        change = f"model.tiny.num_heads={nums[-1]} model.tiny.num_kv_heads={nums[-1]}, or {change}"
    *lengths, last = package.cpu_heads
    raise PreflightError(
        f"rollout.engine: expected a model with heads of {', '.join(map(str, lengths))} or {last} numbers for "
        f"{package.name} on a CPU, got {model.head_dim}; set {change}"
    )


def _gpu_bytes(hosts: Sequence[Host]) -> int:
    return min((host.gpu_bytes for host in hosts if host.gpu_ids), default=0)  # without a GPU, `place` says so


def _host_share(config: Config, hosts: Sequence[Host]) -> int:
    """Return the memory for a rank on a CPU: all ranks of a host get half of the host's; 0 if unknown."""
    return min(host.memory_bytes for host in hosts) // 2 // -(-config.learner.num_ranks // len(hosts))


def _beside_engine(config: Config, model: Sizes, gpu_bytes: int) -> Config:
    """Fit a rank beside the engine of a shared GPU."""
    fitted = _fitted(config, model, gpu_bytes - reserved(config, model, gpu_bytes, least=False))
    engine_bytes = reserved(config, model, gpu_bytes, least=True)
    if _needed(fitted, model) + engine_bytes > gpu_bytes:
        raise _too_large(fitted, model, gpu_bytes, engine_bytes)
    return fitted


def _alone(config: Config, counted: Config, hosts: Sequence[Host], model: Sizes) -> Config:
    """Fit a rank into a GPU of its own; `counted` has numbers for `auto`, and more ranks learn if there is room."""
    gpu_bytes, found = _gpu_bytes(hosts), counted
    while True:
        fitted = _fitted(found, model, gpu_bytes)
        if _needed(fitted, model) * _MARGIN <= gpu_bytes:
            return fitted
        more = None if config.learner.num_ranks else _with_more_ranks(config, found.learner.num_ranks, hosts)
        if more is None:
            break
        found = more
    if _needed(fitted, model) > gpu_bytes:
        raise _too_large(fitted, model, gpu_bytes, 0)
    return fitted


def _with_more_ranks(config: Config, num_ranks: int, hosts: Sequence[Host]) -> Config | None:
    """Count again with the next number of ranks above this number; None if the hosts have no place for them."""
    with contextlib.suppress(UserError):
        more = with_counts(_with(config, num_ranks=num_ranks + config.learner.num_replicas), hosts)
        place(more, hosts)
        return more
    return None


def memory_words(config: Config, hosts: Sequence[Host], model: Sizes | None) -> str:
    """Name the memory of a learner rank and an engine's room for a cache, by the estimate; the config has no `auto`."""
    if model is None:
        return (
            f"learner: {config.model.path} is not here yet, so its memory is unknown; a folder with its config.json "
            "alone gives the estimate: set model.path to this folder"
        )
    rank_gpus, worker_gpus = gpus_each(config, hosts)
    parts = _parts(config, model, on_gpu=rank_gpus > 0)
    gpu_bytes = _gpu_bytes(hosts)
    words = f"learner: a rank needs about {sum(parts.values()) / GIB:.1f} GiB ({in_words(parts)})"
    if rank_gpus and gpu_bytes:
        words += f", which fits into a GPU's {in_gib(gpu_bytes)}"
    if config.rollout.shares:
        words += f"; learner and engine share the devices {config.rollout.share_devices.replace('_', ' ')}"
    return f"{words}; {cache_words(config, model, gpu_bytes)}" if worker_gpus and gpu_bytes else words


def _fitted(config: Config, model: Sizes, device_bytes: float, *, on_gpu: bool = True) -> Config:
    """Replace `auto` of rows and gradient checkpointing: the fastest choice within the memory, else the smallest."""
    *faster, smallest = _choices(config)
    fits = (choice for choice in faster if _needed(choice, model, on_gpu=on_gpu) * _MARGIN <= device_bytes)
    return next(fits, smallest)


def _parts(config: Config, model: Sizes, *, on_gpu: bool) -> dict[str, float]:
    """Return the bytes of a rank by part, with those of CUDA on a GPU."""
    return estimate(model, config, on_gpu=on_gpu) | ({"CUDA": float(OVERHEAD_BYTES)} if on_gpu else {})


def _too_large(config: Config, model: Sizes, gpu_bytes: int, engine_bytes: float) -> TooLargeError:
    parts = _parts(config, model, on_gpu=True)
    beside = f", and the engine beside it {engine_bytes / GIB:.1f} GiB" if engine_bytes else ""
    needed = sum(parts.values()) / GIB
    words = f"a rank needs about {needed:.1f} GiB ({in_words(parts)}){beside}; a GPU has {in_gib(gpu_bytes)}"
    return TooLargeError(f"learner: {words}", RANK, _least_needs(config, model))


def _choices(config: Config) -> list[Config]:
    """List the choices of `auto`, the fastest first: long rows, then without checkpointing."""
    learner = config.learner
    longest = config.trajectory_tokens
    rows = [row for row in (_MOST_ROW >> step for step in range(16)) if row > longest] + [longest]
    if learner.microbatch_tokens:
        rows = [learner.microbatch_tokens]
    checkpointing = [False, True] if learner.gradient_checkpointing == "auto" else [learner.gradient_checkpointing]
    choices = [(row, again) for row in rows for again in checkpointing]
    choices.sort(key=lambda choice: (choice[0] < _GOOD_ROW, choice[1], -choice[0]))
    return [_with(config, microbatch_tokens=row, gradient_checkpointing=again) for row, again in choices]


def _unknown(config: Config) -> Config:
    """Choose without knowing the memory: most GPUs can hold this."""
    learner = config.learner
    longest = config.trajectory_tokens
    again = learner.gradient_checkpointing
    return _with(
        config,
        microbatch_tokens=learner.microbatch_tokens or max(_UNKNOWN_ROW, longest),
        gradient_checkpointing=True if again == "auto" else again,
    )


def _needed(config: Config, model: Sizes, *, on_gpu: bool = True) -> float:
    return sum(estimate(model, config, on_gpu=on_gpu).values()) + OVERHEAD_BYTES


def _with(config: Config, **learner: object) -> Config:
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, **learner))
