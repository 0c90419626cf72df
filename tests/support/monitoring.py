"""The shipped alert rules and dashboard."""

import json
from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "launcher" / "monitoring"
RULES = MONITORING / "prometheus" / "alerts.yml"
DASHBOARD = MONITORING / "grafana" / "dashboard.json"


def expressions() -> list[str]:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return rules + [target["expr"] for panel in panels for target in panel["targets"]]
