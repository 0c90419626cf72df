"""Every accepted plan fits by its own numbers, and every printed advice, followed literally, gives an accepted plan."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_rloo.config import Config, load_config
from areal_rloo.errors import PreflightError, UserError
from areal_rloo.launcher.fit import few_words, memory_words, model_sizes, resolved
from areal_rloo.launcher.gpu_need import gpu_need
from areal_rloo.launcher.placement import Host, gpus_each, place
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, STANDING, estimate, number_bytes
from areal_rloo.models.sizes import SHIPPED, Sizes

CONFIGS = sorted(path.name for path in (Path(__file__).resolve().parents[3] / "configs").glob("*rloo*.yaml"))
SMALL = SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"]
CHANGES: dict[str, list[str]] = {
    "data.eval": ["null"],
    "evaluation.every_n_versions": ["0", "10"],
    "model.path": list(SHIPPED),
    "model.dtype": ["float32", "bfloat16"],
    "learner.num_ranks": ["auto", "1", "2", "4"],
    "learner.num_replicas": ["1", "2"],
    "learner.microbatch_tokens": ["auto", "16384", "65536"],
    "learner.gradient_checkpointing": ["auto", "false", "true"],
    "learner.offload": ["none", "optimizer"],
    "learner.device": ["auto", "cpu"],
    "rollout.engine": ["embedded", "sglang", "vllm"],
    "rollout.device": ["auto", "cpu"],
    "rollout.num_workers": ["auto", "1", "2", "6"],
    "rollout.tensor_parallel": ["1", "2"],
    "rollout.num_slots": ["1", "512"],
    "rollout.share_devices": ["auto", "side_by_side", "in_turns"],
    "rollout.embedded.cache_tokens": ["null", "9000", "3000000"],
    "rollout.sglang.arguments.mem-fraction-static": ["0.1", "0.5", "0.9"],
    "rollout.sglang.arguments.max-total-tokens": ["100", "90000", "3000000"],
    "rollout.vllm.arguments.gpu-memory-utilization": ["0.1", "0.5", "0.9"],
    "rollout.vllm.arguments.kv-cache-memory-bytes": ["1000", "4000000000", "90000000000"],
}
OPTIONS = st.lists(st.sampled_from(sorted(CHANGES)), max_size=6, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.sampled_from(CHANGES[key]) for key in keys})
)
HOSTS = st.builds(
    lambda num, gpus, gib: _hosts(gpus, gib * GIB, num),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([1, 1, 2, 3, 4, 8]),
    st.integers(4, 160),
)


def _hosts(gpus: int, gpu_bytes: int, num: int = 1) -> list[Host]:
    ids = tuple(map(str, range(gpus)))
    return [Host(f"n{index}", "10.0.0.1", 32, ids, 512 * GIB, gpu_bytes) for index in range(num)]


def _plan(name: str, options: dict[str, str], hosts: list[Host]) -> tuple[Config, Sizes]:
    config = load_config(name, [f"{key}={value}" for key, value in options.items()])
    model = model_sizes(config, {})
    assert model is not None
    found = resolved(config, hosts, model)
    place(found, hosts)
    return found, model


def _assert_fits(config: Config, model: Sizes, hosts: list[Host]) -> None:
    """Add up the parts of each GPU again, with the cache as the words give it."""
    rank_gpus, worker_gpus = gpus_each(config, hosts)
    gpu, words = hosts[0].gpu_bytes, memory_words(config, hosts, model)
    parts = estimate(model, config, on_gpu=True)
    rank = sum(parts.values()) + OVERHEAD_BYTES
    if rank_gpus:
        assert rank <= gpu
    found = re.search(r"an engine has about ([\d.]+) GiB for a cache, (\d+) completions? of (\d+) tokens", words)
    assert (found is not None) == (worker_gpus > 0), words
    if found is None:
        return
    rollout = config.rollout
    low, cache = number_bytes(config), (float(found[1]) - 0.05) * GIB  # the words are rounded
    copies = 2 if rollout.engine == "embedded" and config.data.eval is not None else 1
    heads = max(1, model.num_kv_heads // rollout.tensor_parallel)
    token = 2 * model.num_layers * model.head_dim * low * heads
    weights = copies * low * model.num_parameters / rollout.tensor_parallel
    assert int(found[2]) >= 1
    assert int(found[2]) * int(found[3]) * token <= cache + 0.1 * GIB + 1  # a byte: of rounding here
    if rollout.share_devices == "in_turns":
        assert rank + weights + OVERHEAD_BYTES <= gpu
        rank = sum(size for part, size in parts.items() if part in STANDING) + OVERHEAD_BYTES
    assert rank * rollout.shares + weights + OVERHEAD_BYTES + cache <= gpu


def _advised(text: str) -> tuple[str, list[list[str]]]:
    """Return the verb of the advice, and each sufficient list of assignments and of keys to leave out."""
    words = re.sub(r" \([^()]*\)", "", text.rpartition("; ")[2])
    if words.startswith("combine"):
        return "combine", [
            shlex.split(words.removeprefix("combine ").replace(", and leave out ", " ").replace(" and ", " "))
        ]
    if words.startswith(("set ", "leave out ")):
        alone = re.split(r",? or ", words.removeprefix("set "))
        return "set", [word.removeprefix("leave out ").replace(" and ", " ").split() for word in alone]
    return words, []


def _with_more_gpus(text: str, hosts: list[Host]) -> tuple[str, list[Host]]:
    """Cut the advice to take more GPUs off, and return the hosts with them."""
    found = re.search(r"(?:, or )?(?:start where (\d+) GPUs are|set launcher\.num_hosts=(\d+))$", text)
    if found is None:
        return text, []
    gpus = int(found[1]) if found[1] else len(hosts[0].gpu_ids)
    return text[: found.start()], _hosts(gpus, hosts[0].gpu_bytes, int(found[2] or 1))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CONFIGS), OPTIONS, HOSTS)
def test_an_accepted_plan_fits_and_every_advice_leads_to_one(
    name: str, options: dict[str, str], hosts: list[Host]
) -> None:
    try:
        found, model = _plan(name, options, hosts)
    except UserError as error:
        text = str(error)
    else:
        _assert_fits(found, model, hosts)
        return
    if not text.startswith(("learner: ", "rollout: a GPU's")):
        return  # a mistake of the config, or too few GPUs: judged before memory
    text, more = _with_more_gpus(text, hosts)
    if more:
        _assert_fits(*_plan(name, options, more), more)
    verb, lists = _advised(text)
    assert lists or more or verb == "take a smaller model, or GPUs with more memory", text
    for words in lists:
        changed = dict(options)
        for word in words:
            key, is_set, value = word.partition("=")
            changed[key] = value
            if not is_set:
                del changed[key]
        found, model = _plan(name, changed, hosts)
        _assert_fits(found, model, hosts)


def _text(*overrides: str, gpus: int = 1, gigabytes: float = 24, model: Sizes = SMALL) -> str:
    config = load_config("gsm8k_rloo.yaml", overrides)
    with pytest.raises(PreflightError) as raised:
        resolved(config, _hosts(gpus, int(gigabytes * 10**9)), model)
    return str(raised.value)


def test_adapters_are_among_the_remedies_with_their_saving() -> None:
    text = _text(gigabytes=24)
    assert re.search(
        r"; set learner\.offload=parameters \(\S+ GiB less\) or learner\.lora\.rank=16 \(\S+ GiB less\), "
        "or start where 3 GPUs are$",
        text,
    )


def test_options_that_exclude_each_other_are_not_combined() -> None:
    text = _text(gigabytes=12)
    verb, (words,) = _advised(text)
    assert verb == "combine"
    assert len({word.partition("=")[0] for word in words}) == len(words) >= 2, text


def test_a_second_beta_too_large_for_bfloat16_moments_rules_them_out() -> None:
    beta = "learner.optimizer.betas=[0.9, 0.999]"
    given = ("learner.num_ranks=1", "learner.offload=optimizer")
    assert "state_dtype" not in _text(*given, beta, gpus=2, gigabytes=8)
    moments = _text("learner.num_ranks=1", "learner.microbatch_tokens=4096", gpus=2, gigabytes=30)
    assert "learner.optimizer.state_dtype=bfloat16" in moments
    assert "state_dtype" not in _text(
        "learner.num_ranks=1", "learner.microbatch_tokens=4096", beta, gpus=2, gigabytes=30
    )


def test_more_ranks_are_advised_only_if_gpus_are_left_to_generate() -> None:
    large = SHIPPED["Qwen/Qwen3-8B"]
    assert "learner.num_ranks=" not in _text("learner.num_ranks=7", "model.path=Qwen/Qwen3-8B", gpus=8, model=large)
    assert "learner.num_ranks=2 (" in _text("learner.num_ranks=1", gpus=4, gigabytes=24)


def test_counts_are_judged_before_memory() -> None:
    text = _text("learner.num_ranks=4", "rollout.num_workers=4", gpus=4, gigabytes=16)
    assert text.startswith("devices: the plan needs 8 GPUs")


def test_growing_ranks_leave_gpus_to_all_workers_of_the_user() -> None:
    large = SHIPPED["Qwen/Qwen3-8B"]
    text = _text("rollout.num_workers=6", "model.path=Qwen/Qwen3-8B", gpus=8, gigabytes=48, model=large)
    assert text.startswith("learner: a rank needs about")
    assert "rollout.num_workers=auto (" in text
    config = load_config("gsm8k_rloo.yaml", ["rollout.num_workers=3", "model.path=Qwen/Qwen3-8B"])
    found = resolved(config, _hosts(8, 48 * GIB), large)
    assert (found.learner.num_ranks, found.rollout.num_workers) == (5, 3)


# -- the user's own memory of the engine -------------------------------------------------------------------------------

OWN = [
    ("rollout.sglang.arguments.mem-fraction-static=0.5", "sglang", 40),
    ("rollout.vllm.arguments.gpu-memory-utilization=0.5", "vllm", 40 - 2.147),
    ("rollout.vllm.arguments.kv-cache-memory-bytes=37000000000", "vllm", 37 + 3.087),
    ("rollout.sglang.arguments.max-total-tokens=1290000", "sglang", 37 + 3.087),
]


@pytest.mark.parametrize(("given", "engine", "gigabytes"), OWN)
def test_the_learner_fits_beside_the_users_own_engine(given: str, engine: str, gigabytes: float) -> None:
    config = load_config("gsm8k_rloo.yaml", [f"rollout.engine={engine}", given])
    hosts = _hosts(1, 80 * 10**9)
    found = resolved(config, hosts, SMALL)
    rank = sum(estimate(SMALL, found, on_gpu=True).values()) + OVERHEAD_BYTES
    assert rank + gigabytes * 10**9 + OVERHEAD_BYTES <= 80.1e9, "cache and weights of the user, and both overheads"
    cache = (gigabytes * 10**9 - 2 * SMALL.num_parameters) / GIB
    words = re.search(r"about ([\d.]+) GiB for a cache", memory_words(found, hosts, SMALL))
    assert words is not None
    assert float(words[1]) == pytest.approx(cache, abs=0.15)
    assert f"leave out {given.partition('=')[0]}" in _text(
        f"rollout.engine={engine}", re.sub(r"=(0\.5|37000000000|1290000)", lambda m: _more(m[1]), given), gigabytes=80
    )


def _more(value: str) -> str:
    return {"0.5": "=0.9", "37000000000": "=70000000000", "1290000": "=3000000"}[value]


def test_a_cache_of_the_user_too_large_for_the_gpu_is_refused() -> None:
    text = _text("rollout.engine=embedded", "rollout.embedded.cache_tokens=3000000", gigabytes=80)
    assert text.endswith("; set rollout.embedded.cache_tokens=null")
    text = _text("rollout.engine=embedded", "rollout.embedded.cache_tokens=3000000", gigabytes=80, gpus=2)
    assert "and rollout.embedded.cache_tokens=3000000 takes 80.11" in text


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_cache_too_small_for_a_completion_is_refused(gpus: int) -> None:
    small = "rollout.sglang.arguments.max-total-tokens=100"
    text = _text(small, gpus=gpus, gigabytes=80)
    assert "a completion of 2304 tokens needs 0.06" in text
    assert text.endswith("leave out rollout.sglang.arguments.max-total-tokens")


def test_an_engine_on_its_own_gpu_needs_room_for_a_completion() -> None:
    large = SHIPPED["Qwen/Qwen3-8B"]
    given = ("learner.lora.rank=16", "learner.num_ranks=6", "model.path=Qwen/Qwen3-8B")
    text = _text(*given, gpus=8, gigabytes=17.1, model=large)
    assert text.startswith(
        "rollout: a GPU's 15.9 GiB (17 GB) leave an engine no room for a cache (beside weights 15.26 +"
    )
    assert "rollout.tensor_parallel=2 (" in text


# -- devices -----------------------------------------------------------------------------------------------------------


def test_workers_on_cpus_leave_all_gpus_to_the_learner() -> None:
    config = load_config("gsm8k_rloo.yaml", ["rollout.engine=embedded", "rollout.device=cpu"])
    hosts = _hosts(4, 80 * GIB)
    found = resolved(config, hosts, SMALL)
    assert {gpu for seat in place(found, hosts).learner for gpu in seat.gpu_ids} == {"0", "1", "2", "3"}
    assert "an engine has" not in memory_words(found, hosts, SMALL)


# -- a machine without a GPU -------------------------------------------------------------------------------------------

HERE = [Host("laptop", "127.0.0.1", 8)]
NUMBERS = {"one": 1, "two": 2, "three": 3}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_needs_in_the_head_of_a_config_are_enough(name: str) -> None:
    head = (Path(__file__).resolve().parents[3] / "configs" / name).read_text().split("\nrun:")[0]
    claims = re.findall(r"(\w+)(?: GPUs?)? of (\d+) GB", head)
    assert claims
    for count, gigabytes in claims:
        _plan(name, {}, _hosts(NUMBERS.get(count) or int(count), int(gigabytes) * 10**9))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_for_gpus_names_the_least_gpu(name: str) -> None:
    config = load_config(name)
    words = gpu_need(config, HERE, model_sizes(config, {}))
    needs = re.match(
        r"no GPU on laptop: rollout\.engine=sglang needs (one|\d+) GPUs? of (\d+) GB or more(?:, better .* GB)?"
        r"; start where .*"
        r"rollout\.engine=embedded .*quickstart\.yaml$",
        words,
    )
    assert needs is not None, words
    count = NUMBERS.get(needs[1]) or int(needs[1])
    _plan(name, {}, _hosts(count, int(needs[2]) * 10**9))
    with pytest.raises(UserError):
        _plan(name, {}, _hosts(count, int(needs[2]) * 10**9 * 2 // 3))


@pytest.mark.parametrize(("memory", "offered"), [(0, True), (30 * GIB, False), (64 * GIB, True)])
def test_the_embedded_engine_is_offered_only_to_hosts_with_its_memory(memory: int, offered: bool) -> None:
    """Learner, engine, versions and the copy for a checkpoint of a 1.5B model take 38 GiB on CPUs."""
    config = load_config("gsm8k_rloo.yaml")
    words = gpu_need(config, [Host("laptop", "127.0.0.1", 8, (), memory)], SMALL)
    assert ("rollout.engine=embedded" in words) == offered
    assert words.endswith("begin with --config quickstart.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["learner.device=cuda"], "learner.device=cuda needs one GPU of 8 GB or more"),
        (["rollout.engine=sglang"], ""),
        ([], ""),
    ],
)
def test_the_tiny_model_needs_a_gpu_only_for_cuda(options: list[str], words: str) -> None:
    config = load_config("quickstart.yaml", options)
    assert words in gpu_need(config, HERE, model_sizes(config, {}))
    assert bool(gpu_need(config, HERE, model_sizes(config, {}))) == bool(words)
    assert gpu_need(config, _hosts(1, 80 * GIB), model_sizes(config, {})) == ""


def test_advice_leaves_a_cache_for_many_slots_if_there_is_such_advice() -> None:
    """At 32 GB, moments in bfloat16 alone would leave the cache of an engine a single completion."""
    for gigabytes in (32, 40):
        text = _text("rollout.engine=embedded", gigabytes=gigabytes)
        _, lists = _advised(_with_more_gpus(text, _hosts(1, gigabytes * 10**9))[0])
        assert lists
        for words in lists:
            config = load_config("gsm8k_rloo.yaml", ["rollout.engine=embedded", *words])
            hosts = _hosts(1, gigabytes * 10**9)
            assert few_words(config, hosts, SMALL) == "", words


def test_advice_fits_into_the_known_memory_of_the_host() -> None:
    """On 24 GB, moments and weights in CPU memory would be enough for the GPU, and need 37 GiB of the host."""
    hosts = [dataclasses.replace(_hosts(1, 24 * 10**9)[0], memory_bytes=32 * 10**9)]
    with pytest.raises(PreflightError) as raised:
        resolved(load_config("gsm8k_rloo.yaml"), hosts, SMALL)
    assert "learner.lora.rank=16" in str(raised.value)
    assert "learner.offload" not in str(raised.value)


def test_a_cache_of_the_user_is_no_reason_for_other_gpus() -> None:
    config = load_config("gsm8k_rloo.yaml", ["rollout.sglang.arguments.max-total-tokens=9000"])
    assert "needs one GPU of 40 GB or more; " in gpu_need(config, HERE, SMALL)
