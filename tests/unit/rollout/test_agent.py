"""Agents as episodes: functions with the real `openai` client on a real engine, and the outcome of every sample."""

import asyncio
import importlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.agents_to_train import HOLD, SEEN
from support.chat_endpoint import (
    DATA,
    Recorder,
    RefusingRewards,
    ScriptedEngine,
    a_sample,
    assert_trained_ids_are_generated_ids,
    chat_format,
    sample_engine,
    until,
)

from areal_rloo.config import Config, EpisodeConfig, RolloutConfig
from areal_rloo.errors import ConfigError, EngineError, EpisodeError
from areal_rloo.launcher.start import check
from areal_rloo.models.files import load_tokenizer
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.agent import Agent
from areal_rloo.rollout.episode import Rewards, Sample, SingleTurn, Submitter
from areal_rloo.rollout.episode_types import make_episode, serving
from areal_rloo.trajectory import Item, Message, Trajectory


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    HOLD.clear()
    yield
    HOLD.set()
    for thread in threading.enumerate():
        if thread.name == "agent":
            thread.join()


def _config(
    function: str, *, module: str = "support.agents_to_train", timeout_s: float = 120.0, num_agents: int | None = None
) -> Config:
    episode = EpisodeConfig(
        type="agent", agent=f"{module}:{function}", agent_timeout_s=timeout_s, num_agents=num_agents
    )
    return Config(data=DATA, rollout=RolloutConfig(episode=episode))


Run = Callable[[Sample], Awaitable[list[Trajectory]]]


def _with(
    config: Config, engine: Recorder, folder: Path, use: Callable[[Run], Awaitable[Any]], rewards: Rewards | None = None
) -> Any:
    """Serve the config's episode as a worker does, and call `use`."""

    async def run() -> Any:
        submitter = Submitter(engine, context_tokens=1200)
        episode = make_episode(config)
        async with serving(episode):

            async def one(sample: Sample) -> list[Trajectory]:
                the_engine = sample_engine(submitter, sample.sample_id[0])
                return list(await episode.run(sample, the_engine, rewards or RefusingRewards(), chat_format(folder)))

            return await use(one)

    return asyncio.run(run())


@pytest.mark.parametrize(("function", "reward"), [("converse", None), ("converse_async", 1.0)])
def test_a_conversation_is_one_trajectory_with_the_returned_reward(
    engine: Recorder, folder: Path, function: str, reward: float | None
) -> None:
    (trajectory,) = _with(_config(function), engine, folder, lambda run: run(a_sample(0)))
    assert_trained_ids_are_generated_ids([trajectory], engine.completions_of(0))
    assert len(trajectory.completion.spans) == 3
    last = chat_format(folder).text(engine.completions_of(0)[-1][1].tokens.tolist())
    assert trajectory.reward == (len(last) / 4 if reward is None else reward)
    assert trajectory.reward_parts == {"agent": trajectory.reward}


def test_all_conversations_of_an_agent_get_its_reward(engine: Recorder, folder: Path) -> None:
    trajectories = _with(_config("parallel"), engine, folder, lambda run: run(a_sample(0)))
    assert [trajectory.reward for trajectory in trajectories] == [0.25] * 4
    assert_trained_ids_are_generated_ids(trajectories, engine.completions_of(0))


@pytest.mark.parametrize("function", ["converse", "converse_async"])
def test_many_agents_run_together_and_each_has_its_own_tokens(engine: Recorder, folder: Path, function: str) -> None:
    async def use(run: Run) -> list[list[Trajectory]]:
        return await asyncio.gather(*(run(a_sample(group_id)) for group_id in range(20)))

    for group_id, trajectories in enumerate(_with(_config(function), engine, folder, use)):
        assert {trajectory.sample_id for trajectory in trajectories} == {(group_id, 0)}
        assert_trained_ids_are_generated_ids(trajectories, engine.completions_of(group_id))


def test_a_posted_reward_becomes_the_sample_s_reward(engine: Recorder, folder: Path) -> None:
    (trajectory,) = _with(_config("posted"), engine, folder, lambda run: run(a_sample(0)))
    assert trajectory.reward == 0.75


class _LastTurn:
    """Score and record every request; also give rewards to single tokens."""

    def __init__(self) -> None:
        self.asked: list[RewardRequest] = []

    async def score(self, request: RewardRequest) -> Scored:
        self.asked.append(request)
        token_rewards = tuple(float(n) for n in range(len(request.completion_ids)))
        return Scored(reward=0.5, parts={"it": 0.5}, token_rewards=token_rewards, answer="8")


def test_without_a_reward_the_source_s_rewards_score_the_last_turn(folder: Path) -> None:
    rewards = _LastTurn()
    engine = ScriptedEngine(load_tokenizer(str(folder)), ["five", "seven", "8"])
    first, last = _with(_config("two"), engine, folder, lambda run: run(a_sample(0)), rewards)
    (request,) = rewards.asked
    assert (request.completion, request.turns, request.purpose) == ("8", ("seven", "8"), "train")
    assert (first.reward, last.reward, first.answer) == (0.5, 0.5, "8")
    assert first.token_rewards is None
    assert last.token_rewards is not None
    assert_trained_ids_are_generated_ids([first, last], engine.completions_of(0))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("silent", "made no call"),
        ("posted_and_given", "posted a reward and gave back 0.5"),
        ("wrong_type", "expected None or a number up to"),
        ("wants_more", "there is no value for its argument 'database'"),
    ],
)
def test_an_agent_that_breaks_the_rules_drops_its_sample(
    engine: Recorder, folder: Path, function: str, expected: str
) -> None:
    with pytest.raises(EpisodeError, match=expected) as dropped:
        _with(_config(function), engine, folder, lambda run: run(a_sample(0)))
    assert dropped.value.reason == "episode_error"


@pytest.mark.parametrize(
    ("function", "mistakes"),
    [
        ("crashes", {"crash": "an agent's own mistake", "exit": "SystemExit: 3", "stop": "StopIteration"}),
        (
            "crashes_async",
            {
                "crash": "own mistake",
                "exit": "SystemExit: 3",
                "task": "SystemExit: 4",
                "callback": "took more than",
                "cancel": "cancelled itself",
            },
        ),
    ],
)
def test_a_crashing_agent_drops_only_its_sample(
    engine: Recorder, folder: Path, function: str, mistakes: dict[str, str]
) -> None:
    prompts = [*mistakes, "fine", *mistakes]

    async def use(run: Run) -> list[Any]:
        samples = [a_sample(group_id, Item(prompt)) for group_id, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(run, samples), return_exceptions=True)

    outcomes = _with(_config(function, timeout_s=5.0), engine, folder, use)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if prompt == "fine" and function == "crashes":
            assert outcome[0].reward == 1.0
        else:
            assert isinstance(outcome, EpisodeError)
            assert outcome.reason == ("agent_timeout" if prompt == "callback" else "episode_error")
            assert mistakes.get(prompt, "an agent's own mistake") in outcome.detail


def test_an_agent_gets_the_arguments_of_its_signature(engine: Recorder, folder: Path) -> None:
    item = Item((Message("system", "Add."), Message("user", "3+5=?")), "8", "sums", {"question": "3+5", "hint": "more"})
    for function in ("named", "everything"):
        with pytest.raises(EpisodeError, match="made no call"):
            _with(_config(function), engine, folder, lambda run: run(a_sample(4, item)))
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+5=?"}]
    assert SEEN[0] == ("3+5", "more", "8", item, said, said, "policy", "4-0", 3)
    assert {"base_url", "api_key", "question", "hint"} <= set(SEEN[1])


def test_a_session_timeout_drops_the_sample_and_refuses_the_key(engine: Recorder, folder: Path) -> None:
    async def use(run: Run) -> None:
        with pytest.raises(EpisodeError) as dropped:
            await run(a_sample(0))
        assert dropped.value.reason == "agent_timeout"
        HOLD.set()  # its thread goes on, to its next call
        await until(lambda: SEEN)

    _with(_config("hangs", timeout_s=1.0), engine, folder, use)
    assert isinstance(SEEN[0], openai.ConflictError)


def test_an_async_agent_is_cancelled_at_its_timeout(engine: Recorder, folder: Path) -> None:
    async def use(run: Run) -> None:
        with pytest.raises(EpisodeError, match="agent_timeout"):
            await run(a_sample(0))
        await until(lambda: SEEN)

    _with(_config("sleeps", timeout_s=0.2), engine, folder, use)
    assert SEEN == ["cancelled"]


@pytest.mark.parametrize("function", ["converse", "hangs_async"])
def test_a_session_timeout_aborts_its_completions(engine: Recorder, folder: Path, function: str) -> None:
    engine.holds = True
    with pytest.raises(EpisodeError, match="agent_timeout"):
        _with(_config(function, timeout_s=1.0), engine, folder, lambda run: run(a_sample(0)))
    assert engine.aborted == [request.request_id for request, _ in engine.calls]
    assert function == "converse" or SEEN == ["cancelled"]


@pytest.mark.parametrize("function", ["converse", "hangs_async"])
def test_cancelling_a_sample_ends_its_agent(engine: Recorder, folder: Path, function: str) -> None:
    engine.holds = True

    async def use(run: Run) -> None:
        task = asyncio.ensure_future(run(a_sample(0)))
        await until(lambda: engine.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.aborted)

    _with(_config(function), engine, folder, use)
    assert engine.aborted == ["0/0/0"]


def test_the_example_agent_gives_rewards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[3])
    monkeypatch.syspath_prepend(".")
    example = importlib.import_module("examples.openai_agent")
    engine = ScriptedEngine(load_tokenizer(str(folder)), ["1+2=3\n#### 3", "1+2=4\n#### 4", "what?"])

    async def use(run: Run) -> list[float]:
        return [(await run(a_sample(group_id)))[0].reward for group_id in range(3)]

    with example.HTTP:
        assert _with(_config("solve", module=example.__name__), engine, folder, use) == [1.0, 0.0, 0.0]
    assert {engine.calls[n][0].prompt_tokens for n in range(3)} == {chat_format(folder).prompt(a_sample(0).item)}


def test_hanging_agents_free_their_slots_at_the_timeout(engine: Recorder, folder: Path) -> None:
    async def use(run: Run) -> None:
        samples = [a_sample(group_id, Item(str(group_id))) for group_id in range(12)]
        outcomes = await asyncio.gather(*map(run, samples), return_exceptions=True)
        assert [outcome.reason for outcome in outcomes] == ["agent_timeout"] * 12
        assert len(SEEN) == 12  # all of them had begun, although none had ended

    _with(_config("blocks", timeout_s=0.2, num_agents=4), engine, folder, use)


def test_threads_of_hanging_async_agents_delay_no_other_agent(engine: Recorder, folder: Path) -> None:
    async def use(run: Run) -> None:
        hanging = [asyncio.ensure_future(run(a_sample(group_id, Item("hang")))) for group_id in range(40)]
        await until(lambda: len(SEEN) == 40)
        (trajectory,) = await run(a_sample(99, Item("fine")))
        assert trajectory.reward == 1.0
        assert not any(task.done() for task in hanging)
        HOLD.set()
        await asyncio.gather(*hanging, return_exceptions=True)

    _with(_config("threads_async", num_agents=100), engine, folder, use)


def test_no_more_agents_run_than_num_agents(engine: Recorder, folder: Path) -> None:
    async def use(run: Run) -> None:
        tasks = [asyncio.ensure_future(run(a_sample(group_id, Item(str(group_id))))) for group_id in range(12)]
        await until(lambda: len(SEEN) == 4)
        await asyncio.sleep(0.1)  # time enough for a fifth
        assert len(SEEN) == 4
        HOLD.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(SEEN) == 12

    _with(_config("blocks", num_agents=4), engine, folder, use)


def test_a_lost_engine_ends_the_worker_instead_of_the_sample(engine: Recorder, folder: Path) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        _with(_config("converse"), engine, folder, lambda run: run(a_sample(0)))


def test_an_episode_without_a_context_manager_is_not_entered() -> None:
    async def run() -> None:
        async with serving(SingleTurn()) as entered:
            assert entered is None

    asyncio.run(run())


@pytest.mark.parametrize(
    "episode",
    [
        EpisodeConfig(type="agent", agent="no_such_file.py:solve"),
        EpisodeConfig(type="no_such_module:Episode"),
        EpisodeConfig(type="agent", agent="json:no_such_function"),
    ],
)
def test_an_agent_that_cannot_be_imported_is_refused_at_start(episode: EpisodeConfig) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.episode\.(agent|type): "):
        check(Config(data=DATA, rollout=RolloutConfig(episode=episode)))


def test_an_agent_is_made_from_the_config_of_a_run() -> None:
    episode = make_episode(_config("converse"))
    assert isinstance(episode, Agent)
    assert episode.statistics().num_sessions == 0


def test_an_agent_s_file_may_define_dataclasses(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Note:\n    text: str\ndef solve():\n    return Note('')\n"
    )
    assert isinstance(make_episode(_config("solve", module=str(file))), Agent)
