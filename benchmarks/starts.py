"""How much sooner has a learner imported its modules without Python's collector of cycles?

Both contestants run `python -m areal_rloo.learner --help` with runpy, from the start to the end of the process. The
named alternative, `collecting`, leaves the collector on, as Python does. A rollout worker has the same start; together
they are most of the start of a small run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from functools import partial

from benchmarks.harness import Benchmark, Case, timed

_START = "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('areal_rloo.learner', run_name='__main__')"
_COLLECTING = "import areal_rloo.program; areal_rloo.program.begin_imports = lambda: None; "


def cases(quick: bool) -> Generator[Case]:
    contestants = {"ours": partial(_seconds, _START), "collecting": partial(_seconds, _COLLECTING + _START)}
    yield Case("learner", "s", contestants, [("ours", "collecting")], 2 if quick else 9)


def _seconds(program: str) -> float:
    return timed(lambda: subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=True))


BENCHMARK = Benchmark("starts", __doc__, cases)
