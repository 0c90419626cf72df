"""Run a training run, strike it with random faults, and count the damage.

    python tests/chaos/soak.py --minutes 30 [--seed N] [--every SECONDS] [--only WORD,WORD] [--calm] [--write FILE.json]
    python tests/chaos/soak.py --steps 60 ...

The first line has the seed, every fault has a line, and the last line has the counts. Exit code 1 if the run lost a
sample, trained on a sample twice or past the staleness bound, left an orphan, or did not end well. The soak runs in
namespaces of its own (`unshare`), so everything that is left can be seen, and ends with the soak. The process outside
prints the last line, also if the soak itself is killed or hangs. With `--steps`, the run ends by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from chaos.faults import FAULTS, Blow, Fault, send
from chaos.soaked_run import MEMORY, SoakedRun
from chaos.verdict import Verdict, judge, left_files, left_processes

from areal_rloo.waiting import wait_until

_INSIDE = "AREAL_RLOO_SOAK_INSIDE"  # variable of the soak within the namespaces
_RESPITE_S = 60.0  # without a train step; then no fault until the next step
_STUCK_S = 210.0
_END_S = 120.0
_REST_S = 900.0  # of a soak, beside the faults
_CALM_STEPS = 15  # the last steps, without faults
_ENDLESS = 1_000_000
_LAST_LINE = "last-line"  # file
_HAZARD_SHARE = 0.003
_SETUP = """
mount -t tmpfs -o size=4g tmpfs /dev/shm && mount -t tmpfs -o size=4g tmpfs "$1/disk" || exit 77
shift
"$@"
exit $?
"""


@dataclass(slots=True)
class Soak:
    """A run under faults."""

    run: SoakedRun
    chance: Random
    every_s: float
    faults: tuple[Fault, ...] = FAULTS
    num_steps: int | None = None  # of the run; None: endless
    round: list[Fault] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    healing: list[tuple[float, str, Blow]] = field(default_factory=list)
    num_bytes: int = 0
    moved_s: float = field(default_factory=time.monotonic)

    def say(self, words: str) -> None:
        print(f"{time.monotonic() - self.started_s:8.1f} s  {words}", flush=True)

    def until(self, ends_s: float, *, calm: bool) -> None:
        """Strike until this time.

        Raises:
            RuntimeError: the run has ended, or makes no progress.
        """
        next_s = time.monotonic() + self.every_s
        while time.monotonic() < ends_s and not self.look():
            if time.monotonic() - self.moved_s > _RESPITE_S:
                self.look(heal_all=True)  # so a run without a train step is stuck by itself, not by the next fault
            elif not calm and time.monotonic() >= next_s:
                self.strike()
                next_s = time.monotonic() + self.chance.expovariate(1 / self.every_s)
            time.sleep(0.1)

    def strike(self) -> None:
        """Strike with the next fault of the round that can strike now.

        The first round has every kind of fault, in random order; later rounds have each kind as often as its weight. A
        run that ends at a step has the first round alone, and no fault in the last steps.
        """
        is_first = not self.counts
        if self.num_steps is not None:
            ends_soon = self.run.num_steps() + _CALM_STEPS >= self.num_steps
            if ends_soon or not (is_first or self.round):
                return
        if not self.round:
            self.round = [fault for fault in self.faults for _ in range(1 if is_first else fault.weight)]
            self.chance.shuffle(self.round)
        for fault in self.round:
            if fault.alone:
                self.look(heal_all=True)
            blow = fault.strike(self.run, self.chance)
            if blow is None:
                continue
            self.round.remove(fault)
            self.counts[fault.name] += 1
            lasting = f", for {blow.lasts_s:.1f} s" if blow.heal else ""
            self.say(f"{fault.name}: {blow.words}{lasting}")
            if blow.heal is not None:
                self.healing.append((time.monotonic() + blow.lasts_s, fault.name, blow))
            return

    def look(self, *, heal_all: bool = False) -> bool:
        """Heal what is due, and check that the run goes on; return True if the run has made all of the steps."""
        due = [entry for entry in self.healing if heal_all or entry[0] <= time.monotonic()]
        self.healing = [entry for entry in self.healing if entry not in due]
        for _, _, blow in due:
            assert blow.heal is not None
            blow.heal()
        num_bytes = self.run.num_record_bytes()
        if num_bytes > self.num_bytes:
            self.moved_s = time.monotonic()
        self.num_bytes = num_bytes
        if self.run.launcher.poll() is not None:
            if self.run.launcher.returncode == 0 and self.run.num_steps() == self.num_steps:
                return True
            raise RuntimeError(f"the launcher ended with code {self.run.launcher.returncode}")
        if time.monotonic() - self.moved_s > _STUCK_S:
            send([*self.run.learners(), *self.run.workers()], signal.SIGUSR2)  # the stacks, for the logs
            time.sleep(2)
            raise RuntimeError(f"no train step for {_STUCK_S:.0f} s")
        return False

    def settle(self) -> None:
        """Heal everything and wait for more train steps."""
        self.look(heal_all=True)
        self.say("no more faults")
        for _ in range(3):
            before = self.num_bytes
            while self.num_bytes <= before:
                before = min(before, self.num_bytes)  # a restart removes records
                self.look()
                time.sleep(0.2)

    def drain(self) -> None:
        """End the run.

        Raises:
            RuntimeError: the run did not end in time, or not well.
        """
        self.run.launcher.send_signal(signal.SIGTERM)
        try:
            code = self.run.launcher.wait(_END_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the drain took more than {_END_S:.0f} s") from error
        reason = json.loads((self.run.folder / "summary.json").read_text())["exit_reason"]
        if (code, reason) != (0, "drained"):
            raise RuntimeError(f"the run ended with code {code}, {reason}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, help="end after this number of train steps, at the latest after --minutes")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two faults")
    parser.add_argument("--only", default="", help="words in the names of the faults, with commas between")
    parser.add_argument("--calm", action="store_true", help="no faults, to compare")
    parser.add_argument("--write", type=Path, help="write the counts and the learning curve")
    parser.add_argument("--work", type=Path, help="an empty folder; the logs stay there")
    options = parser.parse_args()
    if os.environ.get(_INSIDE) is not None:
        return _soak(Path(os.environ[_INSIDE]), options)
    seed = time.time_ns() % 10**6 if options.seed is None else options.seed
    return _in_namespaces(options.work or Path(tempfile.mkdtemp(prefix="areal-rloo-soak-")), seed, options.minutes)


def _in_namespaces(work: Path, seed: int, minutes: float) -> int:
    """Run this program again, with /dev/shm, the processes and a small disk apart; 77 if that is not possible."""
    if shutil.which("unshare") is None:
        print("error: no unshare(1) here, which a soak needs")
        return 77
    for name in ("disk", "tmp"):
        (work / name).mkdir(parents=True)
    script = ["sh", "-c", _SETUP, "sh", str(work), sys.executable, *sys.argv, f"--seed={seed}"]
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *script]
    environment = {**os.environ, _INSIDE: str(work), "TMPDIR": str(work / "tmp"), "PYTHONPATH": str(TESTS.parent)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # ends the wait, which kills the soak
    code, reason = 1, "ended by a signal"
    try:
        code = subprocess.run(command, env=environment, check=False, timeout=60 * minutes + _REST_S).returncode
        reason = f"the soak ended with code {code}"
    except subprocess.TimeoutExpired:
        reason = f"the soak hung for {_REST_S:.0f} s"
    finally:
        if code != 77:
            told = work / _LAST_LINE
            last = told.read_text() if told.exists() else f"seed {seed}: NO VERDICT, {reason}; logs in {work}"
            print(last, flush=True)
    return code if code in (0, 77) else 1


def _soak(work: Path, options: argparse.Namespace) -> int:
    seed = options.seed
    print(f"seed {seed}: SEED={seed} repeats the faults; logs in {work}", flush=True)
    steps = _ENDLESS if options.steps is None else options.steps
    run = SoakedRun(work, seed, hazard_share=0.0 if options.calm else _HAZARD_SHARE, num_train_steps=steps)
    faults = tuple(fault for fault in FAULTS if any(word in fault.name for word in options.only.split(",")))
    soak = Soak(run, Random(seed), options.every, faults, options.steps)
    verdict, trouble = Verdict(), None
    try:
        _disturb(soak, options)
        known = {1, os.getpid()}
        wait_until(lambda: not left_processes(known), timeout_s=10.0, look_every_s=0.1)
        verdict = judge(run.folder)
        verdict.orphans = [*left_processes(known), *left_files(run.folder, [MEMORY, work / "tmp"])]
    except Exception as error:  # noqa: BLE001 - a mistake of the soak has a last line, too
        trouble = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        soak.say(f"FAILED: {traceback.format_exc()}")
    for finding in (*verdict.findings, *verdict.orphans):
        soak.say(f"FOUND: {finding}")
    is_well = trouble is None and verdict.is_clean
    if not is_well:
        print(run.ends_of_logs())
    _tell(soak, verdict, trouble, options)
    if not is_well:
        _keep(run)
    return 0 if is_well else 1


def _disturb(soak: Soak, options: argparse.Namespace) -> None:
    """Run to the end of the soak.

    Raises:
        RuntimeError: the run did not end well.
    """
    soak.until(time.monotonic() + 60 * options.minutes, calm=options.calm)
    if options.steps is None:
        soak.settle()
        soak.drain()
    elif soak.run.launcher.poll() is None:
        raise RuntimeError(f"fewer than {options.steps} steps in {options.minutes:g} minutes")


def _keep(run: SoakedRun) -> None:
    """Copy the run folder, which is on a disk that ends with the soak."""
    shutil.copytree(run.folder, run.work / "run", symlinks=True, ignore_dangling_symlinks=True)


def _tell(soak: Soak, verdict: Verdict, trouble: str | None, options: argparse.Namespace) -> None:
    seed, steps, accuracies = options.seed, soak.run.num_steps(), soak.run.accuracies()
    last = f"{soak.counts.total()} faults, {verdict if trouble is None else 'damage not counted'}"
    print("faults: " + ", ".join(f"{fault.name} {soak.counts[fault.name]}" for fault in soak.faults))
    print("accuracy: " + ", ".join(f"{version}: {value:.2f}" for version, value in accuracies.items()))
    if options.write is not None:
        numbers = {"seed": seed, "minutes": options.minutes, "steps": steps, "last_line": last}
        curve = [[version, accuracy] for version, accuracy in accuracies.items()]
        found = {**numbers, "faults": dict(sorted(soak.counts.items())), "accuracy": curve}
        options.write.write_text(json.dumps(found, indent=2) + "\n")
    ending = "ended well" if trouble is None else trouble.replace("\n", " ")
    (soak.run.work / _LAST_LINE).write_text(f"seed {seed}, {steps} steps, {ending}: {last}")


if __name__ == "__main__":
    sys.exit(main())
