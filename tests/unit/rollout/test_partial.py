"""Partial rollouts: episodes cut off at any moment go on from their turns, whatever the type of the episode."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.agents_to_train import HOLD
from support.chat_endpoint import DATA, STOPS, RefusingRewards, a_sample, chat_format, embedded
from support.episodes import RewardsByTurn, episode_config

from areal_rloo.config import Config, EpisodeConfig, RolloutConfig
from areal_rloo.engines.base import Engine, GenerationRequest, SamplingParameters
from areal_rloo.errors import DecodeError
from areal_rloo.rollout.episode import Rewards, SampleEngine, Submitter
from areal_rloo.rollout.episode_types import make_episode, serving
from areal_rloo.rollout.partial import Journal, digest_of
from areal_rloo.trajectory import Completion, FinishReason, Trajectory
from areal_rloo.wire.turns import RecordedTurn, decode_turns, encode_turns


def _agent(function: str) -> Config:
    episode = EpisodeConfig(type="agent", agent=f"support.agents_to_train:{function}", agent_timeout_s=120.0)
    return Config(data=DATA, rollout=RolloutConfig(episode=episode))


EPISODES: dict[str, tuple[Config, Rewards]] = {
    "single_turn": (episode_config(), RewardsByTurn(1.0)),
    "multi_turn": (
        episode_config("rollout.episode.type=multi_turn", "rollout.episode.max_turns=3"),
        RewardsByTurn(0.0),
    ),
    "agent": (_agent("converse"), RefusingRewards()),
    "async agent": (_agent("converse_async"), RefusingRewards()),
    "agent with parallel calls": (_agent("parallel"), RefusingRewards()),
}


def _engine_of(submitter: Submitter, piece: int, journal: Journal, most: int = 120) -> SampleEngine:
    # Another seed each time: the same tokens again can only come from the journal.
    sampling = SamplingParameters(max_new_tokens=most, seed=piece, stop_token_ids=STOPS[:1])
    return SampleEngine(
        submitter=submitter, name=f"0/0/{piece}", sampling=sampling, max_turn_tokens=most // 3, journal=journal
    )


def _spans(trajectories: Sequence[Trajectory]) -> list[tuple[list[int], bytes, list[int]]]:
    """Return tokens, logprobs and versions of each turn of the policy."""
    found = []
    for completion in (trajectory.completion for trajectory in trajectories):
        ends = np.cumsum(completion.spans or [len(completion.tokens)]).tolist()
        for start, end in list(zip([0, *ends], ends, strict=False))[::2]:
            each = (completion.tokens, completion.behaviour_logprobs, completion.versions)
            tokens, logprobs, versions = (array[start:end] for array in each)
            found.append((tokens.tolist(), logprobs.tobytes(), versions.tolist()))
    return found


def _begins(turn: RecordedTurn, span: tuple[list[int], bytes, list[int]]) -> bool:
    completion, num = turn.completion, len(turn.completion.tokens)
    ours = (completion.tokens.tolist(), completion.behaviour_logprobs.tobytes(), completion.versions.tolist())
    return ours == (span[0][:num], span[1][: 4 * num], span[2][:num])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads of an agent cut off
@pytest.mark.parametrize("name", EPISODES)
@pytest.mark.parametrize("seed", range(3))
def test_an_episode_cut_off_at_any_moment_goes_on_from_its_turns(folder: Path, name: str, seed: int) -> None:
    config, rewards = EPISODES[name]
    draw = random.Random(seed)

    async def scenario() -> tuple[list[Trajectory], list[RecordedTurn], int]:
        submitter, episode, sample = Submitter(engine, context_tokens=1200), make_episode(config), a_sample(0)
        turns: list[RecordedTurn] = []
        async with serving(episode):
            for piece in range(100):
                journal = Journal(decode_turns(encode_turns(turns)))
                the_engine = _engine_of(submitter, piece, journal)
                running = asyncio.create_task(episode.run(sample, the_engine, rewards, chat_format(folder)))
                cut_at = engine.statistics().generated_tokens + draw.randrange(12)
                while not running.done() and engine.statistics().generated_tokens <= cut_at:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                if running.done():
                    return list(running.result()), turns, piece
                turns = journal.turns(await asyncio.wrap_future(engine.unfinished()))
                running.cancel()
                await asyncio.wait([running])
        raise AssertionError("the episode makes no progress")

    engine = embedded(folder)
    trajectories, turns, pieces = asyncio.run(scenario())
    HOLD.clear()
    engine.close()
    assert pieces, "the episode was never cut off"
    assert turns
    spans = _spans(trajectories)
    for turn in turns:
        assert any(_begins(turn, span) for span in spans)
        assert turn.prompt in {digest_of(request.prompt_tokens) for request, _ in engine.calls}


def _turn(num: int, reason: FinishReason = "abort", version: int = 0) -> RecordedTurn:
    tokens, logprobs = np.arange(num, dtype=np.int32), -np.arange(num, dtype=np.float32)
    return RecordedTurn(digest_of((5, 6)), Completion(tokens, logprobs, np.full(num, version, dtype=np.int32), reason))


async def _generated(engine: Engine, turn: RecordedTurn, *, most: int) -> Completion:
    made = _engine_of(Submitter(engine, context_tokens=1200), 0, Journal([turn]), 3 * most)
    return await made.generate((5, 6))


@pytest.mark.parametrize(
    ("turn", "most", "num_kept", "num_made"),
    [
        pytest.param(_turn(10), 20, 10, 10, id="unfinished"),
        pytest.param(_turn(10, "stop"), 20, 10, 0, id="stopped"),
        pytest.param(_turn(10, "length"), 10, 10, 0, id="at the limit"),
        pytest.param(_turn(10, "length"), 20, 10, 10, id="the limit was raised"),
        pytest.param(_turn(10, "length"), 5, 0, 5, id="the limit was lowered"),
        pytest.param(_turn(10, "stop"), 5, 0, 5, id="stopped beyond the limit"),
        pytest.param(_turn(0), 20, 0, 20, id="no token"),
    ],
)
def test_a_turn_is_replayed_continued_or_made_anew(
    folder: Path, turn: RecordedTurn, most: int, num_kept: int, num_made: int
) -> None:
    engine = embedded(folder)
    completion = asyncio.run(_generated(engine, turn, most=most))
    engine.close()
    kept = len(turn.completion.tokens) == num_kept
    assert (completion.tokens[:num_kept].tolist() == list(range(num_kept))) == kept or num_kept == 0
    assert len(completion.tokens) <= num_kept + num_made
    assert engine.statistics().generated_tokens == len(completion.tokens) - num_kept


@pytest.mark.parametrize("reason", ["abort", "stop"], ids=["continued", "the turn after a whole turn"])
def test_versions_never_decrease_along_a_continued_sample(folder: Path, reason: FinishReason) -> None:
    engine = embedded(folder)  # has version 0, and the earlier lease saw version 4

    async def scenario() -> None:
        made = _engine_of(Submitter(engine, context_tokens=1200), 0, Journal([_turn(10, reason, version=4)]), 60)
        async with asyncio.timeout(0.5):
            turn = await made.generate((5, 6))
            await made.generate((5, 6, *turn.tokens.tolist(), 7))

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    engine.close()
    ((request, _),) = engine.calls
    assert request.min_version == 4


def test_the_first_of_parallel_calls_gets_the_first_turn() -> None:
    """Else an agent that uses its first answer would get the answer that ended first, which is a short one."""
    lengths = {"first": 9, "second": 3, "third": 5}

    async def call(journal: Journal, name: str, ends: asyncio.Event) -> int:
        async def complete(request: GenerationRequest) -> Completion:
            await ends.wait()
            return _turn(lengths[name], "stop").completion

        request = GenerationRequest(name, (5, 6), SamplingParameters(max_new_tokens=20))
        return len((await journal.continued(request, complete)).tokens)

    async def scenario() -> list[int]:
        journal, ends = Journal(), {name: asyncio.Event() for name in lengths}
        calls = [asyncio.create_task(call(journal, name, ends[name])) for name in lengths]
        ends["second"].set()
        await calls[1]
        turns = journal.turns({"third": _turn(2).completion})
        for one in calls:
            one.cancel()
        await asyncio.wait(calls)
        assert [len(turn.completion.tokens) for turn in turns] == [0, 3, 2]
        later = Journal(decode_turns(encode_turns(turns)))
        for event in ends.values():
            event.set()
        return await asyncio.gather(*(call(later, name, ends[name]) for name in lengths))

    assert asyncio.run(scenario()) == [9, 3, 5]


def test_what_was_told_once_is_told_again_without_an_answer_of_the_engine() -> None:
    async def scenario() -> list[int]:
        journal = Journal()
        request = GenerationRequest("a", (5, 6), SamplingParameters(max_new_tokens=20))
        running = asyncio.create_task(journal.continued(request, lambda _: asyncio.Future()))
        await asyncio.sleep(0)
        told = [journal.turns(so_far) for so_far in ({}, {"a": _turn(7).completion}, {})]
        running.cancel()
        await asyncio.wait([running])
        return [len(turn.completion.tokens) for turns in (*told, journal.turns({})) for turn in turns]

    assert asyncio.run(scenario()) == [0, 7, 7], "a cancelled call is forgotten"


def test_turns_arrive_as_they_are() -> None:
    turns = [_turn(3, "stop", version=2), _turn(0), _turn(70_000, version=9)]
    for before, after in zip(turns, decode_turns(encode_turns(turns)), strict=True):
        assert after.prompt == before.prompt
        assert after.completion.finish_reason == before.completion.finish_reason
        for field in ("tokens", "behaviour_logprobs", "versions"):
            one, other = getattr(before.completion, field), getattr(after.completion, field)
            assert one.tobytes() == other.tobytes()
            assert one.dtype == other.dtype
    assert encode_turns([]) == encode_turns([_turn(0)]) == b""
    assert decode_turns(b"") == ()


def _altered(place: int, value: object) -> bytes:
    """Return an encoded turn of three tokens with another value at one place."""
    turn = msgspec.msgpack.decode(encode_turns([_turn(3)]))[0]
    turn[place] = value
    return msgspec.msgpack.encode([turn])


@pytest.mark.parametrize(
    "partial",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(encode_turns([_turn(3)])[:-1], id="cut off"),
        pytest.param(_altered(1, b"\0" * 8), id="too few tokens"),
        pytest.param(_altered(1, b"\0" * 7), id="half a token"),
        pytest.param(_altered(1, b"\xff" * 12), id="negative tokens"),
        pytest.param(_altered(2, np.array([0, np.nan, 0], np.float32).tobytes()), id="a logprob that is no number"),
        pytest.param(_altered(3, [[0, 2]]), id="versions of too few tokens"),
        pytest.param(_altered(3, [[0, 4], [1, -1]]), id="a negative count"),
        pytest.param(_altered(3, [[1, 1], [0, 2]]), id="versions that decrease"),
        pytest.param(_altered(3, [[2**40, 3]]), id="a version beyond 32 bits"),
        pytest.param(_altered(4, "tired"), id="an unknown finish reason"),
    ],
)
def test_bytes_that_are_no_turns_are_refused(partial: bytes) -> None:
    with pytest.raises(DecodeError, match="a partial rollout is not readable"):
        decode_turns(partial)
