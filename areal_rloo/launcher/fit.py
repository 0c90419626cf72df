"""Fit the learner into the memory of the devices: choose values for `auto`, and refuse a learner too large.

    config, hosts, sizes of the model ─► resolved ─► a config without `auto`, whose learner fits by the estimate

Pure functions on the estimate of `learner/memory.py`, apart from `model_sizes`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.config import Config, validate
from areal_rloo.config.section import argument_name
from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError, PreflightError
from areal_rloo.files import read_regular
from areal_rloo.launcher.placement import Host, gpus_each, shares_gpus, with_counts
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, STANDING, estimate, in_words, number_bytes
from areal_rloo.models.folder import cached_folder
from areal_rloo.models.sizes import SHIPPED, Sizes

_MOST_ROW = 32_768  # tokens; longer rows make a GPU no faster
_GOOD_ROW = 8_192  # shorter rows leave a GPU waiting for memory
_UNKNOWN_ROW = 8_192  # if the memory or the model is unknown
_MARGIN = 1.1  # of the estimate, for the choices of `auto`
_MOST_CACHE = 0.25  # of a shared GPU, for the cache of an engine, before the part of the learner
_CACHE_FOR_SLOTS = 1.25  # full contexts for each slot, as the embedded engine chooses by itself
_FRACTIONS = {  # a server's option to size the cache by the free memory, and a value without effect
    "sglang": ("mem-fraction-static", 0.99),  # the profile keeps only the rest, and no plan uses all memory
    "vllm": ("gpu-memory-utilization", 0.01),  # as much must be free at the start; the bytes of a cache replace it
}
_PAGE_TOKENS = 128  # servers round a cache down to pages, and reserve a few tokens


def model_sizes(config: Config, environment: Mapping[str, str]) -> Sizes | None:
    """Read the sizes of the policy; None if the model was never downloaded, or config.json lacks a size.

    The models of the shipped configs need no download.
    """
    path = config.model.path
    if path == "tiny":
        return Sizes.of_tiny(config.model.tiny)
    folder = Path(path) if Path(path).is_dir() else cached_folder(path, environment)
    if folder is None:
        return SHIPPED.get(path)
    try:
        return Sizes.of(from_json(read_regular(folder / "config.json"), dict[str, Any]))
    except (OSError, DecodeError):
        return None  # the doctor's check of the model reports the error


def resolved(config: Config, hosts: Sequence[Host], model: Sizes | None) -> Config:
    """Replace every `auto`. With `learner.num_ranks: auto`, as many GPUs learn as the model needs.

    Raises:
        ConfigError: the numbers do not fit the rest of the config.
        PreflightError: a rank of the learner does not fit into a GPU.
    """
    *sooner, last = _ways_to_share(config, hosts)
    for way in sooner:
        with contextlib.suppress(PreflightError):
            found = _resolved(_with_rollout(config, share_devices=way), hosts, model)
            if config.rollout.embedded.cache_tokens is not None or _has_cache(found):
                return found
    return _resolved(_with_rollout(config, share_devices=last), hosts, model)


def _ways_to_share(config: Config, hosts: Sequence[Host]) -> list[str]:
    """List the possible values of rollout.share_devices, the best first.

    Raises:
        PreflightError: no such way is possible here.
    """
    asked, each = config.rollout.share_devices, gpus_each(config, hosts)
    if asked != "in_turns" and not shares_gpus(config, hosts):
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
    """Resolve a config that says how devices are shared."""
    shared, on_gpu = shares_gpus(config, hosts), gpus_each(config, hosts)[0] > 0
    validate(config)
    found = with_counts(config, hosts)
    grows = on_gpu and not shared and not config.learner.num_ranks
    most = sum(len(host.gpu_ids) for host in hosts) - config.rollout.tensor_parallel if grows else 0
    while True:
        gpu_bytes = _device_bytes(found, hosts, on_gpu=on_gpu)
        if model is None or not gpu_bytes:
            return _unknown(found)
        engine_bytes = _engine_bytes(found, model, gpu_bytes) if shared else 0
        room = gpu_bytes - engine_bytes
        fitted = _fitted(found, model, room)
        if not on_gpu or _needed(fitted, model) * _MARGIN <= room:
            break
        num_ranks = found.learner.num_ranks + config.learner.num_replicas
        if num_ranks <= most:
            found = with_counts(_with(config, num_ranks=num_ranks), hosts)
        elif _needed(fitted, model) - OVERHEAD_BYTES <= room:  # it may just fit: the estimate is not exact
            break
        else:
            raise PreflightError(f"learner: {_too_large(fitted, model, gpu_bytes, engine_bytes)}")
    return _split(fitted, model, gpu_bytes) if shared else fitted


def _device_bytes(config: Config, hosts: Sequence[Host], *, on_gpu: bool) -> int:
    """Return the memory for a rank of the learner; 0 if unknown. The ranks on a CPU get half of the host's."""
    if on_gpu:
        return min((host.gpu_bytes for host in hosts if host.gpu_ids), default=0)  # without a GPU, `place` says so
    return min(host.memory_bytes for host in hosts) // 2 // -(-config.learner.num_ranks // len(hosts))


def _engine_bytes(config: Config, model: Sizes, gpu_bytes: int) -> int:
    """Return the least memory of an engine on a shared GPU: weights, overhead, and side by side half contexts."""
    if config.rollout.share_devices == "in_turns":
        return _engine_weights(config, model)
    slots = config.rollout.num_slots * config.context_tokens // 2
    cache = min(slots, int(_MOST_CACHE * gpu_bytes) // _cache_bytes(config, model))
    return _engine_weights(config, model) + max(config.context_tokens, cache) * _cache_bytes(config, model)


def _engine_weights(config: Config, model: Sizes) -> int:
    """Return the bytes of the weights and of the overhead; the embedded engine copies the weights to evaluate them."""
    copies = 2 if config.rollout.engine == "embedded" and config.evaluation.every_n_versions else 1
    return copies * number_bytes(config) * model.num_parameters + OVERHEAD_BYTES


def _cache_bytes(config: Config, model: Sizes) -> int:
    return number_bytes(config) * model.cache_numbers


def _left_for_engine(config: Config, model: Sizes, gpu_bytes: int) -> float:
    """Return the memory of a GPU beside the learner: in turns, the learner keeps only a part between two steps."""
    if not config.rollout.shares:
        return gpu_bytes
    in_turns = config.rollout.share_devices == "in_turns"
    kept = (size for part, size in estimate(model, config).items() if not in_turns or part in STANDING)
    return gpu_bytes - sum(kept) - OVERHEAD_BYTES


def _split(config: Config, model: Sizes, gpu_bytes: int) -> Config:
    """Give the engine of a shared GPU the rest of the memory, in the engine's own option, unless the user did."""
    left, rollout = _left_for_engine(config, model, gpu_bytes), config.rollout
    cache = int(left - _engine_weights(config, model)) // _cache_bytes(config, model)
    if rollout.server is not None:
        return _with_cache(config, max(config.context_tokens + _PAGE_TOKENS, cache), _cache_bytes(config, model))
    if rollout.embedded.cache_tokens is not None:
        return config
    most = math.ceil(_CACHE_FOR_SLOTS * rollout.num_slots * config.context_tokens)
    cache_tokens = max(config.context_tokens, min(most, cache))
    return _with_rollout(config, embedded=msgspec.structs.replace(rollout.embedded, cache_tokens=cache_tokens))


def _with_cache(config: Config, num_tokens: int, token_bytes: int) -> Config:
    """Give a server on a shared GPU a cache of this size, unless the user gave a fraction or a size.

    By a fraction alone, the cache would depend on the learner's memory at the start of the server. SGLang
    takes tokens, and a layer with a sliding window holds at most as many; vLLM takes bytes.
    """
    engine, server = config.rollout.engine, config.rollout.server
    assert server is not None
    name, never_binds = _FRACTIONS[engine]
    given = set(map(argument_name, server.arguments))
    if name in given:
        return config
    size = (
        ("max-total-tokens", num_tokens) if engine == "sglang" else ("kv-cache-memory-bytes", num_tokens * token_bytes)
    )
    ours = {option: value for option, value in ((name, never_binds), size) if option not in given}
    arguments = {**server.arguments, **ours}
    return _with_rollout(config, **{engine: msgspec.structs.replace(server, arguments=arguments)})


def memory_words(config: Config, hosts: Sequence[Host], model: Sizes | None) -> str:
    """Name the memory of a learner rank and an engine's room for a cache, by the estimate; the config has no `auto`."""
    if model is None:
        return "learner: the model is not here yet, so its memory is unknown"
    parts = estimate(model, config)
    num_bytes, on_gpu = sum(parts.values()), gpus_each(config, hosts)[0] > 0
    there = _device_bytes(config, hosts, on_gpu=True) if on_gpu else 0
    words = f"learner: a rank needs about {(num_bytes + on_gpu * OVERHEAD_BYTES) / GIB:.1f} GiB ({in_words(parts)})"
    how = config.rollout.share_devices.replace("_", " ")
    engine = f"; learner and engine share the devices {how}" if config.rollout.shares else ""
    if not there:
        return words + engine
    return f"{words}, of a GPU's {there / GIB:.1f} GiB{engine}; {_cache_words(config, model, there)}"


def _cache_words(config: Config, model: Sizes, gpu_bytes: int) -> str:
    """Name the memory that an engine has for its cache on each GPU, and how many completions of full length fit."""
    rollout = config.rollout
    room = _left_for_engine(config, model, gpu_bytes) - OVERHEAD_BYTES
    room -= (_engine_weights(config, model) - OVERHEAD_BYTES) / rollout.tensor_parallel
    num_tokens = int(max(0, room) * rollout.tensor_parallel / _cache_bytes(config, model))
    if rollout.engine == "embedded":
        num_tokens = min(num_tokens, rollout.embedded.cache_tokens or num_tokens)
    return (
        f"an engine has about {room / GIB:.1f} GiB for a cache, {num_tokens // config.context_tokens} completions of "
        f"{config.context_tokens} tokens"
    )


def _fitted(config: Config, model: Sizes, device_bytes: int) -> Config:
    """Replace `auto` of rows and gradient checkpointing: the fastest choice within the memory, else the smallest."""
    *faster, smallest = _choices(config)
    return next((choice for choice in faster if _needed(choice, model) * _MARGIN <= device_bytes), smallest)


def _too_large(config: Config, model: Sizes, gpu_bytes: int, engine_bytes: int) -> str:
    """Name the memory of a rank, and the saving of each option."""
    engine = f", {engine_bytes / GIB:.1f} of them for the engine" if engine_bytes else ""
    needed, parts = _needed(config, model) / GIB, in_words(estimate(model, config))
    has, advice = f"a GPU has {gpu_bytes / GIB:.1f}{engine}", _advice(config, model, gpu_bytes - engine_bytes)
    return f"a rank needs about {needed:.1f} GiB ({parts}), and {has}; {advice}"


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


def _needed(config: Config, model: Sizes) -> float:
    return sum(estimate(model, config).values()) + OVERHEAD_BYTES


def _advice(config: Config, model: Sizes, device_bytes: int) -> str:
    """Name the saving of each option alone: of each sufficient option, or of all."""
    found, needed = [], _needed(config, model)
    for words, changed in _remedies(config):
        saved = needed - _needed(changed, model)
        if saved > 0.01 * needed:
            found.append((needed - saved > device_bytes, -saved, f"{words} ({saved / GIB:.1f} GiB less)"))
    if not found:
        return "take a smaller model, or GPUs with more memory"
    enough = [text for is_short, _, text in sorted(found) if not is_short]
    return f"set {' or '.join(enough)}" if enough else f"combine {', '.join(text for _, _, text in sorted(found))}"


def _remedies(config: Config) -> Iterator[tuple[str, Config]]:
    learner = config.learner
    longest = config.trajectory_tokens
    if not learner.gradient_checkpointing:
        yield "learner.gradient_checkpointing=true", _with(config, gradient_checkpointing=True)
    if (half := max(longest, learner.microbatch_tokens // 2)) < learner.microbatch_tokens:
        yield f"learner.microbatch_tokens={half}", _with(config, microbatch_tokens=half)
    if not config.rollout.shares:
        num = learner.num_ranks + learner.num_replicas
        yield f"learner.num_ranks={num}", _with(config, num_ranks=num)
    if learner.offload == "none":
        yield "learner.offload=optimizer", _with(config, offload="optimizer")
    if learner.offload != "parameters":
        yield "learner.offload=parameters", _with(config, offload="parameters")
    if learner.optimizer.state_dtype == "float32":
        optimizer = msgspec.structs.replace(learner.optimizer, state_dtype="bfloat16")
        yield "learner.optimizer.state_dtype=bfloat16", _with(config, optimizer=optimizer)
    reference = config.model.reference
    if reference is not None and not reference.offload and config.algorithm.kl.coefficient > 0:
        away = msgspec.structs.replace(reference, offload=True)
        yield (
            "model.reference.offload=true",
            msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, reference=away)),
        )


def _with(config: Config, **learner: object) -> Config:
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, **learner))


def _with_rollout(config: Config, **rollout: object) -> Config:
    return msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, **rollout))
