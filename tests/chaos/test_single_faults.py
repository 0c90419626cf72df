"""A kind of fault strikes a whole run, which ends at its number of steps, with every sample trained on once.

The faults of `soak.py` come in groups. The others need parts that a soak lacks: two networks, another clock, several
ranks, and workers that break the protocol.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from chaos import sockets
from chaos.verdict import judge, left_files
from support.local_runs import REPO, SENDS_GARBAGE, Run, assert_kills_cost_nothing, balanced, further_worker, gone
from support.networks import CAN_MAKE_NETWORKS, two_networks
from support.processes import wire_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SOAK = Path(__file__).with_name("soak.py")
NUM_STEPS = 150
WITH_VERDICT = (
    *("telemetry.trajectories_per_step=1000000", "data.train.num_prompts=16", f"learner.num_train_steps={NUM_STEPS}"),
    *("rollout.num_workers=2", "wire.transport=tcp", "wire.heartbeat_timeout_s=3", "weights.timeout_s=5"),
    *("learner.groups_per_step=8", "evaluation.every_n_versions=50", "checkpoint.every_n_steps=50"),
)
# The worker with this id runs in another network than the learner.
IN_ANOTHER_NETWORK = """
import ctypes, os, sys

if "--worker-id=rollout-1" in sys.argv:
    libc = ctypes.CDLL(None, use_errno=True)
    network = os.open("/run/netns/{name}", os.O_RDONLY)
    if libc.setns(network, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
"""
# Adds the number in a file to the clock of the day; the monotonic clock stays. Another clock is set for this run alone.
CLOCK_THAT_JUMPS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t jump(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("CLOCK_JUMPS_BY"), "r");
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += jump();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    int code = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return code;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
OF_ANOTHER_VERSION = "import areal_rloo.wire.messages as messages; messages.WIRE_VERSION += 1"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setenv("AREAL_RLOO_CACHE", str(REPO / ".pytest_cache" / "models"))
    runs: list[Run] = []

    def begin(*arguments: str, **options: object) -> Run:
        runs.append(Run(tmp_path / "run", *WITH_VERDICT, *arguments, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert gone(run), "orphans"


def _assert_ended_well(run: Run) -> None:
    code, output = run.wait()
    assert code == 0, output
    summary = run.summary()
    assert (summary["num_train_steps"], summary["exit_reason"]) == (NUM_STEPS, "completed")
    assert balanced(summary["ledger"])
    verdict = judge(run.folder)
    assert verdict.is_clean, verdict.findings
    assert gone(run), "orphans"
    assert left_files(run.folder, []) == []


def _wait_for_steps(run: Run, number: int) -> None:
    run.wait_for(lambda: len(run.records()) >= number)


@pytest.mark.parametrize(
    "words",
    [
        "worker,reward,keeper",
        "learner,launcher",
        "connection,garbage,peer,scale",
        pytest.param("full,few,engine", marks=pytest.mark.rare),
        pytest.param("two at once", marks=pytest.mark.rare),
    ],
)
def test_a_run_under_faults_of_a_group_ends_at_its_step(tmp_path: Path, words: str) -> None:
    """Repeat a failure with the command of this test."""
    options = ["--seed=5", "--steps=100", "--minutes=10", "--every=2", f"--work={tmp_path / 'soak'}"]
    command = [sys.executable, str(SOAK), *options, f"--only={words}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 77:
        pytest.skip("no namespaces of one's own here, which a soak needs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, *_, last = ended.stdout.splitlines()
    assert first.startswith("seed 5: SEED=5 repeats the faults")
    assert re.fullmatch(
        r"seed 5, 100 steps, ended well: [1-9]\d* faults, 0 samples lost, 0 samples trained twice, "
        r"0 tokens trained past the bound, 0 orphans",
        last,
    )


@pytest.mark.skipif(not CAN_MAKE_NETWORKS, reason="only root, with ip and nsenter, can make networks")
def test_a_network_that_is_cut_and_slow_loses_nothing(start: Callable[..., Run], tmp_path: Path) -> None:
    chance = Random(1)
    with two_networks() as networks:
        entry = tmp_path / "entry.py"
        entry.write_text(IN_ANOTHER_NETWORK.format(name=networks.second.name))
        network = (f"wire.host={networks.first.address}", "weights.transport=collective", f"run.entry={entry}")
        run = start(*network, before=networks.first.prefix)
        for lasts_s in (chance.uniform(0.5, 2), chance.uniform(6, 9)):  # shorter and longer than the heartbeat timeout
            _wait_for_steps(run, len(run.records()) + 3)
            networks.cut()
            time.sleep(lasts_s)
            networks.mend()
        port = _port(run)
        ends = [end for worker in run.children("areal_rloo.rollout") for end in sockets.connections(worker.pid, port)]
        for end in ends:
            assert end.getpeername()[0] == networks.first.address
            sockets.slow_down(end, chance.choice((3_000, 20_000)))
        _wait_for_steps(run, len(run.records()) + 3)
        for end in ends:
            sockets.slow_down(end)
            end.close()
        _assert_ended_well(run)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_a_clock_that_jumps_changes_nothing(start: Callable[..., Run], tmp_path: Path) -> None:
    chance, jump, library = Random(2), tmp_path / "jump", tmp_path / "clock.so"
    jump.write_text("0")
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(compiler, input=CLOCK_THAT_JUMPS, text=True, check=True)
    clock = {"LD_PRELOAD": str(library), "CLOCK_JUMPS_BY": str(jump)}
    run = start(environment=clock)
    for _ in range(5):
        _wait_for_steps(run, len(run.records()) + 2)
        jump_s = chance.choice((-1, 1)) * chance.choice((10_000, 100_000, 100_000_000))
        jump.write_text(str(jump_s))
        command = [sys.executable, "-c", "import time; print(time.time())"]
        shown = float(subprocess.check_output(command, env={**os.environ, **clock}))
        assert abs(shown - time.time() - jump_s) < 1_000, "the clock did not jump"  # noqa: TID251
    _assert_ended_well(run)


def _said(run: Run) -> str:
    path = run.folder / "logs" / "rollout-7.log"
    return path.read_text() if path.exists() else ""


def test_a_worker_of_another_wire_version_ends_alone(start: Callable[..., Run]) -> None:
    run = start()
    with further_worker(run, OF_ANOTHER_VERSION) as worker:
        assert worker.wait(120) == 2, "a restart would end in the same way"
    assert "wire version" in _said(run)
    assert "Traceback" not in _said(run)
    _assert_ended_well(run)


def test_a_worker_that_sends_garbage_does_no_harm(start: Callable[..., Run]) -> None:
    run = start()
    with further_worker(run, SENDS_GARBAGE):
        run.wait_for(lambda: "the learner refuses a message" in _said(run))
        _assert_ended_well(run)


def test_ranks_that_are_stopped_and_killed_cost_nothing(start: Callable[..., Run]) -> None:
    options = ("learner.num_ranks=2", "learner.num_train_steps=32", "launcher.max_learner_restarts=2")
    small = ("learner.groups_per_step=4", "checkpoint.every_n_steps=2", "wire.heartbeat_timeout_s=30")
    run = start(*options, *small)
    _wait_for_steps(run, 2)
    stopped = run.rank(1)
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(3)
    stopped.send_signal(signal.SIGCONT)
    assert_kills_cost_nothing(run)
    assert judge(run.folder).is_clean


def _port(run: Run) -> int:
    (learner,) = run.children("areal_rloo.learner")
    port = wire_port(learner)
    assert port is not None, "the learner has ended"
    return port
