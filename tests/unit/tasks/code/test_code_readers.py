"""Rows in the shapes of HumanEval, MBPP, APPS and LiveCodeBench, of our own making, are read as problems."""

import base64
import json
import pickle
import zlib
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
    pickled,
)

from areal_rloo.config import DataConfig, FewShotConfig, SourceConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks import check_data, load_train
from areal_rloo.tasks.code.readers import read_problem
from areal_rloo.tasks.code.task import CodeTask
from areal_rloo.tasks.code.tests import CallTests, OutputTests

ROWS = {
    "humaneval": (HUMANEVAL,),
    "mbpp": (MBPP, MBPP_SANITIZED),
    "apps": (APPS, APPS_CALL),
    "livecodebench": (LIVECODEBENCH, LIVECODEBENCH_CALL),
}


def _task(**parameters: Any) -> CodeTask:
    return CodeTask(SourceConfig(task="code", parameters=parameters), 0)


@pytest.mark.parametrize("shape", ROWS)
def test_a_shape_is_found_by_its_fields(shape: str) -> None:
    for row in ROWS[shape]:
        assert read_problem(row, "here", "auto") == read_problem(row, "here", shape)


def test_a_row_without_a_known_shape_is_refused_with_all_shapes() -> None:
    with pytest.raises(
        DataError, match=r"a:1: expected the fields prompt, test, entry_point \(humaneval\); or .*got q"
    ):
        read_problem({"q": 1}, "a:1", "auto")


def test_humaneval_and_mbpp_become_asserts() -> None:
    problem = read_problem(HUMANEVAL, "here", "auto")
    assert isinstance(problem.tests, CallTests)
    assert problem.tests.tests[0].endswith("\ncheck(tops)\n")
    assert (problem.tests.names, problem.tests.stub) == (("tops",), HUMANEVAL["prompt"])
    problem = read_problem(MBPP, "here", "auto")
    assert problem.tests == CallTests(tests=tuple(MBPP["test_list"]), names=("sum",), setup="")
    problem = read_problem(MBPP_SANITIZED, "here", "auto")
    assert isinstance(problem.tests, CallTests)
    assert problem.tests.setup == "import math\n"


def test_apps_and_livecodebench_become_outputs_or_calls() -> None:
    tests = read_problem(APPS, "here", "auto").tests
    assert isinstance(tests, OutputTests)
    assert list(zip(tests.inputs, tests.outputs, strict=True))[1] == ("3 4\n", "7\n")
    tests = read_problem(LIVECODEBENCH, "here", "auto").tests
    assert tests == OutputTests(inputs=("1 2\n", "3 4"), outputs=("3\n", "7"))
    for row, name in ((APPS_CALL, "ends"), (LIVECODEBENCH_CALL, "repeat")):
        tests = read_problem(row, "here", "auto").tests
        assert isinstance(tests, CallTests)
        assert (len(tests.tests), tests.names) == (2, (name,))


def test_inputs_of_apps_may_be_lists_of_lines() -> None:
    cases = {"inputs": [["1", "2"]], "outputs": [["3", 4]]}
    tests = read_problem({**APPS, "input_output": json.dumps(cases)}, "here", "apps").tests
    assert isinstance(tests, OutputTests)
    assert (tests.inputs, tests.outputs) == (("1\n2",), ("3\n4",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("length", [0, 300, 100_000])
def test_a_pickled_text_is_read_without_pickle(protocol: int, length: int) -> None:
    cases = json.dumps([{"input": "é" * length, "output": "7"}])
    private = base64.b64encode(zlib.compress(pickle.dumps(cases, protocol))).decode()
    tests = read_problem({**LIVECODEBENCH, "private_test_cases": private}, "here", "auto").tests
    assert isinstance(tests, OutputTests)
    assert tests.inputs[1] == "é" * length


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path("/tmp/areal_rloo-unpickled"), "ran"))


@pytest.mark.parametrize(
    ("private", "words"),
    [
        (pickled(_Evil()), "the pickle has the instruction"),
        (pickled(["a", "b"]), "the pickle has the instruction EMPTY_LIST"),
        (pickled(7), "the pickle has the instruction BININT1"),
        (base64.b64encode(zlib.compress(b"\x80\x04N.")).decode(), "the pickle has the instruction NONE"),
        (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "the pickle has 0 texts"),
        (base64.b64encode(zlib.compress(b"\x80\x04X")).decode(), "expected JSON, or a compressed pickle of a text"),
        (base64.b64encode(b"no zlib").decode(), "expected JSON, or a compressed pickle of a text"),
        ("#", "expected JSON, or a compressed pickle of a text"),
        (pickled("not JSON"), "expected JSON in the field 'private_test_cases'"),
        (pickled('[{"input": "1"}]'), "with the texts 'input' and 'output' in 'private_test_cases'"),
    ],
)
def test_private_tests_that_are_no_text_are_refused(private: str, words: str) -> None:
    with pytest.raises(DataError, match=f"a:1: .*{words}"):
        read_problem({**LIVECODEBENCH, "private_test_cases": private}, "a:1", "auto")
    assert not Path("/tmp/areal_rloo-unpickled").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {**HUMANEVAL, "test": "def check(candidate):\n    assert True"},
            "expected Python with an assert in the field",
        ),
        ({**MBPP, "test_list": ["assert f( == 1"]}, "expected Python with an assert in the field 'test_list'"),
        ({**MBPP, "test_list": []}, "expected a list of texts in the field 'test_list'"),
        ({**MBPP, "test_setup_code": "import"}, "expected Python in the fields 'test_imports' and"),
        ({**MBPP, "text": 5}, "expected text in the field 'text', got int"),
        ({**APPS, "input_output": ""}, "expected JSON in the field 'input_output'"),
        ({**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "as many 'inputs' as 'outputs', at least one"),
        ({**APPS, "input_output": '{"inputs": [1], "outputs": ["1"]}'}, "expected texts in the field 'input_output'"),
        ({**APPS_CALL, "input_output": '{"inputs": [[]], "outputs": [1], "fn_name": "a b"}'}, "the name of a function"),
        ({**LIVECODEBENCH, "public_test_cases": "[]", "private_test_cases": ""}, "expected at least one test"),
        ({**LIVECODEBENCH_CALL, "metadata": "{}"}, "the name of a function in the field 'metadata', got None"),
        (
            {**LIVECODEBENCH_CALL, "private_test_cases": LIVECODEBENCH["private_test_cases"]},
            "expected the testtype stdin or functional, the same for all",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_place(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"^a:1: .*{words}"):
        read_problem(row, "a:1", "auto")


def test_files_of_all_shapes_load(tmp_path: Path) -> None:
    for shape, rows in ROWS.items():
        path = tmp_path / f"{shape}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(train=SourceConfig(task="code", path=str(path), few_shot=None))
        check_data(data)
        (source,) = load_train(data, seed=0)
        assert len(source.items) == len(rows)
        assert not {"input_output", "private_test_cases"} & source.items[0].fields.keys(), "the tests travel once"


def test_prompts_show_what_a_program_needs_and_no_hidden_test() -> None:
    texts = {shape: [_task().item(row, "here").text for row in rows] for shape, rows in ROWS.items()}
    assert all("End with the whole program in Python" in text for each in texts.values() for text in each)
    assert "def tops(" in texts["humaneval"][0]
    assert "assert sum([1, 2]) == 3" in texts["mbpp"][0]
    assert "assert sum([]) == 0" not in texts["mbpp"][0]
    assert "assert sum([]) == 0" in _task(shown_tests=2).item(MBPP, "here").text
    assert "reads the input from stdin" in texts["apps"][0]
    assert "def ends(self" in texts["apps"][1]
    assert "The name of the function is ends." in _task().item({**APPS_CALL, "starter_code": ""}, "here").text
    assert _task(instruction=False).item(HUMANEVAL, "here").text == HUMANEVAL["prompt"]


def test_a_demonstration_is_the_solution_of_the_row(tmp_path: Path) -> None:
    shown = _task().item(HUMANEVAL, "here").answer
    assert shown.startswith("```python\nfrom typing") and shown.endswith("if n > 0]\n```")
    assert _task(instruction=False).item(HUMANEVAL, "here").answer == HUMANEVAL["canonical_solution"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({**LIVECODEBENCH, "question_content": f"{n}"}) + "\n" for n in range(3)))
    data = DataConfig(train=SourceConfig(task="code", path=str(path), few_shot=FewShotConfig(num=1)))
    with pytest.raises(DataError, match="no solution for an example"):
        load_train(data, seed=0)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"format": "mbbp"}, "parameters.format: unknown format 'mbbp'; did you mean 'mbpp'?"),
        ({"format": "x"}, r"parameters.format: unknown format 'x'; expected auto, humaneval, mbpp"),
        ({"cpu_s": 0}, "parameters.cpu_s: expected a number above 0, got 0"),
        ({"wall_s": float("nan")}, "parameters.wall_s: expected a number above 0"),
        ({"max_tests": -1}, "parameters.max_tests: expected at least 0, got -1"),
        ({"memory_mib": 1}, "parameters.memory_mib: expected at least 64, got 1"),
        ({"partial": 1}, "parameters.partial: expected bool, got 1"),
    ],
)
def test_a_wrong_parameter_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        _task(**parameters)
