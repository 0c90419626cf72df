"""Draw several runs on one page, comparison.html: `areal-rloo report RUN_FOLDER RUN_FOLDER ...`.

Runs with the same options, but for the seed and for options without an effect on the numbers, are a setting: one
line in each chart, the mean, with a band from the lowest to the highest run. A setting is named by the options in
which the settings differ. The table has means with 95 % intervals by Student's t distribution over the runs.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from areal_rloo.config import Config, check_run, load_config
from areal_rloo.config.resume import Change, changes, shown
from areal_rloo.errors import ConfigError, DataError
from areal_rloo.files import write_atomically
from areal_rloo.inspect.shown import document, number
from areal_rloo.learner.stretches import breaks_of
from areal_rloo.report.charts import Curve, Point, line_chart
from areal_rloo.report.curves import STYLE, by_set, curve_name, drawn, points
from areal_rloo.telemetry.metric import Declared
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, TrainRecord, result_field

_MOST_KEYS = 3  # in the name of a setting
_LAST_STEPS = 10
# 97.5 % of t, by degrees of freedom from 1 on.
_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class Run:
    """A run to compare."""

    folder: Path
    config: Config
    train: Sequence[TrainRecord]
    evaluations: Sequence[EvalRecord]  # after the last change of their set


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs with the same options, but for the seed."""

    name: str
    runs: Sequence[Run]


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write the page of several runs; returns its path. A folder named twice, or by a link, is a single run.

    Raises:
        DataError: a folder holds no run, or its files cannot be read; or the page cannot be written.
    """
    folders = list({folder.resolve(): folder for folder in folders if folder.resolve() != target.resolve()}.values())
    settings = grouped([_read(folder) for folder in folders])
    body = "\n".join(
        [
            f"<h1>{len(folders)} runs, {len(settings)} setting{'s' if len(settings) > 1 else ''}</h1>",
            f"<section><h2>Results</h2><table class=results>{''.join(_table(settings))}</table>",
            "<p class=soft>mean, and a 95 % interval if a setting has several runs</p></section>",
            f"<div class='charts below'>{''.join(_charts(settings))}</div>",
        ]
    )
    try:
        write_atomically(target, document("comparison", body, style=STYLE).encode())
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror}") from error
    return target


def grouped(runs: Sequence[Run]) -> list[Setting]:
    """Put runs with equal options together, but for the seed, and name each setting by the different options."""
    groups: list[list[Run]] = []
    for run in runs:
        same = next((group for group in groups if not _differences(group[0].config, run.config)), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    options = [_differences(groups[0][0].config, group[0].config) for group in groups]
    keys = list(dict.fromkeys(key for of_group in options for key in of_group))
    first = {key: before for of_group in options for key, (before, _) in of_group.items()}
    values = [{key: of_group[key][1] if key in of_group else first[key] for key in keys} for of_group in options]
    names = [_name(of_group, _MOST_KEYS) for of_group in values]
    if len({*names}) < len(names):  # the first options do not tell the settings apart
        names = [_name(of_group, len(keys)) for of_group in values]
    if not keys:
        names = [groups[0][0].folder.resolve().name if len(groups[0]) == 1 else "all runs"]
    return [Setting(name, group) for name, group in zip(names, groups, strict=True)]


def mean_with_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and half of the 95 % interval of the mean; None for a single value."""
    if len(values) < 2:
        return fmean(values), None
    freedom = len(values) - 1
    quantile = _QUANTILES[freedom - 1] if freedom <= len(_QUANTILES) else 1.96 + 2.5 / freedom
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


def _read(folder: Path) -> Run:
    check_run(folder)
    try:
        config = load_config(str(folder / "config.yaml"))
    except ConfigError as error:
        raise DataError(f"{folder}: the config is of another version of areal_rloo: {error}") from error
    records = read_records(folder / "metrics.jsonl")
    train = [record for record in records if isinstance(record, TrainRecord)]
    evaluations = breaks_of(folder).comparable(record for record in records if isinstance(record, EvalRecord))
    return Run(folder, config, train, evaluations)


def _differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Return the different options with an effect: both values."""
    found = changes(before, now)
    return {change.key: (change.before, change.now) for change in found if _has_effect(change)}


def _has_effect(change: Change) -> bool:
    return change.rule.effect != "exact" and change.key != "run.seed"


def _name(options: Mapping[str, Any], most: int) -> str:
    values = [f"{key.rpartition('.')[2]}={shown(value)}" for key, value in options.items()]
    return ", ".join([*values[:most], *(["..."] if len(values) > most else [])])


def _sets(settings: Sequence[Setting]) -> list[str]:
    """Name the evaluation sets of all runs."""
    return list(dict.fromkeys(r.name for setting in settings for run in setting.runs for r in run.evaluations))


def _table(settings: Sequence[Setting]) -> list[str]:
    sets = _sets(settings)
    columns: list[tuple[str, Callable[[Run], float | None]]] = [("train steps", lambda run: len(run.train))]
    for name in sets:
        label = f"{_result(settings)}, {name}" if len(sets) > 1 else _result(settings)
        columns.append((f"first {label}", lambda run, name=name: _evaluated(run, name, 0)))  # type: ignore[misc]
        columns.append((f"last {label}", lambda run, name=name: _evaluated(run, name, -1)))  # type: ignore[misc]
    columns += [
        (f"reward, last {_LAST_STEPS} steps", lambda run: _last(run, "reward_mean")),
        (f"trained tokens/s, last {_LAST_STEPS} steps", lambda run: _last(run, "trained_tokens_per_s")),
        (f"staleness, last {_LAST_STEPS} steps", lambda run: _last(run, "staleness_mean")),
        ("training time, s", lambda run: run.train[-1].wall_s if run.train else None),
    ]
    heads = "".join(
        f"<td class=soft>{html.escape(text)}" for text in ("setting", "runs", *(name for name, _ in columns))
    )
    rows = [f"<tr>{heads}"]
    for setting in settings:
        cells = [html.escape(setting.name), f"{len(setting.runs)}"]
        for _, value_of in columns:
            values = [value for run in setting.runs if (value := value_of(run)) is not None and math.isfinite(value)]
            cells.append(_cell(values))
        rows.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
    return rows


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    mean, half = mean_with_interval(values)
    return number(mean) if not half else f"{number(mean)} ± {number(half)}"


def _result(settings: Sequence[Setting]) -> str:
    return result_field([record for setting in settings for run in setting.runs for record in run.evaluations])


def _evaluated(run: Run, name: str, index: int) -> float | None:
    of_set = by_set(run.evaluations).get(name)
    return None if not of_set else of_set[index].reward


def _last(run: Run, field: str) -> float | None:
    values = [value for _, value in points(run.train[-_LAST_STEPS:], field) if math.isfinite(value)]
    return fmean(values) if values else None


def _charts(settings: Sequence[Setting]) -> list[str]:
    charts = []
    (result,) = (declared for declared in drawn(EvalRecord) if declared.field == _result(settings))
    sets = _sets(settings)
    for name in sets:
        title = f"{_title(result)}: {name}" if len(sets) > 1 else _title(result)
        curves = [
            _curve(setting.name, [points(by_set(run.evaluations).get(name, []), result.field) for run in setting.runs])
            for setting in settings
        ]
        charts.append(line_chart(title, curves, hint="band: lowest to highest run"))
        by_time = [
            Curve(_of_run(setting, run), _by_time(run, by_set(run.evaluations).get(name, [])))
            for setting in settings
            for run in setting.runs
        ]
        charts.append(line_chart(title.replace("by policy version", "by training time, in s"), by_time))
    fields = {"reward_mean": "Reward of the batch"}
    fields |= {declared.field: _title(declared) for declared in drawn(TrainRecord) if declared.metric.label is None}
    for field, title in fields.items():
        of_settings = [(setting.name, [points(run.train, field) for run in setting.runs]) for setting in settings]
        charts.append(line_chart(title, [_curve(name, of_runs) for name, of_runs in of_settings]))
    return charts


def _by_time(run: Run, evaluations: Sequence[EvalRecord]) -> list[Point]:
    """Give the results of evaluations by the seconds of training up to their version."""
    trained_s = {0: 0.0, **{record.policy_version: record.wall_s for record in run.train}}
    return [(trained_s[r.policy_version], r.reward) for r in evaluations if r.policy_version in trained_s]


def _curve(name: str, of_runs: Sequence[Sequence[Point]]) -> Curve:
    """Join the runs of a setting: the mean and the range at each version of all runs."""
    by_version = [dict(of_run) for of_run in of_runs if of_run]
    if not by_version:
        return Curve(name, [])
    common = sorted(set.intersection(*(set(of_run) for of_run in by_version)))
    values = [[of_run[version] for of_run in by_version] for version in common]
    line = [(version, fmean(every)) for version, every in zip(common, values, strict=True)]
    return Curve(name, line, [(min(every), max(every)) for every in values] if len(by_version) > 1 else ())


def _of_run(setting: Setting, run: Run) -> str:
    return setting.name if len(setting.runs) == 1 else f"{setting.name}, {run.folder.resolve().name}"


def _title(declared: Declared) -> str:
    """Name a chart after the field, where several fields share a chart on the page of a run."""
    chart = declared.metric.chart
    assert chart is not None, "only metrics with a chart are drawn"
    alone = sum(other.metric.chart == chart for other in (*drawn(TrainRecord), *drawn(EvalRecord))) == 1
    return chart.title if alone else f"{chart.title}: {curve_name(declared)}"
