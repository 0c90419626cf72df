"""The learner's memory against that of the GPUs: what `auto` chooses, what is refused, and shared GPUs."""

import contextlib
import dataclasses
import math
import re
from pathlib import Path

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.errors import ConfigError, PreflightError
from areal_rloo.launcher.engine_memory import arriving_bytes, overhead_bytes, weight_bytes
from areal_rloo.launcher.fit import memory_words, model_sizes, resolved
from areal_rloo.launcher.placement import Host, place
from areal_rloo.launcher.plan import JobRequest, as_table, plan_run
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, estimate
from areal_rloo.models.sizes import SHIPPED, Sizes

REPO = Path(__file__).resolve().parents[3]
SMALL = SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"]
LARGE = Sizes(152_064, 3_584, 18_944, 28, 28, 4, 128, tied=False, gated=True)  # 7B


def _hosts(gpus: int, gigabytes: int, num: int = 1) -> list[Host]:
    ids = tuple(str(index) for index in range(gpus))
    return [Host(f"n{index}", "10.0.0.1", 32, ids, 512 * GIB, gigabytes * 10**9) for index in range(num)]


def _config(*overrides: str) -> Config:
    return load_config("gsm8k_rloo.yaml", overrides)


def _needed(config: Config, model: Sizes = SMALL) -> float:
    return sum(estimate(model, config, on_gpu=True).values()) + OVERHEAD_BYTES


@pytest.mark.parametrize("name", ["gsm8k", "math", "reasoning_gym", "svamp"])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("gigabytes", [24, 48, 80, 141])
def test_a_shipped_config_fits_and_uses_every_gpu_or_says_what_to_do(name: str, gpus: int, gigabytes: int) -> None:
    config, hosts = load_config(f"{name}_rloo.yaml"), _hosts(gpus, gigabytes)
    model = model_sizes(config, {})
    assert model is not None
    try:
        found = resolved(config, hosts, model)
    except PreflightError as error:
        words = re.search(r"; set (learner\.\w+)=(\w+) \(", str(error))
        assert words is not None, error
        assert (gigabytes, name != "svamp") == (24, True), "only the 1.5B model needs more than a small GPU has"
        found = resolved(load_config(f"{name}_rloo.yaml", [f"{words[1]}={words[2]}"]), hosts, model)
    seats = place(found, hosts).seats
    assert {gpu for seat in seats for gpu in seat.gpu_ids} == set(hosts[0].gpu_ids)
    assert _needed(found, model) <= hosts[0].gpu_bytes
    assert found.learner.microbatch_tokens >= found.context_tokens
    assert found.learner.gradient_checkpointing != "auto"


def test_long_rows_without_recomputation_are_chosen_where_they_fit() -> None:
    chosen = [
        (found.learner.microbatch_tokens, found.learner.gradient_checkpointing)
        for gigabytes in (24, 48, 80, 141)
        for found in [resolved(_config("learner.num_ranks=2"), _hosts(4, gigabytes), SMALL)]
    ]
    assert chosen == [(8192, True), (32768, True), (8192, False), (16384, False)]


def test_a_large_model_learns_on_as_many_gpus_as_it_needs() -> None:
    found = resolved(_config(), _hosts(8, 80), LARGE)
    assert (found.learner.num_ranks, found.rollout.num_workers) == (3, 5)
    found = resolved(_config(), _hosts(8, 48), LARGE)
    assert (found.learner.num_ranks, found.rollout.num_workers) == (4, 4)
    found = resolved(_config(), _hosts(3, 24), SMALL)
    assert (found.learner.num_ranks, found.rollout.num_workers) == (2, 1)
    with pytest.raises(
        PreflightError, match=r"a rank needs about .*; a GPU has 22\.4 GiB \(24 GB\); .*learner\.offload"
    ):
        resolved(_config(), _hosts(4, 24), LARGE)


def test_options_of_the_user_are_kept() -> None:
    given = ("learner.microbatch_tokens=4096", "learner.gradient_checkpointing=false", "learner.num_ranks=3")
    found = resolved(_config(*given), _hosts(8, 80), SMALL)
    learner = found.learner
    assert (learner.microbatch_tokens, learner.gradient_checkpointing, learner.num_ranks) == (4096, False, 3)
    assert found.rollout.num_workers == 5


def test_the_advice_says_what_each_option_saves() -> None:
    given = ("learner.microbatch_tokens=16384", "learner.gradient_checkpointing=false", "learner.num_ranks=1")
    config = _config(*given)
    with pytest.raises(PreflightError) as raised:
        resolved(config, _hosts(4, 48), SMALL)
    advice = re.findall(r"([\w.]+)=(\w+) \(([0-9.]+) GiB less\)", str(raised.value))
    assert {key for key, _, _ in advice} >= {"learner.gradient_checkpointing"}
    before = resolved(config, _hosts(4, 4000), SMALL)
    for key, value, saved in advice:
        after = resolved(_config(*given, f"{key}={value}"), _hosts(4, 4000), SMALL)
        assert float(saved) == pytest.approx((_needed(before) - _needed(after)) / GIB, abs=0.06), key
        assert _needed(after) <= 48e9, "the options that suffice are named"


def test_a_rank_fits_up_to_the_last_byte() -> None:
    given = ("learner.microbatch_tokens=8192", "learner.gradient_checkpointing=false", "learner.num_ranks=1")
    needed = math.ceil(_needed(resolved(_config(*given), _hosts(4, 141), SMALL)))
    just = dataclasses.replace(_hosts(4, 1)[0], gpu_bytes=needed)
    assert resolved(_config(*given), [just], SMALL).learner.microbatch_tokens == 8192
    with pytest.raises(PreflightError, match="a rank needs about"):
        resolved(_config(*given), [dataclasses.replace(just, gpu_bytes=needed - 1)], SMALL)


@pytest.mark.parametrize(("model", "gigabytes"), [(None, 80), (SMALL, 0)])
def test_without_knowing_the_memory_the_choice_is_careful(model: Sizes | None, gigabytes: int) -> None:
    found = resolved(_config(), _hosts(4, gigabytes), model)
    assert (found.learner.microbatch_tokens, found.learner.gradient_checkpointing) == (8192, True)
    assert "unknown" in memory_words(found, _hosts(4, 80), None)


def test_on_a_cpu_half_of_the_memory_is_for_the_learner() -> None:
    config = _config("rollout.engine=embedded", "rollout.num_slots=8")
    host = Host("n", "127.0.0.1", 8, (), 128 * GIB)
    found = resolved(config, [host], SMALL)
    assert (found.learner.num_ranks, found.rollout.num_workers) == (1, 1)
    assert (found.learner.microbatch_tokens, found.learner.gradient_checkpointing) == (8192, False)
    assert resolved(config, [dataclasses.replace(host, memory_bytes=GIB)], SMALL).learner.microbatch_tokens == 2304


# -- a GPU for both ----------------------------------------------------------------------------------------------------


def _cache_bytes(config: Config) -> int:
    """Return the bytes of the cache that the plan gives to the engine."""
    if config.rollout.engine == "vllm":
        return int(config.rollout.vllm.arguments["kv-cache-memory-bytes"] or 0)
    tokens = config.rollout.embedded.cache_tokens or config.rollout.sglang.arguments["max-total-tokens"] or 0
    return int(tokens) * 2 * SMALL.cache_numbers


def test_rows_on_a_cpu_are_planned_without_the_logits_of_a_gpu() -> None:
    """A GPU has four times the logits of a chunk in memory."""
    half = SHIPPED["Qwen/Qwen2.5-0.5B-Instruct"]
    given = ("learner.device=cpu", "rollout.device=cpu", "rollout.engine=embedded", "learner.num_ranks=1")
    host = Host("n0", "10.0.0.1", 8, (), 32 * 10**9, 0)
    found = resolved(_config(*given, "rollout.num_workers=1"), [host], half)
    on_cpu, on_gpu = (sum(estimate(half, found, on_gpu=on_gpu).values()) + OVERHEAD_BYTES for on_gpu in (False, True))
    assert on_cpu * 1.1 <= 16e9 < on_gpu * 1.1
    assert found.learner.microbatch_tokens == 16_384


def test_the_plan_knows_the_logits_of_decode_steps() -> None:
    """Of recorded steps and of sampling, of both batches if there is an evaluation."""
    few, many = (_config(f"rollout.num_slots={slots}", "rollout.engine=embedded") for slots in (1, 257))
    of_slot = (overhead_bytes(many, SMALL) - overhead_bytes(few, SMALL)) / 256
    assert 8 * 4 * SMALL.vocab_size <= of_slot <= 16 * 4 * SMALL.vocab_size
    without = _config("rollout.num_slots=257", "rollout.engine=embedded", "data.eval=null")
    assert overhead_bytes(without, SMALL) < overhead_bytes(many, SMALL)
    few, many = (_config(f"rollout.num_slots={slots}", "rollout.engine=sglang") for slots in (1, 257))
    assert overhead_bytes(many, SMALL) - overhead_bytes(few, SMALL) == 6 * 4 * 256 * SMALL.vocab_size


@pytest.mark.parametrize("engine", ["sglang", "vllm", "embedded"])
def test_one_gpu_is_shared_by_learner_and_engine(engine: str) -> None:
    hosts = _hosts(1, 80)
    config = resolved(_config(f"rollout.engine={engine}"), hosts, SMALL)
    placement = place(config, hosts)
    assert [seat.gpu_ids for seat in placement.seats] == [("0",), ("0",)]
    assert config.weights_transport(same_host=True) == "shared_memory"
    left, copies = hosts[0].gpu_bytes - _needed(config), 2 if engine == "embedded" else 1
    cache = _cache_bytes(config)
    assert config.context_tokens * 2 * SMALL.cache_numbers <= cache
    assert copies * 2 * SMALL.num_parameters + OVERHEAD_BYTES + cache <= left
    request = JobRequest(config, placement, Path("/run"), "tcp://127.0.0.1:1", 9, resume=False)
    plan = plan_run(request, model_path="/model")
    assert {spec.environment["CUDA_VISIBLE_DEVICES"] for spec in plan.processes} == {"0"}
    assert "2 processes, 1 of 1 GPUs" in as_table(plan, placement)
    words = memory_words(config, hosts, SMALL)
    assert "a GPU's 74.5 GiB (80 GB); learner and engine share the devices side by side; an engine has about" in words


def test_the_users_own_split_of_a_shared_gpu_is_kept() -> None:
    config = resolved(_config("rollout.engine=embedded", "rollout.embedded.cache_tokens=5000"), _hosts(1, 80), SMALL)
    assert config.rollout.embedded.cache_tokens == 5000


def test_several_gpus_are_shared_if_the_user_says_so() -> None:
    hosts = _hosts(4, 80)
    config = resolved(_config("rollout.share_devices=side_by_side"), hosts, SMALL)
    placement = place(config, hosts)
    assert [seat.gpu_ids for seat in placement.learner] == [seat.gpu_ids for seat in placement.workers]
    assert (config.learner.num_ranks, config.rollout.num_workers) == (4, 4)
    fewer = resolved(_config("rollout.share_devices=side_by_side", "rollout.num_workers=2"), hosts, SMALL)
    assert (fewer.learner.num_ranks, len(place(fewer, hosts).workers)) == (4, 2)


def test_gpus_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(PreflightError, match=r"rollout\.share_devices: expected never on 2 hosts, got side_by_side"):
        resolved(_config("rollout.share_devices=side_by_side"), _hosts(4, 80, num=2), SMALL)
    wrong = ("rollout.tensor_parallel=2", "weights.transport=collective")
    for others in (wrong[:1], wrong[1:], wrong):
        with pytest.raises(
            ConfigError, match=rf"share_devices: expected never with {' and '.join(others)}, "
        ) as refused:
            _config("rollout.share_devices=side_by_side", *others)
        advice = str(refused.value).rpartition("; set ")[2].split()
        assert len(advice) == len(others)
        _config("rollout.share_devices=side_by_side", *advice)
    with pytest.raises(
        PreflightError, match=r"^weights\.transport: .* with rollout\.share_devices=auto, got collective; "
    ):
        resolved(_config("weights.transport=collective"), _hosts(1, 80), SMALL)
    assert resolved(_config("weights.transport=auto"), _hosts(1, 80), SMALL).rollout.shares
    with pytest.raises(PreflightError, match="the plan needs 3 GPUs"):
        resolved(_config("rollout.num_workers=2"), _hosts(1, 80), SMALL)
    with pytest.raises(
        PreflightError, match=r"beside it \S+ GiB; a GPU has 22\.4 GiB \(24 GB\); set learner\.offload="
    ):
        resolved(_config(), _hosts(1, 24), SMALL)


def test_a_worker_of_a_running_server_shares_no_gpu() -> None:
    urls = "rollout.sglang={urls: [http://127.0.0.1:3000]}"
    config = resolved(_config(urls, "rollout.num_workers=1"), _hosts(1, 80), SMALL)
    assert config.rollout.share_devices == "never"
    assert [seat.gpu_ids for seat in place(config, _hosts(1, 80)).seats] == [("0",), ()]


# -- in turns ----------------------------------------------------------------------------------------------------------

EMBEDDED = ("rollout.engine=embedded", "rollout.num_slots=256")
WAYS = ("side_by_side", "in_turns")


def _engine_needs(config: Config, model: Sizes = SMALL) -> int:
    """Return the bytes of an engine in bfloat16: weights, their copy for the evaluation, and the cache."""
    assert config.rollout.embedded.cache_tokens is not None
    return (
        2 * 2 * model.num_parameters + config.rollout.embedded.cache_tokens * 2 * model.cache_numbers + OVERHEAD_BYTES
    )


@pytest.mark.parametrize(
    ("gigabytes", "way"), [(45, "in_turns"), (48, "in_turns"), (80, "side_by_side"), (141, "side_by_side")]
)
def test_without_room_for_a_cache_learner_and_engine_take_turns(gigabytes: int, way: str) -> None:
    hosts = _hosts(1, gigabytes)
    config = resolved(_config(*EMBEDDED), hosts, SMALL)
    assert config.rollout.share_devices == way
    parts = estimate(SMALL, config, on_gpu=True)
    if way == "in_turns":
        assert "; learner and engine share the devices in turns; " in memory_words(config, hosts, SMALL)
        in_a_step = sum(parts.pop(part) for part in ("gradients", "activations", "logits"))
        assert in_a_step > 2**30
        # During a step, the engine has no cache.
        assert _needed(config) + 2 * 2 * SMALL.num_parameters + OVERHEAD_BYTES <= hosts[0].gpu_bytes
    assert sum(parts.values()) + OVERHEAD_BYTES + _engine_needs(config) <= hosts[0].gpu_bytes
    placement = place(config, hosts)
    assert [seat.gpu_ids for seat in placement.seats] == [("0",), ("0",)]
    assert [seat.num_threads for seat in placement.seats] == [32 if way == "in_turns" else 16] * 2


def test_side_by_side_leaves_the_cache_less_than_in_turns() -> None:
    hosts = _hosts(1, 48)
    beside, turns = (resolved(_config(*EMBEDDED, f"rollout.share_devices={way}"), hosts, SMALL) for way in WAYS)
    caches = [config.rollout.embedded.cache_tokens or 0 for config in (beside, turns)]
    assert 2 * caches[0] < caches[1], "and rows of the learner are longer, too"
    assert beside.learner.microbatch_tokens < turns.learner.microbatch_tokens


def test_the_users_own_cache_stays_side_by_side() -> None:
    config = resolved(_config(*EMBEDDED, "rollout.embedded.cache_tokens=5000"), _hosts(1, 80), SMALL)
    assert (config.rollout.share_devices, config.rollout.embedded.cache_tokens) == ("side_by_side", 5000)


def test_on_cpus_turns_are_a_choice_and_give_both_all_cores() -> None:
    host = Host("n", "127.0.0.1", 8, (), 128 * GIB)
    with pytest.raises(PreflightError, match=r"never or in_turns without a GPU, got side_by_side; .* set it to auto"):
        resolved(_config(*EMBEDDED, "rollout.share_devices=side_by_side"), [host], SMALL)
    for way, num_threads in (("auto", 4), ("never", 4), ("in_turns", 8)):
        config = resolved(_config(*EMBEDDED, f"rollout.share_devices={way}"), [host], SMALL)
        assert config.rollout.share_devices == ("in_turns" if way == "in_turns" else "never")
        assert [seat.num_threads for seat in place(config, [host]).seats] == [num_threads] * 2
        assert ("in turns" in memory_words(config, [host], SMALL)) == (way == "in_turns")
    several = resolved(_config(*EMBEDDED, "rollout.share_devices=in_turns", "rollout.num_workers=2"), [host], SMALL)
    assert [seat.num_threads for seat in place(several, [host]).seats] == [8, 4, 4]


def test_turns_that_are_not_possible_are_refused() -> None:
    in_turns = (*EMBEDDED, "rollout.share_devices=in_turns")
    urls = "rollout.sglang.urls=[http://127.0.0.1:1]"
    with pytest.raises(
        ConfigError, match=r"expected another value with rollout\.sglang\.urls, got in_turns; only a server"
    ):
        _config("rollout.share_devices=in_turns", urls, "rollout.num_workers=1")
    with pytest.raises(ConfigError, match=r"expected never with weights\.transport=collective, got in_turns; "):
        _config(*in_turns, "weights.transport=collective")
    with pytest.raises(PreflightError, match=r"expected never on 2 hosts, got in_turns; .* set it to never"):
        resolved(_config(*in_turns), _hosts(1, 80, num=2), SMALL)
    for devices in (("learner.device=cpu", 0, 1), ("rollout.device=cpu", 1, 0)):
        words = rf"never with {devices[1]} GPUs for each learner rank and {devices[2]} for each worker, got in_turns"
        with pytest.raises(PreflightError, match=words):
            resolved(_config(*in_turns, devices[0]), _hosts(1, 80), SMALL)
    with pytest.raises(
        PreflightError,
        match=r"a rank needs about .* and the engine beside it \S+ GiB; a GPU has 22\.4 GiB \(24 GB\); set",
    ):
        resolved(_config(*in_turns), _hosts(1, 24), SMALL)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_every_model_of_a_shipped_config_is_known_before_the_download() -> None:
    paths = {load_config(path.name).model.path for path in (REPO / "configs").glob("*.yaml")} - {"tiny"}
    assert paths == set(SHIPPED)
    billions = {path: sizes.num_parameters / 1e9 for path, sizes in SHIPPED.items()}
    assert billions == {
        "Qwen/Qwen2.5-0.5B-Instruct": pytest.approx(0.494, rel=0.01),
        "Qwen/Qwen2.5-1.5B-Instruct": pytest.approx(1.543, rel=0.01),
        "Qwen/Qwen2.5-7B-Instruct": pytest.approx(7.616, rel=0.01),
        "Qwen/Qwen3-8B": pytest.approx(8.191, rel=0.01),
    }


@pytest.mark.parametrize("config", [{}, {"hidden_size": 8, "num_attention_heads": 0}, {"hidden_size": "8"}])
def test_a_config_without_a_size_has_none(config: dict[str, object]) -> None:
    assert Sizes.of(config) is None


# -- the engine's cache in words ---------------------------------------------------------------------------------------


def _room(config: Config, hosts: list[Host], model: Sizes = SMALL) -> tuple[float, int]:
    words = re.search(
        r"an engine has about ([\d.]+) GiB for a cache, (\d+) completions of ", memory_words(config, hosts, model)
    )
    assert words is not None
    return float(words[1]), int(words[2])


def test_the_words_give_an_engines_room_for_its_cache() -> None:
    hosts = _hosts(2, 80)
    config = resolved(_config("rollout.engine=sglang", "rollout.num_slots=2000"), hosts, SMALL)
    weights, each = 2 * SMALL.num_parameters, 2 * SMALL.cache_numbers * config.context_tokens
    room = int(0.95 * hosts[0].gpu_bytes - weights - overhead_bytes(config, SMALL))
    alone = room - int(arriving_bytes(config, SMALL))
    assert _room(config, hosts) == (pytest.approx(alone / GIB, abs=0.05), alone // each)
    shared = resolved(_config("rollout.engine=sglang", "rollout.num_slots=2000"), _hosts(1, 80), SMALL)
    assert shared.rollout.share_devices == "side_by_side"
    assert _room(shared, _hosts(1, 80)) == (
        pytest.approx((room - _needed(shared)) / GIB, abs=0.05),
        (room - _needed(shared)) // each,
    )


def test_an_embedded_engine_has_no_more_cache_than_its_option_says() -> None:
    config = resolved(_config("rollout.engine=embedded", "rollout.embedded.cache_tokens=20000"), _hosts(2, 80), SMALL)
    assert _room(config, _hosts(2, 80))[1] == 20_000 // config.context_tokens


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
@pytest.mark.parametrize("eval_set", [(), ("data.eval=null",)])
@pytest.mark.parametrize("every", ["0", "10"])
def test_an_eval_set_alone_gives_the_embedded_engine_a_second_copy(
    engine: str, eval_set: tuple[str, ...], every: str
) -> None:
    config = _config(f"rollout.engine={engine}", f"evaluation.every_n_versions={every}", *eval_set)
    copies = 2 if engine == "embedded" and not eval_set else 1
    assert weight_bytes(config, SMALL) == copies * 2 * SMALL.num_parameters
    layer = 2 * 8192 * (3 * SMALL.intermediate_size + 6 * SMALL.hidden_size)
    batches, prefill = (6, layer) if engine == "sglang" else (6 + 4 * copies, 0)
    logits = 4 * config.rollout.num_slots * SMALL.vocab_size
    assert overhead_bytes(config, SMALL) == OVERHEAD_BYTES + logits * batches + prefill


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(("parallel", "fits"), [(1, True), (2, True), (4, True), (3, False), (5, False), (64, False)])
def test_a_server_spreads_heads_evenly_over_gpus(engine: str, parallel: int, fits: bool) -> None:
    """32 heads, 8 of keys and values: 16 GPUs would share each of the 8, 3 GPUs share nothing evenly."""
    large = SHIPPED["Qwen/Qwen3-8B"]
    options = (f"rollout.engine={engine}", f"rollout.tensor_parallel={parallel}", "model.path=Qwen/Qwen3-8B")
    words = rf"^rollout\.tensor_parallel: expected 1 or 2 or 4 or 8 or 16 or 32, got {parallel}; "
    with contextlib.nullcontext() if fits else pytest.raises(PreflightError, match=words):
        resolved(_config(*options, "learner.num_ranks=2"), _hosts(8, 141), large)


def test_a_server_on_a_cpu_has_attention_for_the_heads_of_the_model() -> None:
    """Of 0.32.0, vLLM has none for heads of 16; its process would end two minutes later."""
    here = [Host("laptop", "127.0.0.1", 8)]
    config = load_config("quickstart.yaml", ["rollout.engine=vllm"])
    model = Sizes.of_tiny(config.model.tiny)
    with pytest.raises(
        PreflightError, match=r"^rollout\.engine: .* 32, 64, .* or 512 .* vLLM on a CPU, got 16; "
    ) as no:
        resolved(config, here, model)
    advised = re.findall(r"model\.tiny\.\w+=\d+", str(no.value))
    changed = load_config("quickstart.yaml", ["rollout.engine=vllm", *advised])
    assert resolved(changed, here, Sizes.of_tiny(changed.model.tiny)).model.tiny.num_heads == 3
    for others in (["rollout.engine=sglang"], ["rollout.engine=embedded"]):
        assert resolved(load_config("quickstart.yaml", others), here, model).rollout.num_workers
    assert resolved(config, _hosts(1, 24), model).rollout.num_workers, "on a GPU, the kernels are others"
