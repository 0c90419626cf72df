"""Right programs pass, wrong programs fail, and partial credit is the share of passed tests."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from support.code_rows import (
    APPS,
    APPS_CALL,
    HUMANEVAL,
    LIVECODEBENCH,
    LIVECODEBENCH_CALL,
    MBPP,
    MBPP_SANITIZED,
    reward,
)
from support.reward_requests import reward_request

from areal_rloo.config import SourceConfig, load_config
from areal_rloo.errors import DataError, RewardError
from areal_rloo.rewards.parts import make_scorer, scorer_argument
from areal_rloo.rewards.process import PartJob
from areal_rloo.tasks.code.cores import Cores
from areal_rloo.tasks.code.program import find_program
from areal_rloo.tasks.code.task import CodeTask
from areal_rloo.tasks.code.tests import CallTests, OutputTests
from areal_rloo.tasks.code.verdict import same_output
from areal_rloo.tasks.tools import landlock
from areal_rloo.trajectory import Item

ADD = "a, b = map(int, input().split())\nprint(a + b)"
PAIR = (
    "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef total(pairs): return sum(p.a for p in pairs)"
)
TREE = "class Node:\n    left = None\ndef depth(n): return 1 + depth(n.left) if n else 0"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("row", "program", "share"),
    [
        (HUMANEVAL, "def tops(numbers):\n    return [double(n) for n in numbers if n > 0]", 1),
        (HUMANEVAL, "def tops(numbers):\n    return []", 1 / 5),
        (HUMANEVAL, "    return [2 * n for n in numbers if n > 0]", 1),
        (MBPP, MBPP["code"], 1),
        (MBPP, "def sum(numbers): return 3", 1 / 3),
        (MBPP, "def other(numbers): return 3", 0),
        (MBPP, "def sum(numbers): return 3 if numbers else 1 / 0", 1 / 3),
        (MBPP, "def sum(", 0),
        (MBPP_SANITIZED, MBPP_SANITIZED["code"], 1),
        (APPS, ADD, 1),
        (APPS, "print(3)", 1 / 3),
        (APPS, f"if __name__ == '__main__':\n    {ADD.replace(chr(10), chr(10) + '    ')}\n    exit()", 1),
        (APPS, f"from __future__ import annotations\n{ADD}", 1),
        (APPS, f"{ADD}\nraise ValueError", 0),
        (APPS, "import threading\ndef main():\n  a, b = map(int, input().split())\n  print(pow(a + b, 1))\n"
               "t = threading.Thread(target=main); t.start(); t.join()", 1),
        (APPS_CALL, "class Solution:\n  def ends(self, numbers: List[int]):\n    return min(numbers), max(numbers)", 1),
        (APPS_CALL, "def ends(numbers): return [min(numbers), 5]", 1 / 2),
        (LIVECODEBENCH, ADD, 1),
        (LIVECODEBENCH_CALL, "class Solution:\n  def repeat(self, word: str, num: int):\n    return word * num", 1),
        (LIVECODEBENCH_CALL, "class Solution:\n  def repeat(self, word: str, num: int):\n    return word * 2", 1 / 2),
        ({**MBPP, "test_list": ["assert total([Pair(1, 2), Pair(3, 4)]) == 4", "assert Pair(5, 6).b == 6"]}, PAIR, 1),
        ({**MBPP, "test_setup_code": "root = Node()\nroot.left = Node()", "test_list": ["assert depth(root) == 2"]},
         TREE, 1),
        ({**MBPP, "test_list": ["assert list(up(3)) == [0, 1, 2]", "assert up(3) != [0, 1, 2]"]},
         "def up(n): yield from range(n)", 1),
        ({**MBPP, "test_list": [
            "x = [1, 2.5, 'é', None, True, (1,), {2: [3]}, {4}, frozenset([5]), b'6', 7j, 10**5000]\n"
            "assert same(x) == x and [type(a) for a in same(x)] == [type(a) for a in x]"]},
         "def same(x): return x", 1),
        ({**MBPP, "test_setup_code":
            "from collections import deque\nfrom decimal import Decimal\nfrom fractions import Fraction",
          "test_list": [f"assert same({x}) == {x} and type(same({x})) is type({x})" for x in (
            "deque([8, 9])", "range(1, 9, 3)", "Decimal('0.10')", "Fraction(-1, 3)")]},
         "def same(x): return x", 1),
        ({**MBPP, "test_list": ["assert half(1) == 0.5", "assert half(3) == 1.5", "assert half(5) == 2"]},
         "from fractions import Fraction\nhalf = lambda n: Fraction(n, 2)", 2 / 3),
        ({**MBPP, "test_list": ["try:\n    half(-1)\n    assert False\nexcept ValueError:\n    assert half(4) == 2"]},
         "def half(n):\n    if n < 0: raise ValueError\n    return n // 2", 1),
        (MBPP, "import numpy\ndef sum(numbers): return numpy.array(numbers, int).sum()", 1),
    ],
)  # fmt: skip
def test_partial_credit_is_the_share_of_passed_tests(row: dict[str, Any], program: str, share: float) -> None:
    assert reward(row, program, partial=True) == pytest.approx(share)


@pytest.mark.usefixtures("sandbox")
def test_without_partial_credit_all_tests_must_pass() -> None:
    assert reward(MBPP, MBPP["code"]) == reward(APPS, ADD) == 1
    assert reward(MBPP, "def sum(numbers): return 3") == reward(APPS, ADD.replace("a + b", "a + b + (a == 3)")) == 0


@pytest.mark.usefixtures("sandbox")
def test_only_the_first_tests_run_if_asked() -> None:
    assert reward(APPS, "print(3)", max_tests=1) == 1
    assert reward(MBPP, "def sum(numbers): return 3", max_tests=1) == 1


@pytest.mark.usefixtures("sandbox")
def test_a_failed_first_test_starts_no_other(tmp_path: Path) -> None:
    """The other tests would take far longer than the limit of this test."""
    hang = "import time\na, b = map(int, input().split())\ntime.sleep(500 * (a != 1))"
    assert reward(APPS, hang, total_s=5000, wall_s=1000) == 0


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "same"),
    [
        ("1\n2\n", "1\n2", 0, True),
        (" 1  \n 2\n\n", "1\n2\n", 0, True),
        ("1 2", "1\n2", 0, False),
        ("1", "1\n2", 0, False),
        ("1.0", "1", 0, True),
        ("1  2", "1 2", 0, True),
        ("a  b", "a b", 0, False),
        ("0.3333333", "0.33333333", 0, False),
        ("0.3333333", "0.33333333", 1e-5, True),
        ("100001", "100000", 1e-5, False),
        ("0.10000000000000000001", "0.1", 0, False),
        ("nan", "nan 1", 0, False),
        ("sNaN", "1", 0, False),
        ("1e999999999", "1", 0, False),
        ("", "", 0, True),
    ],
)
def test_outputs_are_compared_by_line_as_texts_or_numbers(
    got: str, expected: str, tolerance: float, same: bool
) -> None:
    assert same_output(got, expected, tolerance) is same


STUB = "import math\n\ndef helper(): ...\n\ndef f(x):\n    '''Doc.'''\n"
OUTPUT = OutputTests(inputs=("",), outputs=("",))
BODY = CallTests(tests=("assert f(1)",), names=("f",), stub=STUB)


@pytest.mark.parametrize(
    ("completion", "tests", "program"),
    [
        ("print(1)", OUTPUT, "print(1)"),
        ("a\n```python\none\n```\nb\n```py\ntwo\n```\nc\n```\nthree\n```", OUTPUT, "two\n"),
        ("```\none\n```\n```\ntwo\n```\n```cpp\nthree\n```", OUTPUT, "two\n"),
        ("```python\ncut off", OUTPUT, "cut off"),
        ("1. So:\n   ```python\n   if 1:\n     x\n   ```", OUTPUT, "if 1:\n  x\n"),
        ("    return x\n\n    # more\n\nprint(f(1))\nassert 0", BODY, f"{STUB}    return x\n\n    # more\n\n"),
        (
            "```python\ndef f(x):\n    return x\n```",
            BODY,
            "import math\n\ndef helper(): ...\n\ndef f(x):\n    return x\n",
        ),
        ("def ff(x): 1", BODY, STUB),
    ],
)
def test_the_program_is_the_last_python_block_or_the_body_of_the_stub(
    completion: str, tests: CallTests | OutputTests, program: str
) -> None:
    assert find_program(completion, tests) == program


@pytest.mark.usefixtures("sandbox")
def test_rows_of_another_task_can_have_this_reward() -> None:
    config = load_config(
        "quickstart.yaml",
        [
            "data.eval=null",
            "data.train={task: rows, path: a.jsonl, rewards: [{task: code, parameters: {partial: true}}]}",
        ],
    )
    score = make_scorer(scorer_argument(config, (("train", "rows", "code"),)))
    item = Item("?", source="rows", fields={"prompt": "?", **MBPP})
    request = reward_request("```python\ndef sum(x): return 3\n```", item)
    assert score(PartJob(job_id=1, request=request, part="code")).reward == pytest.approx(1 / 3)


def test_a_row_without_tests_has_no_reward() -> None:
    with pytest.raises(DataError, match="the fields of the row: expected the fields prompt, test"):
        CodeTask(SourceConfig(task="code"), 0).reward("1", Item("?", fields={"prompt": "?"}))


@pytest.mark.parametrize("row", [MBPP, APPS])
def test_a_broken_sandbox_drops_the_sample_with_the_reason(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "CREATE_RULESET", 4000)
    with pytest.raises(RewardError, match=r"the program was not run: .*needs Landlock for its sandbox") as caught:
        reward(row, "pass")
    assert caught.value.reason == "reward_error"


def test_reward_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("areal_rloo.files.memory_folder", lambda: tmp_path)  # other tests take cores, too
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    num_running, most = 0, 0

    async def run(cores: Cores) -> None:
        nonlocal num_running, most
        async with cores.core():
            num_running += 1
            most = max(most, num_running)
            await asyncio.sleep(0.001)
            num_running -= 1

    async def run_all() -> None:
        one, other = Cores(), Cores()
        await asyncio.gather(*(run(cores) for cores in (one, other) for _ in range(10)))

    asyncio.run(run_all())
    assert (num_running, most) == (0, 2)
