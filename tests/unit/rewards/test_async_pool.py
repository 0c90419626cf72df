"""Async rewards: many at a time in a process, and a failing reward affects no other."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import children_with
from support.reward_requests import reward_request

from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.async_pool import AsyncRewardPool
from areal_rloo.trajectory import Item

SCORER = """
import asyncio, os, sys, time
from areal_rloo.rewards.request import read_worth

running = most = 0

async def reward(completion, fields):
    global running, most
    if completion == "most":
        return most
    running += 1
    most = max(most, running)
    try:
        if completion == "meet":  # ends when as many as are expected are here together
            while most < fields["expected"]:
                await asyncio.sleep(0.01)
        elif completion == "much memory":
            bytearray(2**40)
        elif completion == "hang":
            await asyncio.sleep(3600)
        elif completion == "block":
            await asyncio.sleep(0.1)
            while True:
                pass
        elif completion == "crash":
            await asyncio.sleep(0.1)
            os._exit(7)
        elif completion == "raise":
            raise ValueError("no such thing")
        elif completion == "own timeout":
            raise TimeoutError("the judge's")
        elif completion == "cancel":
            raise asyncio.CancelledError
        elif completion == "fork":
            os.fork()
        elif completion == "exit":
            await asyncio.sleep(0.05)
            sys.exit(3)
        elif completion == "exit in a task":
            async def leave():
                await asyncio.sleep(0.05)
                sys.exit(3)
            await asyncio.create_task(leave())
        elif completion == "exit in a callback":
            asyncio.get_running_loop().call_soon(sys.exit, 0)
            await asyncio.sleep(0.1)
        elif completion == "hang in a thread":
            await asyncio.to_thread(time.sleep, 3600)
        elif completion == "answer in a thread":
            await asyncio.to_thread(time.sleep, 0)
        elif completion == "garbage":
            os.write(int(sys.argv[1]), b"\\xff" * 64)
            await asyncio.sleep(3600)
        else:
            await asyncio.sleep(fields.get("for_s", 0.3))
        return float("nan") if completion == "nan" else float(completion.startswith("right"))
    finally:
        running -= 1

def make(argument):
    async def score(job):
        request = job.request
        return read_worth(await reward(request.completion, request.item.fields), request, returns="trajectory")
    return score
"""

Scenario = Callable[[AsyncRewardPool], Coroutine[Any, Any, Any]]


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    (tmp_path / "scorer.py").write_text(SCORER)
    return f"{tmp_path / 'scorer.py'}"


def _run(
    scorer: str, scenario: Scenario, *, num_at_once: int = 64, deadline_s: float = 5.0, grace_s: float = 2.0
) -> Any:
    """Return the result of a scenario on a loop with a pool."""

    async def with_pool() -> Any:
        pool = AsyncRewardPool(f"{scorer}:make", b"", num_at_once=num_at_once, deadline_s=deadline_s, grace_s=grace_s)
        await pool.ready()
        try:
            return await scenario(pool)
        finally:
            await pool.close()

    return asyncio.run(with_pool())


def _processes() -> list[psutil.Process]:
    return [child for keeper in children_with("areal_rloo.rewards") for child in keeper.children()]


async def _outcome(pool: AsyncRewardPool, completion: str, **fields: Any) -> float | str:
    request = reward_request(completion, Item("what?", fields=fields))
    try:
        return (await pool.score(request, "part")).reward
    except RewardError as failure:
        return failure.reason


async def _outcomes(pool: AsyncRewardPool, *completions: str, **fields: Any) -> list[float | str]:
    return list(await asyncio.gather(*(_outcome(pool, completion, **fields) for completion in completions)))


def test_a_reward_beyond_its_memory_drops_only_its_own_sample(scorer: str) -> None:
    """The reward that holds the memory may be another, so all are retried alone."""

    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, "right", "much memory", "right") == [1.0, "reward_crash", 1.0]
        with pytest.raises(RewardError, match=r"rollout\.reward_memory_bytes"):
            await pool.score(reward_request("much memory", Item("what?", "right")), "part")

    _run(scorer, scenario)


def test_sixty_four_async_rewards_run_concurrently_in_one_process(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        assert len(_processes()) == 1
        assert await _outcomes(pool, *["meet"] * 64, expected=64) == [0.0] * 64
        assert await _outcome(pool, "most") == 64

    _run(scorer, scenario, deadline_s=60.0)


def test_rewards_beyond_the_limit_wait_and_keep_their_whole_deadline(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, *["right"] * 40, for_s=0.2) == [1.0] * 40
        assert await _outcome(pool, "most") == 2

    _run(scorer, scenario, num_at_once=2, deadline_s=2.0)


def test_async_rewards_that_wait_until_they_can_start_are_counted(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        outcomes = asyncio.create_task(_outcomes(pool, *["right"] * 3, for_s=0.2))
        while not pool.statistics().num_queued:  # noqa: ASYNC110 - until all have come
            await asyncio.sleep(0)
        assert pool.statistics().num_queued == 2
        assert await outcomes == [1.0] * 3
        assert pool.statistics().num_queued == 0

    _run(scorer, scenario, num_at_once=1)


def test_each_failure_has_its_reason_and_drops_only_its_sample(scorer: str) -> None:
    completions = ["right", "hang", "raise", "nan", "own timeout", "cancel", "fork", "right", "wrong"]
    expected = [1.0, "reward_timeout", "reward_error", "reward_out_of_range", "reward_error", "reward_error", 0.0, 1.0]

    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, *completions) == [*expected, 0.0]
        assert pool.statistics().restarts == 0

    _run(scorer, scenario, deadline_s=6.0)


def test_an_exception_is_reported_with_its_traceback(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        request = reward_request("raise", Item("what?"), prompt_ids=(), completion_ids=())
        with pytest.raises(RewardError) as caught:
            await pool.score(request, "part")
        assert re.fullmatch(r"ValueError: no such thing \(.*/scorer\.py:\d+\)", caught.value.summary)
        assert 'scorer.py", line' in caught.value.detail

    _run(scorer, scenario)


@pytest.mark.parametrize(("culprit", "reason"), [("block", "reward_timeout"), ("crash", "reward_crash")])
def test_only_the_reward_that_kills_the_process_is_dropped(scorer: str, culprit: str, reason: str) -> None:
    """Running and waiting rewards get their normal values."""
    completions = ["right", "right", culprit, "right", "wrong", "right", "right", "right"]

    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, *completions) == [1.0, 1.0, reason, 1.0, 0.0, 1.0, 1.0, 1.0]
        assert pool.statistics().restarts == 2  # with the others, and alone
        assert await _outcome(pool, "right") == 1.0

    _run(scorer, scenario, num_at_once=5, deadline_s=5.0, grace_s=2.0)


def test_two_crashing_rewards_are_both_dropped(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        outcomes = await _outcomes(pool, "crash", "right", "crash", "right")
        assert outcomes == ["reward_crash", 1.0, "reward_crash", 1.0]

    _run(scorer, scenario)


def test_garbage_from_a_reward_leaves_the_pool_usable(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, "garbage") == ["reward_crash"]
        assert await _outcomes(pool, "right", "right") == [1.0, 1.0]

    _run(scorer, scenario)


def test_killing_an_idle_process_drops_no_sample(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        (process,) = _processes()
        os.kill(process.pid, signal.SIGKILL)
        for _ in range(6000):  # until it is noticed
            if pool.statistics().restarts:
                break
            await asyncio.sleep(0.01)
        assert await _outcome(pool, "right") == 1.0

    _run(scorer, scenario)


def test_cancelled_rewards_free_their_slots(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> None:
        first, second = (asyncio.create_task(_outcome(pool, "hang")) for _ in range(2))
        await asyncio.sleep(0.1)
        first.cancel()
        second.cancel()
        assert await _outcome(pool, "right") == 1.0

    _run(scorer, scenario, num_at_once=1, deadline_s=5.0)


def test_closing_the_pool_ends_the_process_and_all_waits(scorer: str) -> None:
    async def scenario(pool: AsyncRewardPool) -> list[psutil.Process]:
        waiting = [asyncio.create_task(_outcome(pool, completion)) for completion in ("block", "right", "right")]
        await asyncio.sleep(0.3)
        processes = _processes()
        await pool.close()
        assert await asyncio.gather(*waiting) == ["reward_crash"] * 3
        return processes

    _, alive = psutil.wait_procs(_run(scorer, scenario, num_at_once=2, deadline_s=60.0), timeout=60)
    assert alive == []


def test_a_broken_scorer_is_refused_at_start(scorer: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="has no function 'absent'"):
            await AsyncRewardPool(f"{scorer}:absent", b"", num_at_once=1, deadline_s=1.0).ready()

    asyncio.run(scenario())


def test_an_exit_of_a_reward_or_its_task_drops_only_its_sample(scorer: str) -> None:
    completions = ["right", "exit", "exit in a task", "exit in a callback", "right"]

    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, *completions) == [1.0, "reward_error", "reward_error", 0.0, 1.0]
        assert pool.statistics().restarts == 0

    _run(scorer, scenario)


def test_calls_that_hang_in_threads_delay_no_other_reward(scorer: str) -> None:
    """The default executor of a loop has a few threads for all rewards."""

    async def scenario(pool: AsyncRewardPool) -> None:
        assert await _outcomes(pool, *["hang in a thread"] * 40) == ["reward_timeout"] * 40
        assert await _outcome(pool, "answer in a thread") == 0.0

    _run(scorer, scenario, deadline_s=3.0, grace_s=60.0)
