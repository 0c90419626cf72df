"""Recorded decode steps make the completions of plain steps, on a CPU with an obvious attention, and on a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.families import family_model
from support.model_versions import model_of
from support.requests_to_serve import (
    assert_agree,
    assert_same,
    learner_logprobs,
    logprobs_by_version,
    mixed_requests,
    request,
    results,
    serving,
    wait_until,
)
from support.turn_takers import told_learner
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.config import EmbeddedConfig
from areal_rloo.engines.embedded import EmbeddedEngine, decode_attention
from areal_rloo.engines.embedded.decode_attention import RowAttention
from areal_rloo.engines.embedded.recorded import RecordedSteps
from areal_rloo.models.device import GraphRecorder
from areal_rloo.turns import EngineTurn

SIZES: list[int] = []  # of the recorded steps


def _row_by_row(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, longest: int, scale: float, window: object
) -> Tensor:
    """Attend one row and head after the other."""
    out = torch.empty_like(q)
    for index, length in enumerate(lengths.tolist()):
        seen = slice(int(starts[index]), int(starts[index]) + length)
        assert 0 < length <= longest
        scores = q[index].double() @ keys[seen].double().t() * scale
        if isinstance(window, int):
            scores[:, : max(0, length - window)] = -torch.inf
        out[index] = scores.softmax(-1) @ values[seen].double()
    return out


@pytest.fixture
def fixtures(request: pytest.FixtureRequest) -> pytest.FixtureRequest:
    """The fixtures of a test by name, for a test whose engines have them in turn; `request` is another name here."""
    return request


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record = RecordedSteps.rows

    def rows(self: RecordedSteps, tokens: Tensor, counters: Tensor, starts: Tensor) -> object:
        SIZES.append(len(tokens))
        return record(self, tokens, counters, starts)

    SIZES.clear()
    monkeypatch.setattr(RowAttention, "serves", lambda *_, **__: True)
    monkeypatch.setattr(RecordedSteps, "rows", rows)
    monkeypatch.setattr(decode_attention, "flash_rows", _row_by_row)


@pytest.mark.parametrize(
    ("name", "steps_ahead", "cache_tokens"), [("qwen2", 0, 4096), ("qwen3", 1, 4096), ("llama", 1, 640)]
)
def test_recorded_steps_change_no_completion(
    name: str, steps_ahead: int, cache_tokens: int, tiny_folders: dict[str, Path], fixtures: pytest.FixtureRequest
) -> None:
    requests = mixed_requests(23, longest=230, stop_token_ids=(2, 9))
    options = {"context_tokens": 512, "num_slots": 7, "options": EmbeddedConfig(cache_tokens=cache_tokens)}
    with serving(tiny_folders[name], **options, steps_ahead=0) as engine:
        expected = results(engine.submit(requests))
    fixtures.getfixturevalue("_recorded")
    with serving(tiny_folders[name], **options, steps_ahead=steps_ahead) as engine:
        completions = results(engine.submit(requests))
        assert engine.statistics().num_preempted > 0 or cache_tokens > 640
    assert_same(completions, expected)
    assert set(SIZES) <= {1, 2, 4, 6, 7}
    assert len(set(SIZES)) > 2, "rows of several sizes, and rounded up"


@pytest.mark.parametrize("name", ["qwen2_sliding", "gemma3_text"])
def test_recorded_steps_know_windows(name: str, tmp_path: Path, fixtures: pytest.FixtureRequest) -> None:
    family_model(name).save_pretrained(tmp_path)
    requests = mixed_requests(9, vocab_size=200)
    with serving(tmp_path) as engine:
        expected = results(engine.submit(requests))
    fixtures.getfixturevalue("_recorded")
    with serving(tmp_path) as engine:
        completions = results(engine.submit(requests))
    assert_same(completions, expected, tolerance=1e-4)
    assert SIZES


def test_a_turn_frees_the_memory_of_recordings(
    tiny_folders: dict[str, Path], tmp_path: Path, _recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has another memory after a turn, so each step is recorded again."""
    recorded: list[object] = []

    def record(_: GraphRecorder, function: Callable[[], None]) -> Callable[[], None]:
        recorded.append(function)
        function()
        return function

    monkeypatch.setattr(GraphRecorder, "record", record)
    requests = [request(str(i), seed=i, max_new_tokens=400) for i in range(4)]
    options = {"context_tokens": 512, "num_slots": 4, "turn": EngineTurn(tmp_path)}
    with told_learner(tmp_path) as learner, serving(tiny_folders["qwen2"], **options) as engine:
        futures = engine.submit(requests)
        for turns in range(1, 4):
            wait_until(lambda turns=turns: len(recorded) >= turns)  # type: ignore[misc]
            assert learner.take() == 0
            learner.give()
        completions = results(futures)
    assert 4 <= len(recorded) <= 12, "at most three sizes a turn"
    assert_agree(completions, learner_logprobs(tiny_folders["qwen2"], requests, completions), 1e-5)


@pytest.mark.usefixtures("_recorded")
def test_recorded_steps_use_new_weights(tiny_folders: dict[str, Path]) -> None:
    models = {version: model_of(tiny_folders["qwen2"], factor=1 + version / 10) for version in range(3)}
    requests = [request(str(i), seed=i, max_new_tokens=400) for i in range(3)]
    with serving(tiny_folders["qwen2"], context_tokens=512) as engine:
        futures = engine.submit(requests)
        for version in (1, 2):
            wait_until(lambda version=version: engine.statistics().decode_steps > 100 * version)  # type: ignore[misc]
            engine.load_weights(version, models[version].named_parameters()).result(timeout=60)
        completions = results(futures)
    expected = [
        logprobs_by_version(models, one, completion) for one, completion in zip(requests, completions, strict=True)
    ]
    assert_agree(completions, expected, 1e-4)
    assert all(set(completion.versions.tolist()) == {0, 1, 2} for completion in completions)


def test_a_recorded_size_is_at_most_half_larger() -> None:
    steps = RecordedSteps.__new__(RecordedSteps)
    steps._num_slots = 200
    sizes = [steps.size_for(num) for num in range(1, 201)]
    assert all(num <= size <= max(num * 3 / 2, num + 1) for num, size in enumerate(sizes, start=1))
    assert sizes[-1] == 200
    assert len(set(sizes)) <= 15


def test_attention_of_rows_needs_a_gpu_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SimpleNamespace(num_kv_heads=8, head_dim=128, attention_cap=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def serves(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, num_rows: int = 256, **other: object) -> bool:
        a: Any = SimpleNamespace(**{**vars(sizes), **other})
        return RowAttention.serves(a, num_rows=num_rows, device=torch.device(device), dtype=dtype)

    assert serves()
    assert not serves(device="cpu")
    assert not serves(dtype=torch.float32)
    assert not serves(num_rows=2**13), "a dimension of CUDA's grid is 65,535 at most"
    assert not serves(attention_cap=50.0)
    assert not serves(head_dim=320)
    assert not serves(head_dim=100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not serves()


def test_torch_has_attention_of_rows_with_gaps() -> None:
    """The operation is not public: its arguments could change."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    first = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert names[:10] == [*first, "return_debug_mask"]
    assert {"scale", "seqused_k", "window_size_left", "window_size_right"} <= set(names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_sliding", "gemma3_text"])
def test_completions_of_a_gpu_have_the_logprobs_of_the_learner(name: str, tmp_path: Path) -> None:
    model: PreTrainedModel = family_model(name, head_dim=16) if name != "qwen2" else family_model(name)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    requests = mixed_requests(23, vocab_size=200, stop_token_ids=(2, 9))
    engine = EmbeddedEngine(
        tmp_path, device=torch.device("cuda"), dtype=torch.bfloat16, num_slots=7, context_tokens=128
    )
    completions = results(engine.submit(requests))
    engine.close()
    expected = learner_logprobs(tmp_path, requests, completions, torch.bfloat16)
    gaps = [
        np.abs(completion.behaviour_logprobs - logprobs)
        for completion, logprobs in zip(completions, expected, strict=True)
    ]
    assert float(np.concatenate(gaps).mean()) < 2e-2
