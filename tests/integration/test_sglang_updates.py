"""Updates of a real, generating SGLang server through a process group, successful and failed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.model_versions import cached_logprobs, model_of
from support.patience import PATIENCE_S
from support.sglang_support import (
    PROMPT,
    EngineOnThread,
    Sender,
    after,
    assert_close,
    fresh_logprobs,
    in_buckets,
    request,
    results,
    running_engine,
    version_runs,
)
from torch import Tensor

from areal_rloo.engines.sglang import BucketLayout
from areal_rloo.errors import EngineError

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOnThread]:
    with running_engine(folder, tmp_path_factory.mktemp("logs") / "server.log") as running:
        yield running


Buckets = tuple[list[BucketLayout], list[Tensor]]


def _buckets(folder: Path, *factors: float) -> list[Buckets]:
    return [in_buckets(model_of(folder, factor=factor)) for factor in factors]


def _in_group(engine: EngineOnThread, sender: Sender, version: int, buckets: Buckets, *, meet: bool) -> None:
    layouts, flat = buckets
    loaded = engine.update_from_group(version, sender.group, layouts)
    if meet:
        sender.meet()
    sender.send(flat)
    assert loaded.result(timeout=PATIENCE_S) == version


def test_versions_arrive_in_flight_through_several_groups(engine: EngineOnThread, folder: Path) -> None:
    base = engine.statistics().policy_version
    models = {base + i: model_of(folder, factor=factor) for i, factor in enumerate((1.0, 1.02, 0.98, 1.01))}
    one, two, three = _buckets(folder, 1.02, 0.98, 1.01)
    first, second = Sender(f"first-{base}"), Sender(f"second-{base}")
    futures = engine.submit([request(f"a{i}", max_new_tokens=1000) for i in range(4)])
    after(0.8, engine)
    _in_group(engine, first, base + 1, one, meet=True)
    after(0.8, engine)
    _in_group(engine, first, base + 2, two, meet=False)
    after(0.8, engine)
    _in_group(engine, second, base + 3, three, meet=True)
    for completion in results(futures):
        assert version_runs(completion) == [base, base + 1, base + 2, base + 3]
        assert_close(completion, cached_logprobs(models, PROMPT, completion))


def test_a_layout_that_does_not_fit_is_refused_before_the_pause(engine: EngineOnThread, folder: Path) -> None:
    before = engine.statistics()
    layouts, _ = in_buckets(model_of(folder))
    with pytest.raises(EngineError, match="is missing"):
        sender = Sender("unfit")
        engine.update_from_group(before.policy_version + 1, sender.group, layouts[1:]).result(timeout=PATIENCE_S)
    assert engine.statistics().swap_s == before.swap_s


def _fails(engine: EngineOnThread, sender: Sender, version: int, folder: Path, send: Callable[[Sender], None]) -> str:
    ((layouts, _),) = _buckets(folder, 1.0)
    loaded = engine.update_from_group(version, sender.group, layouts)
    sender.meet()
    send(sender)
    sender.leave()
    return str(loaded.exception(timeout=PATIENCE_S))


def test_a_sender_that_dies_before_the_first_bucket_changes_nothing(engine: EngineOnThread, folder: Path) -> None:
    base = engine.statistics().policy_version
    weights = model_of(folder, factor=1.03).named_parameters()
    assert engine.load_weights(base + 1, weights).result(timeout=PATIENCE_S) == base + 1
    futures = engine.submit([request(f"b{i}", max_new_tokens=900) for i in range(3)])
    after(0.2, engine)
    words = _fails(engine, Sender(f"early-{base}"), base + 2, folder, lambda sender: None)
    assert "did not arrive" in words
    assert engine.statistics().policy_version == base + 1
    for completion in results(futures):
        assert version_runs(completion) == [base + 1]
        assert_close(completion, cached_logprobs({base + 1: model_of(folder, factor=1.03)}, PROMPT, completion))


def test_a_half_done_update_stops_generation_until_the_next(engine: EngineOnThread, folder: Path) -> None:
    base = engine.statistics().policy_version
    weights = model_of(folder, factor=0.97).named_parameters()
    assert engine.load_weights(base + 1, weights).result(timeout=PATIENCE_S) == base + 1
    ((_, flat),) = _buckets(folder, 5.0)
    futures = engine.submit([request(f"c{i}", max_new_tokens=900) for i in range(3)])
    after(0.2, engine)
    words = _fails(engine, Sender(f"middle-{base}"), base + 2, folder, lambda sender: sender.send(flat[:1]))
    assert "halfway" in words
    assert engine.statistics().policy_version == -1
    assert not any(future.done() for future in futures)
    _in_group(engine, Sender(f"again-{base}"), base + 3, *_buckets(folder, 1.0), meet=True)
    for completion in results(futures):
        assert len(completion.tokens) == 900
        assert version_runs(completion) == [base + 3]
        assert_close(completion, cached_logprobs({base + 3: model_of(folder)}, PROMPT, completion))


def test_mode_retract_computes_the_cache_again(folder: Path, tmp_path: Path) -> None:
    models = {v: model_of(folder, factor=f) for v, f in enumerate((1.0, 1.02, 0.98))}
    with running_engine(folder, tmp_path / "server.log", pause="retract") as engine:
        (second,) = _buckets(folder, 0.98)
        futures = engine.submit([request(f"d{i}", max_new_tokens=900) for i in range(4)])
        after(0.8, engine)
        assert engine.load_weights(1, models[1].named_parameters()).result(timeout=PATIENCE_S) == 1
        after(0.8, engine)
        _in_group(engine, Sender("retract"), 2, second, meet=True)
        for completion in results(futures):
            assert version_runs(completion) == [0, 1, 2]
            assert_close(completion, fresh_logprobs(models, PROMPT, completion))
        assert engine.server_statistics().retractions > 0


def test_a_missing_sender_ends_in_a_timeout(folder: Path, tmp_path: Path) -> None:
    """The server hangs while joining the group. It is restarted, and its requests continue."""
    with running_engine(folder, tmp_path / "server.log") as engine:
        futures = engine.submit([request(f"e{i}", max_new_tokens=300) for i in range(3)])
        layouts, _ = in_buckets(model_of(folder))
        update = engine.update_from_group(1, Sender("nobody", timeout_s=3.0).group, layouts)
        assert "no answer within 3 s" in str(update.exception(timeout=PATIENCE_S))
        for completion in results(futures):
            assert len(completion.tokens) == 300
            assert_close(completion, cached_logprobs({0: model_of(folder)}, PROMPT, completion))
        assert engine.server_statistics().restarts == 1
        assert engine.server_statistics().weights_lost == 0, "version 0 is what a server starts with"


def test_a_server_on_two_devices_loads_its_parts_of_the_weights(folder: Path, tmp_path: Path) -> None:
    models = {0: model_of(folder), 1: model_of(folder, factor=1.02)}
    (later,) = _buckets(folder, 1.02)
    with running_engine(folder, tmp_path / "server.log", tensor_parallel=2) as engine:
        for version in (0, 1):
            if version:
                _in_group(engine, Sender("two-devices", world_size=3), version, later, meet=True)
            (completion,) = results(engine.submit([request(f"f{version}")]))
            assert version_runs(completion) == [version]
            assert_close(completion, cached_logprobs(models, PROMPT, completion))
