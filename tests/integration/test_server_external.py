"""An external server of each kind: whole runs, key, unknown weights, absences, and a server without version tags."""

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.external_server import export, running_server
from support.local_runs import Run
from support.model_versions import cached_logprobs, model_of
from support.patience import PATIENCE_S, eventually
from support.server_support import (
    CAPABILITIES,
    CONTEXT_TOKENS,
    PROMPT,
    SERVERS,
    VLLM_CAPABILITIES,
    RealServer,
    assert_close,
    begin,
    endless,
    fresh_logprobs,
    make_engine,
    more_tokens,
    request,
    results,
    running_engine,
    server_processes,
    stopped,
    version_runs,
)

from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.errors import ConfigError

pytestmark = pytest.mark.full

KEY = "AREAL_RLOO_TEST_SERVER_KEY"
UNTAGGED = {
    "sglang": dataclasses.replace(
        CAPABILITIES,
        version="0.4",
        context_tokens=CONTEXT_TOKENS + 16,
        prompt_tokens=CONTEXT_TOKENS + 10,
        cache_tokens=8 * (CONTEXT_TOKENS + 16),
        cache_key=None,
        weight_versions=False,
    ),
    "vllm": dataclasses.replace(VLLM_CAPABILITIES, version="0.4", context_tokens=CONTEXT_TOKENS, weight_versions=False),
}


@dataclasses.dataclass(frozen=True)
class External:
    """A running server, and its kind."""

    tested: RealServer
    process: ServerProcess


@pytest.fixture(scope="session")
def folder(wide_folder: Path) -> Path:
    return wide_folder


@pytest.fixture(scope="session")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exported") / "model"
    export(folder, made)
    return made


@pytest.fixture(scope="module", params=SERVERS)
def server(
    exported: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[External]:
    tested = SERVERS[request.param]
    with running_server(tested, exported, tmp_path_factory.mktemp("logs") / "external.log") as process:
        os.environ[KEY] = process.api_key
        yield External(tested, process)
    os.environ.pop(KEY, None)


def _options(server: External, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "engine": server.tested.engine,
        "url": server.process.url,
        "urls": (server.process.url,),
        "api_key_env": KEY,
        "health_every_s": 1.0,
    }
    return {**options, "health_timeout_s": 20.0, **changes}


def _run_at(start: Callable[..., Run], server: External, model: Path, name: str, *arguments: str) -> Run:
    kind = server.tested.engine
    where = (f"model.path={model}", f"rollout.{kind}.urls=[{server.process.url}]", f"rollout.{kind}.api_key_env={KEY}")
    # Versions differ enough to reveal a wrong version.
    steps = ("data.eval=null", "rollout.num_slots=8", "learner.optimizer.learning_rate=0.01")
    return start(f"rollout.engine={kind}", *where, *steps, *arguments, name=name)


@pytest.mark.rare
def test_two_runs_in_sequence_share_a_server(server: External, exported: Path, start: Callable[..., Run]) -> None:
    """The second run finds the last weights and the prompt cache of the first run, and uses neither."""
    for name in ("first", "second"):
        run = _run_at(start, server, exported, name)
        code, output = run.wait()
        assert code == 0, output
        assert run.summary()["num_train_steps"] == 5
        fresh = run.records()[0]
        assert set(fresh.staleness_tokens) == {0}
        assert fresh.mismatch_max < 1e-3, "its tokens are of the first weights, cache and all"
    assert server.process.exit_code() is None
    assert len(server_processes(server.process.log)) >= 3
    code, output = _run_at(start, server, exported, "third", "rollout.tensor_parallel=2").wait()
    assert code == 2
    size = {"sglang": "tp_size", "vllm": "tensor-parallel-size"}[server.tested.engine]
    assert f"expected a server with {size} 2, as rollout.tensor_parallel says, got 1" in output


def test_nothing_is_generated_before_the_learners_weights_load(server: External, folder: Path, tmp_path: Path) -> None:
    with running_engine(folder, tmp_path / "no.log", **_options(server)) as engine:
        assert engine.statistics().policy_version == -1
        (future,) = engine.submit([request("a")])
        time.sleep(1.0)
        assert not future.done()
        assert engine.load_weights(0, model_of(folder).named_parameters()).result(timeout=PATIENCE_S) == 0
        completion = future.result(timeout=PATIENCE_S)
        assert version_runs(completion) == [0]
        assert_close(completion, cached_logprobs({0: model_of(folder)}, PROMPT, completion))
    assert server.process.exit_code() is None, "it is not ours to end"


def test_a_server_with_its_weights_continues_after_an_absence(server: External, folder: Path, tmp_path: Path) -> None:
    with running_engine(folder, tmp_path / "no.log", **_options(server)) as engine:
        assert engine.load_weights(3, model_of(folder).named_parameters()).result(timeout=PATIENCE_S) == 3
        long = endless("l", 6)
        futures = begin(engine, [*long, *(request(f"b{i}", max_new_tokens=500) for i in range(4))], num_tokens=100)
        os.killpg(server.process.pid, signal.SIGSTOP)
        eventually(lambda: engine.statistics().num_running == 0, "it is noticed")
        os.killpg(server.process.pid, signal.SIGCONT)
        completions = [*stopped(engine, long, futures[:6]), *results(futures[6:])]
        assert [len(completion.tokens) for completion in completions[6:]] == [500] * 4
        for completion in completions:
            assert version_runs(completion) == [3]
            assert_close(completion, cached_logprobs({3: model_of(folder)}, PROMPT, completion))
        assert engine.server_statistics().restarts == 1
        assert engine.server_statistics().weights_lost == 0
    assert server.process.exit_code() is None


def test_a_server_without_tags_is_updated_without_running_requests(
    server: External, folder: Path, tmp_path: Path
) -> None:
    models = {v: model_of(folder, factor=f) for v, f in ((5, 1.0), (6, 1.02), (7, 0.98))}
    with running_engine(
        folder, tmp_path / "no.log", capabilities=UNTAGGED[server.tested.engine], **_options(server)
    ) as engine:
        assert engine.load_weights(5, models[5].named_parameters()).result(timeout=PATIENCE_S) == 5
        long = endless("l", 6)
        futures = begin(engine, [*long, *(request(f"c{i}", max_new_tokens=500) for i in range(6))])
        for version in (6, 7):
            more_tokens(engine, 100)
            weights = models[version].named_parameters()
            assert engine.load_weights(version, weights).result(timeout=PATIENCE_S) == version
        completions = [*stopped(engine, long, futures[:6]), *results(futures[6:])]
        assert [len(completion.tokens) for completion in completions[6:]] == [500] * 6
        for completion in completions:
            assert_close(completion, fresh_logprobs(models, PROMPT, completion))
        assert version_runs(completions[0]) == [5, 6, 7]
        assert engine.server_statistics().resumed > 0


def test_a_wrong_key_is_refused_with_the_option_to_fix(
    server: External, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_RLOO_TEST_WRONG_KEY", "wrong")
    for name, message in (
        ("AREAL_RLOO_TEST_WRONG_KEY", "refuses the key"),
        ("AREAL_RLOO_TEST_NO_KEY", "got nothing; set it"),
    ):
        engine = make_engine(folder, tmp_path / "no.log", **_options(server, api_key_env=name))
        with pytest.raises(ConfigError, match=f"rollout.{server.tested.engine}.api_key_env: .*{message}"):
            engine.ready.result(timeout=PATIENCE_S)
        engine.close()


def test_a_server_that_does_not_fit_or_answer_is_refused(server: External, folder: Path, tmp_path: Path) -> None:
    nobody = {"url": "http://127.0.0.1:9", "urls": ("http://127.0.0.1:9",), "start_timeout_s": 1.0}
    kind = server.tested.engine
    small = dataclasses.replace(UNTAGGED[kind], context_tokens=100)
    for changes, message in (
        ({"tensor_parallel": 2}, "(tp_size|tensor-parallel-size) 2"),
        ({"capabilities": small}, f"expected room for {CONTEXT_TOKENS} tokens"),
        (nobody, f"did not answer within rollout.{kind}.start_timeout_s=1 s"),
    ):
        engine = make_engine(folder, tmp_path / "no.log", **_options(server, **changes))
        with pytest.raises(ConfigError, match=f"rollout.{kind}.urls: .*{message}"):
            engine.ready.result(timeout=PATIENCE_S)
        engine.close()
    assert server_processes(server.process.log), "it is left alone"
