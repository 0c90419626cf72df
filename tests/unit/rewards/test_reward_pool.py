"""Rewards in processes that can be killed: a failing reward affects no other."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE_S
from support.processes import children_with
from support.reward_pools import PoolOnALoop
from support.reward_requests import reward_request

from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.pool import RewardPool
from areal_rloo.rewards.process import Reply, WorkerProcess
from areal_rloo.rewards.request import RewardRequest
from areal_rloo.trajectory import Item

SCORER = """
import os, signal, struct, subprocess, sys, threading, time
import msgspec
from areal_rloo.errors import RewardError
from areal_rloo.rewards.process import Reply
from areal_rloo.rewards.request import Worth, read_worth

def send(content, length=None):
    "Write to the pool, as code of a policy may that runs in a reward."
    os.write(int(sys.argv[1]), struct.pack("!i", len(content) if length is None else length) + content)

hoard = []

def reward(completion, answer):
    if completion == "hang":
        while True:
            pass
    if completion == "crash":
        os._exit(7)
    if completion == "raise":
        raise ValueError("no such thing\\nand more of it")
    if completion == "leave":
        sys.exit("bye")
    if completion == "interrupt":
        raise KeyboardInterrupt
    if completion == "broken text":
        raise type("Broken", (Exception,), {"__str__": lambda self: 1 / 0})
    if completion == "surrogate":
        raise ValueError("\\ud83d")
    if completion == "own reason":
        raise RewardError("mine", "of my own")
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1"
    if completion.startswith("sleep"):
        time.sleep(0.2)
    if completion == "much memory":
        return float(len(bytearray(4 * 2**30)))
    if completion == "hoard":
        hoard.append(bytearray(600 * 2**20))
        hoard.append(bytearray(600 * 2**20))
    if completion == "long reply":
        send(b"x" * 2**26)
    if completion == "print without end":
        for _ in range(100):
            os.write(1, b"x" * 2**20)
    if completion == "print":
        print("reward: " * 100_000)
        sys.stdout.flush()
    if completion == "fork and wait":
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if completion == "fork and both go on":
        os.fork()
    if completion == "fork and crash":
        if os.fork() == 0:
            time.sleep(600)
        os._exit(7)
    if completion == "negative length":
        send(b"", length=-1)
    if completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "no msgpack":
        send(b"\\xc1")
    if completion == "forged reply":
        send(msgspec.msgpack.encode(Reply(result=Worth(reward=99.0))))
    if completion == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    if completion.startswith("start "):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(completion.removeprefix("start "), "w").write(str(started.pid))
        started.wait()
    return float(completion == answer)

def make(argument):
    def score(job):
        value = reward(job.request.completion, job.request.item.answer)
        return read_worth(value + len(argument) if value != "1" else value, job.request, returns="trajectory")
    return score

def broken(argument):
    raise RuntimeError("cannot be made")

"""


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    (tmp_path / "scorer.py").write_text(SCORER)
    return f"{tmp_path / 'scorer.py'}"


@pytest.fixture
def pool(scorer: str) -> Iterator[PoolOnALoop]:
    made = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=1.0)
    yield made
    made.close()


def _request(completion: str, answer: str) -> RewardRequest:
    return reward_request(completion, Item("what?", answer))


def _scorers() -> list[psutil.Process]:
    """Return the worker processes of this test, without their keepers."""
    return [child for keeper in children_with("areal_rloo.rewards") for child in keeper.children()]


async def _outcome(pool: PoolOnALoop, completion: str, answer: str = "right") -> float | str:
    try:
        return (await pool.score(_request(completion, answer), "part")).reward
    except RewardError as failure:
        return failure.reason


async def _outcomes(pool: PoolOnALoop, *completions: str) -> list[float | str]:
    return list(await asyncio.gather(*(_outcome(pool, completion) for completion in completions)))


def test_waiting_under_load_does_not_count_towards_the_deadline(scorer: str) -> None:
    """40 rewards of 0.2 s on one worker with a deadline of 6 s: the last waits for eight."""
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=6.0)

    async def scenario() -> list[float | str]:
        return list(await asyncio.gather(*(_outcome(pool, f"sleep {i}", f"sleep {i}") for i in range(40))))

    assert asyncio.run(scenario()) == [1.0] * 40
    assert pool.statistics().restarts == 0
    assert pool.statistics().busy_s >= 40 * 0.2
    pool.close()


def test_rewards_that_wait_until_they_can_start_are_counted(scorer: str) -> None:
    async def scenario() -> None:
        pool = RewardPool(f"{scorer}:make", b"", num_workers=1, deadline_s=60.0)
        await pool.ready()
        scores = [asyncio.create_task(pool.score(_request(f"sleep {i}", "right"), "part")) for i in range(3)]
        while not pool.statistics().num_queued:  # noqa: ASYNC110 - until all have come
            await asyncio.sleep(0)
        assert pool.statistics().num_queued == 2
        await asyncio.gather(*scores)
        assert pool.statistics().num_queued == 0
        await pool.close()

    asyncio.run(scenario())


def test_garbage_from_a_reward_drops_only_its_sample(pool: PoolOnALoop) -> None:
    completions = ["negative length", "right", "no msgpack", "right", "forged reply", "right"]
    assert asyncio.run(_outcomes(pool, *completions)) == ["reward_crash", 1.0, "reward_crash", 1.0, 0.0, 1.0]


def test_a_request_that_cannot_be_encoded_occupies_no_process(pool: PoolOnALoop) -> None:
    async def scenario() -> float | str:
        with pytest.raises(UnicodeEncodeError):
            await pool.score(_request("\ud83d", "right"), "part")
        async with asyncio.timeout(PATIENCE_S):
            return await _outcome(pool, "right")

    assert asyncio.run(scenario()) == 1.0


def _on_this_loop(scorer: str, scenario: Callable[[RewardPool, psutil.Process], Awaitable[None]]) -> None:
    async def main() -> None:
        before = {process.pid for process in _scorers()}
        pool = RewardPool(f"{scorer}:make", b"", num_workers=1, deadline_s=1.0)
        try:
            await pool.ready()
            (process,) = (process for process in _scorers() if process.pid not in before)
            await scenario(pool, process)
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", [0, 5])
def test_a_reply_in_time_counts_although_the_loop_was_blocked(
    scorer: str, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long reply takes several turns of the loop from the socket to the pool."""
    receive = WorkerProcess.receive

    async def receive_in_turns(worker: WorkerProcess) -> Reply:
        reply = await receive(worker)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return reply

    monkeypatch.setattr(WorkerProcess, "receive", receive_in_turns)

    async def scenario(pool: RewardPool, process: psutil.Process) -> None:
        scoring = asyncio.create_task(pool.score(_request("right", "right"), "part"))
        for _ in range(5):  # turns of the loop until the job is sent
            await asyncio.sleep(0)
        time.sleep(2.0)  # noqa: ASYNC251 - longer than the deadline: the reply waits in the socket
        assert (await scoring).reward == 1.0
        assert pool.statistics().restarts == 0

    _on_this_loop(scorer, scenario)


def test_a_process_that_died_idle_is_replaced_before_the_next_job(scorer: str) -> None:
    async def scenario(pool: RewardPool, process: psutil.Process) -> None:
        process.kill()
        process.wait(PATIENCE_S)  # without a turn of the loop, which would see the end
        assert (await pool.score(_request("right", "right"), "part")).reward == 1.0
        assert pool.statistics().restarts == 1

    _on_this_loop(scorer, scenario)


def test_each_failure_has_its_reason_and_drops_only_its_sample(pool: PoolOnALoop) -> None:
    completions = ["right", "hang", "right", "crash", "wrong", "raise", "right", "leave", "nan", "text", "right"]
    expected = [1.0, "reward_timeout", 1.0, "reward_crash", 0.0, "reward_error", 1.0, "reward_error"]
    assert asyncio.run(_outcomes(pool, *completions)) == [*expected, "reward_out_of_range", "reward_wrong_type", 1.0]
    assert pool.statistics().restarts == 2  # after the hang and the crash


def test_exceptions_of_every_kind_keep_the_process(pool: PoolOnALoop) -> None:
    completions = ["interrupt", "broken text", "surrogate", "own reason", "leave"]
    assert asyncio.run(_outcomes(pool, *completions, "right")) == ["reward_error"] * len(completions) + [1.0]
    assert pool.statistics().restarts == 0


def test_an_exception_is_reported_with_a_summary_and_the_traceback(pool: PoolOnALoop) -> None:
    with pytest.raises(RewardError) as caught:
        asyncio.run(pool.score(_request("raise", "right"), "part"))
    assert re.fullmatch(r"ValueError: no such thing \(.*/scorer\.py:\d+\)", caught.value.summary)
    assert 'scorer.py", line' in caught.value.detail
    assert caught.value.detail.endswith("ValueError: no such thing\nand more of it")


def test_a_crash_is_reported_with_its_exit_code(pool: PoolOnALoop) -> None:
    with pytest.raises(RewardError, match="ended with code 7"):
        asyncio.run(pool.score(_request("crash", "right"), "part"))


def test_a_segmentation_fault_writes_a_traceback(scorer: str, capfd: pytest.CaptureFixture[str]) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=PATIENCE_S)
    with pytest.raises(RewardError, match=r"ended with code -11; the output of .* \(logs/rollout-\*\.out\) may have"):
        asyncio.run(pool.score(_request("segfault", "right"), "part"))
    pool.close()
    assert "Fatal Python error: Segmentation fault" in (written := capfd.readouterr().err)
    assert 'scorer.py", line' in written


def test_killing_an_idle_worker_drops_no_sample(pool: PoolOnALoop) -> None:
    (worker,) = _scorers()
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(PATIENCE_S)
    assert asyncio.run(_outcome(pool, "right")) == 1.0
    assert pool.statistics().restarts == 1


def test_a_reward_may_print_fork_and_start_threads(pool: PoolOnALoop) -> None:
    completions = ["print", "right", "fork and wait", "right", "fork and both go on", "right", "thread", "right"]
    expected = [0.0, 1.0] * 4
    assert asyncio.run(_outcomes(pool, *completions)) == expected
    assert pool.statistics().restarts == 0


def test_a_crash_is_noticed_while_a_fork_of_the_worker_survives(scorer: str) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=60.0)
    assert asyncio.run(_outcomes(pool, "fork and crash", "right")) == ["reward_crash", 1.0]
    pool.close()


def test_processes_started_by_a_reward_end_with_its_worker(pool: PoolOnALoop, tmp_path: Path) -> None:
    assert asyncio.run(_outcome(pool, f"start {tmp_path / 'pid'}")) == "reward_timeout"
    started = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_workers_run_in_parallel(scorer: str) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"abc", num_workers=2, deadline_s=6.0)

    async def scenario() -> list[float | str]:
        hang = asyncio.create_task(_outcome(pool, "hang"))
        rest = [await _outcome(pool, "right") for _ in range(5)]
        assert not hang.done()
        return [*rest, await hang]

    assert asyncio.run(scenario()) == [4.0] * 5 + ["reward_timeout"]
    pool.close()


def test_closing_the_pool_ends_idle_and_busy_workers(scorer: str) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=2, deadline_s=60.0)
    children = _scorers()
    assert len(children) == 2

    async def scenario() -> None:
        hang = asyncio.create_task(_outcome(pool, "hang"))
        await asyncio.sleep(0.1)
        pool.close()
        assert await hang == "reward_crash"

    asyncio.run(scenario())
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (2, [])
    assert _scorers() == []


def test_a_scorer_that_cannot_be_made_is_refused_with_the_reason(scorer: str) -> None:
    for name, reason in (("broken", "cannot be made"), ("absent", "has no function 'absent'")):
        with pytest.raises(ConfigError, match=reason):
            PoolOnALoop(f"{scorer}:{name}", b"", num_workers=2, deadline_s=1.0)
    assert _scorers() == []


def test_a_reward_that_never_ends_is_killed_only_at_its_deadline(pool: PoolOnALoop) -> None:
    began_s = time.monotonic()
    assert asyncio.run(_outcome(pool, "hang")) == "reward_timeout"
    assert time.monotonic() - began_s >= 1.0, "not before its deadline"


def test_a_reward_beyond_its_memory_drops_only_its_sample(scorer: str) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=PATIENCE_S, memory_bytes=2**30)
    completions = ["right", "much memory", "right", "hoard", "right"]
    assert asyncio.run(_outcomes(pool, *completions)) == [1.0, "reward_crash", 1.0, "reward_crash", 1.0]
    with pytest.raises(RewardError, match=r"code 71: out of memory \(rollout\.reward_memory_bytes\)"):
        asyncio.run(pool.score(_request("much memory", "right"), "part"))
    pool.close()


def test_a_reply_without_end_drops_only_its_sample(scorer: str) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=PATIENCE_S)
    assert asyncio.run(_outcomes(pool, "long reply", "right")) == ["reward_crash", 1.0]
    pool.close()


def test_output_without_end_is_cut_in_the_log(scorer: str, capfd: pytest.CaptureFixture[str]) -> None:
    pool = PoolOnALoop(f"{scorer}:make", b"", num_workers=1, deadline_s=PATIENCE_S)
    assert asyncio.run(_outcomes(pool, "print without end", "right")) == [0.0, 1.0]
    pool.close()
    log = capfd.readouterr().err
    assert len(log) < 1_200_000
    assert "bytes of output are left out]" in log
