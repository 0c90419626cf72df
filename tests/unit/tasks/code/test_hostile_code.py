"""Programs that want the reward without the work, really executed; and the few that get it, which documents name."""

import asyncio
import json
from typing import Any

import msgspec
import psutil
import pytest
from support.code_rows import APPS, HUMANEVAL, MBPP, reward
from support.processes import command_of
from support.reward_pools import PoolOnALoop
from support.reward_requests import reward_request

from areal_rloo.config import SourceConfig, load_config
from areal_rloo.rewards.parts import scorer_argument
from areal_rloo.tasks.code.task import CodeTask
from areal_rloo.tasks.code.verdict import TESTS_LATER_S

pytestmark = pytest.mark.usefixtures("sandbox")

SHORT = {"cpu_s": 1, "wall_s": 1.5, "total_s": 1.5}
SECRET = "rosebud-4711"
SECRET_CALL = {**MBPP, "test_list": [f"assert find(1) == '{SECRET}'"], "code": ""}
SECRET_OUTPUT = {**APPS, "input_output": json.dumps({"inputs": ["1"], "outputs": [SECRET]})}
PASSED = '{"passed": 3, "failed": 0, "num": 3}'
FIND = """
import gc, glob, os, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from map(repr, (*frame.f_locals.values(), *frame.f_globals.values(), frame.f_code.co_consts))
        frame = frame.f_back
    yield from (repr(each) for each in gc.get_objects() if isinstance(each, (dict, list, tuple, str)))
    up, tmp = os.path.dirname(os.getcwd()), os.path.dirname(os.path.dirname(os.getcwd()))
    for place in (*glob.glob("*"), f"{up}/orders", f"{up}/stdin", *glob.glob(f"{tmp}/*/*"), *glob.glob(f"{tmp}/*/*/*"),
                  "/proc/self/mem", "/proc/self/environ", f"/proc/{os.getppid()}/mem", f"/proc/{os.getppid()}/cmdline"):
        try:
            yield open(place, errors="replace").read(1 << 20)
        except OSError:
            pass
    for fd in range(16):
        try:
            yield os.pread(fd, 1 << 20, 0).decode(errors="replace")
        except OSError:
            pass
def find(n):
    return next((found[0] for text in texts() if (found := re.search("r[o]sebud-[0-9]+", text))), None)
if __name__ == "__main__":
    print(find(1))
"""


@pytest.mark.parametrize(
    "program",
    [
        # The end of the process before the asserts.
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os\ndef sum(x): os._exit(0)",
        "def sum(x): raise SystemExit(0)",
        "def sum(x): raise StopIteration",
        # Objects that are equal to everything.
        "class A:\n  def __eq__(self, other): return True\ndef sum(x): return A()",
        "class A(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\ndef sum(x): return A(7)",
        "class A(list):\n  def __eq__(self, other): return True\ndef sum(x): return A()",
        "import unittest.mock\ndef sum(x): return unittest.mock.ANY",
        # Changes of Python.
        "import builtins, json\nbuiltins.AssertionError = ValueError\njson.loads = lambda *a, **k: None\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.bool = lambda x: True\ndef sum(x): return True",
        "import sys\nsys.modules['json'] = None\nsys.settrace(lambda *a: None)\ndef sum(x): return 0",
        # A verdict of the program's own.
        f"import os\nfor fd in range(16):\n  try: os.write(fd, b'{PASSED}')\n  except OSError: pass\n"
        "def sum(x): return 0",
        f"print('{PASSED}')\nprint('OK: all tests passed')\ndef sum(x): return 0",
        f"import os\ndef sum(x):\n  os.write(1, b'{PASSED}')\n  return 0",
        # Results before the calls, and no results.
        "import os\nfor fd in range(3, 16):\n  try: os.write(fd, b'[\"returned\", 3]\\n' * 9)\n  except OSError: pass\n"
        "def sum(x): return 0",
        "import os\nfor fd in range(3, 16):\n  try: os.write(fd, b'[' * 200000 + b'\\n')\n  except OSError: pass\n"
        "def sum(x): return 0",
        "def sum(x):\n  y = []\n  y.append(y)\n  return y",
        "def sum(x): return float('nan')",
    ],
)
def test_no_trick_passes_asserts(program: str) -> None:
    assert reward(MBPP, program) == 0


def test_a_stop_iteration_does_not_end_a_loop_of_the_tests() -> None:
    row = {**MBPP, "test_list": ["assert all(map(f, [1, 2]))"], "code": ""}
    assert reward(row, "def f(x): raise StopIteration") == 0
    assert reward(row, "def f(x): return True") == 1


def test_a_program_cannot_replace_the_helpers_and_builtins_of_the_tests() -> None:
    cheat = "def double(n): return 0\ndef tops(numbers): return [0 for n in numbers]"
    assert reward(HUMANEVAL, cheat, partial=True) == pytest.approx(1 / 5)
    row = {**MBPP, "test_list": ["assert set(f(3)) == set([1, 2])"], "code": ""}
    assert reward(row, "def set(x): return 0\ndef f(x): return []") == 0


@pytest.mark.parametrize("row", [SECRET_CALL, SECRET_OUTPUT], ids=["calls", "outputs"])
def test_a_program_cannot_read_the_expected_values(row: dict[str, Any]) -> None:
    assert reward(row, FIND) == 0
    assert reward(row, f"open('notes', 'w').write('rose' 'bud-4711')\n{FIND}") == 1, "the search would find it"


@pytest.mark.parametrize(
    ("row", "program"),
    [
        (MBPP, "while True: pass"),
        (APPS, "while True: pass"),
        (APPS, "import time\ntime.sleep(1000)"),
        (
            MBPP,
            "import signal\nfor n in (signal.SIGPROF, signal.SIGALRM): signal.signal(n, signal.SIG_IGN)\nwhile 1: pass",
        ),
        (MBPP, "x = []\nwhile True: x.append('y' * 10**7)"),
        (APPS, "x = []\nwhile True: x.append('y' * 10**7)"),
        (APPS, "while True: print('3' * 10**5)"),
        (MBPP, "def sum(x): return 'y' * 10**8"),
        (APPS, "import os\nwhile True: os.fork()"),
        (
            MBPP,
            "import threading\nfor _ in range(99): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
        ),
        (APPS, "for n in range(10**6): open(str(n), 'w').write('x' * 4096)"),
        (MBPP, "def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()"),
    ],
)
def test_a_program_that_never_ends_or_floods_has_no_reward(row: dict[str, Any], program: str) -> None:
    assert reward(row, program, **SHORT, memory_mib=256) == 0
    assert not _sandboxes()


def test_a_hanging_call_costs_the_other_calls_nothing() -> None:
    hang = "def sum(x):\n  while not x: pass\n  return 3 if len(x) == 2 else 1"
    assert reward(MBPP, hang, partial=True, cpu_s=0.2, wall_s=60, total_s=10) == pytest.approx(2 / 3)


def test_the_time_of_all_tests_is_limited() -> None:
    inputs = {"inputs": ["1"] * 50, "outputs": ["1"] * 50}
    row = {**APPS, "input_output": json.dumps(inputs)}
    limits = {"cpu_s": 1, "wall_s": 60, "total_s": 0.7}
    assert 0 < reward(row, "import time\ntime.sleep(0.2)\nprint(1)", partial=True, **limits) < 0.2


def test_a_test_that_starts_just_before_the_end_has_its_whole_time() -> None:
    adds = "print(sum(map(int, input().split())))"
    assert reward(APPS, adds, partial=True, cpu_s=5, wall_s=60, total_s=1e-6) == pytest.approx(1 / 3)


def test_the_longest_time_includes_the_last_test_and_the_tests_of_calls() -> None:
    """A program can return its last value just before the end, and the tests count after that."""

    def longest_s(**limits: float) -> float:
        return CodeTask(SourceConfig(task="code", parameters=limits), 0).longest_s

    assert longest_s(wall_s=8.0, total_s=16.0) == 24
    assert longest_s(wall_s=0.5, total_s=3.0) == 3 + TESTS_LATER_S


def test_a_hang_in_a_pool_has_a_reward_of_0_and_leaves_no_process() -> None:
    data = f"data.train={{task: code, path: x, parameters: {SHORT}}}"
    config = load_config("quickstart.yaml", ["data.eval=null", data])
    item = msgspec.structs.replace(CodeTask(SourceConfig(task="code"), 0).item(APPS, "here"), source="code")
    pool = PoolOnALoop(
        "areal_rloo.rewards.parts:make_scorer",
        scorer_argument(config, (("train", "code", "code"),)),
        num_workers=1,
        deadline_s=config.rollout.reward_timeout_s,
    )
    try:
        scored = asyncio.run(pool.score(reward_request("```python\nwhile 1: pass\n```", item), "code"))
        assert (scored.reward, pool.statistics().restarts) == (0, 0)
    finally:
        pool.close()
    assert not _sandboxes()


def _sandboxes() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "sandbox_child" in str(command_of(each))]


def test_knowing_the_tests_is_enough_for_the_reward() -> None:
    """Nothing stops a program that has the right answers without computing them: hide tests, and use many."""
    assert reward(MBPP, "def sum(x): return {2: 3, 0: 0, 3: 1}[len(x)]") == 1
    assert reward(APPS, "print({'1 2': 3, '3 4': 7, '-5 5': 0}[input()])") == 1
    assert reward(APPS, "print(3)", partial=True) == pytest.approx(1 / 3), "a constant is right in one test"


def test_weak_tests_stay_weak() -> None:
    row = {**MBPP, "test_list": ["assert f(1)", "assert f(1) != 5"], "code": ""}
    assert reward(row, "def f(x): return object()") == 1
