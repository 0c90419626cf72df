"""Dashboards and alert rules name only metrics that exist, and are well-formed."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.metric_names import all_metrics, metric_names
from support.monitoring import GRAFANA, MONITORING, dashboards, expressions, panels, rules

from areal_rloo.learner import __main__ as learner
from areal_rloo.report.dashboards import dashboard, linked, read_panels
from areal_rloo.telemetry.metric import PREFIX

_OF_A_PROCESS = '{{ if eq $labels.process "learner" }}critical{{ else }}warning{{ end }}'
OF_EVERY_PROCESS = "process_(start_time_seconds|resident_memory_bytes|cpu_seconds_total|open_fds|max_fds)"


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_only_metrics_that_exist(expression: str) -> None:
    named = set(re.findall(rf"\b{PREFIX}\w+", expression))
    # A real server is asked for its own metrics, in its tests; the Prometheus library has those of a process.
    assert named or re.search(rf"\b(sglang|vllm):|^up\{{|\b({OF_EVERY_PROCESS})\b", expression)
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
            assert matched in {*labels[name], "run"}


def _alerts() -> dict[str, str]:
    """Give the condition of each alert, without the condition that the run has not ended."""
    return {rule["alert"]: rule["expr"].partition(" and on (")[0].removesuffix(")") for rule in rules()}


def test_every_healthy_range_has_an_alert_at_its_end() -> None:
    for declared in all_metrics():
        if declared.metric.healthy is not None:
            low, high = declared.metric.healthy
            alerts = [expr for expr in _alerts().values() if re.search(rf"\b{declared.name}\b", expr)]
            ends = {f"> {high:g}", f"!= {high:g}"} if high < math.inf else {f"== {low - 1:g}", f"< {low:g}"}
            assert any(expr.endswith(tuple(ends)) for expr in alerts), declared.name


def test_every_alert_on_the_height_of_a_metric_has_a_healthy_range() -> None:
    """Alerts on drops by reason and on missing steps use rates, others compare two numbers."""
    others = {"NoTrainStep", "SamplesDropped", "RolloutIdle", "CodeDiffers", "WorkerMissing", "DiskFull"}
    others |= {"CheckpointOld", "LearnerStarved", "RewardsSaturated", "MemoryGrows", "RestartLoop"}
    healthy = {declared.name for declared in all_metrics() if declared.metric.healthy is not None}
    for alert, expr in _alerts().items():
        if alert not in others:
            assert set(re.findall(rf"{PREFIX}\w+", expr)) <= healthy, alert


def test_a_number_that_is_missing_silences_no_alert_on_an_average() -> None:
    names = ("masked_token_share", "zero_variance_group_share", "idle_share", "reward_num_queued")
    always = {f"{PREFIX}{name}" for name in names}
    keeping = {declared.name for declared in all_metrics() if declared.metric.keeps}
    for expression in (rule["expr"] for rule in rules()):
        assert set(re.findall(rf"avg_over_time\(({PREFIX}\w+)", expression)) <= always | keeping


def test_every_alert_links_to_a_panel_of_its_numbers() -> None:
    """The file is written by `python -m areal_rloo.report.dashboards launcher/monitoring/grafana`."""
    pages = [dashboard(uid, page) for uid, page in read_panels(GRAFANA).items()]
    written = (MONITORING / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    assert written == linked(written, pages)
    by_uid = {page["uid"]: {panel["id"]: panel for panel in page["panels"]} for page in pages}
    for rule in rules():
        uid, panel_id, run = re.fullmatch(  # type: ignore[union-attr]
            r"/d/([a-z-]+)\?viewPanel=(\d+)&var-run=(.*)", rule["annotations"]["dashboard"]
        ).groups()
        shown = " ".join(target["expr"] for target in by_uid[uid][int(panel_id)]["targets"])
        named = set(re.findall(r"areal_rloo_\w+|process_\w+|\bup\b", rule["expr"]))
        assert named & set(re.findall(r"\w+", shown)), rule["alert"]
        assert run == "{{ $labels.run }}"


def test_the_alarm_of_drops_links_to_the_reasons() -> None:
    (rule,) = (rule for rule in rules() if rule["alert"] == "SamplesDropped")
    (panel,) = (one for one in dashboards()["overview"]["panels"] if one["title"].startswith("Dropped samples"))
    assert f"/areal-rloo-overview?viewPanel={panel['id']}&" in rule["annotations"]["dashboard"]


def test_a_panel_of_reasons_names_those_that_occur_and_the_sum() -> None:
    for panel in panels():
        if "ledger_dropped" in panel["targets"][0]["expr"]:
            by_reason, together = panel["targets"]
            assert by_reason["expr"].endswith("} > 0")
            assert together["expr"].startswith("sum without (reason) (")


def test_every_alert_has_a_severity_and_a_summary() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning", _OF_A_PROCESS}
        assert len(rule["annotations"]["summary"]) > 20
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def test_every_alert_has_a_runbook_in_the_same_order() -> None:
    page = (MONITORING.parents[1] / "docs" / "runbooks.md").read_text()
    sections = re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert [alert for alert, _ in sections] == [rule["alert"] for rule in rules()]
    for alert, text in sections:
        assert all(f"\n{word}: " in text for word in ("Look", "Do")), alert


@pytest.mark.parametrize("uid", dashboards())
def test_a_dashboard_is_made_of_the_declarations(uid: str) -> None:
    assert dashboards()[uid] == dashboard(uid, read_panels(GRAFANA)[uid]), (
        "run python -m areal_rloo.report.dashboards launcher/monitoring/grafana"
    )


def test_every_page_of_panels_has_a_dashboard() -> None:
    assert set(dashboards()) == set(read_panels(GRAFANA))


def test_every_metric_is_in_a_panel() -> None:
    """A metric of an alarm, too: who gets the alarm looks for its numbers."""
    asked = {word for panel in panels() for one in panel["targets"] for word in re.findall(r"\w+", one["expr"])}
    assert metric_names() - asked == set()


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    for page in dashboards().values():
        assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
        cells = [
            (x, y)
            for panel in page["panels"]
            for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
            for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24


def test_a_panel_has_unit_help_and_healthy_range_of_the_metric() -> None:
    (shown,) = (panel for panel in panels() if panel["title"].startswith("Tokens past the bound"))
    defaults = shown["fieldConfig"]["defaults"]
    assert defaults["unit"] == "percentunit"
    assert [step["value"] for step in defaults["thresholds"]["steps"]] == [None, 0.1]
    assert shown["description"] == "masked_token_share: Tokens past max_staleness (healthy: 0 to 0.1)."


def test_every_panel_says_what_it_shows() -> None:
    assert [panel["title"] for panel in panels() if not panel["description"]] == []
    (shown,) = (panel for panel in panels() if panel["title"].startswith("Skipped steps"))
    assert [line.partition(":")[0] for line in shown["description"].splitlines()] == [
        *("skipped_steps", "failed_checkpoints", "watchdog_hangs"),
    ]


def test_prometheus_accepts_the_rules_and_the_scrape_config() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    config = MONITORING / "prometheus" / "prometheus.yml"
    ended = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_scrape_of_a_learner_with_a_hung_loop_ends_in_time() -> None:
    """Prometheus gives a scrape its interval at most, and drops all numbers of a later one: `Hang` would never fire."""
    config = (MONITORING / "prometheus" / "prometheus.yml").read_text()
    (interval,) = re.findall(r"scrape_interval: (\d+)s", config)
    source = Path(learner.__file__).read_text()
    assert source.count("timeout_s=_SCRAPE_S") * learner._SCRAPE_S < int(interval)


def test_the_alarms_that_hold_back_others_exist() -> None:
    path = MONITORING / "prometheus" / "alertmanager.yml"
    named = re.findall(r'alertname=~?"([\w|]+)"', path.read_text())
    assert {name for names in named for name in names.split("|")} <= {rule["alert"] for rule in rules()}
    if amtool := shutil.which("amtool"):
        ended = subprocess.run([amtool, "check-config", path], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


def test_workers_that_start_again_with_the_learner_are_no_message() -> None:
    """A worker ends with code 4 when the learner restarts, so it has a `RestartLoop` whenever the learner has one."""
    held = yaml.safe_load((MONITORING / "prometheus" / "alertmanager.yml").read_text())["inhibit_rules"]
    loop = 'alertname="RestartLoop"'
    (rule,) = (rule for rule in held if rule["source_matchers"] == [loop, 'process="learner"'])
    assert rule["target_matchers"] == [loop, 'process!="learner"']
    assert rule["equal"] == ["run", "run_id"]


def test_the_job_of_the_operator_is_the_job_of_the_alarms() -> None:
    """Else `up{job="areal_rloo"}` has no series, and `TargetDown` and others never fire."""
    asked = {job for rule in rules() for job in re.findall(r'job="(\w+)"', rule["expr"])}
    spec = yaml.safe_load((MONITORING.parent / "ray" / "monitor.yaml").read_text())["spec"]
    assert {spec.get("jobName")} == asked


@pytest.mark.parametrize(
    ("values", "minutes"),
    [
        pytest.param("0+50x24", 2, id="a_run_of_two_minutes"),
        pytest.param("0+50x720", 60, id="an_old_run"),
        pytest.param("0+50x60 stale _x8 0+50x60", 10, id="a_learner_that_was_restarted"),
        pytest.param("5000+50x24", 2, id="a_prometheus_that_came_later"),
        pytest.param("0+0x59 3000+0x59 6000+0x59 9000+0x59 12000+0x59", 24, id="steps_of_five_minutes"),
    ],
)
def test_a_panel_shows_the_tokens_of_a_second_of_any_run(values: str, minutes: int, tmp_path: Path) -> None:
    """A scrape takes place every 5 s, and the run trains on 10 tokens a second."""
    shown = [{"labels": '{run="a", process="learner"}', "value": 10}]
    assert _unlike_trained_tokens_per_second(shown, values, minutes, tmp_path) == ""


def test_a_panel_of_totals_ends_with_the_learner(tmp_path: Path) -> None:
    """Else the tokens per second of a dead run look well for a quarter of an hour."""
    assert _unlike_trained_tokens_per_second([], "0+50x120 stale", 11, tmp_path) == ""


def _unlike_trained_tokens_per_second(shown: list[dict[str, object]], values: str, minutes: int, folder: Path) -> str:
    """Give what promtool says against the numbers of a panel."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    (expression,) = {each for each in expressions() if re.search(r"\bincrease\(areal_rloo_trained_tokens_", each)}
    asked = {"expr": f"round({expression})", "eval_time": f"{minutes}m", "exp_samples": shown}
    series = {"series": 'areal_rloo_trained_tokens_total{run="a",process="learner"}', "values": values}
    test = {"interval": "5s", "input_series": [series], "promql_expr_test": [asked]}
    (folder / "tests.yml").write_text(yaml.safe_dump({"evaluation_interval": "5s", "tests": [test]}))
    ended = subprocess.run(
        [promtool, "test", "rules", str(folder / "tests.yml")], capture_output=True, text=True, check=False
    )
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr
