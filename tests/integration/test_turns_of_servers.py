"""Real servers in turns with a learner: no token in a step, weights after it, and tokens with the right logprobs."""

import signal
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from support.model_versions import model_of
from support.patience import PATIENCE_S, eventually
from support.server_support import (
    PROMPT,
    SERVERS,
    EngineOnThread,
    assert_close,
    begin,
    endless,
    fresh_logprobs,
    make_engine,
    named,
    server_processes,
    stopped,
    version_runs,
)
from support.turn_takers import ToldLearner, told_learner

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.turns import EngineTurn

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[ToldLearner]:
    with told_learner(tmp_path, patience_s=PATIENCE_S) as found:
        yield found


@pytest.mark.parametrize("kind", SERVERS)
def test_a_real_server_sleeps_in_each_step(kind: str, wide_folder: Path, tmp_path: Path, learner: ToldLearner) -> None:
    log = tmp_path / "server.log"
    models = {version: model_of(wide_folder, factor=1 + 0.02 * version) for version in range(4)}
    learner.take()
    engine = make_engine(wide_folder, log, engine=kind, turn=EngineTurn(tmp_path))
    try:
        time.sleep(1)
        assert not engine.ready.done()
        assert server_processes(log) == [], "a server takes memory at its start"
        learner.give()
        engine.ready.result(timeout=PATIENCE_S)
        requests = endless("a", 4)
        futures = begin(engine, requests)
        for version in range(1, 4):
            assert learner.take() == 0
            so_far = _tokens(engine)
            assert so_far > 0
            loading = engine.load_weights(version, models[version].named_parameters())
            time.sleep(0.5)
            assert _tokens(engine) == so_far, "the server generates in a step"
            assert not loading.done()
            learner.give()
            assert loading.result(timeout=PATIENCE_S) == version
            _all_go_on(engine, requests, version)
        for completion in stopped(engine, requests, futures):
            runs = version_runs(completion)
            assert (runs, runs[0], runs[-1]) == (sorted(runs), 0, 3)
            assert_close(completion, fresh_logprobs(models, PROMPT, completion))
        assert engine.server_statistics().restarts == 0
        assert engine.server_statistics().unproven_updates == 0
        assert engine.statistics().turns_given == 3
        _dies_in_its_sleep(engine, log, learner)
    finally:
        engine.close()
    assert learner.take() == 0


def _dies_in_its_sleep(engine: EngineOnThread, log: Path, learner: ToldLearner) -> None:
    """The server is started again only after the step, and continues its requests with the newest weights."""
    futures = begin(engine, endless("b", 4))
    assert learner.take() == 0
    named(log, engine.tested.titles[0]).send_signal(signal.SIGKILL)
    eventually(lambda: not server_processes(log), "the processes of the server end")
    time.sleep(1)
    assert server_processes(log) == []
    learner.give()
    eventually(lambda: bool(server_processes(log)), "the server is started again")
    assert not any(future.done() for future in futures)


def _all_go_on(engine: EngineOnThread, requests: Sequence[GenerationRequest], version: int) -> None:
    """Wait until every request has tokens of this version, with pauses that grow: a question calls requests back."""
    pauses_s = (0.1 * 1.5**number for number in count())

    def have_tokens() -> bool:
        time.sleep(next(pauses_s))
        newest = [completion.versions[-1] for completion in engine.unfinished().values()]
        return newest == [version] * len(requests)

    eventually(have_tokens, f"all requests go on with version {version}")


def _tokens(engine: EngineOnThread) -> int:
    return sum(len(completion.tokens) for completion in engine.unfinished().values())
