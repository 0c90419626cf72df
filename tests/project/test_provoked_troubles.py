"""Every alarm and every symptom is provoked in a real run: a test of whole runs names it."""

import ast
import re
from pathlib import Path

from support.monitoring import rules

from areal_rloo.telemetry.health import SYMPTOMS

INTEGRATION = Path(__file__).resolve().parents[1] / "integration"
PROVOKING = [*sorted(INTEGRATION.glob("test_provoked_*.py")), INTEGRATION / "test_watched_runs.py"]


def _named(source: str) -> set[str]:
    """Return the texts of a test that are not docstrings, and the symptom in each line about the health."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings)
    texts = {node.value for node in constants if isinstance(node.value, str)}
    return texts | {name for text in texts for name in re.findall(r"health: (\w+): ", text)}


def test_every_alarm_and_every_symptom_is_provoked_in_a_real_run() -> None:
    named = {name for path in PROVOKING for name in _named(path.read_text())}
    assert {rule["alert"] for rule in rules()} - named == set(), "provoke this alarm in a tests/integration/test_prov*"
    assert set(SYMPTOMS) - named == set(), "provoke this symptom"


def test_a_name_in_a_docstring_provokes_nothing() -> None:
    assert _named('"""Fire `Hang`."""\ndef test():\n    "Hang"\n    wait("health: stale: x", {"Late"})') == {
        "health: stale: x",
        "stale",
        "Late",
    }
