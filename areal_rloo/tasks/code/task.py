"""The task `code`: 1 if the program of a completion passes all tests of the row, else 0; or the share of passed tests.

Rows have the shape of HumanEval, MBPP, APPS or LiveCodeBench (readers.py). The reward also works for rows of another
task: `rewards: [{task: code}]` reads the tests from the fields of the row.
"""

from __future__ import annotations

import asyncio
import math
from typing import ClassVar

import msgspec

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError, EpisodeError, PreflightError, RewardError, SourceError
from areal_rloo.tasks.base import Item, closest
from areal_rloo.tasks.code.cores import Cores
from areal_rloo.tasks.code.program import find_program
from areal_rloo.tasks.code.readers import SHAPES, Problem, read_problem
from areal_rloo.tasks.code.tests import CallTests, OutputTests, Tests
from areal_rloo.tasks.code.verdict import TESTS_LATER_S, RunLimits, passed_share
from areal_rloo.tasks.rows import Row, RowTask

_TESTS = "code_tests"  # the field of an item with the tests
_ONLY_TESTS = ("input_output", "public_test_cases", "private_test_cases", "test", "solutions")
_INSTRUCTION = "\n\nEnd with the whole program in Python, in a block that begins with ```python and ends with ```."


class CodeTask(RowTask):
    """The task. The parameters are those of `defaults`; docs/tasks.md describes them."""

    defaults: ClassVar = {
        "format": "auto",
        "partial": False,
        "instruction": True,
        "shown_tests": 1,
        "max_tests": 0,
        "cpu_s": 5.0,
        "wall_s": 8.0,
        "total_s": 16.0,
        "memory_mib": 1024,
    }

    def __init__(self, source: ConfiguredSource, seed: int) -> None:
        super().__init__(source, seed)
        chosen = self.parameters
        if chosen["format"] not in ("auto", *SHAPES):
            hint = closest(chosen["format"], SHAPES, f"expected auto, {', '.join(SHAPES)}")
            raise SourceError(f"parameters.format: unknown format '{chosen['format']}'; {hint}")
        for name, least in (("shown_tests", 0), ("max_tests", 0), ("memory_mib", 64)):
            if chosen[name] < least:
                raise SourceError(f"parameters.{name}: expected at least {least}, got {chosen[name]}")
        for name in ("cpu_s", "wall_s", "total_s"):
            if not 0 < chosen[name] < math.inf:
                raise SourceError(f"parameters.{name}: expected a number above 0, got {chosen[name]:g}")
        limits = {name: chosen[name] for name in ("cpu_s", "wall_s", "total_s")}
        self._limits = RunLimits(**limits, memory_bytes=chosen["memory_mib"] << 20)
        self._cores: Cores | None = None  # in reward processes only

    @property
    def longest_s(self) -> float:
        """The most seconds of the programs of a completion: the last test may start just before the end.

        Tests of calls end later than their program.
        """
        return self._limits.total_s + max(self._limits.wall_s, TESTS_LATER_S)

    def item(self, row: Row, where: str) -> Item:
        problem = read_problem(row, where, self.parameters["format"])
        tests = _first(problem.tests, self.parameters["max_tests"])
        fields = {name: value for name, value in row.items() if name not in _ONLY_TESTS}
        fields[_TESTS] = msgspec.to_builtins(tests)
        prompt = self._prompt(problem) if self.parameters["instruction"] else problem.text
        return Item(prompt, self._completion(problem), fields=fields)

    def reward(self, completion: str, item: Item) -> float:
        tests = self._tests(item)
        if self._cores is None:
            self._cores = Cores()
        program, partial = find_program(completion, tests), self.parameters["partial"]
        try:
            return asyncio.run(passed_share(program, tests, self._limits, self._cores, partial=partial))
        except (EpisodeError, PreflightError) as error:
            raise RewardError("reward_error", f"the program was not run: {error}") from error

    def demonstration(self, item: Item) -> str:
        if not item.answer:
            raise DataError(f"no solution for an example: {item.text[:60]!r}; leave few_shot out, or add solutions")
        return item.answer

    def _tests(self, item: Item) -> Tests:
        if _TESTS in item.fields:
            tests: Tests = msgspec.convert(item.fields[_TESTS], Tests)
            return tests
        problem = read_problem(item.fields, "the fields of the row", self.parameters["format"])
        return _first(problem.tests, self.parameters["max_tests"])

    def _prompt(self, problem: Problem) -> str:
        tests, parts = problem.tests, [problem.text]
        if isinstance(tests, CallTests) and tests.stub:
            parts = [f"Complete this function:\n\n```python\n{tests.stub.rstrip()}\n```"]
        if examples := problem.shown[: self.parameters["shown_tests"]]:
            parts.append("The program has to pass tests like this:\n\n" + "\n".join(examples))
        if problem.starter:
            parts.append(f"Begin the program with this code:\n\n```python\n{problem.starter.rstrip()}\n```")
        elif isinstance(tests, OutputTests):
            parts.append("The program reads the input from stdin, and prints the output.")
        elif not problem.shown and not tests.stub:
            parts.append(f"The name of the function is {tests.names[0]}.")
        return "\n\n".join(parts) + _INSTRUCTION

    def _completion(self, problem: Problem) -> str:
        """Write a correct completion; empty if the row has no solution."""
        if not problem.solution:
            return ""
        if self.parameters["instruction"]:
            return f"```python\n{problem.solution.strip()}\n```"
        stub = problem.tests.stub if isinstance(problem.tests, CallTests) else ""
        return problem.solution.removeprefix(stub)


def _first(tests: Tests, num: int) -> Tests:
    """Keep the first tests; all if `num` is 0."""
    if not num:
        return tests
    if isinstance(tests, CallTests):
        return msgspec.structs.replace(tests, tests=tests.tests[:num])
    return msgspec.structs.replace(tests, inputs=tests.inputs[:num], outputs=tests.outputs[:num])
