"""GPU check: run every test marked `gpu`.

    python -m benchmarks.gpu_tests [--device cpu --small]

Only files with such a test are collected, so packages of other tests may be missing. On a CPU all of them skip.
"""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

from benchmarks.gpu_part import REPO, Part, run

_LIMIT_S = 400


def check(part: Part) -> None:
    files = sorted(path for path in (REPO / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text())
    report = part.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *map(str, files)]
    paths = os.pathsep.join([str(REPO), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(command, cwd=REPO, env=os.environ | {"PYTHONPATH": paths}, timeout=_LIMIT_S, check=False)
    part.check(report.exists(), f"pytest ended with {ended.returncode} and without a report")
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        skipped, failed = case.find("skipped"), case.find("failure")
        failed = case.find("error") if failed is None else failed
        outcome = "passed"
        if skipped is not None:
            outcome = f"skipped: {skipped.get('message')}"
            part.goal(not part.on_gpu, f"{name} {outcome}")
        if failed is not None:
            outcome = "failed"
            part.failures.append(f"{name} failed: {' '.join(str(failed.get('message')).split())[:300]}")
        part.row("tests", test=name, outcome=outcome, seconds=float(case.get("time", "nan")))
    if not part.on_gpu:
        part.notes.append("These tests mean nothing on a CPU, and skip.")
    part.check(bool(part.tables.get("tests")), "no test is marked gpu")


if __name__ == "__main__":
    run(check)
