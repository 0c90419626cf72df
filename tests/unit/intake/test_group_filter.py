"""The user's group filter: its results are True or False."""

from pathlib import Path

import numpy as np
import pytest
import torch

from areal_rloo.errors import UserError
from areal_rloo.intake.group_filter import load_group_filter
from areal_rloo.trajectory import Group

_FILE = """
import functools
RESULT = None
def keep(group):
    return RESULT
class Keeper:
    def __call__(self, group):
        return RESULT
keeper = Keeper()
partial = functools.partial(keep)
"""
_GROUP = Group(group_id=1, deadline=1, trajectories=())


def _result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, result: object) -> bool:
    path = tmp_path / "filters.py"
    path.write_text(_FILE)
    kept = load_group_filter(f"{path}:{name}")
    assert kept is not None
    monkeypatch.setattr(f"{str(path).replace('.', '_')}.RESULT", result)
    return kept(_GROUP)


@pytest.mark.parametrize("result", [True, 1, np.bool_(True), torch.tensor(True)])
def test_a_true_of_any_library_keeps_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: object) -> None:
    assert _result(tmp_path, monkeypatch, "keep", result) is True


@pytest.mark.parametrize("result", [False, 0, np.bool_(False), torch.tensor(False)])
def test_a_false_of_any_library_drops_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: object) -> None:
    assert _result(tmp_path, monkeypatch, "keep", result) is False


@pytest.mark.parametrize(("result", "shown"), [(None, "None"), ("no", "no"), ([], "[]"), (0.5, "0.5")])
@pytest.mark.parametrize(("name", "line"), [("keep", 4), ("keeper", 6), ("partial", None)])
def test_another_result_is_refused_with_the_line_of_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: object, shown: str, name: str, line: int | None
) -> None:
    with pytest.raises(UserError) as caught:
        _result(tmp_path, monkeypatch, name, result)
    file = tmp_path / "filters.py"
    place = "" if line is None else f" ({file}:{line})"
    assert str(caught.value) == f"{file}:{name} returned {shown}, expected True or False{place}"


def test_without_a_path_there_is_no_filter() -> None:
    assert load_group_filter(None) is None
