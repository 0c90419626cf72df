"""A server and a learner in turns: the server sleeps during a step, and nothing is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.faulty_server import FIRST_TOKEN, FakeSGLang, FakeVLLM, Faults, engine_on_faulty, fake_sample
from support.model_versions import model_of
from support.server_support import in_buckets, request
from support.turn_takers import ToldLearner, told_learner

from areal_rloo.engines.server import ServerEngine, UpdateGroup
from areal_rloo.engines.server.api import Connection
from areal_rloo.errors import EngineError
from areal_rloo.trajectory import Completion
from areal_rloo.turns import EngineTurn

Scenario = Callable[[ServerEngine, FakeSGLang, Faults, ToldLearner], Awaitable[None]]
PATIENCE_S = 3.0
STEP_S = 1.5  # longer than any pause of an update of the fake
KINDS = {"sglang": FakeSGLang, "vllm": FakeVLLM}
SLEEP = {"sglang": "/release_memory_occupation", "vllm": "/sleep"}
WAKE = {"sglang": "/resume_memory_occupation", "vllm": "/wake_up"}


def _play(folder: Path, run_folder: Path, fake: FakeSGLang, scenario: Scenario) -> None:
    async def main() -> None:
        with told_learner(run_folder, patience_s=PATIENCE_S) as learner:
            turn = EngineTurn(run_folder)
            on_faulty = engine_on_faulty(folder, fake, timeout_s=5.0, turn=turn)
            async with asyncio.timeout(60), on_faulty as (engine, faults):
                await _update(engine, folder, 1)
                await scenario(engine, fake, faults, learner)
                assert fake.disturbed == []

    asyncio.run(main())


async def _update(engine: ServerEngine, folder: Path, version: int) -> None:
    layouts, _ = in_buckets(model_of(folder))
    group = UpdateGroup("127.0.0.1", 1, f"group-{version}", 1, 2, "gloo", 5.0)
    await asyncio.wrap_future(engine.update_from_group(version, group, layouts, [fake_sample(version)]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_sleeps_in_each_step_and_requests_go_on(
    kind: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        futures = engine.submit([request(str(i), prompt=(1, 2), max_new_tokens=60) for i in range(12)])  # 8 slots
        for turn in range(1, 4):
            await asyncio.sleep(0.05)
            assert await asyncio.to_thread(learner.take) == 0, "no turn is missed"
            assert fake.asleep
            before = fake.sampled
            await asyncio.sleep(0.05)
            assert fake.sampled == before > 0
            assert engine.statistics().turns_given == turn
            await asyncio.to_thread(learner.give)
        for future in futures:
            completion = await asyncio.wrap_future(future)
            assert completion.tokens.tolist() == [FIRST_TOKEN + 1] * 60
        assert fake.sampled == 12 * 60, "no token is sampled twice"
        assert engine.statistics().turn_wait_s > 0.1
        assert engine.server_statistics().restarts == 0

    _play(tiny_folders["qwen2"], tmp_path, KINDS[kind](), scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_wait_for_the_end_of_a_step_and_come_before_the_next(
    kind: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        folder = tiny_folders["qwen2"]
        (future,) = engine.submit([request("a", prompt=(1, 2), max_new_tokens=60)])
        await asyncio.sleep(0.03)
        for version in range(2, 6):
            await asyncio.to_thread(learner.take)
            before = fake.sampled
            updating = asyncio.create_task(_update(engine, folder, version))
            await asyncio.sleep(0.05)
            assert not updating.done()
            await asyncio.to_thread(learner.give)
            while fake.version != version:
                assert fake.sampled == before, "a token of weights that are replaced at once"
                await asyncio.sleep(0)
            await asyncio.to_thread(learner.take)
            assert updating.done(), "the update is before the next step"
            await updating
            assert engine.statistics().policy_version == version
            await asyncio.to_thread(learner.give)
        assert len((await asyncio.wrap_future(future)).tokens) == 60

    _play(tiny_folders["qwen2"], tmp_path, KINDS[kind](), scenario)


def test_a_sleeping_server_has_no_part_in_a_question_for_tokens(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        (future,) = engine.submit([request("a", prompt=(1, 2), max_new_tokens=60)])
        await asyncio.sleep(0.05)
        await asyncio.to_thread(learner.take)
        begun = await asyncio.wait_for(asyncio.wrap_future(engine.unfinished()), timeout=5)
        assert 0 < len(begun["a"].tokens) == fake.sampled < 60
        assert fake.asleep, "the answer does not wake the server"
        engine.abort(["a"])
        await asyncio.sleep(0.05)
        assert future.done()
        await asyncio.to_thread(learner.give)

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [SLEEP, WAKE], ids=["sleep", "wake"])
@pytest.mark.parametrize("fault", ["refuse", "break", "reset"])
def test_a_server_that_does_not_obey_is_given_up(
    kind: str, calls: dict[str, str], fault: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    """The engine connects again, here to the same server; a server of a worker is restarted."""

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        faults.path, faults.fault, faults.left = calls[kind], fault, 1  # type: ignore[assignment]
        futures = engine.submit([request(str(i), prompt=(1, 2), max_new_tokens=60) for i in range(4)])
        for _ in range(2):
            await asyncio.sleep(0.02)
            assert await asyncio.to_thread(learner.take) == 0
            await asyncio.to_thread(learner.give)
            if calls is WAKE:
                fake.asleep = False  # as a new process
        for future in futures:
            assert len((await asyncio.wrap_future(future)).tokens) == 60
        assert faults.left == 0
        assert engine.server_statistics().restarts == 1
        fake.disturbed.clear()  # of the former process

    _play(tiny_folders["qwen2"], tmp_path, KINDS[kind](), scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_no_update_is_made_on_a_server_that_does_not_wake(
    kind: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        await asyncio.to_thread(learner.take)
        updating = asyncio.create_task(_update(engine, tiny_folders["qwen2"], 2))
        await asyncio.sleep(0.05)
        faults.path, faults.left = WAKE[kind], 1
        await asyncio.to_thread(learner.give)
        with pytest.raises(EngineError, match="version 2 was not loaded: the server"):
            await updating
        assert fake.disturbed == []
        fake.asleep = fake.paused = False  # as a new process

    _play(tiny_folders["qwen2"], tmp_path, KINDS[kind](), scenario)


def test_an_update_that_meets_a_server_falling_asleep_goes_first(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """A question for tokens delays both; then requests do not leave under the weights that the update replaces."""

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        (future,) = engine.submit([request("a", prompt=(1, 2), max_new_tokens=60)])
        await asyncio.sleep(0.05)
        exclusive = engine._state.exclusive
        async with exclusive:
            taking = asyncio.create_task(asyncio.to_thread(learner.take))
            await _until(lambda: len(exclusive._waiters or ()) == 1)
            updating = asyncio.create_task(_update(engine, tiny_folders["qwen2"], 2))
            await _until(lambda: len(exclusive._waiters or ()) == 2)
        await taking
        await asyncio.sleep(STEP_S)
        before, prefilled = fake.sampled, engine.statistics().prefill_tokens
        await asyncio.to_thread(learner.give)
        await _until(lambda: fake.version == 2)
        assert (fake.sampled, engine.statistics().prefill_tokens) == (before, prefilled)
        await updating
        assert engine.server_statistics().last_pause_s < STEP_S, "the step is no pause of the update"
        assert len((await asyncio.wrap_future(future)).tokens) == 60

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


def test_a_lost_request_costs_no_server(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_rloo.engines.server.turns._CALL_BACK_S", 0.3)

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        fake.loses = 1
        futures = engine.submit([request(str(i), prompt=(1, 2), max_new_tokens=60) for i in range(4)])
        await asyncio.sleep(0.05)
        assert await asyncio.to_thread(learner.take) == 0
        assert fake.asleep
        await asyncio.to_thread(learner.give)
        for future in futures:
            assert len((await asyncio.wrap_future(future)).tokens) == 60
        assert engine.server_statistics().restarts == 0

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


def test_only_requests_make_a_wait(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        await asyncio.to_thread(learner.take)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(learner.give)
        await _until(lambda: not fake.asleep)
        assert engine.statistics().turn_wait_s == 0

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


def test_a_crashed_server_gives_the_turn_and_starts_after_the_step(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        state = engine._state
        monkeypatch.setattr(engine._server, "managed", True)
        engine._supervision._num_restarts = 1  # so the start waits for two seconds
        assert state.connection is not None
        state.give_up(state.connection, "a crash")
        await _until(lambda: not state.occupied)
        (future,) = engine.submit([request("a", prompt=(1, 2), max_new_tokens=60)])
        assert await asyncio.to_thread(learner.take) == 0
        assert engine.statistics().turns_given == 1
        await asyncio.sleep(2.5)
        assert not state.occupied, "the server starts in a step"
        opens = engine._server.open

        async def slow() -> Connection:
            assert state.occupied
            await asyncio.sleep(PATIENCE_S + 1)
            monkeypatch.setattr(engine._server, "managed", False)  # it has the weights, so that these close no gate
            return await opens()

        monkeypatch.setattr(engine._server, "open", slow)
        await asyncio.to_thread(learner.give)
        await _until(lambda: state.occupied)
        assert await asyncio.to_thread(learner.take) == 0, "the learner waits for the end of a start"
        assert state.connection is not None
        assert fake.asleep
        assert fake.sampled == 0, "a server that the learner waits for computes nothing"
        await asyncio.to_thread(learner.give)
        await _until(lambda: fake.sampled > 0)
        await _update(engine, tiny_folders["qwen2"], 2)
        assert len((await asyncio.wrap_future(future)).tokens) == 60

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


@pytest.mark.parametrize("call", [SLEEP["sglang"], WAKE["sglang"], "/update_weights_from_distributed"])
def test_the_learner_waits_for_work_longer_than_its_patience(
    call: str, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        faults.path, faults.fault, faults.left, faults.wait_s = call, "wait", 1, PATIENCE_S + 1
        updating = asyncio.create_task(_update(engine, tiny_folders["qwen2"], 2))
        await asyncio.sleep(0.05)
        for _ in range(2):
            assert await asyncio.to_thread(learner.take) == 0
            assert fake.asleep
            await asyncio.to_thread(learner.give)
            await asyncio.sleep(0.05)
        assert faults.left == 0
        await updating

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


def test_a_server_that_stays_awake_starts_again_after_the_step(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        monkeypatch.setattr(engine._server, "managed", True)
        faults.path, faults.fault, faults.left = SLEEP["sglang"], "refuse", 1
        assert await asyncio.to_thread(learner.take) == 0
        await asyncio.sleep(0.5)  # the first restart is at once
        assert not engine._state.occupied, "the server starts in a step"
        monkeypatch.setattr(engine._server, "managed", False)
        await asyncio.to_thread(learner.give)
        await _until(lambda: engine._state.connection is not None)

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)


def test_a_waiting_question_is_answered_when_the_engine_ends(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    questions: list[Future[dict[str, Completion]]] = []

    async def scenario(engine: ServerEngine, fake: FakeSGLang, faults: Faults, learner: ToldLearner) -> None:
        await engine._state.exclusive.acquire()
        questions.append(engine.unfinished())
        await asyncio.sleep(0.05)
        questions.append(engine.unfinished())

    _play(tiny_folders["qwen2"], tmp_path, FakeSGLang(), scenario)
    for question in questions:
        with pytest.raises(EngineError, match="the engine was closed"):
            question.result(timeout=0)


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the fake server has no events
        await asyncio.sleep(0)


def test_an_engine_without_the_turn_starts_no_server(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeSGLang()
        with told_learner(tmp_path) as learner:
            await asyncio.to_thread(learner.take)
            on_faulty = engine_on_faulty(tiny_folders["qwen2"], fake, timeout_s=5.0, turn=EngineTurn(tmp_path))
            entering = asyncio.create_task(on_faulty.__aenter__())
            await asyncio.sleep(0.2)
            assert not entering.done()
            await asyncio.to_thread(learner.give)
            await asyncio.wait_for(entering, timeout=10)
            await on_faulty.__aexit__(None, None, None)
            assert await asyncio.to_thread(learner.take) == 0, "a closed engine has no turn"

    asyncio.run(main())
