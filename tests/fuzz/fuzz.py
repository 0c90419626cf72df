"""Search for bytes that break a boundary, with atheris, which follows the coverage of the code.

    python tests/fuzz/fuzz.py [TARGET ...] [--minutes 1]

In: the seeds of `targets.py` and the kept corpus. Out: exit code 0, or 1 with the traceback; the bytes that broke a
target are in tests/fuzz/found/, and belong into a test once mended. Each target runs in a process of its own, with
limits of time and memory for each input. `--keep` puts inputs with new coverage into tests/fuzz/corpus/, which `make
test` tries.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOUND = HERE / "found"
_MOST_KEPT = 300  # the smallest
_LIMITS = ("-rss_limit_mb=1500", "-malloc_limit_mb=256", "-timeout=10", "-max_len=65536")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        sys.stdout.write("error: atheris is not installed; run make extras\n")
        return 2
    if arguments.inside is not None:
        return _fuzz(arguments.inside, arguments.targets)
    from targets import TARGETS

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        codes = list(pool.map(lambda name: _run(name, arguments), arguments.targets or TARGETS))
    sys.stdout.write(f"{codes.count(0)} of {len(codes)} targets without a finding\n")
    return int(any(codes))


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Fuzz a target in another process: a finding ends the process. Print its output if there is a finding."""
    from targets import corpus, keep

    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for number, content in enumerate(corpus(name)):
            (Path(work) / f"kept-{number}").write_bytes(content)
        limits = (*_LIMITS, f"-max_total_time={60 * arguments.minutes:.0f}", f"-artifact_prefix={FOUND}/{name}-")
        command = [sys.executable, __file__, f"--inside={name}", "--", *limits, "-print_final_stats=1", work]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if arguments.keep and done.returncode == 0:
            inputs_now = sorted((path.read_bytes() for path in Path(work).iterdir()), key=len)
            keep(name, inputs_now[:_MOST_KEPT])
    inputs = re.findall(r"number_of_executed_units: *(\d+)", done.stdout) or ["unknown"]
    sys.stdout.write(f"{name}: {inputs[0]} inputs\n" if done.returncode == 0 else f"--- {name}\n{done.stdout}\n")
    sys.stdout.flush()
    return done.returncode


def _fuzz(name: str, options: list[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=["areal_rloo"]):
        from targets import TARGETS
    atheris.Setup([sys.argv[0], *options], TARGETS[name].try_bytes)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
