"""The memory of an engine on a GPU, by the estimate: weights, and the room for a cache.

The plan gives an engine this room, compares it with a single completion, and prints it. All bytes are of each GPU of
the engine. Pure functions of configs with a known way to share devices.
"""

from __future__ import annotations

import math

import msgspec

from areal_rloo.config import Config, argument_name, option_number
from areal_rloo.launcher.placement import counted
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, STANDING, broadcast_bytes, estimate, in_gib, number_bytes
from areal_rloo.models.sizes import Sizes

_PAGE_TOKENS = 128  # servers round a cache down to pages, and reserve a few tokens
_MOST_CACHE = 0.25  # of a shared GPU, for the cache of an engine, before the part of the learner
_CACHE_FOR_SLOTS = 1.25  # full contexts for each slot, as the embedded engine chooses by itself
_FEW_CACHED = 0.25  # of the slots
_SPARE = 0.05  # of a GPU, beside a planned cache: blocks that torch keeps, and errors of the estimate
_PREFILL_TOKENS = 8192  # of a server at the same time, on a large GPU; less on a small one
_FRACTIONS = {"sglang": "mem-fraction-static", "vllm": "gpu-memory-utilization"}  # size the cache by the free memory
_SIZES = {"sglang": "max-total-tokens", "vllm": "kv-cache-memory-bytes"}
_WITHOUT_EFFECT = {  # fractions above the size in every case
    "sglang": 0.99,  # the profile keeps only the rest, and no plan uses all memory
    "vllm": 0.01,  # as much must be free at the start; the bytes of a cache replace it
}


def weight_bytes(config: Config, model: Sizes) -> float:
    """Return the bytes of the weights; the embedded engine copies the weights to evaluate them."""
    return config.copies_of_weights * number_bytes(config) * model.num_parameters / config.rollout.tensor_parallel


def token_bytes(config: Config, model: Sizes) -> float:
    """Return the bytes of a token in the cache; each GPU has at least a head of keys and values."""
    heads = -(-model.num_kv_heads // config.rollout.tensor_parallel)
    return number_bytes(config) * model.cache_numbers * heads / model.num_kv_heads


def least_cache(config: Config, model: Sizes) -> float:
    """Return the bytes of the smallest cache: for a single completion of full length."""
    pages = 0 if config.rollout.server is None else _PAGE_TOKENS
    return (config.context_tokens + pages) * token_bytes(config, model)


def given_options(config: Config) -> dict[str, object]:
    """Return the user's options for the memory of the engine, by the key in the config."""
    rollout = config.rollout
    if rollout.server is None:
        tokens = rollout.embedded.cache_tokens
        return {} if tokens is None else {"rollout.embedded.cache_tokens": tokens}
    ours = (_FRACTIONS[rollout.engine], _SIZES[rollout.engine])
    key = f"rollout.{rollout.engine}.arguments"
    return {f"{key}.{name}": v for name, v in rollout.server.arguments.items() if argument_name(name) in ours}


def without_options(config: Config) -> Config:
    """Leave out the options of a server for the memory."""
    server, given = config.rollout.server, given_options(config)
    assert server is not None, "the embedded engine has no such arguments"
    kept = {name: v for name, v in server.arguments.items() if not any(key.endswith(f".{name}") for key in given)}
    return with_rollout(config, **{config.rollout.engine: msgspec.structs.replace(server, arguments=kept)})


def given_cache(config: Config, model: Sizes, gpu_bytes: int) -> float | None:
    """Return the most bytes of a cache by the options of the engine in the config; None without such options.

    A fraction of SGLang is of the memory free at the start, for weights and cache. A fraction of vLLM is of the whole
    GPU, for all of the server, and is not read if the bytes of the cache are given. Any other value leaves
    the server's own choice, which may be most of the GPU.
    """
    engine, options = config.rollout.engine, given_options(config)
    if not options:
        return None
    numbers = {argument_name(key.rpartition(".")[2]): option_number(engine, value) for key, value in options.items()}
    given = {name: number for name, number in numbers.items() if not math.isnan(number)}
    if engine == "embedded":
        return given["cache-tokens"] * token_bytes(config, model)
    fraction = given.get(_FRACTIONS[engine], 1.0)
    rest = fraction * gpu_bytes - weight_bytes(config, model)
    size = given.get(_SIZES[engine], math.inf)
    if engine == "sglang":
        return min(rest, size * token_bytes(config, model))
    return rest - OVERHEAD_BYTES if size == math.inf else size


def overhead_bytes(config: Config, model: Sizes) -> float:
    """Return the bytes of an engine besides weights and cache: of CUDA and recorded steps, and what is added here.

    All engines: 6 times the logits of a decode step, to sample. The embedded engine: 4 times the logits for the
    recorded steps of each batch (a batch has its copy of the weights). Servers: the layer of a prefill.
    """
    rollout = config.rollout
    logits = 4 * rollout.num_slots * model.vocab_size
    if rollout.engine == "embedded":
        return OVERHEAD_BYTES + logits * (6 + 4 * config.copies_of_weights)
    widths = (3 * model.intermediate_size + 6 * model.hidden_size) / rollout.tensor_parallel
    return OVERHEAD_BYTES + logits * 6 + _PREFILL_TOKENS * widths * number_bytes(config)


def arriving_bytes(config: Config, model: Sizes) -> float:
    """Return the bytes of a broadcast version before an engine has it: all buckets, or a server's longest, on each GPU.

    Through shared memory, tensors are copied from the memory of the host.
    """
    sent = broadcast_bytes(model, config)
    return sent.whole if config.rollout.server is None else sent.bucket


def _fixed_bytes(config: Config, model: Sizes) -> float:
    """Return the bytes of an engine besides its cache."""
    return sum(part(config, model) for part in (weight_bytes, arriving_bytes, overhead_bytes))


def cache_room(config: Config, model: Sizes, gpu_bytes: int) -> float:
    """Return the bytes for a cache beside all else on the GPU; negative if the weights alone are too large."""
    return gpu_bytes - learner_beside(config, model) - _fixed_bytes(config, model)


def learner_beside(config: Config, model: Sizes) -> float:
    """Return the bytes of a learner on the GPU while the engine generates: in turns, the parts between two steps."""
    if not config.rollout.shares:
        return 0.0
    in_turns = config.rollout.takes_turns
    parts = estimate(model, config, on_gpu=True)
    return OVERHEAD_BYTES + sum(size for part, size in parts.items() if not in_turns or part in STANDING)


def cache_bytes(config: Config, model: Sizes, gpu_bytes: int) -> float:
    """Return the bytes of the engine's cache."""
    rollout, room = config.rollout, cache_room(config, model, gpu_bytes)
    given = given_cache(config, model, gpu_bytes)
    if given is not None:  # alone on a GPU, SGLang takes the rest at most
        return min(given, room) if rollout.engine == "sglang" and not rollout.shares else given
    if rollout.engine == "embedded" and not rollout.shares:  # by itself, the engine takes half of the free memory
        return max(least_cache(config, model), min(_cache_of_slots(config, model), room / 2))
    return room


def _cache_of_slots(config: Config, model: Sizes) -> float:
    return _CACHE_FOR_SLOTS * config.rollout.num_slots * config.context_tokens * token_bytes(config, model)


def reserved(config: Config, model: Sizes, gpu_bytes: int, *, least: bool) -> float:
    """Return the bytes of an engine on a shared GPU during a train step.

    In turns, the engine then has no cache. Side by side, the cache is the user's, or the least, or for half contexts in
    all slots up to a quarter of the GPU.
    """
    fixed = _fixed_bytes(config, model)
    if config.rollout.takes_turns:
        return fixed
    smallest = least_cache(config, model)
    given = given_cache(config, model, gpu_bytes)
    if given is not None:
        return fixed + max(smallest, given)
    slots = config.rollout.num_slots * config.context_tokens // 2 * token_bytes(config, model)
    return fixed + (smallest if least else max(smallest, min(slots, _MOST_CACHE * gpu_bytes)))


def least_bytes(config: Config, model: Sizes) -> float:
    """Return the bytes of the smallest engine, on a GPU of its own."""
    return _fixed_bytes(config, model) + least_cache(config, model)


def has_no_cache(config: Config, model: Sizes, gpu_bytes: int) -> str:
    """Describe a missing room for a completion of full length; empty if the room is there."""
    least, room = least_cache(config, model), cache_room(config, model, gpu_bytes)
    has = cache_bytes(config, model, gpu_bytes)
    if least <= has <= room:
        return ""
    parts = {"weights": weight_bytes(config, model), "overhead": overhead_bytes(config, model)}
    parts |= {"arriving weights": arriving_bytes(config, model), "learner": learner_beside(config, model)}
    beside_words = " + ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items() if size)
    given = ", ".join(f"{key}={value}" for key, value in given_options(config).items())
    asks = f", and {given} takes {has / GIB:.2f}" if given and (room >= least or has > room) else ""
    left = f"about {room / GIB:.2f}" if room > 0 else "no room"
    return (
        f"rollout: a GPU's {in_gib(gpu_bytes)} leave an engine {left} for a cache (beside "
        f"{beside_words}){asks}; a completion of {config.context_tokens} tokens needs {least / GIB:.2f}"
    )


def with_cache(config: Config, model: Sizes, gpu_bytes: int) -> Config:
    """Give an engine on a GPU a cache: for full contexts in all slots, or the rest of the memory but a part to spare.

    Not if the user did, nor to the embedded engine on a GPU of its own, which looks at the memory itself.
    """
    rollout, room = config.rollout, cache_room(config, model, gpu_bytes)
    room = max(min(room, least_cache(config, model)), room - _SPARE * gpu_bytes)
    room = min(room, _cache_of_slots(config, model))
    if rollout.server is not None:
        return _with_cache(config, math.floor(room), math.floor(room / token_bytes(config, model)))
    if rollout.embedded.cache_tokens is not None or not rollout.shares:
        return config
    cache_tokens = int(room / token_bytes(config, model))
    tokens = max(config.context_tokens, cache_tokens)
    return with_rollout(config, embedded=msgspec.structs.replace(rollout.embedded, cache_tokens=tokens))


def _with_cache(config: Config, num_bytes: int, num_tokens: int) -> Config:
    """Give a server a cache of this size, unless the user gave a fraction or a size.

    By a fraction alone, the cache would depend on a learner's memory at the start of the server, and on the server's
    own rule (by default, SGLang 0.5.23 leaves 7 of 24 GB free, and 13 of 80). SGLang takes tokens, and a layer with a
    sliding window holds at most as many; vLLM takes bytes.
    """
    engine, server = config.rollout.engine, config.rollout.server
    assert server is not None
    given = set(map(argument_name, server.arguments))
    if _FRACTIONS[engine] in given:
        return config
    ours = {
        _FRACTIONS[engine]: _WITHOUT_EFFECT[engine],
        _SIZES[engine]: max(0, num_tokens if engine == "sglang" else num_bytes),
    }
    arguments = {**server.arguments, **{option: value for option, value in ours.items() if option not in given}}
    return with_rollout(config, **{engine: msgspec.structs.replace(server, arguments=arguments)})


def cache_words(config: Config, model: Sizes, gpu_bytes: int) -> str:
    """Name the memory for an engine's cache on each GPU, and how many completions of full length fit."""
    room, num = cache_bytes(config, model, gpu_bytes), num_cached(config, model, gpu_bytes)
    whole = f"{counted(num, 'completion')} of {config.context_tokens} tokens"
    return f"an engine has about {room / GIB:.1f} GiB for a cache, {whole}"


def few_cached(config: Config, model: Sizes, gpu_bytes: int) -> str:
    """Warn of a cache with room for few of the slots; empty if the room is enough."""
    num, slots = num_cached(config, model, gpu_bytes), config.rollout.num_slots
    if num >= _FEW_CACHED * slots:
        return ""
    return (
        f"generation is slow if completions are long: the cache holds {num} of full length, and rollout.num_slots is "
        f"{slots}"
    )


def num_cached(config: Config, model: Sizes, gpu_bytes: int) -> int:
    """Return the number of completions of full length in the cache."""
    return int(cache_bytes(config, model, gpu_bytes) // token_bytes(config, model)) // config.context_tokens


def with_rollout(config: Config, **rollout: object) -> Config:
    return msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, **rollout))
