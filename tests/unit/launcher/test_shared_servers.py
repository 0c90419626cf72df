"""The plan of a server that sleeps during train steps, on the GPU of the learner."""

import pytest

from areal_rloo.config import load_config
from areal_rloo.launcher.engine_memory import cache_room, overhead_bytes, weight_bytes
from areal_rloo.launcher.fit import few_words, resolved
from areal_rloo.launcher.host_memory import host_parts
from areal_rloo.launcher.placement import Host, place
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, STANDING, estimate
from areal_rloo.models.sizes import SHIPPED

SMALL = SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"]


def _host(gigabytes: int) -> list[Host]:
    return [Host("n", "10.0.0.1", 32, ("0",), 512 * GIB, gigabytes * 10**9)]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_in_turns_has_the_cache_that_it_lacks_side_by_side(engine: str) -> None:
    hosts = [Host("n", "10.0.0.1", 32, ("0",), 512 * GIB, 40 * 10**9)]
    given = (f"rollout.engine={engine}", "learner.gradient_checkpointing=true", "learner.microbatch_tokens=8192")
    beside = resolved(load_config("gsm8k_rloo.yaml", given), hosts, SMALL)
    assert beside.rollout.share_devices == "side_by_side", "auto takes the way that keeps completions"
    assert "rollout.share_devices=in_turns" in few_words(load_config("gsm8k_rloo.yaml", given), hosts, SMALL)
    in_turns = load_config("gsm8k_rloo.yaml", [*given, "rollout.share_devices=in_turns"])
    found = resolved(in_turns, hosts, SMALL)
    assert few_words(in_turns, hosts, SMALL) == ""
    parts, gpu_bytes = estimate(SMALL, found, on_gpu=True), hosts[0].gpu_bytes
    fixed = weight_bytes(found, SMALL) + overhead_bytes(found, SMALL) + OVERHEAD_BYTES
    assert sum(parts.values()) + fixed <= gpu_bytes, "a step, beside a server without a cache"
    standing = sum(size for part, size in parts.items() if part in STANDING)
    assert standing + fixed + cache_room(found, SMALL, gpu_bytes) == pytest.approx(gpu_bytes), "between two steps"
    parts_of_host = host_parts(found, place(found, hosts), SMALL, SMALL.num_parameters)
    asleep = 2 * SMALL.num_parameters if engine == "vllm" else 0
    assert parts_of_host.get("weights of sleeping servers", 0) == asleep
