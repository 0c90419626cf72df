"""Dashboards and alert rules name only metrics that exist, and are well-formed."""

import json
import math
import re
import shutil
import subprocess

import pytest
import yaml
from support.metric_names import all_metrics, metric_names
from support.monitoring import DASHBOARD, MONITORING, RULES, expressions

from areal_rloo.telemetry.metric import PREFIX, declared_metrics
from areal_rloo.telemetry.records import TrainRecord


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_only_metrics_that_exist(expression: str) -> None:
    named = set(re.findall(rf"\b{PREFIX}\w+", expression))
    # A real server is asked for its own metrics, in its tests; the Prometheus library has those of a process.
    assert named or re.search(
        r"\b(sglang|vllm):|^up\{|\bprocess_(start_time_seconds|resident_memory_bytes)\b", expression
    )
    assert named <= metric_names()


@pytest.mark.parametrize("expression", expressions())
def test_only_a_counter_has_a_rate(expression: str) -> None:
    for name in re.findall(rf"\b(?:rate|increase)\((({PREFIX}|sglang:|vllm:)\w+)", expression):
        assert name[0].endswith(("_total", "_bucket")), f"{name[0]} is a gauge"


def test_labels_in_expressions_are_labels_of_the_metric() -> None:
    labels = {declared.name: declared.labels for declared in all_metrics()}
    for expression in expressions():
        for grouped, name in re.findall(rf"by \((\w+)\) \(\w+\(({PREFIX}\w+)", expression):
            assert grouped in labels[name]
        for name, matched in re.findall(rf"({PREFIX}\w+)\{{(\w+)", expression):
            assert matched in labels[name]


def _alerts() -> dict[str, str]:
    """Give the condition of each alert, without the condition that the run has not ended."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    return {alert: expr.partition(" and on (")[0].removesuffix(")") for alert, expr in rules.items()}


def test_every_healthy_range_has_an_alert_at_its_end() -> None:
    for declared in all_metrics():
        if declared.metric.healthy is not None:
            low, high = declared.metric.healthy
            alerts = [expr for expr in _alerts().values() if re.search(rf"\b{declared.name}\b", expr)]
            ends = {f"> {high:g}", f"!= {high:g}"} if high < math.inf else {f"== {low - 1:g}", f"< {low:g}"}
            assert any(expr.endswith(tuple(ends)) for expr in alerts), declared.name


def test_every_alert_on_the_height_of_a_metric_has_a_healthy_range() -> None:
    """Alerts on drops by reason and on missing steps use rates, which have no healthy range."""
    healthy = {declared.name for declared in all_metrics() if declared.metric.healthy is not None}
    for alert, expr in _alerts().items():
        if alert not in {"NoTrainStep", "SamplesDropped", "RolloutIdle", "CodeDiffers"}:
            assert set(re.findall(rf"{PREFIX}\w+", expr)) <= healthy, alert


def test_every_alert_has_a_severity_and_a_summary() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert len(rule["annotations"]["summary"]) > 20


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_prometheus_accepts_the_rules_and_the_scrape_config() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    config = MONITORING / "prometheus" / "prometheus.yml"
    ended = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("field", ["ratio_mean", "behaviour_weight_mean"])
def test_a_panel_of_a_ratio_has_the_title_of_its_chart(field: str) -> None:
    """With `decoupled: false`, the ratio is to the behaviour policy: the title must hold for this, too."""
    chart = next(declared.metric.chart for declared in declared_metrics(TrainRecord) if declared.field == field)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    title = next(p["title"] for p in panels if any(t["expr"] == f"{PREFIX}{field}" for t in p["targets"]))
    assert chart is not None
    assert title == chart.title
    assert field != "ratio_mean" or "proximal" not in title
