"""The engine on real servers: requests, logprobs, new weights through files and a process group, aborts."""

import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.model_versions import cached_logprobs, model_of
from support.monitoring import expressions
from support.patience import PATIENCE_S, eventually
from support.server_support import (
    PROMPT,
    SERVERS,
    EngineOnThread,
    Sender,
    assert_close,
    begin,
    endless,
    fresh_logprobs,
    in_buckets,
    more_tokens,
    request,
    results,
    running_engine,
    samples_of,
    server_processes,
    stopped,
    version_runs,
)
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.engines.server import BucketLayout
from areal_rloo.errors import EngineError, GenerationError

pytestmark = pytest.mark.full

Buckets = tuple[list[BucketLayout], list[Tensor], PreTrainedModel]


@pytest.fixture(scope="session")
def folder(wide_folder: Path) -> Path:
    return wide_folder


@pytest.fixture(scope="module", params=SERVERS)
def engine(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[EngineOnThread]:
    with running_engine(folder, tmp_path_factory.mktemp("logs") / "server.log", engine=request.param) as running:
        yield running


@pytest.fixture(scope="module", params=SERVERS)
def retracting(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[EngineOnThread]:
    """A server that retracts requests during an update."""
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with running_engine(folder, log, engine=request.param, pause="retract") as running:
        yield running


def _load(engine: EngineOnThread, factor: float, folder: Path) -> int:
    """Load the next version and return its number."""
    version = engine.statistics().policy_version + 1
    model = model_of(folder, factor=factor)
    assert engine.load_weights(version, model.named_parameters()).result(timeout=PATIENCE_S) == version
    return version


def _buckets(folder: Path, *factors: float) -> list[Buckets]:
    models = [model_of(folder, factor=factor) for factor in factors]
    return [(*in_buckets(model), model) for model in models]


def _in_group(engine: EngineOnThread, sender: Sender, version: int, buckets: Buckets, *, meet: bool) -> None:
    layouts, flat, model = buckets
    samples = samples_of(model, version, num_ranks=sender.group.world_size - 1)
    loaded = engine.update_from_group(version, sender.group, layouts, samples)
    if meet:
        sender.meet()
    sender.send(flat)
    assert loaded.result(timeout=PATIENCE_S) == version


def test_logprobs_agree_with_transformers(engine: EngineOnThread, folder: Path) -> None:
    assert engine.statistics().policy_version == 0
    requests = [request(f"a{i}", prompt=PROMPT[: 2 + i % 4]) for i in range(12)]
    for asked, completion in zip(requests, results(engine.submit(requests)), strict=True):
        assert completion.finish_reason == "length"
        assert completion.versions.tolist() == [0] * 20
        assert_close(completion, cached_logprobs({0: model_of(folder)}, asked.prompt_tokens, completion))


def test_a_missing_sender_ends_in_a_timeout(engine: EngineOnThread, folder: Path) -> None:
    """The server hangs while joining the group. It is restarted, and its requests continue."""
    before = engine.server_statistics()
    assert engine.statistics().policy_version == 0
    requests = endless("t", 3)
    futures = begin(engine, requests, num_tokens=100)
    layouts, _ = in_buckets(model_of(folder))
    update = engine.update_from_group(1, Sender("nobody", timeout_s=3.0).group, layouts, ())
    assert "no answer within 3 s" in str(update.exception(timeout=PATIENCE_S))
    eventually(lambda: engine.server_statistics().restarts == before.restarts + 1, "it is restarted")
    for completion in stopped(engine, requests, futures):
        assert_close(completion, cached_logprobs({0: model_of(folder)}, PROMPT, completion))
    assert engine.server_statistics().weights_lost == before.weights_lost, "version 0 is what a server starts with"


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
    running = endless("w", 8)
    futures = begin(engine, [*running, *(request(f"x{i}") for i in range(12))])
    assert (engine.statistics().num_running, engine.statistics().num_waiting) == (8, 12)
    stopped(engine, running, futures[:8])
    assert all(len(completion.tokens) == 20 for completion in results(futures[8:]))


def test_a_bad_request_is_refused_by_name(engine: EngineOnThread) -> None:
    long, strange = engine.submit([request("long", max_new_tokens=20_000), request("strange", prompt=(3, 10**6))])
    with pytest.raises(GenerationError, match="request long: needs 20005 tokens, the context holds 16000"):
        long.result(timeout=0)
    with pytest.raises(GenerationError, match="request strange: a prompt: expected token ids from 0 to"):
        strange.result(timeout=0)
    assert engine.statistics().num_waiting == 0


def test_an_abort_returns_the_tokens_so_far_and_spares_others(engine: EngineOnThread) -> None:
    requests = [*endless("n", 1), *(request(name, max_new_tokens=800) for name in ("n00", "n01"))]
    futures = begin(engine, requests, num_tokens=100)
    engine.abort(["n0", "unknown"])
    ended = futures[0].result(timeout=PATIENCE_S)
    assert ended.finish_reason == "abort"
    assert len(ended.tokens) > 0
    assert [len(completion.tokens) for completion in results(futures[1:])] == [800, 800]


def test_an_update_in_flight_tags_tokens_with_their_weights(engine: EngineOnThread, folder: Path) -> None:
    before = engine.statistics()
    version = before.policy_version + 1
    models = {before.policy_version: model_of(folder), version: model_of(folder, factor=1.02)}
    requests = endless("u", 4)
    futures = begin(engine, requests, num_tokens=100)
    assert engine.load_weights(version, models[version].named_parameters()).result(timeout=PATIENCE_S) == version
    for completion in stopped(engine, requests, futures):
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


def test_calls_without_the_key_are_refused(engine: EngineOnThread) -> None:
    for path in (engine.tested.read_path, engine.tested.resume_path):
        asked = urllib.request.Request(engine.url() + path, data=b"{}", headers={"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=PATIENCE_S)
        assert refused.value.code == 401
        refused.value.close()


def test_the_dashboards_use_metrics_of_the_server(engine: EngineOnThread) -> None:
    prefix = f"{engine.tested.engine}:"
    asked = {name for expression in expressions() for name in re.findall(rf"{prefix}\w+", expression)}
    said = set(re.findall(rf"^({prefix}\w+)", engine.metrics_text(), flags=re.MULTILINE))
    assert asked
    assert asked <= said


def test_versions_arrive_in_flight_through_several_groups(engine: EngineOnThread, folder: Path) -> None:
    base = _load(engine, 1.0, folder)
    models = {base + i: model_of(folder, factor=factor) for i, factor in enumerate((1.0, 1.02, 0.98, 1.01))}
    one, two, three = _buckets(folder, 1.02, 0.98, 1.01)
    first, second = Sender(f"first-{base}"), Sender(f"second-{base}")
    requests = endless("a", 4)
    futures = begin(engine, requests, num_tokens=100)
    _in_group(engine, first, base + 1, one, meet=True)
    more_tokens(engine, 100)
    _in_group(engine, first, base + 2, two, meet=False)
    more_tokens(engine, 100)
    _in_group(engine, second, base + 3, three, meet=True)
    for completion in stopped(engine, requests, futures):
        assert version_runs(completion) == [base, base + 1, base + 2, base + 3]
        assert_close(completion, cached_logprobs(models, PROMPT, completion))


def test_a_layout_that_does_not_fit_is_refused_before_the_pause(engine: EngineOnThread, folder: Path) -> None:
    before = engine.statistics()
    layouts, _ = in_buckets(model_of(folder))
    with pytest.raises(EngineError, match="is missing"):
        sender = Sender("unfit")
        version = before.policy_version + 1
        engine.update_from_group(version, sender.group, layouts[1:], ()).result(timeout=PATIENCE_S)
    assert engine.statistics().swap_s == before.swap_s


def _fails(engine: EngineOnThread, sender: Sender, version: int, folder: Path, send: Callable[[Sender], None]) -> str:
    ((layouts, *_),) = _buckets(folder, 1.0)
    loaded = engine.update_from_group(version, sender.group, layouts, ())
    sender.meet()
    send(sender)
    sender.leave()
    return str(loaded.exception(timeout=PATIENCE_S))


def test_a_sender_that_dies_before_the_first_bucket_changes_nothing(engine: EngineOnThread, folder: Path) -> None:
    base = engine.statistics().policy_version
    weights = model_of(folder, factor=1.03).named_parameters()
    assert engine.load_weights(base + 1, weights).result(timeout=PATIENCE_S) == base + 1
    requests = endless("b", 3)
    futures = begin(engine, requests, num_tokens=100)
    words = _fails(engine, Sender(f"early-{base}"), base + 2, folder, lambda sender: None)
    assert "did not arrive" in words
    assert engine.statistics().policy_version == base + 1
    for completion in stopped(engine, requests, futures):
        assert version_runs(completion) == [base + 1]
        assert_close(completion, cached_logprobs({base + 1: model_of(folder, factor=1.03)}, PROMPT, completion))


def test_a_half_done_update_stops_generation_until_the_next(engine: EngineOnThread, folder: Path) -> None:
    base = engine.statistics().policy_version
    weights = model_of(folder, factor=0.97).named_parameters()
    assert engine.load_weights(base + 1, weights).result(timeout=PATIENCE_S) == base + 1
    ((_, flat, _),) = _buckets(folder, 5.0)
    requests = endless("c", 3)
    futures = begin(engine, requests, num_tokens=100)
    words = _fails(engine, Sender(f"middle-{base}"), base + 2, folder, lambda sender: sender.send(flat[:1]))
    assert "halfway" in words
    assert engine.statistics().policy_version == -1
    assert not any(future.done() for future in futures)
    _in_group(engine, Sender(f"again-{base}"), base + 3, *_buckets(folder, 1.0), meet=True)
    for completion in stopped(engine, requests, futures):
        assert version_runs(completion) == [base + 3]
        assert_close(completion, cached_logprobs({base + 3: model_of(folder)}, PROMPT, completion))


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_on_two_devices_loads_its_parts_of_the_weights(kind: str, folder: Path, tmp_path: Path) -> None:
    models = {0: model_of(folder), 1: model_of(folder, factor=1.02)}
    (later,) = _buckets(folder, 1.02)
    with running_engine(folder, tmp_path / "server.log", engine=kind, tensor_parallel=2) as engine:
        for version in (0, 1):
            if version > 0:
                _in_group(engine, Sender("two-devices", world_size=3), version, later, meet=True)
            (completion,) = results(engine.submit([request(f"f{version}")]))
            assert version_runs(completion) == [version]
            assert_close(completion, cached_logprobs(models, PROMPT, completion))
        assert engine.server_statistics().proven_updates == 1


def test_mode_retract_computes_the_cache_again(retracting: EngineOnThread, folder: Path) -> None:
    base = _load(retracting, 1.0, folder)
    models = {base + i: model_of(folder, factor=factor) for i, factor in enumerate((1.0, 1.02, 0.98))}
    (third,) = _buckets(folder, 0.98)
    requests = endless("d", 4)
    futures = begin(retracting, requests, num_tokens=100)
    assert _load(retracting, 1.02, folder) == base + 1
    more_tokens(retracting, 100)
    _in_group(retracting, Sender(f"retract-{base}"), base + 2, third, meet=True)
    for completion in stopped(retracting, requests, futures):
        assert version_runs(completion) == [base, base + 1, base + 2]
        assert_close(completion, fresh_logprobs(models, PROMPT, completion))
    if retracting.tested.engine == "sglang":  # vLLM does not tell this of a request
        assert retracting.server_statistics().retractions > 0


def test_close_ends_requests_with_the_tokens_so_far(retracting: EngineOnThread) -> None:
    futures = begin(retracting, endless("c", 10), num_tokens=100)
    retracting.close()
    assert [future.result(timeout=0).finish_reason for future in futures] == ["abort"] * 10
    eventually(lambda: not server_processes(retracting.log), "a process is left")
