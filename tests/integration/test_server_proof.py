"""A real server's parameters are compared with the published weights after each update."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faulty_server import Faults, faulty_proxy
from support.model_versions import cached_logprobs, model_of
from support.patience import PATIENCE_S, eventually
from support.server_support import (
    CONTEXT_TOKENS,
    MODEL_TOKENS,
    PROMPT,
    SERVERS,
    EngineOnThread,
    Sender,
    assert_close,
    in_buckets,
    request,
    results,
    running_engine,
    samples_of,
    version_runs,
)

from areal_rloo.config import ServerConfig
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server import ServerPlan
from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.errors import EngineError
from areal_rloo.loop_thread import LoopThread

pytestmark = pytest.mark.full


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
def proxied(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[EngineOnThread, Faults]]:
    """An engine on a real external server, behind a proxy with faults."""
    tested = SERVERS[request.param]
    plan = ServerPlan(folder, "cpu", "float32", 1, 8, CONTEXT_TOKENS, 1, model_context_tokens=MODEL_TOKENS)
    logs = tmp_path_factory.mktemp("proxied")
    process, loop = (
        ServerProcess(kind_of(tested.engine), tested.python(), ServerConfig(), plan, logs / "server.log"),
        LoopThread("proxy"),
    )
    proxy = faulty_proxy(process.url, process.api_key)
    try:
        url, faults = loop.run(proxy.__aenter__())
        health = {"health_every_s": 1.0, "health_timeout_s": 20.0}
        with running_engine(folder, logs / "no.log", engine=tested.engine, url=url, urls=(url,), **health) as running:
            yield running, faults
        loop.run(proxy.__aexit__(None, None, None))
    finally:
        loop.close()
        process.kill()


def _send(engine: EngineOnThread, version: int, model: Any, flat: list[torch.Tensor]) -> BaseException | None:
    """Send bytes as a version, with the fingerprints of the model."""
    sender = Sender(f"proof-{version}")
    loaded = engine.update_from_group(version, sender.group, in_buckets(model)[0], samples_of(model, version))
    sender.meet()
    sender.send(flat)
    sender.leave()
    return loaded.exception(timeout=PATIENCE_S)


def test_right_weights_are_proven_whatever_the_sample(engine: EngineOnThread, folder: Path) -> None:
    before = engine.server_statistics()
    for version in range(1, 5):  # two layers, and the parameters outside of the layers
        model = model_of(folder, factor=1 + version / 100)
        if version % 2:
            assert _send(engine, version, model, in_buckets(model)[1]) is None
        else:
            assert engine.load_weights(version, model.named_parameters()).result(timeout=PATIENCE_S) == version
    after = engine.server_statistics()
    assert after.proven_updates == before.proven_updates + 4
    assert (after.unproven_updates, after.weight_mismatches) == (0, 0)


def test_altered_bytes_fail_the_update_and_then_restart_the_server(engine: EngineOnThread, folder: Path) -> None:
    before, base = engine.server_statistics(), engine.statistics().policy_version
    model = model_of(folder, factor=1.05)
    for version in (base + 1, base + 2):
        _, flat = in_buckets(model)
        for bucket in flat:
            bucket.view(torch.float32).mul_(1 + 1e-6)
        error = _send(engine, version, model, flat)
        assert isinstance(error, EngineError)
        assert f"the server does not hold version {version}: model." in str(error)
        assert "expected" in str(error)
        assert "found" in str(error)
        assert engine.statistics().policy_version in (-1, 0), "a version that was not proven is not reported"
    eventually(lambda: engine.server_statistics().restarts > before.restarts, "the server is restarted")
    assert engine.server_statistics().weight_mismatches == before.weight_mismatches + 2
    (future,) = engine.submit([request("a")])
    assert not future.done()
    assert _send(engine, base + 3, model, in_buckets(model)[1]) is None
    completion = future.result(timeout=PATIENCE_S)
    assert version_runs(completion) == [base + 3]
    assert_close(completion, cached_logprobs({base + 3: model}, PROMPT, completion))


def test_a_server_that_only_says_it_loaded_is_noticed(proxied: tuple[EngineOnThread, Faults], folder: Path) -> None:
    engine, faults = proxied
    version = engine.statistics().policy_version + 2
    former, model = model_of(folder, factor=1.01), model_of(folder, factor=1.02)
    assert engine.load_weights(version, former.named_parameters()).result(timeout=PATIENCE_S) == version
    faults.path, faults.fault, faults.left = engine.tested.read_path, "ignore", 1
    error = engine.load_weights(version + 1, model.named_parameters()).exception(timeout=PATIENCE_S)
    assert isinstance(error, EngineError)
    noticed = {
        "sglang": f"the server does not hold version {version + 1}",
        "vllm": "expected results of 1 ranks, got 0",
    }
    assert noticed[engine.tested.engine] in str(error)
    assert engine.statistics().policy_version == -1
    weights = list(model.named_parameters())
    eventually(lambda: _loads(engine, version + 2, weights), "the next update succeeds")  # vLLM is opened again first


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        ("refuse", 1),
        pytest.param("break", 3, marks=pytest.mark.rare),
        pytest.param("reset after", 1, marks=pytest.mark.rare),
    ],
)
def test_a_server_that_does_not_continue_keeps_right_tags(
    fault: Any, times: int, proxied: tuple[EngineOnThread, Faults], folder: Path
) -> None:
    engine, faults = proxied
    version = max(0, engine.statistics().policy_version) + 10
    models = {version + i: model_of(folder, factor=1 + i / 50) for i in range(3)}
    assert engine.load_weights(version, models[version].named_parameters()).result(timeout=PATIENCE_S) == version
    futures = engine.submit([request(f"{fault}{i}", max_new_tokens=3000) for i in range(4)])
    faults.path, faults.fault, faults.left = engine.tested.resume_path, fault, times
    second = engine.load_weights(version + 1, models[version + 1].named_parameters())
    assert (second.exception(timeout=PATIENCE_S) is None) == (fault == "refuse")
    futures += engine.submit([request(f"{fault}-later{i}", max_new_tokens=300) for i in range(4)])
    weights = list(models[version + 2].named_parameters())
    eventually(lambda: _loads(engine, version + 2, weights), "the next update succeeds")
    for completion in results(futures):
        assert_close(completion, cached_logprobs(models, PROMPT, completion))


def _loads(engine: EngineOnThread, version: int, weights: list[Any]) -> bool:
    return engine.load_weights(version, weights).exception(timeout=PATIENCE_S) is None
