"""Numbers at /metrics that alarms compare: the wanted workers, the length of a long step, labels of long ago."""

import contextlib
import itertools
import json
import socket
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from areal_rloo.config import load_config
from areal_rloo.learner.reporting import Reporter
from areal_rloo.telemetry.metrics import LearnerMetrics
from areal_rloo.telemetry.records import TrainRecord
from areal_rloo.telemetry.scrapes import serve_metrics, serve_process
from areal_rloo.telemetry.wanted import LauncherStatistics, note_wanted, read_wanted
from areal_rloo.top.fleet import _ask


def test_the_wanted_number_of_workers_is_the_launchers(tmp_path: Path) -> None:
    assert read_wanted(tmp_path, 4).num_workers == 4
    noted = LauncherStatistics(num_workers=2, restarts={"learner": 1}, start_timestamp_s=5.5)
    note_wanted(tmp_path, noted)
    assert read_wanted(tmp_path, 4) == noted
    (tmp_path / "workers.json").write_text("{")
    assert read_wanted(tmp_path, 4).num_workers == 4


@pytest.mark.parametrize(("steps", "long"), [([30.0], 30.0), ([360.0, 1920.0], 1920.0), ([9.0, 8.0, 1800.0, 7.0], 9.0)])
def test_a_single_standstill_does_not_hide_the_next(steps: list[float], long: float) -> None:
    reporter: Any = SimpleNamespace(
        _stepped=datetime.now(UTC), _evaluated=datetime.now(UTC), _steps_left=5, _steps_s=deque(steps, maxlen=10)
    )
    assert Reporter.pace(reporter).long_train_step_s == long


def test_a_staleness_that_the_newest_step_lacks_has_no_value(make_train_record: Callable[..., TrainRecord]) -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry)
    for kl in ({0: 0.5, 1: 0.2}, {1: 0.3}):
        metrics.train_step(make_train_record(behaviour_kl_by_staleness=kl))
    name = "areal_rloo_behaviour_kl_by_staleness"
    assert registry.get_sample_value(name, {"staleness": "0"}) is None
    assert registry.get_sample_value(name, {"staleness": "1"}) == 0.3


def test_a_run_that_has_trained_has_no_steps_left() -> None:
    """Also if its data ended before: the last evaluation may take longer than any step."""
    now = datetime.now(UTC)
    reporter: Any = SimpleNamespace(_stepped=now, _evaluated=now, _steps_left=988, _steps_s=deque([9.0]))
    Reporter.has_trained(reporter)
    assert Reporter.pace(reporter).train_steps_left == 0


def test_a_process_whose_port_is_taken_serves_at_a_free_one(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", [f"telemetry.targets_folder={tmp_path / 'targets'}"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve_process(CollectorRegistry(), config, tmp_path, process="learner", port=port)
    (file,) = (tmp_path / "targets").iterdir()
    (entry,) = json.loads(file.read_text())
    (address,) = entry["targets"]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert b"process_start_time_seconds" in answer.read()
    assert address != f"127.0.0.1:{port}"


def test_an_answer_without_end_is_no_answer() -> None:
    """Another program may have the port of a process that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b"a" * 2**16)

        thread = threading.Thread(target=send, name="endless answer")
        thread.start()
        assert _ask(f"http://127.0.0.1:{server.getsockname()[1]}/metrics").numbers == {}
        thread.join()


def test_scrapes_that_a_disk_holds_up_are_few_and_later_ones_are_refused() -> None:
    goes_on = threading.Event()

    class Hanging(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            goes_on.wait(60)
            yield GaugeMetricFamily("areal_rloo_disk", "A number of a disk that hangs", value=1.0)

        def describe(self) -> list[GaugeMetricFamily]:
            return []

    registry = CollectorRegistry()
    registry.register(Hanging())
    port, stop = serve_metrics(registry, 0)
    url = f"http://127.0.0.1:{port}/metrics"

    def scrape() -> int:
        try:
            with urllib.request.urlopen(url) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(scrape) for _ in range(12)]
        refused = [done.result() for done in itertools.islice(as_completed(asked), 4)]
        goes_on.set()
        codes = [each.result() for each in asked]
    assert refused == [503] * 4
    assert sorted(codes) == [200] * 8 + [503] * 4
    assert scrape() == 200
    stop()
