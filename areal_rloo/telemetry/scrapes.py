"""Serve the metrics of a process at /metrics, and the addresses of all processes of the run at /targets.

Each request has a thread. Any user of the host can connect, and all connections share the process's descriptors with
the run. So a connection has a time limit, and the oldest is ended if there are too many. A refused request is counted,
and in no log.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Annotated, Any, ClassVar, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
import psutil
from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from areal_rloo.config import Config
from areal_rloo.telemetry.code_state import RunInfo, run_info
from areal_rloo.telemetry.gpus import Gpus, GpuStatistics
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.metrics import watch
from areal_rloo.telemetry.targets import Group, Targets

logger = get_logger(__name__)

MOST_CONNECTIONS = 32
_MOST_SCRAPES = 8  # at a time: each has a thread, also after Prometheus has given up
_TIMEOUT_S = 10.0  # of a wait for the bytes of a request


class ScrapeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the process."""

    metrics_prefix: ClassVar[str] = "scrape_"

    refused: Annotated[int, Metric("Connections to /metrics without a readable request in time", kind="counter")]


class FolderStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of the run folder, as this process sees it."""

    metrics_prefix: ClassVar[str] = "run_folder_"

    free_bytes: Annotated[int, Metric("Free disk at the run folder", "bytes", healthy=(1e9, math.inf))]


class MemoryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory; shared pages count for each process."""

    metrics_prefix: ClassVar[str] = ""

    memory_bytes: Annotated[
        dict[str, int],
        Metric("Memory of the process, and of all that it started: rewards, tools, servers", "bytes", label="of"),
    ]


def memory_statistics() -> MemoryStatistics:
    """Read the memory of this process and of its descendants."""
    own, started = psutil.Process(), 0
    for child in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # has ended
            started += child.memory_info().rss
    return MemoryStatistics(memory_bytes={"process": own.memory_info().rss, "started": started})


def serve_process(
    registry: CollectorRegistry, config: Config, run_folder: Path, *, process: str, port: int, essential: bool = True
) -> Targets:
    """Serve the metrics of a process of a run, with those of every Linux process, and tell Prometheus where.

    `process`: its name in the run. The caller removes the target when the process ends well.

    Raises:
        OSError: the address cannot be served; unless `essential`, the process goes on without metrics.
    """
    info = run_info(config, run_folder)
    watch(registry, RunInfo, lambda: info)
    watch(registry, FolderStatistics, lambda: FolderStatistics(free_bytes=shutil.disk_usage(run_folder).free))
    watch(registry, MemoryStatistics, memory_statistics)
    watch(registry, GpuStatistics, Gpus().statistics)
    ProcessCollector(registry=registry)
    targets = Targets(config, run_folder)
    host = config.telemetry.metrics_host
    try:
        port, _ = _served(registry, port, host, targets)
    except OSError as error:
        if essential:
            raise
        logger.warning("no metrics of this process: telemetry.metrics_host=%s is not of this host: %s", host, error)
        return targets
    logger.info("metrics on http://%s:%d/metrics", host, port)
    targets.add(process, port)
    return targets


def _served(registry: CollectorRegistry, port: int, host: str, targets: Targets) -> tuple[int, Callable[[], None]]:
    """Serve at a free port if another program has taken the port: a run does not end for its metrics."""
    try:
        return serve_metrics(registry, port, address=host, groups=targets.groups)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not port:
            raise
        logger.warning("port %d (telemetry.metrics_port) is taken: metrics are at a free port", port)
        return serve_metrics(registry, 0, address=host, groups=targets.groups)


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    address: str = "127.0.0.1",
    groups: Callable[[], Sequence[Group]] = tuple,
) -> tuple[int, Callable[[], None]]:
    """Serve /metrics, and `groups` at /targets for the `http_sd_configs` of Prometheus.

    Gives the port (0 asks for a free port) and a function to end the service.
    """
    server = _Server6((address, port), Handler) if ":" in address else _Server((address, port), Handler)
    watch(registry, ScrapeStatistics, server.statistics)
    metrics, free = make_wsgi_app(registry), threading.Semaphore(_MOST_SCRAPES)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/targets":
            if not free.acquire(blocking=False):  # by scrapes that a disk or a driver holds up
                start("503 Service Unavailable", [])
                return []
            try:
                return cast("Iterable[bytes]", metrics(environ, start))
            finally:
                free.release()
        start("200 OK", [("Content-Type", "application/json")])
        return [msgspec.json.encode(groups())]

    server.set_app(answer)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_port), stop


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[Handler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        self._num_refused = 0
        super().__init__(address, handler)

    def statistics(self) -> ScrapeStatistics:
        return ScrapeStatistics(refused=self._num_refused)

    def count_refused(self, request: socket.socket) -> None:
        """Count a connection, unless it was counted when it was ended as the oldest."""
        with self._lock:
            self._num_refused += request in self._open

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                self._num_refused += 1
                _shut(oldest)  # the thread of the connection ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, at the end of the thread or without a thread."""
        with self._lock:  # the descriptor must not be another's when a later connection ends the oldest
            self._open.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Count a failed or slow connection; the base class would print a traceback."""
        del client_address
        self.count_refused(request)


class _Server6(_Server):
    address_family = socket.AF_INET6


class Handler(WSGIRequestHandler):
    """Reads a request, and counts an unreadable request."""

    server: _Server
    timeout = _TIMEOUT_S
    _is_readable = False

    def handle(self) -> None:
        """Answer the request; an error goes to `handle_error`."""
        super().handle()
        if not self._is_readable:
            self.server.count_refused(self.connection)

    def get_environ(self) -> dict[str, Any]:
        """Give the application a readable request."""
        self._is_readable = True
        return super().get_environ()

    def log_message(self, *arguments: Any) -> None:
        """Log nothing: requests are counted."""

    def get_stderr(self) -> io.StringIO:
        """Discard the traceback of a client without interest in the answer; `_Safe` logs errors of our own."""
        return io.StringIO()


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
