"""Processes that fail while a pool replaces them, and everything that a reward starts."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import eventually
from support.processes import children_with, processes_with
from support.reward_requests import reward_request

from areal_rloo.errors import RewardError, StartError
from areal_rloo.rewards.async_pool import AsyncRewardPool
from areal_rloo.rewards.outage import RestartPolicy
from areal_rloo.rewards.pool import RewardPool
from areal_rloo.telemetry.logs import run_to_exit_code
from areal_rloo.trajectory import Item

SCORER = """
import asyncio, os, signal, subprocess, sys, time
from areal_rloo.rewards.request import read_worth

def make(argument, is_async=False):
    path, bad, how = argument.decode().split("|")
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) in eval(bad):  # which starts fail
        if how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[how])
        elif how == "no descriptor":
            raise OSError(24, how)
        elif how == "hang":
            time.sleep(3600)
        raise RuntimeError("not now")

    def value(completion):
        if completion == "crash":
            os._exit(7)
        if completion == "session":
            code = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\ntime.sleep(3600)"
            for child in (code, "import time; time.sleep(3600)"):
                subprocess.Popen([sys.executable, "-c", child, path], start_new_session=True)
        return 1.0

    def score(job):
        return read_worth(value(job.request.completion), job.request, returns="trajectory")

    async def score_async(job):
        await asyncio.sleep(0)
        return score(job)

    return score_async if is_async else score

def make_async(argument):
    return make(argument, is_async=True)
"""
POLICY = RestartPolicy(
    ready_within_s=60.0, first_pause_s=0.05, longest_pause_s=0.1, most_failures=1000, served_within_s=60.0
)
Pool = RewardPool | AsyncRewardPool
Make = Callable[..., Pool]


@pytest.fixture(params=["in turn", "together"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Make a pool whose scorer fails at certain starts."""
    (tmp_path / "scorer.py").write_text(SCORER)

    def made(bad: str, how: str = "SIGKILL", num_workers: int = 1, policy: RestartPolicy = POLICY) -> Pool:
        argument, path = f"{tmp_path / 'starts'}|{bad}|{how}".encode(), tmp_path / "scorer.py"
        if request.param == "in turn":
            return RewardPool(f"{path}:make", argument, num_workers=num_workers, deadline_s=60.0, restarts=policy)
        return AsyncRewardPool(f"{path}:make_async", argument, num_at_once=8, deadline_s=60.0, restarts=policy)

    yield made
    eventually(lambda: not processes_with([str(tmp_path / "starts")]), "nothing is left")


def _run(pool: Callable[[], Pool], scenario: Callable[[Pool], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        made = pool()
        try:
            await made.ready()
            return await scenario(made)
        finally:
            await made.close()

    return asyncio.run(main())


async def _outcome(pool: Pool, completion: str) -> float | str:
    try:
        return (await pool.score(reward_request(completion, Item("what?")), "part")).reward
    except RewardError as failure:
        return failure.reason


@pytest.mark.parametrize(
    ("how", "code"),
    [("SIGKILL", 1), ("SIGTERM", 1), ("SIGUSR1", 1), ("no descriptor", 1), ("SIGSEGV", 2), ("raise", 2)],
)
def test_only_a_scorer_that_fails_by_itself_is_a_mistake_of_the_user(make: Make, how: str, code: int) -> None:
    """The kernel or an operator may kill a process; then the launcher restarts the worker, and the run goes on."""

    async def scenario(pool: Pool) -> None:
        raise AssertionError("the pool is not ready")

    assert run_to_exit_code(lambda: _run(lambda: make("(1,)", how), scenario)) == code


@pytest.mark.parametrize("within_s", [60.0, 0.3])
def test_an_end_before_the_code_of_the_user_has_begun_is_no_mistake(
    make: Make, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> None:
    """Python turns a SIGINT during its own start into exit code 1; a stopped machine may take any time."""
    command = ("sleep", "1000") if within_s < 1 else ("sh", "-c", "exit 1")
    monkeypatch.setattr("areal_rloo.rewards.process.kept", lambda _: command)
    policy = RestartPolicy(ready_within_s=within_s)

    async def scenario(pool: Pool) -> None:
        raise AssertionError("the pool is not ready")

    assert run_to_exit_code(lambda: _run(lambda: make("()", policy=policy), scenario)) == 1


@pytest.mark.parametrize("how", ["SIGKILL", "raise", "hang"])
def test_a_failed_replacement_is_tried_again(make: Make, how: str) -> None:
    policy = POLICY if how != "hang" else RestartPolicy(ready_within_s=4.0, first_pause_s=0.1, served_within_s=60.0)

    async def scenario(pool: Pool) -> None:
        assert await _outcome(pool, "crash") == "reward_crash"
        assert await asyncio.gather(*(_outcome(pool, "right") for _ in range(4))) == [1.0] * 4

    _run(lambda: make("(2,)", how, policy=policy), scenario)


def test_a_job_without_a_process_in_time_drops_its_own_sample(make: Make) -> None:
    policy = RestartPolicy(first_pause_s=0.05, longest_pause_s=0.05, most_failures=10_000, served_within_s=1.0)

    async def scenario(pool: Pool) -> None:
        assert await _outcome(pool, "crash") == "reward_crash"
        outcomes = await asyncio.gather(*(_outcome(pool, "right") for _ in range(3)))
        assert outcomes == ["reward_unavailable"] * 3

    _run(lambda: make("range(2, 10000)", "raise", policy=policy), scenario)


def test_replacements_that_fail_for_good_end_the_worker_with_code_1(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.01, most_failures=3, served_within_s=60.0)

    async def scenario(pool: Pool) -> None:
        assert await _outcome(pool, "crash") == "reward_crash"
        failures = await asyncio.gather(*(_outcome(pool, "right") for _ in range(3)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [StartError] * 3
        await _outcome(pool, "right")

    assert run_to_exit_code(lambda: _run(lambda: make("range(2, 100)", "raise", policy=policy), scenario)) == 1
    assert "3 times in a row; the last: RuntimeError: not now" in capsys.readouterr().err


def test_the_other_processes_score_while_a_replacement_fails(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    argument = f"{tmp_path / 'starts'}|range(3, 100000)|raise".encode()
    policy = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.01, most_failures=1, served_within_s=60.0)

    async def scenario(pool: Pool) -> None:
        assert await _outcome(pool, "crash") == "reward_crash"
        while (tmp_path / "starts").stat().st_size < 6:  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(0.01)
        assert [await _outcome(pool, "right") for _ in range(5)] == [1.0] * 5

    path = f"{tmp_path / 'scorer.py'}:make"
    _run(lambda: RewardPool(path, argument, num_workers=2, deadline_s=60.0, restarts=policy), scenario)


def _sessions(tmp_path: Path) -> list[psutil.Process]:
    return processes_with(["-c", str(tmp_path / "starts")])


def test_children_in_sessions_of_their_own_end_with_the_pool(make: Make, tmp_path: Path) -> None:
    async def scenario(pool: Pool) -> None:
        assert await _outcome(pool, "session") == 1.0
        while len(_sessions(tmp_path)) != 2:  # noqa: ASYNC110 - a daemon forks twice
            await asyncio.sleep(0.01)

    _run(lambda: make("()"), scenario)
    assert _sessions(tmp_path) == []


def test_children_in_sessions_of_their_own_end_with_a_crash(make: Make, tmp_path: Path) -> None:
    async def scenario(pool: Pool) -> None:
        assert await _outcome(pool, "session") == 1.0
        assert await _outcome(pool, "crash") == "reward_crash"
        while _sessions(tmp_path):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)

    _run(lambda: make("()"), scenario)


def test_children_in_sessions_of_their_own_end_with_a_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    program = f"""
import asyncio
from support.reward_requests import reward_request
from areal_rloo.rewards.pool import RewardPool
from areal_rloo.trajectory import Item

async def main():
    argument = b"{tmp_path / "starts"}|()|SIGKILL"
    pool = RewardPool("{tmp_path / "scorer.py"}:make", argument, num_workers=1, deadline_s=60.0)
    await pool.ready()
    await pool.score(reward_request("session", Item("what?")), "part")
    print("scored", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"scored\n"
        eventually(lambda: len(_sessions(tmp_path)) == 2, "both have started")
        worker.send_signal(signal.SIGKILL)
    eventually(lambda: not processes_with([str(tmp_path / "starts")]), "nothing is left")


def test_a_stopped_keeper_is_killed_with_its_session(make: Make) -> None:
    async def scenario(pool: Pool) -> None:
        (keeper,) = children_with("areal_rloo.rewards")
        os.kill(keeper.pid, signal.SIGSTOP)
        assert await _outcome(pool, "crash") == "reward_crash"
        assert await _outcome(pool, "right") == 1.0

    _run(lambda: make("()"), scenario)
