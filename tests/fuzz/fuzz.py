"""Search for bytes that break a boundary, with atheris, which follows the coverage of the code.

    python tests/fuzz/fuzz.py [TARGET ...] [--minutes 1] [--keep] [--output benchmarks/results/fuzz.json]

In: the seeds of `targets.py` and the kept corpus. Out: exit code 0, or 1 with the traceback; the bytes that broke a
target are in tests/fuzz/found/, and belong into a test once mended. Each target runs in a process of its own, with
limits of time and memory for each input; as many processes at once as there are cores.

`--keep` puts the smallest inputs with all of the coverage into tests/fuzz/corpus/, which `make test` tries. `--output`
puts the numbers of each target into a file of results, beside those of targets that ran before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOUND = HERE / "found"
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # inputs are many and small
_LIMITS = ("-rss_limit_mb=1500", "-malloc_limit_mb=256", "-timeout=10", "-max_len=65536", "-len_control=0")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        sys.stdout.write("error: atheris is not installed; run make extras\n")
        return 2
    if arguments.inside is not None:
        return _fuzz(arguments.inside, arguments.targets)
    from fuzz.targets import NAMES

    names = arguments.targets or NAMES
    began = time.monotonic()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = dict(zip(names, pool.map(lambda name: _run(name, arguments), names), strict=True))
    without = sum(result["findings"] == 0 for result in results.values())
    seconds = time.monotonic() - began
    sys.stdout.write(f"{without} of {len(results)} targets without a finding, in {seconds:.0f} s\n")
    if arguments.output is not None:
        _write(arguments.output, results)
    return int(without < len(results))


def _run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fuzz a target in another process: a finding ends the process. Print its output if there is a finding."""
    from fuzz.targets import corpus, keep

    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=IN_MEMORY) as folder:
        work, least, files = (Path(folder) / kind for kind in ("work", "least", "files"))
        for path in (work, least, files):
            path.mkdir()
        for number, content in enumerate(corpus(name)):
            (work / f"kept-{number}").write_bytes(content)
        limits = (*_LIMITS, f"-max_total_time={60 * arguments.minutes:.0f}", f"-artifact_prefix={FOUND}/{name}-")
        result, output = _libfuzzer(name, files, *limits, "-print_final_stats=1", str(work))
        if arguments.keep and not result["findings"]:
            _libfuzzer(name, files, *_LIMITS, "-merge=1", str(least), str(work))
            keep(name, [path.read_bytes() for path in least.iterdir()])
    line = f"{name}: {result['inputs']} inputs, peak {result['peak_rss_mib']} MiB\n"
    sys.stdout.write(f"--- {name}\n{output}\n" if result["findings"] else line)
    sys.stdout.flush()
    return result


def _libfuzzer(name: str, files: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run libFuzzer on a target, with a folder for the files that the target writes; return numbers and output."""
    began = time.monotonic()
    command = [sys.executable, __file__, f"--inside={name}", "--", *options]
    environment = os.environ | {"TMPDIR": str(files)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        output = process.stdout.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    inputs = re.findall(r"number_of_executed_units: *(\d+)", output)
    branches = re.findall(r"\bcov: (\d+)", output)
    return {
        "findings": int(process.returncode != 0),
        "inputs": int(inputs[-1]) if inputs else None,
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime),
        "peak_rss_mib": usage.ru_maxrss // 1024,
        "branches": int(branches[-1]) if branches else None,
    }, output


def _write(path: Path, results: dict[str, Any]) -> None:
    sys.path.append(str(HERE.parents[1]))
    from benchmarks import hardware

    before = json.loads(path.read_text())["targets"] if path.is_file() else {}
    hardware.write(str(path), {"targets": before | results})


def _fuzz(name: str, options: Sequence[str]) -> int:
    import atheris

    with atheris.instrument_imports(include=["areal_rloo"]):
        from fuzz.targets import target

        found = target(name)
    again = shlex.join([sys.executable, __file__, f"--inside={name}", "--"])  # libFuzzer starts this to merge
    atheris.Setup([again, *options], found.try_bytes)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.path[0] = str(HERE.parent)  # else this file hides its folder
    sys.exit(main())
