"""Write the page of a run from the records and the summary: facts, charts, ledger, config, and changed options."""

from __future__ import annotations

import html
import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.advice.forecast import bottleneck_of_run
from areal_rloo.config import check_run, load_config
from areal_rloo.errors import ConfigError, DataError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.inspect.page import PAGE_NAME, write_page
from areal_rloo.inspect.shown import document
from areal_rloo.learner.checkpoint_folder import folder_of, standing
from areal_rloo.learner.stretches import Stretch, breaks_of, read_stretches
from areal_rloo.report.charts import Curve, histogram, line_chart, stacked_chart
from areal_rloo.report.curves import STYLE, by_set, curve_name, drawn, points
from areal_rloo.report.recorded import best_and_worst, length_chart, read_recorded
from areal_rloo.report.timeline import Lasted, timeline
from areal_rloo.telemetry.bound import idle_share
from areal_rloo.telemetry.code_state import STARTS_NAME
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.metric import Declared, declared_metrics, healthy_range
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.own_code import recorded_own_code
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord, result_field
from areal_rloo.telemetry.trace import FOLDER_NAME
from areal_rloo.telemetry.trajectories import FILE_NAME, read_trajectories
from areal_rloo.trace.perfetto import write_perfetto

_MOST_STARTS = 10
_MOST_TRACE_BYTES = 2**24  # some ten seconds on a slow machine


def write_report(folder: Path) -> Path:
    """Write report.html into a run folder, and trajectories.html if there are any; give the path of the report.

    Raises:
        DataError: the folder holds no run, or its files cannot be read or written.
    """
    check_run(folder)
    target = folder / "report.html"
    try:
        write_atomically(target, _page(folder).encode())
        if (folder / FILE_NAME).is_file():
            write_page(folder, read_trajectories(folder / FILE_NAME))
    except DataError:
        raise
    except Exception as error:  # numbers that no learner writes: in damaged files, they reach every line of a page
        raise DataError(f"{folder}: the report cannot be made: {error}") from error
    return target


def pages_in(folder: Path) -> list[str]:
    """Write report and trace of a run, and say where they are, and how to look at trajectories.

    A long trace would hold up the end of the run, so only a command writes it. Raises DataError as `write_report` does.
    """
    words = [f"report: {write_report(folder)}"]
    if (folder / FILE_NAME).is_file():
        command = [sys.executable, "-m", "areal_rloo", "inspect", str(folder), "--limit", "3"]
        words.append(f"trajectories: {shlex.join(command)}")
    num_bytes = sum(path.stat().st_size for path in (folder / FOLDER_NAME).glob("*"))
    if num_bytes > _MOST_TRACE_BYTES:
        command = [sys.executable, "-m", "areal_rloo", "report", str(folder)]
        words.append(f"trace: {num_bytes:,} bytes; for Perfetto: {shlex.join(command)}")
    elif num_bytes:
        try:
            words.append(f"trace: {write_perfetto(folder)}, for https://ui.perfetto.dev, which keeps it in the browser")
        except DataError as error:
            words.append(f"no trace: {error}")
    return words


def result_in(folder: Path) -> list[str]:
    """Say what a run brought: the result of each evaluation set, first and last; the bottleneck, if records tell.

    Leave out results before a change of the set, and of weights after the newest checkpoint.

    Raises:
        DataError: the records cannot be read.
    """
    records, newest = read_records(folder / "metrics.jsonl"), standing(folder_of(folder)).newest_version
    evaluations = [record for record in _comparable(folder, records) if record.policy_version <= newest]
    firsts, lasts = {one.name: one for one in reversed(evaluations)}, {one.name: one for one in evaluations}
    words = [
        f"result: {name} {result_field([first, lasts[name]])} {first.reward:.3f} (version {first.policy_version}) -> "
        f"{lasts[name].reward:.3f} (version {lasts[name].policy_version})"
        for name, first in reversed(firsts.items())
        if first is not lasts[name]
    ]
    return [*words, *filter(None, [_bottleneck(folder, records)])]


def _comparable(folder: Path, records: Sequence[Record]) -> list[EvalRecord]:
    """Give the evaluations after the last change of their set."""
    return breaks_of(folder).comparable(record for record in records if isinstance(record, EvalRecord))


def _bottleneck(folder: Path, records: Sequence[Record]) -> str | None:
    """Say the bottleneck of a run that learns."""
    try:
        config = load_config(str(folder / "config.yaml"))
    except ConfigError:
        return None  # of another version; the page shows the text
    health = Health(config, breaks_of(folder))
    for record in records:
        health.look(record)
    return bottleneck_of_run(records, config) if health.learns else None


def _health(folder: Path, records: Sequence[Record]) -> tuple[str, list[Lasted]]:
    """List when each symptom began and was over, as text and as times."""
    try:
        health = Health(load_config(str(folder / "config.yaml")), breaks_of(folder))
    except ConfigError:
        return "", []
    rows, lasted, present = [], list[Lasted](), dict[str, Lasted]()
    for record in records:
        rows += [
            f"<tr><td>step {record.policy_version}<td style='text-align: left'>{html.escape(line)}"
            for line in health.look(record)
        ]
        names = {symptom.name for symptom in health.present}
        lasted += [present.pop(name) for name in [*present] if name not in names]
        for name in names:
            known = present.get(name, Lasted(name, record.policy_version, record.policy_version))
            present[name] = known._replace(last=max(known.last, record.policy_version))  # evaluations come late
    lasted += present.values()
    text = f"<section><h2>Health (alarm Unhealthy)</h2><table>{''.join(rows)}</table></section>" if rows else ""
    return text, sorted(lasted, key=lambda symptom: symptom.first)


def _page(folder: Path) -> str:
    title, summary_path = folder.resolve().name, folder / "summary.json"
    records = read_records(folder / "metrics.jsonl")
    train = [record for record in records if isinstance(record, TrainRecord)]
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    config = read_regular(folder / "config.yaml").decode()
    summary = json.loads(read_regular(summary_path)) if summary_path.is_file() else None
    state = "in progress" if summary is None else f"ended: {summary['exit_reason']}"
    link = f" <a href='{PAGE_NAME}'>trajectories</a>" if (folder / FILE_NAME).is_file() else ""
    recorded, stretches = read_recorded(folder), read_stretches(folder)
    health, lasted = _health(folder, records)
    body = "\n".join(
        [
            f"<h1>{html.escape(title)}</h1><p><span class=state>{html.escape(state)}</span>{link}</p>",
            f"<p>{html.escape(_bottleneck(folder, records) or '')}</p>",
            health,
            f"<div class=facts>{_facts(train, _comparable(folder, records), summary)}</div>",
            f"<div class=charts>{''.join(_charts(train, evaluations))}{_staleness_chart(train)}",
            f"{length_chart(recorded)}{timeline(folder, train, evaluations, stretches, lasted)}</div>",
            f"<div class=below>{best_and_worst(recorded)}{_ledger(train, summary)}<section>{_newest_numbers(train)}",
            f"<details><summary>Resolved config</summary><pre>{html.escape(config)}</pre></details>",
            f"{_environment(folder)}</section>{_own_code(folder)}{_stretches(stretches)}</div>",
        ]
    )
    return document(title, body, style=STYLE)


def _facts(train: Sequence[TrainRecord], evaluations: Sequence[EvalRecord], summary: Any | None) -> str:
    facts: list[tuple[str, str]] = []
    for name, records in by_set(evaluations).items():
        title = f"held-out {result_field(records)}"
        title += f", {html.escape(name)}" if len(by_set(evaluations)) > 1 else ""
        facts.append((title, f"{records[0].reward:.3f} → {records[-1].reward:.3f}"))
        if records[-1].num_samples > 1:
            samples = f"pass@{records[-1].num_samples}, {html.escape(name)}"
            facts.append((samples, f"{records[0].pass_share:.3f} → {records[-1].pass_share:.3f}"))
    if train:
        last = train[-1]
        facts += [
            ("reward", f"{train[0].reward_mean:.3f} → {last.reward_mean:.3f}"),
            ("train steps", f"{last.num_train_steps:,}"),
            ("training time", _duration(last.wall_s)),
            ("learner idle", f"{100 * last.learner_idle_s / last.wall_s:.1f} %"),
            ("rollouts idle, after the first step", f"{100 * idle_share(last, train[0]):.1f} %"),
            ("tokens generated", f"{last.generated_tokens:,}"),
        ]
    if summary is not None:
        staleness, times = summary["staleness"], summary["time_s"]
        facts += [
            ("tokens trained", f"{summary['tokens']['trained']:,}"),
            ("staleness, mean and max", f"{staleness['mean_trained']:.2f}, {staleness['max_trained']}"),
            ("tokens past the bound", f"{100 * staleness['masked_token_share']:.2f} %"),
            ("warm start", _duration(times["warm_start"])),
        ]
    return "".join(f"<div><b>{html.escape(value)}</b><span class=soft>{name}</span></div>" for name, value in facts)


def _charts(train: Sequence[TrainRecord], evaluations: Sequence[EvalRecord]) -> list[str]:
    """Draw the evaluations, the reward, and every other chart that the fields of TrainRecord declare."""
    reward = points(train, "reward_mean")
    band = [(record.reward_mean - record.reward_std, record.reward_mean + record.reward_std) for record in train]
    values = sorted({value for record in train for value in record.staleness_tokens})
    sums = [(record, sum(record.staleness_tokens.values())) for record in train]
    by_staleness = [
        Curve(str(value), [(r.policy_version, r.staleness_tokens.get(value, 0) / max(1, tokens)) for r, tokens in sums])
        for value in values
    ]
    return [
        *_evaluation_charts(evaluations),
        line_chart("Reward of the batch", [Curve("mean", reward, band)], hint="band: one standard deviation"),
        stacked_chart("Share of trained tokens by staleness", by_staleness),
        *_declared_charts(train),
    ]


def _staleness_chart(train: Sequence[TrainRecord]) -> str:
    """Draw how stale the trained tokens of the whole run were."""
    tokens: Counter[int] = Counter()
    for record in train:
        tokens.update({value: num for value, num in record.staleness_tokens.items() if value >= 0 and num > 0})
    return histogram("Staleness of all trained tokens, in versions", {"trained tokens": tokens})


def _evaluation_charts(evaluations: Sequence[EvalRecord]) -> list[str]:
    several = any(record.num_samples > 1 for record in evaluations)
    charts = []
    results = {result_field(evaluations)} | {"accuracy" for record in evaluations if math.isfinite(record.accuracy)}
    for declared in drawn(EvalRecord):
        if declared.field not in results and not (several and declared.field.endswith("_share")):
            continue
        curves = [Curve(name, points(records, declared.field)) for name, records in by_set(evaluations).items()]
        charts.append(_line_chart(declared, curves, dots=True))
    return charts


def _declared_charts(train: Sequence[TrainRecord]) -> list[str]:
    """Draw metrics with the same chart as curves in one plane, in the order of the fields."""
    declared_charts = drawn(TrainRecord)
    charts = []
    for title in dict.fromkeys(declared.metric.chart for declared in declared_charts):
        group = [declared for declared in declared_charts if declared.metric.chart == title]
        if group[0].metric.label is None:
            curves = [Curve(curve_name(declared), points(train, declared.field)) for declared in group]
        else:
            by_name = points(train, group[0].field)
            names = sorted({name for _, numbers in by_name for name in numbers})
            curves = [
                Curve(name, [(version, numbers[name]) for version, numbers in by_name if name in numbers])
                for name in names
            ]
            if len(curves) < 2:  # the whole has a chart already
                continue
        charts.append(_line_chart(group[0], curves))
    return charts


def _line_chart(declared: Declared, curves: Sequence[Curve], *, dots: bool = False) -> str:
    chart, healthy = declared.metric.chart, healthy_range(declared)
    assert chart is not None, "only metrics with a chart are drawn"
    return line_chart(chart.title, curves, hint=healthy and f"healthy: {healthy}", dots=dots, share=chart.whole)


def _newest_numbers(train: Sequence[TrainRecord]) -> str:
    if not train:
        return ""
    rows = []
    for declared in declared_metrics(TrainRecord):
        if len(declared.path) == 1 and declared.metric.label is None:
            number = getattr(train[-1], declared.field)
            value = f"{number:,.4g} {declared.metric.unit}" if math.isfinite(number) else "-"
            rows.append(f"<tr><td>{declared.field}<td class=soft>{html.escape(declared.metric.help)}<td>{value}")
    return f"<details><summary>All numbers of the last step</summary><table>{''.join(rows)}</table></details>"


def _ledger(train: Sequence[TrainRecord], summary: Any | None) -> str:
    if summary is None and not train:
        return ""
    counts = msgspec.structs.asdict(train[-1].ledger) if summary is None else summary["ledger"]
    rows = [(state.replace("_", " "), counts[state], "") for state in ("admitted", "trained", "buffered", "in_flight")]
    for reason, count in sorted(counts["dropped"].items()):
        known = counts["dropped_tokens"].get(reason, 0)
        note = f"{known / max(1, count):,.0f} known tokens each, on average" if known else ""
        rows.append((f"dropped: {reason}", count, note))
    cells = "".join(f"<tr><td>{html.escape(name)}<td>{count:,}<td class=soft>{note}" for name, count, note in rows)
    return f"<section><h2>Ledger, in samples</h2><table>{cells}</table></section>"


def _environment(folder: Path) -> str:
    """Show the code, packages and hosts of each start."""
    try:
        starts = read_regular(folder / STARTS_NAME).decode(errors="replace").rstrip("\n").split("\n")
    except OSError:
        return ""
    return "".join(
        f"<details><summary>Environment of start {index}</summary><pre>{html.escape(_indented(start))}</pre></details>"
        for index, start in [*enumerate(starts, 1)][-_MOST_STARTS:]
    )


def _own_code(folder: Path) -> str:
    """Show the user's parts of the run, of the last start."""
    try:
        code = recorded_own_code(read_regular(folder / STARTS_NAME))
    except OSError:
        return ""
    rows = [
        f"<tr><td>{html.escape(key)}<td>{html.escape(part.path)}<td class=soft>digest {html.escape(part.digest or '?')}"
        for key, part in code.items()
    ]
    return f"<section><h2>Your code</h2><table>{''.join(rows)}</table></section>" if rows else ""


def _indented(line: str) -> str:
    try:
        return json.dumps(json.loads(line), indent=2)
    except (ValueError, RecursionError):
        return line


def _stretches(stretches: Sequence[Stretch]) -> str:
    """Show the options that resumes changed, and the config of every stretch but the last."""
    if len(stretches) < 2:
        return ""
    rows = [
        f"<tr><td>step {stretch.version}<td>{html.escape(change.key)}<td>{html.escape(change.values)}"
        f"<td class=soft>{html.escape(change.rule.words)}"
        for stretch in stretches
        for change in stretch.changes
    ]
    earlier = "".join(
        f"<details><summary>Config from step {stretch.version} on</summary><pre>{html.escape(stretch.config)}</pre>"
        "</details>"
        for stretch in stretches[:-1]
    )
    return f"<section><h2>Options changed on a resume</h2><table>{''.join(rows)}</table>{earlier}</section>"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
