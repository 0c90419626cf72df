"""Write the Grafana dashboards from launcher/monitoring/grafana/panels.yaml and the declarations of the metrics:

    python -m areal_rloo.report.dashboards launcher/monitoring/grafana

Each alarm in ../prometheus/alerts.yml gets a link to a panel of its numbers. A test compares the files with the
declarations, and finds each metric in a panel.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_rloo.report.metrics_page import SERVED
from areal_rloo.telemetry.metric import PREFIX, Chart, Declared, declared_metrics, healthy_range
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

PANELS = "panels.yaml"
_STEPS_WINDOW = "15m"  # a number of a train step changes once a step, which may take minutes
_LOOK_S = 5  # between two looks at whether a series is there
_SELECTED, _WINDOW = 'run=~"$run", process=~"$process"', "$__rate_interval"
_LINK = "dashboard: "
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_UNITS = {"s": "s", "share": "percentunit", "bytes": "bytes"}  # ours to Grafana's
_RATES = {"s": "percentunit", "bytes": "Bps"}  # of totals
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Curves with a common axis; see panels.yaml."""

    title: str = ""
    metrics: str = ""
    others: tuple[tuple[str, str], ...] = ()
    unit: str = ""  # in Grafana; empty: of the first metric
    help: str = ""  # of numbers of others
    kind: Literal["timeseries", "state-timeline", "table"] = "timeseries"
    charts: Literal["", "steps", "evaluations"] = ""


class Dashboard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A page of panels, three in a row."""

    title: str
    panels: tuple[Panel, ...]


def short_name(declared: Declared) -> str:
    """Give the name of a metric in panels.yaml."""
    return declared.name.removeprefix(PREFIX).removesuffix("_total")


_METRICS = {
    short_name(declared): (declared, "rollout worker" not in title)
    for title, struct in SERVED
    for declared in declared_metrics(struct)
}

_OF_STEPS = declared_metrics(TrainRecord)


def read_panels(folder: Path) -> dict[str, Dashboard]:
    """Read panels.yaml; dashboards by uid, with a panel in place of each chart."""
    read = msgspec.yaml.decode((folder / PANELS).read_bytes(), type=dict[str, Dashboard])
    return {
        uid: msgspec.structs.replace(page, panels=tuple(one for panel in page.panels for one in _expanded(panel)))
        for uid, page in read.items()
    }


def dashboard(uid: str, page: Dashboard) -> dict[str, Any]:
    """Give the JSON model of a dashboard."""
    links = {"type": "dashboards", "tags": ["areal_rloo"], "title": "areal_rloo", "keepTime": True, "includeVars": True}
    starts = {
        "name": "starts of processes",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "orange",
        "expr": f"process_start_time_seconds{{{_SELECTED}}} * 1000",
        "useValueForTime": "on",
        "titleFormat": "{{process}} starts",
        "textFormat": "{{run}}",
    }
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"areal-rloo-{uid}",
        "title": f"areal_rloo: {page.title}",
        "tags": ["areal_rloo"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [links],
        "annotations": {"list": [starts]},
        "templating": {"list": [source, _variable("run"), _variable("process", of='run=~"$run"')]},
        "panels": [_panel(panel, index) for index, panel in enumerate(page.panels)],
    }


def write_dashboards(folder: Path) -> None:
    """Write dashboards/*.json in a folder with panels.yaml, and the links of the alarms."""
    pages = {uid: dashboard(uid, page) for uid, page in read_panels(folder).items()}
    for uid, page in pages.items():
        (folder / "dashboards" / f"{uid}.json").write_text(json.dumps(page, indent=1) + "\n")
    alerts = folder.parent / "prometheus" / "alerts.yml"
    alerts.write_text(linked(alerts.read_text(encoding="utf-8"), list(pages.values())), encoding="utf-8")


def linked(alerts: str, pages: Sequence[dict[str, Any]]) -> str:
    """Link each alarm to the panel with most numbers of its condition, the first of equals."""
    lines: list[str] = []
    expression = ""
    for line in alerts.splitlines():
        if line.lstrip().startswith(_LINK):
            continue
        lines.append(line)
        if line.lstrip().startswith("expr: "):
            expression = line
        if line.lstrip().startswith("runbook: "):
            lines.append(f"          {_LINK}{_panel_of(expression, pages)}")
    return "\n".join(lines) + "\n"


def _panel_of(expression: str, pages: Sequence[dict[str, Any]]) -> str:
    # The rest says when the alarm is silent, or what the number is divided by.
    condition = re.split(r" (?:and|unless|-) on \(| / ", expression)[0]
    names = set(re.findall(rf"{PREFIX}[a-z_0-9]+|process_[a-z_]+", condition))

    def numbers(place: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, bool]:
        words = {word for target in place[1]["targets"] for word in re.findall(r"\w+", target["expr"])}
        return len(names & words), "up" in words  # a number in no panel is that of a process

    page, panel = max(((page, panel) for page in pages for panel in page["panels"]), key=numbers)
    return f'"/d/{page["uid"]}?viewPanel={panel["id"]}&var-run={{{{ $labels.run }}}}"'


def _expanded(panel: Panel) -> Iterator[Panel]:
    if not panel.charts:
        yield panel
        return
    charts: dict[Chart, list[Declared]] = {}
    for declared in declared_metrics(TrainRecord if panel.charts == "steps" else EvalRecord):
        if declared.metric.chart is not None:
            charts.setdefault(declared.metric.chart, []).append(declared)
    for chart, numbers in charts.items():
        title = chart.title.replace(" since the start", ", per second" if numbers[0].is_counter else "")
        yield Panel(title, " ".join(map(short_name, numbers)))


def _variable(label: str, *, of: str = "") -> dict[str, Any]:
    """Let the user choose among the values of a label, of the series with these labels."""
    asked = f"label_values({PREFIX}run_info{{{of}}}, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": asked,
        "definition": asked,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, index: int) -> dict[str, Any]:
    metrics = [_METRICS[name] for name in panel.metrics.split()]
    asked = [_target(*metric, is_alone=len(metrics) == 1) for metric in metrics]
    asked += [
        (expr.replace("$selected", _SELECTED).replace("$window", _WINDOW), legend) for expr, legend in panel.others
    ]
    asked += [
        (f"sum without (reason) ({_rate(declared)})", "{{run}} all")
        for declared, _ in metrics
        if _has_all_reasons(declared)
    ]
    first = metrics[0][0] if metrics else None
    defaults: dict[str, Any] = {"unit": panel.unit or (_unit(first) if first else "short")}
    if defaults["unit"] == "percentunit":
        defaults["custom"] = {"axisSoftMax": 0.01}  # else the axis of a share of 0 ends at 10,000 %
    if first is not None and not first.is_counter and first.metric.healthy is not None:
        defaults["thresholds"] = {"mode": "absolute", "steps": _thresholds(*first.metric.healthy)}
        defaults.setdefault("custom", {})["thresholdsStyle"] = {"mode": "dashed"}
    once = {"format": "table", "instant": True} if panel.kind == "table" else {}
    across, down = index % _COLUMNS, index // _COLUMNS
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help or "\n".join(map(_describe, _described(panel))),
        "datasource": _SOURCE,
        "gridPos": {"x": across * _WIDTH, "y": down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend, **once}
            for number, (expression, legend) in enumerate(asked)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }


def _described(panel: Panel) -> list[Declared]:
    """Give the metrics of a panel, also those inside an expression."""
    names = [word for expression, _ in panel.others for word in re.findall(rf"{PREFIX}(\w+)", expression)]
    named = dict.fromkeys(panel.metrics.split() + [name.removesuffix("_total") for name in names])
    return [_METRICS[name][0] for name in named]


def _target(declared: Declared, of_learner: bool, *, is_alone: bool) -> tuple[str, str]:
    """Give the expression and the legend of a metric."""
    expression = _rate(declared) if declared.is_counter else _selected(declared)
    if _has_all_reasons(declared):
        expression += " > 0"  # of the total; else a legend has over twenty reasons that do not occur
    name = "" if is_alone else short_name(declared).replace("_", " ")
    parts = ["{{run}}", "" if of_learner else "{{process}}", name, *(f"{{{{{label}}}}}" for label in declared.labels)]
    return expression, " ".join(filter(None, parts))


def _selected(declared: Declared) -> str:
    return f"{declared.name}{{{_SELECTED}}}"


def _has_all_reasons(declared: Declared) -> bool:
    return declared in _OF_STEPS and "reason" in declared.labels


def _rate(declared: Declared) -> str:
    """Give the growth of a total per second.

    `rate` divides by the whole window, also while a process is younger: of a run of a minute, a fifteenth. The window
    outlasts a run, so the number ends with the series: else a dead learner goes on for a quarter of an hour.
    """
    selected = _selected(declared)
    if declared not in _OF_STEPS:
        return f"rate({selected}[{_WINDOW}])"
    num_looks = f"count_over_time({selected}[{_STEPS_WINDOW}:{_LOOK_S}s])"
    return f"increase({selected}[{_STEPS_WINDOW}]) / ({_LOOK_S} * {num_looks}) and {selected}"


def _unit(declared: Declared) -> str:
    return (_RATES if declared.is_counter else _UNITS).get(declared.metric.unit, "short")


def _thresholds(low: float, high: float) -> list[dict[str, Any]]:
    if math.isinf(high):
        return [{"color": "red", "value": None}, {"color": "green", "value": low}]
    return [{"color": "green", "value": None}, {"color": "red", "value": high}]


def _describe(declared: Declared) -> str:
    healthy = healthy_range(declared)
    return f"{short_name(declared)}: {declared.metric.help}{f' (healthy: {healthy})' if healthy else ''}."


if __name__ == "__main__":
    write_dashboards(Path(sys.argv[1]))
