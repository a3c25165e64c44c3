"""The port on which GET /metrics and GET /healthz are answered."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from geomesh_p2p.config import MetricsSection
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.telemetry.metrics import Metrics

RENDER_SECONDS = 1.0


class Page:
    """The text of all metrics. It is rendered at most once in RENDER_SECONDS, however many ask, and shared."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._lock = threading.Lock()
        self._text, self._at = b"", float("-inf")

    def text(self) -> bytes:
        with self._lock:
            if self._clock() - self._at >= RENDER_SECONDS:
                self._text, self._at = generate_latest(self._registry), self._clock()
            return self._text


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    metrics: Metrics
    page: Page

    def server_bind(self) -> None:
        TCPServer.server_bind(self)                               # without HTTPServer's look-up of the host's name
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]


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
