"""Kill, stop or restart a real server under its engine; check that an engine leaves nothing behind."""

import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.model_versions import cached_logprobs, model_of
from support.patience import PATIENCE_S, eventually
from support.processes import command_of
from support.server_support import (
    PROMPT,
    SERVERS,
    EngineOnThread,
    assert_close,
    begin,
    endless,
    make_engine,
    named,
    request,
    results,
    running_engine,
    server_processes,
    stopped,
    version_runs,
)
from torch import Tensor

from areal_rloo.config import ServerConfig
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server import ServerPlan
from areal_rloo.engines.server.process import ServerProcess
from areal_rloo.errors import ConfigError, EngineError

pytestmark = pytest.mark.full

HEALTH = {"health_every_s": 1.0, "health_timeout_s": 20.0, "max_server_restarts": 9}


@pytest.fixture(scope="session")
def folder(wide_folder: Path) -> Path:
    return wide_folder


@pytest.fixture(scope="module", params=SERVERS)
def victim(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[EngineOnThread]:
    log = tmp_path_factory.mktemp("victim") / "server.log"
    with running_engine(folder, log, engine=request.param, **HEALTH) as engine:
        yield engine
    eventually(lambda: not server_processes(log), "a process is left")


@pytest.mark.parametrize(
    ("index", "number"),
    [
        (0, signal.SIGKILL),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.rare),
        (1, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.rare),
    ],
)
def test_a_crashed_or_hung_server_is_replaced_without_loss(
    index: int, number: signal.Signals, victim: EngineOnThread, folder: Path
) -> None:
    engine, log, title = victim, victim.log, victim.tested.titles[index]
    models = {1: model_of(folder, factor=1.02)}
    done: Counter[str] = Counter()
    assert engine.load_weights(1, models[1].named_parameters()).result(timeout=PATIENCE_S) == 1
    before = engine.server_statistics()
    long = endless("l", 6)
    requests = [*long, *(request(f"r{i}", max_new_tokens=500 + 10 * i) for i in range(6))]  # two slots for these
    futures = begin(engine, requests, num_tokens=100)
    for asked, future in zip(requests, futures, strict=True):
        future.add_done_callback(lambda _, name=asked.request_id: done.update([name]))
    former = server_processes(log)
    named(log, title).send_signal(number)
    eventually(lambda: engine.server_statistics().weights_lost > before.weights_lost, "the loss is counted")
    assert engine.statistics().policy_version == 0
    finished = sum(done.values())
    time.sleep(1.0)
    assert sum(done.values()) == finished, "nothing is generated before the weights are back"
    assert engine.load_weights(1, models[1].named_parameters()).result(timeout=PATIENCE_S) == 1
    completions = [*stopped(engine, long, futures[:6]), *results(futures[6:])]
    for asked, completion in zip(requests, completions, strict=True):
        assert (len(completion.tokens) == asked.sampling.max_new_tokens) == (asked not in long)
        assert version_runs(completion) == [1]
        assert_close(completion, cached_logprobs(models, PROMPT, completion))
    assert set(done.values()) == {1}
    assert engine.server_statistics().restarts == before.restarts + 1
    assert not [process for process in former if process.is_running()]


def test_a_crash_while_weights_are_written_fails_only_that_update(victim: EngineOnThread, folder: Path) -> None:
    engine, model = victim, model_of(folder, factor=1.02)
    version = engine.statistics().policy_version + 1

    def weights() -> Iterator[tuple[str, Tensor]]:
        first, *others = model.named_parameters()
        yield first
        named(victim.log, victim.tested.titles[0]).kill()
        eventually(lambda: not engine.statistics().ready, "the engine notices")
        yield from others

    error = engine.load_weights(version, weights()).exception(timeout=PATIENCE_S)
    assert isinstance(error, EngineError)
    (future,) = engine.submit([request("afterwards", min_version=version)])
    assert engine.load_weights(version, model.named_parameters()).result(timeout=PATIENCE_S) == version
    assert version_runs(future.result(timeout=PATIENCE_S)) == [version]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_that_keeps_crashing_ends_the_engine(kind: str, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with running_engine(folder, log, engine=kind, max_server_restarts=0) as engine:
        (future,) = begin(engine, endless("a", 1))
        named(log, engine.tested.titles[0]).kill()
        error = future.exception(timeout=PATIENCE_S)
        assert isinstance(error, EngineError)
        assert "gave up after 0 restarts" in str(error)
        assert str(log) in str(error)
        with pytest.raises(EngineError, match="the engine stopped"):
            engine.submit([request("b")])
        with pytest.raises(EngineError, match="the engine stopped"):
            engine.load_weights(1, [])


@pytest.mark.parametrize("kind", SERVERS)
def test_the_server_dies_with_a_killed_worker(kind: str, folder: Path, tmp_path: Path) -> None:
    python = SERVERS[kind].python()  # skips here: in the worker's process a skip would be an error
    log = tmp_path / "server.log"
    program = f"""
        import time
        from pathlib import Path
        from support.server_support import make_engine
        engine = make_engine(Path({str(folder)!r}), Path({str(log)!r}), engine={kind!r}, python={python!r})
        engine.ready.result(timeout=300)
        engine.load_weights(1, []).exception(timeout=120)
        print("ready", flush=True)
        time.sleep(100)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    tests = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=tests, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            processes = server_processes(log)
        finally:
            worker.kill()
    assert len(processes) >= 3
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive, [command_of(process) for process in alive]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_python_without_the_server_is_refused_with_a_remedy(kind: str, folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, tmp_path / "server.log", engine=kind, python=sys.executable)
    with pytest.raises(ConfigError, match=rf"rollout.{kind}.python: .* has no {kind}; run make {kind}"):
        engine.ready.result(timeout=PATIENCE_S)
    engine.close()


@pytest.mark.parametrize("kind", SERVERS)
def test_a_failed_start_gives_the_servers_error_in_a_line(kind: str, folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder, tmp_path / "server.log", engine=kind, arguments={"no-such-option": True})
    with pytest.raises(ConfigError, match=r"the server ended with code .*no-such-option.*its log is .*server.log"):
        engine.ready.result(timeout=PATIENCE_S)
    engine.close()


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_killed_during_its_start_is_no_mistake_of_the_user(kind: str, folder: Path, tmp_path: Path) -> None:
    """The kernel kills a server for memory; then the launcher starts the worker again."""
    log = tmp_path / "server.log"
    engine = make_engine(folder, log, engine=kind)
    eventually(lambda: len(server_processes(log)) >= 2, "keeper and server")
    for process in server_processes(log)[1:]:
        process.kill()
    with pytest.raises(EngineError, match=r"the server ended with code -9"):
        engine.ready.result(timeout=PATIENCE_S)
    engine.close()


def test_a_model_that_a_server_cannot_run_is_named_with_the_cause(
    tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    """The attention of vLLM on a CPU refuses heads of 16 in the first request."""
    engine = make_engine(tiny_folders["qwen2"], tmp_path / "server.log", engine="vllm")
    with pytest.raises(EngineError, match=r"Unsupported CPU attention configuration: head_dim=16.*server\.log"):
        engine.ready.result(timeout=PATIENCE_S)
    engine.close()
    eventually(lambda: not server_processes(tmp_path / "server.log"), "a process is left")


@pytest.mark.parametrize("kind", SERVERS)
def test_the_key_is_in_no_command_line_and_no_readable_file(kind: str, folder: Path, tmp_path: Path) -> None:
    tested = SERVERS[kind]
    plan = ServerPlan(folder, "cpu", "float32", 1, 2, 64, 1, model_context_tokens=4096)
    log = tmp_path / "server.log"
    process = ServerProcess(kind_of(tested.engine), tested.python(), ServerConfig(), plan, log)
    try:
        begun = ["-m", tested.titles[0]]
        eventually(lambda: any(command_of(each)[1:3] == begun for each in server_processes(log)), "no server starts")
        words = command_of(named(log, tested.titles[0]))
        assert not any(process.api_key in word for each in server_processes(log) for word in command_of(each))
        assert Path(words[words.index("--config") + 1]).stat().st_mode & 0o777 == 0o600
        assert log.stat().st_mode & 0o777 == 0o600, "servers write their options there"
    finally:
        process.kill()
