"""The shipped alert rules and dashboards."""

import json
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "launcher" / "monitoring"
RULES = MONITORING / "prometheus" / "alerts.yml"
GRAFANA = MONITORING / "grafana"


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").iterdir())}


def panels() -> list[dict[str, Any]]:
    return [panel for dashboard in dashboards().values() for panel in dashboard["panels"]]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    """Give the expressions of all rules and panels."""
    targets = [target["expr"] for panel in panels() for target in panel["targets"]]
    asked = dict.fromkeys([*(rule["expr"] for rule in rules()), *targets])
    return [with_values(one) for one in asked]


def with_values(expression: str) -> str:
    """Put values in place of Grafana's variables."""
    return expression.replace("$__rate_interval", "1m").replace('"$run"', '".+"').replace('"$process"', '".+"')
