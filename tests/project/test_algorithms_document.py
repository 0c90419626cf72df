"""Check docs/algorithms.md against the config: the presets, and the name of every option."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from support.metric_names import metric_names

from areal_rloo.algorithm.own_parts import load_own_loss, load_own_parts
from areal_rloo.config import PRESETS, AlgorithmConfig, Config, LossConfig
from areal_rloo.intake.curriculum import Curriculum
from areal_rloo.trajectory import Item

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def _section(title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found.group(1)


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    laid = dict(base)
    for key, value in changes.items():
        laid[key] = _laid_over(base[key], value) if isinstance(value, dict) else value
    return laid


def _floats(tree: Any) -> Any:
    """PyYAML reads 1e-6 as a string."""
    if isinstance(tree, dict):
        return {key: _floats(value) for key, value in tree.items()}
    return float(tree) if isinstance(tree, str) and re.fullmatch(r"[\d.]+e-?\d+", tree) else tree


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_rloo_with_the_changes_of_its_section(name: str) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", _section(f"`{name}`"), re.DOTALL)
    changes = _floats(yaml.safe_load(block))
    expected = changes if name == "rloo" else _laid_over(PRESETS["rloo"], changes)
    assert expected == PRESETS[name]


def _hint(path: str) -> Any:
    """Return the type of an option, or None for an unknown name."""
    hint: Any = Config
    for key in path.split("."):
        struct = next((o for o in (hint, *typing.get_args(hint)) if isinstance(o, type)), None)
        if struct is None or not issubclass(struct, msgspec.Struct):
            return None
        hint = typing.get_type_hints(struct, include_extras=True).get(key)
    return hint


def _options() -> Iterator[str]:
    for row in _section("Option names").splitlines():
        if row.startswith("| `"):
            yield row.split("|")[1].strip().strip("`")


def test_the_table_of_option_names_is_complete() -> None:
    assert len(list(_options())) > 50


@pytest.mark.parametrize("option", list(_options()))
def test_an_option_of_the_table_exists_and_takes_its_value(option: str) -> None:
    key, equals, value = option.partition("=")
    hint = _hint(key)
    assert hint is not None, f"no option {key}"
    if equals:
        msgspec.convert(yaml.safe_load(value), hint)


@pytest.mark.parametrize("system", ["AReaL", "verl", "TRL", "ms-swift"])
def test_every_row_has_a_cell_for_every_system(system: str) -> None:
    header, _, *rows = [line for line in _section("Option names").splitlines() if line.startswith("|")]
    column = [cell.strip() for cell in header.split("|")].index(system)
    assert all(row.split("|")[column].strip() for row in rows)


def _leaves(struct: Any, prefix: str) -> Iterator[str]:
    for key, hint in typing.get_type_hints(struct, include_extras=True).items():
        inner = next((o for o in (hint, *typing.get_args(hint)) if isinstance(o, type)), None)
        if inner is not None and issubclass(inner, msgspec.Struct):
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("path", list(_leaves(_hint("algorithm"), "algorithm.")))
def test_every_option_of_the_algorithm_is_in_the_document(path: str) -> None:
    of_the_other_norm = path.replace("reward_norm", "adv_norm")  # both norms have the same keys
    assert re.search(rf"`({re.escape(path)}|{re.escape(of_the_other_norm)})[`=:]", DOCUMENT), path


def test_the_named_metrics_exist() -> None:
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", _section("Metrics of a step"), re.M)))
    assert len(names) > 20
    assert {f"areal_rloo_{name}" for name in names} <= metric_names()


def test_the_own_functions_of_the_document_pass_the_trial(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", _section("Your own functions"), re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    mine = f"{tmp_path / 'mine.py'}:"
    assert load_own_loss(LossConfig(kind=f"{mine}loss")) is not None
    parts = AlgorithmConfig(advantages=f"{mine}advantages", sample_weights=f"{mine}fresh_first")
    assert None not in load_own_parts(parts)
    assert Curriculum(f"{mine}unsolved", [[Item("1"), Item("2")]], seed=0, every=1).draw(0, 0) in (0, 1)


def test_the_named_files_exist() -> None:
    for file in re.findall(r"`(areal_rloo/[\w/]+\.py)`", DOCUMENT):
        assert (Path(__file__).resolve().parents[2] / file).is_file(), file
