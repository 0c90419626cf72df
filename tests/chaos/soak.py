"""Run a training run, strike it with random faults, and count the damage.

    python tests/chaos/soak.py --minutes 30 [--seed N] [--every SECONDS] [--only WORD,WORD] [--calm] [--write FILE.json]

The first line has the seed, every fault has a line, and the last line has the counts. Exit code 1 if the run lost a
sample, trained on a sample twice or past the staleness bound, left an orphan, or did not end well. The soak runs in
namespaces of its own (`unshare`), so everything that is left can be seen, and ends with the soak.
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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from chaos.faults import FAULTS, Blow, Fault, free_disk, free_memory
from chaos.soaked_run import MEMORY, SoakedRun
from chaos.verdict import Verdict, judge, left_files, left_processes

from areal_rloo.waiting import wait_until

_INSIDE = "AREAL_RLOO_SOAK_INSIDE"  # variable of the soak within the namespaces
_STUCK_S = 150.0
_END_S = 120.0
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
        while time.monotonic() < ends_s:
            self.look()
            if not calm and time.monotonic() >= next_s:
                self.strike()
                next_s = time.monotonic() + self.chance.expovariate(1 / self.every_s)
            time.sleep(0.1)

    def strike(self) -> None:
        (fault,) = self.chance.choices(self.faults, [fault.weight for fault in self.faults])
        blow = fault.strike(self.run, self.chance)
        if blow is None:
            return
        self.counts[fault.name] += 1
        lasting = f", for {blow.lasts_s:.1f} s" if blow.heal else ""
        self.say(f"{fault.name}: {blow.words}{lasting}")
        if blow.heal is not None:
            self.healing.append((time.monotonic() + blow.lasts_s, fault.name, blow))

    def look(self, *, heal_all: bool = False) -> None:
        """Heal what is due, and check that the run goes on."""
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
            raise RuntimeError(f"the launcher ended with code {self.run.launcher.returncode}")
        if time.monotonic() - self.moved_s > _STUCK_S:
            raise RuntimeError(f"no train step for {_STUCK_S:.0f} s")

    def settle(self) -> None:
        """Heal everything and wait for more train steps."""
        self.look(heal_all=True)
        free_disk(self.run)
        free_memory()
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
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two faults")
    parser.add_argument("--only", default="", help="words in the names of the faults, with commas between")
    parser.add_argument("--calm", action="store_true", help="no faults, to compare")
    parser.add_argument("--write", type=Path, help="write the counts and the learning curve")
    parser.add_argument("--work", type=Path, help="an empty folder; the logs stay there")
    options = parser.parse_args()
    if os.environ.get(_INSIDE) is None:
        return _in_namespaces(options.work or Path(tempfile.mkdtemp(prefix="areal-rloo-soak-")))
    seed = time.time_ns() % 10**6 if options.seed is None else options.seed
    return _soak(Path(os.environ[_INSIDE]), seed, options)


def _in_namespaces(work: Path) -> int:
    """Run this program again, with /dev/shm, the processes and a small disk apart; 77 if that is not possible."""
    if shutil.which("unshare") is None:
        print("error: no unshare(1) here, which a soak needs")
        return 77
    for name in ("disk", "tmp"):
        (work / name).mkdir(parents=True)
    script = ["sh", "-c", _SETUP, "sh", str(work), sys.executable, *sys.argv]
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    command = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *script]
    environment = {**os.environ, _INSIDE: str(work), "TMPDIR": str(work / "tmp"), "PYTHONPATH": str(TESTS.parent)}
    return subprocess.run(command, env=environment, check=False).returncode


def _soak(work: Path, seed: int, options: argparse.Namespace) -> int:
    print(f"seed {seed}: SEED={seed} repeats the faults; logs in {work}", flush=True)
    run = SoakedRun(work, seed, hazard_share=0.0 if options.calm else _HAZARD_SHARE)
    faults = tuple(fault for fault in FAULTS if any(word in fault.name for word in options.only.split(",")))
    soak = Soak(run, Random(seed), options.every, faults)
    verdict, trouble = Verdict(), None
    try:
        soak.until(time.monotonic() + 60 * options.minutes, calm=options.calm)
        soak.settle()
        soak.drain()
    except RuntimeError as error:
        trouble = str(error)
        soak.say(f"FAILED: {trouble}")
    if trouble is None:
        known = {1, os.getpid()}
        wait_until(lambda: not left_processes(known), timeout_s=10.0, look_every_s=0.1)
        verdict = judge(run.folder)
        verdict.orphans = [*left_processes(known), *left_files(run.folder, [MEMORY, work / "tmp"])]
    for finding in (*verdict.findings, *verdict.orphans):
        soak.say(f"FOUND: {finding}")
    if trouble is not None or not verdict.is_clean:
        _keep(run)
    _tell(soak, verdict, trouble, seed, options)
    return 0 if trouble is None and verdict.is_clean else 1


def _keep(run: SoakedRun) -> None:
    """Copy the run folder, which is on a disk that ends with the soak."""
    shutil.copytree(run.folder, run.work / "run", symlinks=True, ignore_dangling_symlinks=True)


def _tell(soak: Soak, verdict: Verdict, trouble: str | None, seed: int, options: argparse.Namespace) -> None:
    steps, accuracies = soak.run.num_steps(), soak.run.accuracies()
    last = f"{soak.counts.total()} faults, {verdict}"
    print("faults: " + ", ".join(f"{name} {count}" for name, count in sorted(soak.counts.items())))
    print("accuracy: " + ", ".join(f"{version}: {value:.2f}" for version, value in accuracies.items()))
    if options.write is not None:
        numbers = {"seed": seed, "minutes": options.minutes, "steps": steps, "last_line": last}
        curve = [[version, accuracy] for version, accuracy in accuracies.items()]
        found = {**numbers, "faults": dict(sorted(soak.counts.items())), "accuracy": curve}
        options.write.write_text(json.dumps(found, indent=2) + "\n")
    print(f"seed {seed}, {steps} steps, {'ended well' if trouble is None else trouble}: {last}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
