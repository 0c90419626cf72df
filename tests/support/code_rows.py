"""Rows in the shapes of four benchmarks, of our own making, and the reward of completions of such rows."""

import base64
import json
import pickle
import zlib
from typing import Any

from areal_rloo.config import SourceConfig
from areal_rloo.tasks.code.task import CodeTask

HUMANEVAL: dict[str, Any] = {
    "task_id": "Own/0",
    "prompt": (
        "from typing import List\n\n\ndef double(n: int) -> int:\n    return 2 * n\n\n\n"
        'def tops(numbers: List[int]) -> List[int]:\n    """Double the positive numbers.\n    >>> tops([1, -1])\n'
        '    [2]\n    """\n'
    ),
    "entry_point": "tops",
    "canonical_solution": "    return [double(n) for n in numbers if n > 0]\n",
    "test": (
        "METADATA = {'author': 'own'}\n\n\ndef check(candidate):\n    assert candidate([1, -1]) == [2]\n"
        "    assert candidate([]) == []\n    for n in range(3):\n"
        "        assert candidate([n + 1]) == [double(n + 1)], 'a message'\n    assert True\n"
    ),
}
MBPP: dict[str, Any] = {
    "task_id": 1,
    "text": "Write a function to add a list of numbers.",
    "code": "def sum(numbers):\n    total = 0\n    for n in numbers:\n        total += n\n    return total",
    "test_list": ["assert sum([1, 2]) == 3", "assert sum([]) == 0", "assert sum([5, -5, 1]) == 1"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
MBPP_SANITIZED: dict[str, Any] = {
    "task_id": 2,
    "prompt": "Write a function to find the area of a circle.",
    "code": "import math\ndef area(r):\n    return math.pi * r * r",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(area(1), 3.14159, rel_tol=0.001)", "assert area(0) == 0"],
}
APPS: dict[str, Any] = {
    "problem_id": 3,
    "question": "Print the sum of two numbers.",
    "solutions": json.dumps(["a, b = map(int, input().split())\nprint(a + b)"]),
    "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n", "-5 5\n"], "outputs": ["3\n", "7\n", "0\n"]}),
    "difficulty": "introductory",
    "starter_code": "",
}
APPS_CALL: dict[str, Any] = {
    **APPS,
    "question": "Return the pair of the smallest and the largest number.",
    "input_output": json.dumps({"fn_name": "ends", "inputs": [[[3, 1, 2]], [[5]]], "outputs": [[[1, 3]], [[5, 5]]]}),
    "starter_code": "class Solution:\n    def ends(self, numbers: List[int]) -> List[int]:\n        ",
    "solutions": "",
}


def pickled(tests: object) -> str:
    """Write private tests as LiveCodeBench does."""
    return base64.b64encode(zlib.compress(pickle.dumps(tests))).decode()


LIVECODEBENCH: dict[str, Any] = {
    "question_id": "own_a",
    "question_title": "Sum",
    "question_content": "Print the sum of two numbers.",
    "platform": "own",
    "starter_code": "",
    "metadata": "{}",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
    "private_test_cases": pickled(json.dumps([{"input": "3 4", "output": "7", "testtype": "stdin"}])),
}
LIVECODEBENCH_CALL: dict[str, Any] = {
    **LIVECODEBENCH,
    "starter_code": "class Solution:\n    def repeat(self, word: str, num: int) -> str:\n        ",
    "metadata": '{"func_name": "repeat"}',
    "public_test_cases": json.dumps([{"input": '"ab"\n2', "output": '"abab"', "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": '"x"\n0', "output": '""', "testtype": "functional"}]),
}


def reward(row: dict[str, Any], program: str, **parameters: Any) -> float:
    """Score a program, as the block of a completion."""
    task = CodeTask(SourceConfig(task="code", parameters=parameters), 0)
    return task.reward(f"So:\n```python\n{program}\n```\n", task.item(row, "here"))
