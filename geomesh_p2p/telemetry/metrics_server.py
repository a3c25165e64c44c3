"""The port on which GET /metrics and GET /healthz are answered."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from geomesh_p2p.config import MetricsSection
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.telemetry.exposition import Exposition
from geomesh_p2p.telemetry.metrics import Metrics

RENDER_SECONDS = 1.0
MOST_CONNECTIONS = 128


class Page:
    """The text of all metrics. It is rendered at most once in RENDER_SECONDS, however many ask, and shared."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._exposition = Exposition()
        self._lock = threading.Lock()
        self._text, self._at = b"", float("-inf")

    def text(self) -> bytes:
        with self._lock:
            if self._clock() - self._at >= RENDER_SECONDS:
                self._text, self._at = self._exposition.text(self._registry.collect()), self._clock()
            return self._text


class _Server(ThreadingHTTPServer):
    """A thread a connection, and MOST_CONNECTIONS at one time: a further one takes the place of the oldest."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS
    metrics: Metrics
    page: Page

    def __init__(self, *arguments: Any) -> None:
        self._open: dict[Any, None] = {}                          # connections, the oldest first
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)                               # without HTTPServer's look-up of the host's name
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)             # its thread reads the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nothing that a peer's log should tell of."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0                                                # seconds for a request to arrive and its answer to leave
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, self.server.page.text())
        elif path == "/healthz":
            phase = self.server.metrics.phase
            body = {"phase": phase.phase, "round": phase.round, "waiting_for": phase.waiting_for}
            self._answer(200, "application/json", json.dumps(body).encode() + b"\n")
        else:
            self._answer(404, "text/plain", b"here are /metrics and /healthz\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class MetricsServer:
    """Serves GET /metrics and GET /healthz from threads of its own. Training never depends on it: if the port cannot be had,
    `instead` says so and `port` is another one, which was free."""

    def __init__(self, metrics: Metrics, settings: MetricsSection):
        self.instead = ""
        try:
            self._server = _Server((settings.host, settings.port), _Handler)
        except OSError as error:
            try:
                self._server = _Server((settings.host, 0), _Handler)
            except OSError:
                where = f"metrics.host = {settings.host!r}, metrics.port = {settings.port}"
                text = f"{where} cannot be had: {error.strerror}: choose an address of this host"
                raise ConfigError(text) from None
            taken = f"metrics.port = {settings.port} on {settings.host} cannot be had: {error.strerror}"
            self.instead = f"{taken}: metrics are on port {self._server.server_port} instead"
        self._server.metrics, self._server.page = metrics, Page(metrics.registry)
        self.host, self.port = settings.host, self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
