"""Run benchmarks, list them, or compare two results.

    python -m benchmarks [NAME ...] [--output benchmarks/results]      # most without a name: `make bench`
    python -m benchmarks [NAME ...] --quick --output FOLDER            # seconds each, to see that they run
    python -m benchmarks --compare A B                                 # two result files, or two folders
    python -m benchmarks --list

Each benchmark runs in a process of its own, and writes NAME.json, NAME.md and NAME.svg. The exit code is 1 if a
benchmark failed or refused its numbers; such a benchmark writes nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pages
from benchmarks.compare import IncomparableError, compare
from benchmarks.harness import Benchmark, TooWideError, measure_all, write

HERE = Path(__file__).resolve().parent
IN_ALL = ("plan", "generation", "weights", "packing", "logprobs", "intake", "step_overhead", "async_vs_sync")
NAMES = (*IN_ALL, "wire", "fleet", "weights_many", "observing", "starts")  # by name: `make bench` ends in 15 minutes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="small work and two rounds; no number is a result")
    parser.add_argument("--output", type=Path, help="a folder; benchmarks/results unless --quick")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="say what changed beyond noise")
    parser.add_argument("--list", action="store_true", help="a line for each benchmark and other program")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"{', '.join(unknown)}: expected names among {', '.join(NAMES)}")
    names = arguments.names or IN_ALL
    if arguments.list:
        _print_list()
    elif arguments.compare:
        try:
            first, second = arguments.compare
            print(*compare(first, second, names), sep="\n")
        except IncomparableError as error:
            parser.error(f"--compare: {error}")
    elif arguments.quick and arguments.output is None:
        parser.error("--quick: expected --output FOLDER, because these are no results")
    else:
        sys.exit(_run(names, arguments.output or HERE / "results", quick=arguments.quick))


def _run(names: Sequence[str], folder: Path, *, quick: bool) -> int:
    """Measure and write; return the exit code. Several benchmarks run in a process each."""
    if len(names) > 1:
        options = [*(["--quick"] if quick else []), "--output", str(folder)]
        codes = [
            subprocess.run([sys.executable, "-m", "benchmarks", name, *options], check=False).returncode
            for name in names
        ]
        return int(any(codes))
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{names[0]}").BENCHMARK
    print(f"=== {benchmark.name}: {benchmark.question}", flush=True)
    try:
        result = measure_all(benchmark, quick=quick)
    except TooWideError as error:
        print(f"error: {benchmark.name}: {error}", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    write(result, folder)
    pages.write(result, folder)
    print(pages.markdown(result))
    return 0


def _print_list() -> None:
    print("Benchmarks of the harness:")
    for name in NAMES:
        print(f"  {name:16} {_first_line(HERE / f'{name}.py')}")
    print("Programs of their own, `python -m benchmarks.NAME --help`:")
    for path in sorted(HERE.glob("[a-z]*.py")):
        if '\nif __name__ == "__main__":\n' in path.read_text(encoding="utf-8"):
            print(f"  {path.stem:18} {_first_line(path)}")


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
