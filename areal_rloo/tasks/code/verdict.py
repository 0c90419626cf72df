"""Run a program against tests, and return the share of passed tests. Runs in a reward process.

    tests of the output:  a sandbox for each test; stdout is compared here
    tests of calls:       a sandbox for the program, another for the tests, and a socket between them (dialogue.py)

The expected values never enter the sandbox of the program. Each run takes a core of the host (cores.py).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from areal_rloo.tasks.code import dialogue
from areal_rloo.tasks.code.cores import Cores
from areal_rloo.tasks.code.tests import CallTests, OutputTests, Tests
from areal_rloo.tasks.tools.sandbox import SandboxLimits, run_python
from areal_rloo.waiting import cancel

# Without `site`, Python has no `exit` and `quit`.
_EXIT = "from sys import exit\nquit = exit\n"
# APPS and LiveCodeBench import a long list of names before each program.
_IMPORTS = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, statistics
import string, sys, time
from bisect import *
from collections import *
from copy import *
from datetime import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from random import *
from re import *
from statistics import *
from string import *
from typing import *
from builtins import *
sys.setrecursionlimit(50_000)
"""
_MOST_THREADS = 4  # some programs start a thread to get a larger stack
_LEAST_OUTPUT_BYTES = 64 << 10
TESTS_LATER_S = 5.0  # tests of calls end after the program, to count the passed ones
_ABSOLUTE = 1e-8  # tolerance near 0
_INTEGER = re.compile(r"[-+]?\d+")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of a program. A call has `cpu_s` and `wall_s` too, kept by the program's own process."""

    cpu_s: float  # of processor time, for each test
    wall_s: float  # for each test
    total_s: float  # of all tests together, after which no test starts; the time of tests in parallel adds up
    memory_bytes: int


async def passed_share(program: str, tests: Tests, limits: RunLimits, cores: Cores, *, partial: bool) -> float:
    """Return the share of passed tests. Without `partial`, stop at the first failure and return 0.

    Raises:
        EpisodeError: a sandbox failed; not the fault of the program.
        PreflightError: this machine cannot lock programs.
    """
    if isinstance(tests, OutputTests):
        share = await _Outputs(program, tests, limits, cores, partial).share()
    else:
        async with cores.core():
            share = await _calls(program, tests, limits, partial)
    return share if partial else float(share == 1)


def _before(*, imports: bool) -> str:
    return (_IMPORTS if imports else "") + _EXIT


class _FailedError(Exception):
    """The first failure, if no other test needs to run."""


class _Outputs:
    """The tests of the output of a program."""

    def __init__(self, program: str, tests: OutputTests, limits: RunLimits, cores: Cores, partial: bool) -> None:
        run = f"exec(compile({program!r}, 'program.py', 'exec', dont_inherit=True), globals())"
        self._code = f"{_before(imports=tests.imports)}{run}\n"
        self._tests, self._limits, self._cores, self._partial = tests, limits, cores, partial
        self._cases = zip(tests.inputs, tests.outputs, strict=True)
        self._num_passed, self._spent_s = 0, 0.0

    async def share(self) -> float:
        try:
            await self._run(itertools.islice(self._cases, 1))  # most wrong programs fail in the first test
            async with asyncio.TaskGroup() as running:
                for _ in range(min(self._cores.num, len(self._tests.inputs) - 1)):
                    running.create_task(self._run(self._cases), name="tests of a program")
        except _FailedError:
            return 0.0
        except ExceptionGroup as group:
            first = group.exceptions[0]
            if isinstance(first, _FailedError):
                return 0.0
            raise first from None
        return self._num_passed / len(self._tests.inputs)

    async def _run(self, cases: Iterator[tuple[str, str]]) -> None:
        """Run the next tests, until there are no tests or no time."""
        for given, expected in cases:
            passed = await self._passes(given, expected)
            self._num_passed += passed
            if not passed and not self._partial:
                raise _FailedError

    async def _passes(self, given: str, expected: str) -> bool:
        async with self._cores.core():
            if self._spent_s >= self._limits.total_s:
                return False
            limits = SandboxLimits(
                cpu_s=self._limits.cpu_s,
                wall_s=self._limits.wall_s,  # with only the rest of `total_s`, Python itself might not start in time
                memory_bytes=self._limits.memory_bytes,
                max_threads=_MOST_THREADS,
                max_output_bytes=max(_LEAST_OUTPUT_BYTES, 2 * len(expected.encode(errors="surrogatepass"))),
            )
            started_s = time.monotonic()
            result = await run_python(self._code, limits, given.encode(errors="surrogatepass"))
            self._spent_s += time.monotonic() - started_s
        return result.exit_reason == "ok" and same_output(result.stdout, expected, self._tests.tolerance)


async def _calls(program: str, tests: CallTests, limits: RunLimits, partial: bool) -> float:
    text = inspect.getsource(dialogue)
    served = f"{text}\nserve({program!r}, {_before(imports=tests.imports)!r}, {limits.cpu_s}, {limits.wall_s})\n"
    tested = f"{text}\nrun_tests({tests.setup!r}, {list(tests.tests)!r}, {list(tests.names)!r}, {partial})\n"
    for_program = SandboxLimits(
        cpu_s=limits.total_s, wall_s=limits.total_s, memory_bytes=limits.memory_bytes, max_threads=_MOST_THREADS
    )
    for_tests = SandboxLimits(
        cpu_s=limits.total_s, wall_s=limits.total_s + TESTS_LATER_S, memory_bytes=limits.memory_bytes
    )
    one, other = socket.socketpair()
    running = asyncio.create_task(run_python(served, for_program, one), name="a program under test")
    try:
        result = await run_python(tested, for_tests, other)
    finally:
        one.close()
        other.close()
        await cancel([running])
    if not running.cancelled():
        running.result()  # raises if the sandbox of the program failed
    return _counted(result.stdout)


def _counted(verdict: str) -> float:
    """Read the verdict of the tests; the tests may have ended without one, for example by a limit."""
    try:
        counts = json.loads(verdict)
    except ValueError:
        return 0.0
    passed, failed = counts["passed"], counts["failed"]
    if not failed:
        return float(passed > 0)
    return float(passed / max(passed + failed, counts["num"]))


def same_output(got: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare outputs as LiveCodeBench does: line by line without outer spaces, as texts or else as numbers.

    `tolerance` (APPS): relative, for numbers that are not integers in the expected output.
    """
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (got, expected))
    return len(ours) == len(theirs) and all(
        one == other or _same_numbers(one.split(), other.split(), tolerance)
        for one, other in zip(ours, theirs, strict=True)
    )


def _same_numbers(got: list[str], expected: list[str], tolerance: float) -> bool:
    if len(got) != len(expected) or not all(map(_DECIMAL.fullmatch, (*got, *expected))):
        return False
    return all(
        Decimal(one) == Decimal(other)
        or (
            tolerance > 0
            and not _INTEGER.fullmatch(other)
            and math.isclose(float(one), float(other), rel_tol=tolerance, abs_tol=_ABSOLUTE)
        )
        for one, other in zip(got, expected, strict=True)
    )
