"""The cache of a server on a GPU: the planned one, whatever a learner on the same GPU holds meanwhile.

The servers' own formulas are written out: SGLang 0.5.23 (`KVCacheConfigurator._profile_available_bytes` and
`_apply_token_constraints`, `HybridSWAPoolConfigurator`) and vLLM 0.32 (`request_memory` of `v1/worker/utils.py`,
`determine_available_memory` of `v1/worker/gpu_worker.py`).
"""

import itertools
import math
from pathlib import Path

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server.api import ServerPlan
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.engine_memory import given_cache
from areal_rloo.launcher.fit import memory_words, model_sizes, resolved
from areal_rloo.launcher.placement import Host
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, STANDING, estimate
from areal_rloo.models.sizes import SHIPPED, Sizes

CONTEXT = GIB // 2  # of CUDA, in each process
ACTIVATIONS = GIB  # of vLLM's profile


def _sglang(options: dict[str, str], total: int, before: int, now: int, weights: int, token_bytes: int) -> int:
    """Return the tokens in the cache; `before` and `now`: the learner's bytes before and after the weights load."""
    free_before = total - before - CONTEXT
    free_now = total - now - CONTEXT - weights
    rest = int(free_now - free_before * (1 - float(options["--mem-fraction-static"])))
    if rest <= 0:
        raise ValueError("Loaded weights leave no GPU memory for the KV cache")
    return min(rest // token_bytes, int(options.get("--max-total-tokens", 2**62)))


def _vllm(options: dict[str, str], total: int, before: int, now: int, weights: int, token_bytes: int) -> int:
    requested = math.ceil(total * float(options["--gpu-memory-utilization"]))
    free_before, free_now = total - before - CONTEXT, total - now - CONTEXT - weights
    if free_before < requested:
        raise ValueError("Free memory on startup is less than desired GPU memory utilization")
    if "--kv-cache-memory-bytes" in options:
        cache = int(options["--kv-cache-memory-bytes"])
        if cache > free_now:
            raise MemoryError("out of memory")
    else:
        assert free_before >= free_now, "Error in memory profiling"
        cache = requested - (free_before - free_now) - ACTIVATIONS
    return cache // token_bytes


SERVERS = {"sglang": _sglang, "vllm": _vllm}
CASES = [
    (name, engine, gigabytes)
    for name in ("gsm8k_rloo", "gsm8k_rloo_trl", "gsm8k_rloo_ms_swift")
    for engine in SERVERS
    for gigabytes in (24, 48, 80, 141)
]


def _resolved(name: str, engine: str, gigabytes: int, *overrides: str) -> tuple[Config, Host, Sizes]:
    host = Host("n", "10.0.0.1", 32, ("0",), 512 * GIB, gigabytes * 10**9)
    config = load_config(f"{name}.yaml", [f"rollout.engine={engine}", *overrides])
    model = model_sizes(config, {})
    assert model is not None
    return resolved(config, [host], model), host, model


def _options(config: Config) -> dict[str, str]:
    """Return the options of the server's command line."""
    server = config.rollout.server
    assert server is not None
    plan = ServerPlan(Path("/m"), "cuda", "bfloat16", 1, config.rollout.num_slots, config.context_tokens, None)
    kind = kind_of(config.rollout.engine)
    words = kind.command("python", server.arguments, plan, port=1, config=Path("/c"))
    return {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}


@pytest.mark.parametrize(("name", "engine", "gigabytes"), CASES)
def test_the_cache_of_a_server_is_the_planned_one_in_every_order(name: str, engine: str, gigabytes: int) -> None:
    try:
        config, host, model = _resolved(name, engine, gigabytes)
    except PreflightError:
        assert gigabytes == 24, "only a small GPU is too small for both"
        return
    parts = estimate(model, config, on_gpu=True)
    held = {
        "nothing": 0,
        "loading": int(parts["weights"]) // 2 + CONTEXT,
        "loaded": int(sum(parts.get(part, 0) for part in STANDING)) + CONTEXT,
        "training": int(sum(parts.values())) + CONTEXT,  # the allocator keeps this between two steps
    }
    weights, token_bytes = 2 * model.num_parameters, 2 * model.cache_numbers
    options = _options(config)
    orders = {
        (before, now): SERVERS[engine](options, host.gpu_bytes, held[before], held[now], weights, token_bytes)
        for before, now in itertools.product(held, repeat=2)
    }
    prefill = 2 * 8192 * (3 * model.intermediate_size + 6 * model.hidden_size)
    logits = 6 * 4 * config.rollout.num_slots * model.vocab_size
    beside = int(sum(parts.values()) + 2 * OVERHEAD_BYTES + weights + prefill + logits)
    of_slots = int(1.25 * config.rollout.num_slots * config.context_tokens)
    planned = min(int(0.95 * host.gpu_bytes - beside) // token_bytes, of_slots)
    assert set(orders.values()) == {max(planned, config.context_tokens + 128)}, orders
    tokens = orders["nothing", "nothing"]
    assert tokens >= config.context_tokens
    server = weights + tokens * token_bytes + CONTEXT + prefill + logits
    assert held["training"] + server <= host.gpu_bytes, "a whole step fits beside a prefill"
    if planned > config.context_tokens:
        assert f", {planned // config.context_tokens} completions of" in memory_words(config, [host], model)


@pytest.mark.parametrize("gigabytes", [24, 80])
@pytest.mark.parametrize("engine", SERVERS)
def test_a_server_on_a_gpu_of_its_own_gets_the_cache_that_the_words_name(engine: str, gigabytes: int) -> None:
    """By its own default, SGLang would have room for 134 tokens of Qwen3-8B on 24 GB."""
    hosts = [Host("n", "10.0.0.1", 32, tuple("01234567"), 512 * GIB, gigabytes * 10**9)]
    options = [f"rollout.engine={engine}", "model.path=Qwen/Qwen3-8B", "learner.lora.rank=16"]
    config, model = load_config("gsm8k_rloo.yaml", options), SHIPPED["Qwen/Qwen3-8B"]
    config = resolved(config, hosts, model)
    assert not config.rollout.shares
    weights, token_bytes = 2 * model.num_parameters, 2 * model.cache_numbers
    tokens = SERVERS[engine](_options(config), hosts[0].gpu_bytes, 0, 0, weights, token_bytes)
    assert f", {tokens // config.context_tokens} completions of" in memory_words(config, hosts, model)
    assert config.context_tokens <= tokens <= 1.25 * config.rollout.num_slots * config.context_tokens
    prefill = 2 * 8192 * (3 * model.intermediate_size + 6 * model.hidden_size)
    assert weights + tokens * token_bytes + OVERHEAD_BYTES + prefill <= 0.96 * hosts[0].gpu_bytes


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.8, 1.0])
@pytest.mark.parametrize("windowed", [0, 12, 25])
def test_windowed_layers_never_need_more_than_the_plan(ratio: float, windowed: int) -> None:
    """SGLang gives the windowed layers a pool of their own, of the tokens of the others times at most 1."""
    config, _, model = _resolved("gsm8k_rloo", "sglang", 80)
    tokens = int(_options(config)["--max-total-tokens"])
    layer = 2 * model.cache_numbers // model.num_layers
    full = tokens * layer * (model.num_layers - windowed)
    assert full + int(tokens * ratio) * layer * windowed <= tokens * 2 * model.cache_numbers


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("sglang", "mem_fraction_static: 0.5", {"mem_fraction_static": 0.5}),
        ("sglang", "max_total_tokens: 9000", {"max_total_tokens": 9000, "mem-fraction-static": 0.99}),
        ("vllm", "gpu_memory_utilization: 0.5", {"gpu_memory_utilization": 0.5}),
        (
            "vllm",
            "--kv-cache-memory-bytes: 900000000",
            {"--kv-cache-memory-bytes": 900000000, "gpu-memory-utilization": 0.01},
        ),
    ],
)
def test_the_users_own_options_for_the_cache_win(engine: str, given: str, expected: dict[str, float]) -> None:
    config, _, _ = _resolved("gsm8k_rloo", engine, 80, f"rollout.{engine}.arguments={{{given}}}")
    assert config.rollout.server is not None
    assert config.rollout.server.arguments == expected


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [("8000000000", 8e9), ("8g", 8e9), ("8G", 8 * GIB), ("0.5t", 5e11), ("64K", 65536)],
)
def test_a_size_with_a_suffix_counts_as_vllm_reads_it(written: str, num_bytes: float) -> None:
    assert _given_cache("vllm", f"kv-cache-memory-bytes: {written}") == num_bytes


@pytest.mark.parametrize(("written", "same"), [("10k", "10000"), ("8Ki", "8192"), ("0.5M", "500000")])
def test_a_number_with_a_suffix_counts_as_sglang_reads_it(written: str, same: str) -> None:
    assert _given_cache("sglang", f"max-total-tokens: {written}") == _given_cache("sglang", f"max-total-tokens: {same}")


def _given_cache(engine: str, arguments: str) -> float | None:
    options = [f"rollout.engine={engine}", f"rollout.{engine}.arguments={{{arguments}}}"]
    config = load_config("gsm8k_rloo.yaml", options)
    model = model_sizes(config, {})
    assert model is not None
    return given_cache(config, model, 80 * GIB)
