"""Rows in the shapes of four benchmarks, read as a problem: prompt, tests, and perhaps a solution.

- `humaneval` (arXiv:2107.03374): `prompt`, `test`, `entry_point`, perhaps `canonical_solution`.
- `mbpp` (arXiv:2108.07732): `text` or `prompt`, `test_list`, perhaps `test_setup_code`, `test_imports`, `code`.
- `apps` (arXiv:2105.09938): `question`, `input_output` (JSON: `inputs`, `outputs`, perhaps `fn_name`), perhaps
  `starter_code`, `solutions`.
- `livecodebench` (arXiv:2403.07974): `question_content`, `public_test_cases`, perhaps `private_test_cases`, `metadata`
  (`func_name`), `starter_code`. Private tests are JSON, or a compressed pickle of a text, which is read without pickle.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import pickletools
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from areal_rloo.errors import DataError, shown
from areal_rloo.tasks.code.dialogue import is_counted
from areal_rloo.tasks.code.tests import CallTests, OutputTests, Tests
from areal_rloo.tasks.rows import Row, text_field

_MOST_BYTES = 256 << 20  # of the private tests of a row
_APPS_TOLERANCE = 1e-5
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_AROUND_A_TEXT = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")


class Problem(NamedTuple):
    """A problem. `shown` has the first tests of MBPP, which tell the name of the function."""

    text: str
    tests: Tests
    solution: str = ""  # a whole program; empty: none
    starter: str = ""  # beginning of the program, as the prompt shows it
    shown: tuple[str, ...] = ()


def read_problem(row: Row, where: str, shape: str) -> Problem:
    """Read a row. `shape`: a name of `SHAPES`, or `auto`: by the fields.

    Raises:
        DataError: the row has no such shape, a field is wrong, or there is no test; names the place and the field.
    """
    if shape == "auto":
        found = [name for name, (fields, _) in SHAPES.items() if all(field in row for field in fields)]
        if not found:
            expected = "; or ".join(f"{', '.join(fields)} ({name})" for name, (fields, _) in SHAPES.items())
            raise DataError(f"{where}: expected the fields {expected}; got {', '.join(map(str, row))}")
        shape = found[0]
    return SHAPES[shape][1](row, where)


def _humaneval(row: Row, where: str) -> Problem:
    stub, name = text_field(row, "prompt", where), text_field(row, "entry_point", where)
    tests = (f"{text_field(row, 'test', where)}\ncheck({name})\n",)
    _check_asserts(tests, where, "test")
    body = row.get("canonical_solution")
    return Problem(
        stub,
        CallTests(tests=tests, names=(name,), setup=stub if _is_python(stub) else "", stub=stub),
        solution=f"{stub}{body}" if isinstance(body, str) else "",
    )


def _mbpp(row: Row, where: str) -> Problem:
    text = text_field(row, "text" if "text" in row else "prompt", where)
    tests = _texts(row, "test_list", where)
    _check_asserts(tests, where, "test_list")
    imports = _texts(row, "test_imports", where) if row.get("test_imports") else ()
    setup = text_field(row, "test_setup_code", where) if row.get("test_setup_code") else ""
    setup = "\n".join([*imports, setup])
    if not _is_python(setup):
        raise DataError(
            f"{where}: expected Python in the fields 'test_imports' and 'test_setup_code', got {shown(setup)}"
        )
    solution = row["code"] if isinstance(row.get("code"), str) else ""
    return Problem(text, CallTests(tests=tests, names=_defined(solution), setup=setup), solution, shown=tests)


def _apps(row: Row, where: str) -> Problem:
    cases = _json(text_field(row, "input_output", where), where, "input_output")
    inputs, outputs = (cases.get(key) if isinstance(cases, dict) else None for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        expected = "as many 'inputs' as 'outputs', at least one, in the field 'input_output'"
        raise DataError(f"{where}: expected {expected}, got {shown(row['input_output'])}")
    name = cases.get("fn_name")
    tests: Tests
    if name is None:
        texts = [tuple(_joined(case, where) for case in side) for side in (inputs, outputs)]
        tests = OutputTests(inputs=texts[0], outputs=texts[1], tolerance=_APPS_TOLERANCE)
    else:
        pairs = [(json.dumps(given), json.dumps(expected)) for given, expected in zip(inputs, outputs, strict=True)]
        tests = _calls(_identifier(name, where, "input_output"), pairs, wrapped=True)
    solutions = _json(text_field(row, "solutions", where), where, "solutions") if row.get("solutions") else []
    solution = solutions[0] if isinstance(solutions, list) and solutions else ""
    return Problem(text_field(row, "question", where), tests, str(solution), _starter(row, where))


def _livecodebench(row: Row, where: str) -> Problem:
    cases: list[Mapping[str, Any]] = []
    for field in ("public_test_cases", "private_test_cases"):
        found = _cases(row[field], where, field) if row.get(field) else []
        keys = ("input", "output")
        if not isinstance(found, list) or not all(
            isinstance(case, dict) and all(isinstance(case.get(key), str) for key in keys) for case in found
        ):
            raise DataError(f"{where}: expected a list of tests with the texts 'input' and 'output' in '{field}'")
        cases += found
    if not cases:
        raise DataError(f"{where}: expected at least one test in 'public_test_cases' or 'private_test_cases'")
    kinds = {case.get("testtype", "stdin") for case in cases}
    tests: Tests
    if kinds == {"stdin"}:
        inputs, outputs = (tuple(case[key] for case in cases) for key in ("input", "output"))
        tests = OutputTests(inputs=inputs, outputs=outputs)
    elif kinds == {"functional"}:
        metadata = row.get("metadata")
        metadata = _json(metadata, where, "metadata") if isinstance(metadata, str) else metadata
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        pairs = [(f"[{','.join(case['input'].splitlines())}]", case["output"]) for case in cases]
        for text in (text for pair in pairs for text in pair):
            _json(text, where, "public_test_cases or private_test_cases")
        tests = _calls(_identifier(name, where, "metadata"), pairs, wrapped=False)
    else:
        raise DataError(f"{where}: expected the testtype stdin or functional, the same for all, got {shown(kinds)}")
    return Problem(text_field(row, "question_content", where), tests, starter=_starter(row, where))


SHAPES: Mapping[str, tuple[tuple[str, ...], Callable[[Row, str], Problem]]] = {
    "humaneval": (("prompt", "test", "entry_point"), _humaneval),
    "mbpp": (("test_list",), _mbpp),
    "apps": (("question", "input_output"), _apps),
    "livecodebench": (("question_content", "public_test_cases"), _livecodebench),
}


def _calls(name: str, pairs: Sequence[tuple[str, str]], *, wrapped: bool) -> CallTests:
    """Make an assert of each pair of arguments and result, both as JSON."""
    tests = (
        f"assert __same({name}(*__loads({given!r})), __loads({expected!r}), wrapped={wrapped})"
        for given, expected in pairs
    )
    return CallTests(tests=tuple(tests), names=(name,), imports=True)


def _cases(value: object, where: str, field: str) -> Any:
    """Read tests: a list, or JSON, or a pickled text of JSON, compressed, in base64."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _json(value, where, field)
    try:
        unpacked = zlib.decompressobj()
        pickled = unpacked.decompress(base64.b64decode(value, validate=True), _MOST_BYTES)
        if unpacked.unconsumed_tail:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        text = _pickled_text(pickled)
    except (binascii.Error, zlib.error, ValueError) as error:
        expected = "expected JSON, or a compressed pickle of a text alone"
        raise DataError(f"{where}: {expected}, in the field '{field}': {shown(str(error))}") from error
    return _json(text, where, field)


def _pickled_text(pickled: bytes) -> str:
    """Read a pickle of a text, as a list of instructions that nothing executes."""
    texts = []
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name in _TEXTS:
            texts.append(argument)
        elif instruction.name not in _AROUND_A_TEXT:
            raise ValueError(f"the pickle has the instruction {instruction.name}")
    if len(texts) != 1:
        raise ValueError(f"the pickle has {len(texts)} texts")
    return str(texts[0])


def _json(text: str, where: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON in the field '{field}', got {shown(text)}: {error}") from error


def _joined(case: object, where: str) -> str:
    """Return the text of an input or an output; some rows have a list of lines."""
    if isinstance(case, list):
        return "\n".join(map(str, case))
    if not isinstance(case, str):
        raise DataError(f"{where}: expected texts in the field 'input_output', got {shown(case)}")
    return case


def _texts(row: Row, field: str, where: str) -> tuple[str, ...]:
    value = row.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise DataError(f"{where}: expected a list of texts in the field '{field}', got {shown(value)}")
    return tuple(value)


def _starter(row: Row, where: str) -> str:
    return text_field(row, "starter_code", where) if row.get("starter_code") else ""


def _identifier(name: object, where: str, field: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise DataError(f"{where}: expected the name of a function in the field '{field}', got {shown(name)}")
    return name


def _check_asserts(tests: Sequence[str], where: str, field: str) -> None:
    for text in tests:
        tree = _parsed(text)
        if tree is None or not any(is_counted(node) for node in ast.walk(tree)):
            raise DataError(f"{where}: expected Python with an assert in the field '{field}', got {shown(text)}")


def _is_python(source: str) -> bool:
    return _parsed(source) is not None


def _defined(solution: str) -> tuple[str, ...]:
    """Name the functions and classes of a solution."""
    tree = _parsed(solution)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return tuple(node.name for node in tree.body if isinstance(node, kinds)) if tree is not None else ()


def _parsed(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in a text
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
