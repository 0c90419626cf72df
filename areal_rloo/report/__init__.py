"""Draw a run as one self-contained page, report.html: `areal-rloo report RUN_FOLDER`.

In: config.yaml, configs/, environment.jsonl, metrics.jsonl, trajectories.jsonl and, after the end of the run,
summary.json. Out: HTML with charts as SVG, light and dark, without scripts and without anything to load. A run with
recorded trajectories gets a second page (`areal_rloo.inspect.page`), and a run with traces a file for Perfetto
(`areal_rloo.trace`). Works on a run in progress. Several run folders give comparison.html.

- `__main__` is the command.
- `page` writes the page: facts, charts, ledger, config.
- `timeline` draws the events of a run by step.
- `recorded` draws completion lengths, and shows the ends of the reward, from the recorded trajectories.
- `comparison` writes the page of several runs: settings, and intervals over seeds.
- `curves` turns records into curves, and has the style of both pages.
- `charts` draws a chart as SVG.
- `dashboards` writes the Grafana dashboards.
- `metrics_page` writes docs/metrics.md, the reference of all metrics.
"""

from areal_rloo.report.page import pages_in, result_in, write_report

__all__ = ["pages_in", "result_in", "write_report"]
