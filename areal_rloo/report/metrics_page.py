"""Write docs/metrics.md, the reference of all metrics, from the declarations at the fields:

    python -m areal_rloo.report.metrics_page > docs/metrics.md

A test compares the file with the declarations.
"""

from __future__ import annotations

from areal_rloo.engines.base import EngineStatistics
from areal_rloo.engines.server import ServerStatistics
from areal_rloo.intake.fleet import FleetStatistics
from areal_rloo.intake.lies import LieStatistics
from areal_rloo.learner.checkpoint_folder import CheckpointStatistics
from areal_rloo.learner.reporting import PaceStatistics
from areal_rloo.rewards.request import RewardStatistics
from areal_rloo.rollout.deadline import EpisodeStatistics
from areal_rloo.rollout.protocol import ProtocolStatistics
from areal_rloo.telemetry.code_state import RunInfo
from areal_rloo.telemetry.gpus import GpuStatistics
from areal_rloo.telemetry.health import HealthStatistics
from areal_rloo.telemetry.metric import PREFIX, Measured, declared_metrics, healthy_range
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.telemetry.scrapes import FolderStatistics, MemoryStatistics, ScrapeStatistics
from areal_rloo.telemetry.wanted import LauncherStatistics
from areal_rloo.telemetry.watchdog import WatchdogStatistics
from areal_rloo.turns import TurnStatistics
from areal_rloo.weights.counts import BroadcastStatistics
from areal_rloo.weights.receive import ReceiveStatistics
from areal_rloo.wire.counts import ChannelStatistics

SERVED: tuple[tuple[str, type[Measured]], ...] = (
    ("Each train step (learner, metrics.jsonl)", TrainRecord),
    ("Each evaluation (learner, metrics.jsonl)", EvalRecord),
    ("Health (learner)", HealthStatistics),
    ("Pace (learner)", PaceStatistics),
    ("Checkpoints (learner)", CheckpointStatistics),
    ("Workers to keep (learner)", LauncherStatistics),
    ("Refused answers (learner)", LieStatistics),
    ("Fleet (learner)", FleetStatistics),
    ("Turns on shared devices (learner)", TurnStatistics),
    ("Broadcasts of weights (learner)", BroadcastStatistics),
    ("Weights received (rollout worker)", ReceiveStatistics),
    ("Engine (rollout worker)", EngineStatistics),
    ("Server of an engine (rollout worker)", ServerStatistics),
    ("Samples under way (rollout worker)", EpisodeStatistics),
    ("Rewards (rollout worker)", RewardStatistics),
    ("Wire (learner and rollout worker)", ChannelStatistics),
    ("Run and code (learner and rollout worker)", RunInfo),
    ("Disk (learner and rollout worker)", FolderStatistics),
    ("Memory (learner and rollout worker)", MemoryStatistics),
    ("GPUs (all ranks of the learner, and rollout worker)", GpuStatistics),
    ("Scrapes (learner and rollout worker)", ScrapeStatistics),
    ("Watchdog (learner and rollout worker)", WatchdogStatistics),
    ("Results on the wire (rollout worker)", ProtocolStatistics),
)

_HEAD = f"""# Metrics

This page is generated from the declarations in the code: `python -m areal_rloo.report.metrics_page > docs/metrics.md`.

A field of metrics.jsonl and the metric at `/metrics` have the same name. One rule makes the name at `/metrics`: the
prefix `{PREFIX}`, the field, `_s` at the end spelled `_seconds`, and `_total` after a total. Some totals are numbers
of a single step in the file, and the sum over all steps since the learner started at `/metrics`. A field with several
values has a label. A number that could not be measured is NaN, `null` in the file.

Each process also serves the numbers that the Prometheus library has of every Linux process:
`process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds`, `process_max_fds`,
`process_virtual_memory_bytes` and `process_start_time_seconds`.

The healthy range of a total is the range of its growth. `launcher/monitoring/prometheus/alerts.yml` has an alert for
each range, with the window of time.
"""


def metrics_page() -> str:
    """Write the page."""
    return "\n".join([_HEAD, *(_section(title, struct) for title, struct in SERVED)])


def _section(title: str, struct: type[Measured]) -> str:
    rows = []
    for declared in declared_metrics(struct):
        labels = f"{{{', '.join(declared.labels)}}}" if declared.labels else ""
        cells = (
            f"`{declared.field}`",
            f"`{declared.name.removeprefix(PREFIX)}{labels}`",
            declared.metric.unit,
            healthy_range(declared),
            declared.metric.help.replace("|", "\\|"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    head = "| field | at /metrics, after the prefix | unit | healthy | definition |\n|---|---|---|---|---|"
    return f"## {title}\n\n{head}\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(metrics_page(), end="")  # noqa: T201 - the output of the command
