"""The paths of a GPU with a fake of CUDA alone: memory, streams, and copies that arrive late."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.requests_to_serve import assert_same, mixed_requests, request, results, serving
from torch import Tensor

from areal_rloo import container_limits
from areal_rloo.config import TinyModelConfig
from areal_rloo.engines.embedded import batch
from areal_rloo.errors import PreflightError
from areal_rloo.models.device import (
    GraphRecorder,
    HostCopy,
    SideStream,
    avoid_plans_of_shapes,
    check_flash,
    finish_stream,
    grow_segments,
    memory_of,
)
from areal_rloo.models.tiny import make_tiny_model, save_tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class _LateCopy(HostCopy):
    """A copy whose bytes arrive when the host waits, as those of a GPU may; before, they are garbage."""

    waits = 0

    @classmethod
    def begin(cls, *tensors: Tensor) -> HostCopy:
        garbage = tuple(torch.full_like(tensor, -1) for tensor in tensors)
        return cls(garbage, _Arrival(garbage, [tensor.clone() for tensor in tensors]))  # type: ignore[arg-type]


class _Arrival:
    def __init__(self, places: tuple[Tensor, ...], values: list[Tensor]) -> None:
        self._places, self._values = places, values

    def synchronize(self) -> None:
        for place, value in zip(self._places, self._values, strict=True):
            place.copy_(value)
        _LateCopy.waits += 1


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_the_engine_reads_no_token_before_its_copy_arrived(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    requests = mixed_requests(9)
    with serving(tiny_folders["qwen2"]) as engine:
        expected = results(engine.submit(requests))
    monkeypatch.setattr(batch, "HostCopy", _LateCopy)
    waits = _LateCopy.waits
    with serving(tiny_folders["qwen2"], steps_ahead=steps_ahead) as engine:
        completions = results(engine.submit(requests))
        steps = engine.statistics().decode_steps
    assert_same(completions, expected)
    assert _LateCopy.waits - waits >= max(len(one.tokens) for one in completions)
    assert _LateCopy.waits - waits <= steps, "a copy is waited for once"


def test_copies_on_a_cpu_are_the_tensors_themselves() -> None:
    tensors = torch.arange(3), torch.ones(2)
    copies = HostCopy.begin(*tensors).wait()
    assert all(own is given for own, given in zip(copies, tensors, strict=True))


def test_memory_is_asked_of_the_driver_or_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 8))
    monkeypatch.setattr(container_limits, "memory", lambda: (20, 5))
    assert memory_of(CUDA) == (3, 8)
    assert memory_of(CPU)._asdict() == {"free_bytes": 5, "total_bytes": 20}


class _Cuda:
    """Streams of CUDA that record their use."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_streams = 0

    def new_stream(self, device: torch.device) -> str:
        self.num_streams += 1
        return f"stream {self.num_streams} of {device}"

    def use(self, stream: str) -> Any:
        self.calls.append(f"use {stream}")
        return nullcontext()

    def current_stream(self, device: torch.device) -> "_Cuda":
        self.calls.append(f"current of {device}")
        return self

    def synchronize(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    played = _Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", played.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", played.use)
    monkeypatch.setattr(torch.cuda, "current_stream", played.current_stream)
    return played


def test_only_the_stream_of_the_thread_is_finished(cuda: _Cuda) -> None:
    finish_stream(CPU)
    assert cuda.calls == []
    finish_stream(CUDA)
    assert cuda.calls == ["current of cuda", "wait"]


def test_a_side_stream_is_made_once_and_never_on_a_cpu(cuda: _Cuda) -> None:
    for device in (CPU, CUDA):
        side = SideStream(device)
        for _ in range(2):
            with side.used():
                pass
    assert (cuda.num_streams, cuda.calls) == (1, ["use stream 1 of cuda"] * 2)


def test_no_attention_has_a_mask_and_grouped_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels of a GPU do not know both; the others keep all scores in memory."""
    save_tiny_model(make_tiny_model(TinyModelConfig(hidden_size=64, num_heads=4, num_kv_heads=2)), tmp_path)
    attention, masked = F.scaled_dot_product_attention, 0

    def checked(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        nonlocal masked
        if options.get("attn_mask") is not None:
            masked += 1
            assert q.shape[1] == k.shape[1] and not options.get("enable_gqa")
        return attention(q, k, v, **options)

    prompt = tuple(range(5, 155))
    with serving(tmp_path, context_tokens=256) as engine:
        expected = results(engine.submit([request("whole", prompt=prompt)]))
    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    with serving(tmp_path, context_tokens=256) as engine:
        results(engine.submit([request("beginning", prompt=prompt[:90], max_new_tokens=1)]))
        assert masked == 0
        completions = results(engine.submit([request("whole", prompt=prompt)]))
    assert_same(completions, expected)
    assert masked > 0, "the rest of the prompt sees the tokens before"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_settings_of_a_user_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"})
    grow_segments(CUDA)
    assert os.environ == {name: "max_split_size_mb:64"}


def test_without_settings_the_allocators_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/"})
    monkeypatch.setattr(torch, "empty", lambda size, *, device: None)
    grow_segments(CPU)
    assert os.environ == {"HOME": "/"}
    grow_segments(CUDA)
    assert os.environ == {"HOME": "/", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_driver_that_refuses_growing_memory_gets_fixed_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(size: int, *, device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: operation not supported\nmore lines")

    given: list[str] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch, "empty", refused)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", given.append)
    grow_segments(CUDA)
    assert given == ["expandable_segments:False"]
    assert caplog.messages == [
        "blocks of GPU memory have fixed sizes here, because the driver refuses others: CUDA driver error: operation "
        "not supported"
    ]


def test_an_engine_on_a_gpu_uses_no_plans_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", given.append)
    avoid_plans_of_shapes(CPU)
    assert given == []
    avoid_plans_of_shapes(CUDA)
    assert given == [False]


def test_a_recording_has_the_effect_of_the_function_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the function runs before the recording, which computes nothing, and each replay has its effect."""
    happened: list[str] = []
    GraphRecorder(CPU).record(lambda: happened.append("call"))()
    assert happened == ["call", "call"]
    happened.clear()

    class _Graph:
        def replay(self) -> None:
            happened.append("replay")

    def recording(graph: _Graph, *, pool: str, capture_error_mode: str) -> Any:
        assert (pool, capture_error_mode) == ("pool", "thread_local"), "other threads use the GPU meanwhile"
        happened.append("record")
        if refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return nullcontext()

    refused = False
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", happened.append)
    again = GraphRecorder(CUDA).record(lambda: happened.append("call"))
    again()
    again()
    assert happened == ["call", "record", "call", "replay", "replay"]
    happened.clear()
    refused = True
    GraphRecorder(CUDA).record(lambda: happened.append("call"))()
    assert happened == ["call", "record", "stream of cuda", "call"], "without a recording, each kernel is launched"


@pytest.mark.parametrize(
    ("capability", "dtype", "works"),
    [((8, 0), torch.bfloat16, True), ((7, 5), torch.bfloat16, False), ((7, 0), torch.float32, True)],
)
def test_a_gpu_without_flash_attention_is_refused(
    capability: tuple[int, int], dtype: torch.dtype, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    words = r"model\.dtype: bfloat16 needs flash attention, .* has 7\.5; set model\.dtype=float32"
    with nullcontext() if works else pytest.raises(PreflightError, match=words):
        check_flash(torch.device("cuda"), dtype)
    check_flash(torch.device("cpu"), torch.bfloat16)
