"""The metrics of the learner and of the rollout workers, for tests of documents, dashboards and alert rules."""

from areal_rloo.report.metrics_page import SERVED
from areal_rloo.telemetry.metric import Declared, declared_metrics


def all_metrics() -> list[Declared]:
    return [declared for _, struct in SERVED for declared in declared_metrics(struct)]


def metric_names() -> set[str]:
    """Give the name of every metric as a dashboard or an alert rule writes it."""
    return {declared.name for declared in all_metrics()}
