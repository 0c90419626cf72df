"""Serve a registry at /metrics over HTTP, with a bounded number of connections.

In: a registry of prometheus-client, which also writes the answers. A thread accepts connections, and every connection
has a thread of its own. At most `MOST_CONNECTIONS` are open at a time; the oldest makes room for another, so idle
clients keep no scraper out. A client has `CLIENT_S` to send a request, and again to read the answer.
"""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

MOST_CONNECTIONS = 8
CLIENT_S = 5.0
_MOST_REQUEST_BYTES = 16 * 1024


def serve_metrics(registry: CollectorRegistry, port: int, address: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
    """Serve /metrics; give the port (0 asks for a free port) and a function that ends the service."""
    family, *_, (host, *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server = _Server((str(host), port), family)
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_port), stop


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self._open: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(address, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, if necessary after the end of another."""
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError, StopIteration):  # the connection has just ended
                next(iter(self._open.copy())).shutdown(socket.SHUT_RDWR)
            self._free.acquire()
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered, failed or got no thread."""
        super().shutdown_request(request)
        del self._open[request]
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log our own errors. A lost or slow client needs no record."""
        del request, client_address
        if not isinstance(sys.exception(), OSError):
            logger.exception("a request for /metrics failed")


class _Request(WSGIRequestHandler):
    def setup(self) -> None:
        """Read the request, without a body. Half a request, or too much, gets no answer."""
        super().setup()
        ends_s = time.monotonic() + CLIENT_S
        head = bytearray()
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            self.connection.settimeout(max(1e-3, ends_s - time.monotonic()))
            received = self.connection.recv(4096)
            if not received or len(head) > _MOST_REQUEST_BYTES:
                raise ConnectionAbortedError
            head += received
        self.connection.settimeout(CLIENT_S)
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(head))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the standard library
        """Log nothing: scrapes are many."""
