"""The memory of a broadcast in the plan, against the buckets that the code makes on a device without memory."""

import pytest
import torch

from areal_rloo.config import load_config
from areal_rloo.errors import PreflightError
from areal_rloo.launcher.engine_memory import arriving_bytes, cache_room, with_cache
from areal_rloo.launcher.fit import resolved
from areal_rloo.launcher.placement import Host
from areal_rloo.learner.memory import GIB, OVERHEAD_BYTES, Broadcast, broadcast_bytes, estimate
from areal_rloo.models.sizes import SHIPPED, Sizes
from areal_rloo.weights.collective import _on_device
from areal_rloo.weights.manifest import Manifest, build_manifest, empty_buckets

META = torch.device("meta")
SMALL = SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"]
LARGE = SHIPPED["Qwen/Qwen3-8B"]
RANK = ("learner.num_ranks=1", "learner.gradient_checkpointing=true", "learner.microbatch_tokens=2304")
SERVER = (*RANK, "rollout.engine=sglang", "rollout.share_devices=never")
FAR = (*RANK, "rollout.engine=embedded", "launcher.num_hosts=2", "rollout.share_devices=never")


def _manifest(model: Sizes, bucket_bytes: int) -> Manifest:
    """Lay out the matrices of a model in the order of transformers."""
    embedding = (model.vocab_size, model.hidden_size)
    shapes = {"embed": embedding}
    shapes |= {f"{layer}.{name}": shape for layer in range(model.num_layers) for name, shape in model.matrices.items()}
    shapes |= {} if model.tied else {"head": embedding}
    tensors = [(name, torch.empty(shape, device=META)) for name, shape in shapes.items()]
    return build_manifest(tensors, bucket_bytes=bucket_bytes, dtype=torch.bfloat16)


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["tied", "untied"])
@pytest.mark.parametrize("bucket_bytes", [2**16, 2**26, 2**32])
def test_the_plan_has_room_for_the_buckets_of_a_broadcast(model: Sizes, bucket_bytes: int) -> None:
    config = load_config("gsm8k_rloo.yaml", [*SERVER, f"weights.bucket_bytes={bucket_bytes}"])
    manifest = _manifest(model, bucket_bytes)
    sent = list(_on_device(empty_buckets(manifest, META), META))
    assert list(map(len, sent)) == list(manifest.bucket_num_bytes)
    (held,) = {bucket.untyped_storage().nbytes() for bucket in sent}
    expected = broadcast_bytes(model, config)
    assert manifest.total_bytes == pytest.approx(expected.whole, rel=0.001)
    assert 0.9 * expected.bucket <= max(manifest.bucket_num_bytes) <= 1.001 * expected.bucket
    assert 0.8 * expected.neighbours <= held <= 1.001 * expected.neighbours


def test_a_long_bucket_has_no_second_place_as_long() -> None:
    """A tensor as long as the embedding is on its way once."""
    buckets = [torch.full((64 * length,), length, dtype=torch.uint8) for length in (9, 1, 2, 1, 9)]
    held, seen = set(), []
    under_way: list[torch.Tensor] = []
    for bucket in _on_device([bucket.to(META) for bucket in buckets], META):
        under_way = [*under_way[-1:], bucket]
        held.add(bucket.untyped_storage().nbytes())
        places = [range(one.storage_offset(), one.storage_offset() + len(one)) for one in under_way]
        seen.append(len(places) < 2 or not set(places[0]) & set(places[1]))
    assert held == {64 * 10}
    assert seen == [True] * 5, "two buckets under way are apart"


def test_rank_0_and_a_server_have_buckets_and_a_far_engine_a_copy() -> None:
    server, far = (load_config("gsm8k_rloo.yaml", given) for given in (SERVER, FAR))
    whole, bucket, neighbours = broadcast_bytes(LARGE, server)
    assert whole == 2 * LARGE.num_parameters
    assert bucket == 2 * LARGE.head
    for config, arrives in ((server, bucket), (far, whole)):
        assert estimate(LARGE, config, on_gpu=True)["weights to send"] == neighbours
        assert "weights to send" not in estimate(LARGE, config, on_gpu=False)
        assert arriving_bytes(config, LARGE) == arrives
    near = load_config("gsm8k_rloo.yaml", [*FAR, "launcher.num_hosts=1"])
    assert broadcast_bytes(LARGE, near) == Broadcast(0, 0, 0)
    assert cache_room(near, LARGE, 80 * GIB) - cache_room(far, LARGE, 80 * GIB) == whole
    files = load_config("gsm8k_rloo.yaml", [*SERVER, "weights.transport=shared_memory"])
    assert cache_room(files, LARGE, 80 * GIB) - cache_room(server, LARGE, 80 * GIB) == bucket
    assert with_cache(files, LARGE, 24 * GIB).rollout.sglang != with_cache(server, LARGE, 24 * GIB).rollout.sglang


def test_adapters_are_a_small_broadcast() -> None:
    config = load_config("gsm8k_rloo.yaml", [*FAR, "learner.lora.rank=8"])
    adapters = 4 * LARGE.num_adapted(8, config.learner.lora.targets if config.learner.lora else None)
    assert broadcast_bytes(LARGE, config) == Broadcast(adapters, min(adapters, 2 * LARGE.head), adapters)


def test_engines_on_cpus_are_sent_weights_from_the_memory_of_the_host() -> None:
    config = load_config("gsm8k_rloo.yaml", [*FAR, "rollout.device=cpu"])
    assert "weights to send" not in estimate(SMALL, config, on_gpu=True)


def test_shared_memory_is_advised_where_a_broadcast_is_too_much() -> None:
    given = (*SERVER, "learner.lora.rank=16")
    config = load_config("gsm8k_rloo.yaml", given)
    files = load_config("gsm8k_rloo.yaml", [*given, "weights.transport=shared_memory"])
    needed = [sum(estimate(LARGE, one, on_gpu=True).values()) for one in (files, config)]
    host = Host("n", "10.0.0.1", 32, ("0", "1"), 512 * GIB, int(sum(needed) / 2) + OVERHEAD_BYTES)
    assert resolved(files, [host], LARGE).weights.transport == "shared_memory"
    with pytest.raises(PreflightError, match=r"set .*weights\.transport=shared_memory \(1\.3 GiB less\)"):
        resolved(config, [host], LARGE)
