"""The two ends of a test of calls. The text of this file runs in two sandboxes: with the tests, and with the program.

    run_tests:  tests ─► Remote ─► a call, as plain data ───────────► serve:  the function of the program
    verdict  ◄─ asserts ◄─┴──────── the result, as plain data, or a handle ◄──┘

A line of JSON is a call or a result. The program never meets an expected value, and no object of the program gets to
the asserts: only numbers, texts and containers of them. So a program cannot end the tests, replace `==`, or say that it
passed. Another object of the program is a handle for the tests, equal to nothing else.

Imports nothing of this package, which a sandbox cannot read.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral
from types import ModuleType
from typing import Any, BinaryIO, TextIO, cast

MOST_LINE_BYTES = 64 << 20
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NUMBERS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (complex, range, Decimal, Fraction)}


class TimeLimitError(BaseException):
    """A call took too long. No Exception, so that few programs catch it."""


class ProgramEndedError(BaseException):
    """The process of the program is gone, or sends no results."""


class FailedError(BaseException):
    """An assert failed, and no other needs to run."""


def encode(value: Any, refer: Callable[[Any], int | str]) -> Any:
    """Make JSON of plain data; `refer` gives the handle of another object."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Integral):  # of numpy; its floats are Python's
        return int(value)
    kind, parts = "handle", [value]
    for container in _CONTAINERS:
        if isinstance(value, container):
            kind, parts = container.__name__, [encode(each, refer) for each in value]
    if isinstance(value, dict):
        kind, parts = "dict", [encode(each, refer) for pair in value.items() for each in pair]
    elif isinstance(value, bytes | bytearray):
        kind, parts = "bytes", [value.decode("latin-1")]
    elif isinstance(value, complex):
        kind, parts = "complex", [value.real, value.imag]
    elif isinstance(value, range):
        kind, parts = "range", [value.start, value.stop, value.step]
    elif isinstance(value, Decimal):
        kind, parts = "Decimal", [Decimal.__str__(value)]
    elif isinstance(value, Fraction):
        kind, parts = "Fraction", [int(value.numerator), int(value.denominator)]
    return [kind, *parts] if kind != "handle" else [kind, refer(value)]


def decode(value: Any, find: Callable[[Any], Any]) -> Any:
    """Read JSON of `encode`; `find` gives the object of a handle."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "handle":
        return find(rest[0])
    if kind == "bytes":
        return rest[0].encode("latin-1")
    items = [decode(each, find) for each in rest]
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind in _NUMBERS:
        return _NUMBERS[kind](*items)
    return {container.__name__: container for container in _CONTAINERS}[kind](items)


def take_link() -> tuple[BinaryIO, TextIO]:
    """Take the socket on stdin: read lines from the first, write lines to the second. Then stdin is empty."""
    sys.set_int_max_str_digits(0)
    link = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    return os.fdopen(link, "rb"), os.fdopen(os.dup(link), "w")


def silence() -> None:
    for output in (1, 2):
        os.dup2(0, output)


def serve(program: str, before: str, cpu_s: float, wall_s: float) -> None:
    """Run a program, then the calls of the tests until they end; each has limits of time."""
    source, sink = take_link()
    silence()
    module = sys.modules["solution"] = ModuleType("solution")
    space, kept = module.__dict__, []

    def refer(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    def find(key: int | str) -> Any:
        if isinstance(key, int):
            return kept[key]
        if hasattr(space.get("Solution"), key):
            space[key] = getattr(space["Solution"](), key)
        return space[key]

    def load() -> None:
        exec(before, space)  # the purpose of the sandbox
        exec(compile(program, "program.py", "exec", dont_inherit=True), space)

    def run(line: bytes) -> Any:
        action, target, *rest = decode(json.loads(line), find)
        if action == "call":
            return target(*rest[0], **rest[1])
        if action == "list":
            return list(target)
        return getattr(target, *rest) if action == "get" else setattr(target, *rest)

    def answer(action: Callable[[], Any]) -> bool:
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, wall_s)
            reply = ["returned", encode(action(), refer)]
        except BaseException as error:  # noqa: BLE001 - the program may raise anything
            reply = ["raised", type(error).__name__]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=sink, flush=True)
        return bool(reply[0] == "returned")

    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _stop)
    if answer(load):
        for line in source:
            answer(lambda line=line: run(line))  # type: ignore[misc]


def _stop(*_: object) -> None:
    raise TimeLimitError


class Remote:
    """An object of the program, for the tests: a function by name, or the object of a handle."""

    def __init__(self, ask: Callable[..., Any], key: int | str) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_key", key)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._ask("call", self, values, named)

    def __iter__(self) -> Any:
        return iter(self._ask("list", self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self, name, value)


def run_tests(setup: str, tests: list[str], names: list[str], partial: bool) -> None:
    """Run tests against the program at the other end; write how many asserts passed, failed and exist."""
    source, sink = take_link()
    verdict = os.dup(1)
    silence()
    counts = {"passed": 0, "failed": 0}

    def refer(value: object) -> int | str:
        if isinstance(value, Remote):
            return cast("int | str", value._key)
        raise TypeError(f"the tests can pass only plain data to a program, not {type(value).__name__}")

    def ask(*request: Any) -> Any:
        print(json.dumps(encode(request, refer)), file=sink, flush=True)
        return read()

    def read() -> Any:
        line = source.readline(MOST_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise ProgramEndedError
        kind, value = json.loads(line)
        if kind == "returned":
            return decode(value, lambda key: Remote(ask, key))
        raise _raised(value)

    def record(passed: object) -> None:
        counts["passed" if passed else "failed"] += 1
        if not passed and not partial:
            raise FailedError

    trees = [ast.parse(text) for text in (setup, *tests)]
    num = sum(is_counted(node) for tree in trees[1:] for node in ast.walk(tree))
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    space: dict[str, Any] = {name: Remote(ask, name) for name in used if not hasattr(builtins, name)}
    space |= {"__name__": "tests", "__record": record, "__Exception": Exception, "__same": same, "__loads": json.loads}
    try:
        read()
        exec(compile(trees[0], "setup", "exec"), space)
        space |= {name: Remote(ask, name) for name in names}
        for tree in trees[1:]:
            code = compile(ast.fix_missing_locations(_Recorded().visit(tree)), "tests", "exec")
            try:
                exec(code, space)
            except Exception:  # noqa: BLE001 - a call outside of an assert raised
                record(passed=False)
    except (FailedError, ProgramEndedError, Exception):  # noqa: BLE001 - as above, in the setup
        counts["failed"] += 1
    os.write(verdict, json.dumps({**counts, "num": num}).encode())


def is_counted(node: ast.AST) -> bool:
    """Return True for an assert that can fail; `assert True` is no test."""
    return isinstance(node, ast.Assert) and not (isinstance(node.test, ast.Constant) and bool(node.test.value))


class _Recorded(ast.NodeTransformer):
    """Record each assert, instead of an end at the first that fails."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if not is_counted(node):
            return node
        failed = ast.ExceptHandler(
            type=ast.Name("__Exception", ast.Load()), name=None, body=[_record(ast.Constant(value=False))]
        )
        return ast.Try(body=[_record(node.test)], handlers=[failed], orelse=[], finalbody=[])


def _record(test: ast.expr) -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name("__record", ast.Load()), args=[test], keywords=[]))


def _raised(name: object) -> Exception:
    """Make an exception of the program's: of the same class if Python has the class.

    A StopIteration would end a loop of the tests in silence.
    """
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        return kind("raised by the program")
    return RuntimeError(name)


def same(got: Any, expected: Any, *, wrapped: bool = False) -> bool:
    """Compare a result with a value from JSON, which has lists for tuples.

    `wrapped`: the expected value may be in a list, and a list may have tuples (APPS).
    """
    got = list(got) if isinstance(got, tuple) else got
    if not wrapped:
        return bool(got == expected)
    inner = expected[0] if isinstance(expected, list) and expected else expected
    rows = [list(each) if isinstance(each, tuple) else each for each in got] if isinstance(got, list) else got
    return bool(got == expected) or bool(got == inner) or bool(rows == inner)
