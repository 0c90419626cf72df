"""A real Prometheus with the shipped config, on a free port, which watches the runs of a test."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.local_runs import Run
from support.patience import eventually

from areal_rloo.ports import ReservedPorts

CONFIG = Path(__file__).resolve().parents[2] / "launcher" / "monitoring" / "prometheus"
_SHIPPED = "../../../runs/targets/*.json"


@dataclass(frozen=True)
class Prometheus:
    """The address of a Prometheus that runs."""

    port: int

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the HTTP API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now."""
        result: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return result

    def alarms(self, run: str = ".*") -> set[str]:
        """Name the alarms that fire now, of the runs whose folder has this name."""
        firing = self.query(f'ALERTS{{alertstate="firing", run=~"{run}"}}')
        return {series["metric"]["alertname"] for series in firing}

    def alarms_so_far(self) -> set[str]:
        """Name the alarms that have fired at some time."""
        fired = self.query('count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1d]))')
        return {series["metric"]["alertname"] for series in fired}

    def symptoms(self, run: str) -> set[str]:
        """Name the symptoms of a run with an alarm now."""
        firing = self.query(f'ALERTS{{alertname="Unhealthy", alertstate="firing", run="{run}"}}')
        return {series["metric"]["symptom"] for series in firing}


def sooner(rules: str) -> str:
    """Shorten the times of the rules: a minute becomes a second, but for the window of restarts, which are as slow."""
    rules = re.sub(r"\b(\d+)m\b", r"\1s", re.sub(r"\b1h\b", "60s", rules))
    rules = rules.replace(
        'process_start_time_seconds{job="areal_rloo"}[30s]', 'process_start_time_seconds{job="areal_rloo"}[30m]'
    )
    shorter = {"300) and": "5) and", "> 6000 and": "> 100 and", "> 4e+09": "> 4e+08"}  # NoTrainStep and MemoryGrows
    for before, after in shorter.items():
        assert rules.count(before) == 1
        rules = rules.replace(before, after)
    return rules


@contextmanager
def prometheus(
    folder: Path, targets: Path, *, rules: Callable[[str], str] = lambda shipped: shipped
) -> Iterator[Prometheus]:
    """Start a Prometheus for the runs with this `telemetry.targets_folder`; `rules` changes the alarms."""
    shipped = (CONFIG / "prometheus.yml").read_text()
    assert shipped.count(_SHIPPED) == 1
    here = shipped.replace(_SHIPPED, f"{targets}/*.json").replace("scrape_interval: 5s", "scrape_interval: 1s")
    here = here.replace("evaluation_interval: 15s", "evaluation_interval: 1s").replace(
        "refresh_interval: 5s", "refresh_interval: 1s"
    )
    (folder / "prometheus.yml").write_text(here)
    (folder / "alerts.yml").write_text(rules((CONFIG / "alerts.yml").read_text()))
    with ReservedPorts(1) as reserved:
        (port,) = reserved.ports
    process = subprocess.Popen(
        [
            *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = Prometheus(port)
    try:
        eventually(lambda: _answers(server), "an answer of Prometheus")
        yield server
    finally:
        process.terminate()
        process.wait(30)


def assert_a_silent_end(server: Prometheus, *runs: Run) -> None:
    """End the runs, which drain, and wait until no alarm is left."""
    for run in runs:
        run.process.terminate()
    for run in runs:
        code, output = run.wait()
        assert code == 0, output
    eventually(lambda: server.alarms() == set(), "an end without alarms")


def _answers(server: Prometheus) -> bool:
    try:
        return bool(server.ask("status/buildinfo"))
    except OSError:
        return False
