"""Rewards in processes that can be killed: what one of them does is felt by no other."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.pool import RewardPool, RewardRequest

SCORER = """
import os, time, sys

def make(argument):
    def score(request):
        if request.completion == "hang":
            while True:
                pass
        if request.completion == "crash":
            os._exit(7)
        if request.completion == "raise":
            raise ValueError("no such thing")
        if request.completion == "nan":
            return float("nan")
        if request.completion == "text":
            return "1"
        if request.completion.startswith("sleep"):
            time.sleep(0.2)
        return float(request.completion == request.answer) + len(argument)
    return score

def broken(argument):
    raise RuntimeError("cannot be made")

def once(argument):
    path = argument.decode()
    if os.path.exists(path):
        raise RuntimeError("not a second time")
    open(path, "w").close()
    return make(b"")
"""


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    (tmp_path / "scorer.py").write_text(SCORER)
    return f"{tmp_path / 'scorer.py'}"


@pytest.fixture
def pool(scorer: str) -> Iterator[RewardPool]:
    made = RewardPool(f"{scorer}:make", b"", num_workers=1, deadline_s=1.0)
    yield made
    made.close()


def _request(completion: str, answer: str = "right") -> RewardRequest:
    return RewardRequest("train", completion, answer, "stop")


def _scorers() -> list[psutil.Process]:
    """The worker processes of this test; others of the session may have left children of their own."""
    return [child for child in psutil.Process().children() if "areal_rloo.rewards" in child.cmdline()]


async def _outcome(pool: RewardPool, completion: str, answer: str = "right") -> float | str:
    try:
        return await pool.score(_request(completion, answer))
    except RewardError as failure:
        return failure.reason


def test_under_load_no_right_answer_is_lost_for_having_waited(pool: RewardPool) -> None:
    """40 rewards of 0.2 s on one worker with a deadline of 1 s: the last waits for eight."""

    async def scenario() -> list[float | str]:
        return list(await asyncio.gather(*(_outcome(pool, f"sleep {i}", f"sleep {i}") for i in range(40))))

    assert asyncio.run(scenario()) == [1.0] * 40
    assert pool.statistics().scored == 40


def test_each_failure_has_its_reason_and_costs_no_other_sample(pool: RewardPool) -> None:
    completions = ["right", "hang", "right", "crash", "wrong", "raise", "right", "nan", "text", "right"]

    async def scenario() -> list[float | str]:
        return list(await asyncio.gather(*(_outcome(pool, completion) for completion in completions)))

    expected = [1.0, "reward_timeout", 1.0, "reward_crash", 0.0, "reward_error", 1.0]
    assert asyncio.run(scenario()) == [*expected, "reward_not_finite", "reward_wrong_type", 1.0]
    statistics = pool.statistics()
    assert (statistics.scored, statistics.failed, statistics.restarts) == (5, 5, 2)


def test_an_exception_is_told_with_its_traceback(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="ValueError: no such thing") as caught:
        asyncio.run(pool.score(_request("raise")))
    assert "scorer.py" in caught.value.detail


def test_a_worker_that_was_killed_while_it_had_nothing_to_do_is_replaced(pool: RewardPool) -> None:
    (worker,) = _scorers()
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert asyncio.run(_outcome(pool, "right")) == "reward_crash"
    assert asyncio.run(_outcome(pool, "right")) == 1.0


def test_the_workers_work_side_by_side(scorer: str) -> None:
    pool = RewardPool(f"{scorer}:make", b"abc", num_workers=2, deadline_s=1.0)

    async def scenario() -> list[float | str]:
        hang = asyncio.create_task(_outcome(pool, "hang"))
        rest = [await _outcome(pool, "right") for _ in range(5)]
        assert not hang.done()
        return [*rest, await hang]

    assert asyncio.run(scenario()) == [4.0] * 5 + ["reward_timeout"]
    pool.close()


def test_a_closed_pool_leaves_no_process_behind_whatever_it_was_doing(scorer: str) -> None:
    pool = RewardPool(f"{scorer}:make", b"", num_workers=2, deadline_s=60.0)
    children = _scorers()
    assert len(children) == 2

    async def scenario() -> None:
        hang = asyncio.create_task(_outcome(pool, "hang"))
        await asyncio.sleep(0.1)
        pool.close()
        assert await hang == "reward_crash"

    asyncio.run(scenario())
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert (len(gone), alive) == (2, [])


def test_a_scorer_that_cannot_be_made_is_refused_with_the_reason(scorer: str) -> None:
    for name, reason in (("broken", "cannot be made"), ("absent", "has no function 'absent'")):
        with pytest.raises(ConfigError, match=reason):
            RewardPool(f"{scorer}:{name}", b"", num_workers=1, deadline_s=1.0)


def test_a_scorer_that_cannot_be_made_a_second_time_is_an_error_and_no_silence(scorer: str, tmp_path: Path) -> None:
    pool = RewardPool(f"{scorer}:once", str(tmp_path / "made").encode(), num_workers=1, deadline_s=1.0)
    with pytest.raises(ConfigError, match="not a second time"):
        asyncio.run(_outcome(pool, "crash"))
    pool.close()


def test_a_reward_that_never_ends_takes_its_deadline_and_no_more_of_the_others(pool: RewardPool) -> None:
    began_s = time.monotonic()
    assert asyncio.run(_outcome(pool, "hang")) == "reward_timeout"
    assert time.monotonic() - began_s >= 1.0, "not before its deadline"
