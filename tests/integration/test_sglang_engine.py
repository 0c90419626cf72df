"""The SGLang engine on a real server: requests, logprobs, new weights through files, aborts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.model_versions import cached_logprobs, model_of
from support.patience import PATIENCE_S
from support.sglang_support import (
    PROMPT,
    EngineOnThread,
    after,
    assert_close,
    fresh_logprobs,
    request,
    results,
    running_engine,
    version_runs,
)

from areal_rloo.errors import EngineError

pytestmark = pytest.mark.full

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOnThread]:
    with running_engine(folder, tmp_path_factory.mktemp("logs") / "server.log") as running:
        yield running


def _load(engine: EngineOnThread, factor: float, folder: Path) -> int:
    """Load the next version and return its number."""
    version = engine.statistics().policy_version + 1
    model = model_of(folder, factor=factor)
    assert engine.load_weights(version, model.named_parameters()).result(timeout=PATIENCE_S) == version
    return version


def test_logprobs_agree_with_transformers(engine: EngineOnThread, folder: Path) -> None:
    assert engine.statistics().policy_version == 0
    requests = [request(f"a{i}", prompt=PROMPT[: 2 + i % 4]) for i in range(12)]
    for asked, completion in zip(requests, results(engine.submit(requests)), strict=True):
        assert completion.finish_reason == "length"
        assert completion.versions.tolist() == [0] * 20
        assert_close(completion, cached_logprobs({0: model_of(folder)}, asked.prompt_tokens, completion))


def test_greedy_tokens_and_stops_agree_with_transformers(engine: EngineOnThread, folder: Path) -> None:
    (free,) = results(engine.submit([request("g", greedy=True)]))
    expected = model_of(folder).generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert free.tokens.tolist() == expected[0, len(PROMPT) :].tolist()
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    stopped, held = results(
        engine.submit(
            [
                request("h", greedy=True, stop_token_ids=(stop,)),
                request("i", greedy=True, stop_token_ids=(stop,), min_new_tokens=15),
            ]
        )
    )
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stop not in held.tokens[:15].tolist()
    assert len(held.tokens) >= 15


def test_more_requests_than_slots_wait_in_the_client(engine: EngineOnThread) -> None:
    futures = engine.submit([request(f"w{i}", max_new_tokens=100) for i in range(20)])
    after(0.1, engine)
    statistics = engine.statistics()
    assert statistics.num_running <= 8
    assert statistics.num_waiting > 0
    assert all(len(completion.tokens) == 100 for completion in results(futures))


def test_a_bad_request_is_refused_by_name(engine: EngineOnThread) -> None:
    with pytest.raises(EngineError, match="request long: needs 5005 tokens, the context holds 1200"):
        engine.submit([request("long", max_new_tokens=5000)])
    with pytest.raises(EngineError, match="request strange: a prompt: expected token ids from 0 to"):
        engine.submit([request("strange", prompt=(3, 10**6))])
    assert engine.statistics().num_waiting == 0


def test_an_abort_returns_the_tokens_so_far_and_spares_others(engine: EngineOnThread) -> None:
    futures = engine.submit([request(name, max_new_tokens=800) for name in ("n1", "n10", "n11")])
    after(0.5, engine)
    engine.abort(["n1", "unknown"])
    ended = futures[0].result(timeout=PATIENCE_S)
    assert ended.finish_reason == "abort"
    assert 0 < len(ended.tokens) < 800
    assert [len(completion.tokens) for completion in results(futures[1:])] == [800, 800]


def test_an_update_in_flight_tags_tokens_with_their_weights(engine: EngineOnThread, folder: Path) -> None:
    before = engine.statistics()
    version = before.policy_version + 1
    models = {before.policy_version: model_of(folder), version: model_of(folder, factor=1.02)}
    futures = engine.submit([request(f"u{i}", max_new_tokens=900) for i in range(4)])
    after(0.8, engine)
    assert engine.load_weights(version, models[version].named_parameters()).result(timeout=PATIENCE_S) == version
    for completion in results(futures):
        assert len(completion.tokens) == 900
        assert version_runs(completion) == [version - 1, version]
        assert_close(completion, cached_logprobs(models, PROMPT, completion))
    after_it = engine.statistics()
    assert after_it.weight_updates == before.weight_updates + 1
    assert 0 < after_it.swap_s - before.swap_s == pytest.approx(engine.server_statistics().last_pause_s)


def test_a_prompt_cached_by_earlier_weights_is_computed_again(engine: EngineOnThread, folder: Path) -> None:
    prompt = tuple(range(3, 200))
    results(engine.submit([request("r1", prompt=prompt)]))
    version = _load(engine, 0.9, folder)
    (completion,) = results(engine.submit([request("r2", prompt=prompt)]))
    assert version_runs(completion) == [version]
    assert_close(completion, fresh_logprobs({version: model_of(folder, factor=0.9)}, prompt, completion))


def test_a_request_waits_for_its_version_without_blocking_others(engine: EngineOnThread, folder: Path) -> None:
    version = engine.statistics().policy_version + 1
    (early,) = engine.submit([request("m1", min_version=version)])
    (other,) = engine.submit([request("m2")])
    assert other.result(timeout=PATIENCE_S).versions[-1] == version - 1
    assert not early.done()
    _load(engine, 1.0, folder)
    assert version_runs(early.result(timeout=PATIENCE_S)) == [version]


def test_an_earlier_version_is_not_loaded(engine: EngineOnThread, folder: Path) -> None:
    version = _load(engine, 1.0, folder)
    assert engine.load_weights(version - 1, model_of(folder, factor=3.0).named_parameters()).result() == version
    (completion,) = results(engine.submit([request("e")]))
    assert_close(completion, fresh_logprobs({version: model_of(folder)}, PROMPT, completion))


def test_weights_that_do_not_fit_change_nothing(engine: EngineOnThread, folder: Path) -> None:
    version = _load(engine, 1.0, folder)
    weights = dict(model_of(folder, factor=2.0).named_parameters())
    name = next(iter(weights))
    wrong = {
        "unknown": {**weights, "model.extra": weights[name]},
        "missing": {key: value for key, value in weights.items() if key != "model.norm.weight"},
        "shape": {**weights, "model.norm.weight": torch.ones(3)},
    }
    for case, message in (("unknown", "none of that name"), ("missing", "is missing"), ("shape", "expected shape")):
        with pytest.raises(EngineError, match=message):
            engine.load_weights(version + 1, wrong[case].items()).result(timeout=PATIENCE_S)
    (completion,) = results(engine.submit([request("f")]))
    assert_close(completion, fresh_logprobs({version: model_of(folder)}, PROMPT, completion))


def test_the_dashboard_uses_metrics_of_the_server(engine: EngineOnThread) -> None:
    dashboard = json.loads((REPO / "launcher" / "monitoring" / "grafana" / "dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"sglang:\w+", target["expr"])
    }
    said = set(re.findall(r"^(sglang:\w+)", engine.metrics_text(), flags=re.MULTILINE))
    assert asked
    assert asked <= said
