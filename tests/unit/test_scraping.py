"""Whatever those who read a peer's metrics do: what they cost it stays bounded, and none of it is on the thread that trains."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from geomesh_p2p.config import MetricsSection
from geomesh_p2p.core import observations as seen
from geomesh_p2p.telemetry import metrics_server
from geomesh_p2p.telemetry.exposition import Exposition
from geomesh_p2p.telemetry.metrics import Metrics
from geomesh_p2p.telemetry.metrics_server import MOST_CONNECTIONS, RENDER_SECONDS, MetricsServer, Page
from tests.injection.proof import fired, inject
from tests.process.sites import until


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(Metrics("north", 0.7), MetricsSection())
    yield server
    server.close()


def scrape(server: MetricsServer) -> str:
    with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics", timeout=60) as page:
        return str(page.read().decode())


def connect(server: MetricsServer, count: int = 1) -> list[socket.socket]:
    return [socket.create_connection((server.host, server.port), timeout=60) for _ in range(count)]


def handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


# ---------------------------------------------------------------- the text


def test_the_text_is_what_the_client_library_writes() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("odd_seconds", 'Of "this"\nand\\that', ("zone", "area"), registry=registry)
    counter = Counter("things", "Without labels", registry=registry)
    exposition = Exposition()
    for value in (0.0, 1.5, -2.0, 1e-9, 123456789.0, 1e300, float("inf"), float("-inf"), float("nan")):
        gauge.labels('a"b', "c\\d\ne").set(value)
        gauge.labels("ü", "").inc()
        counter.inc(1e6)
        assert exposition.text(registry.collect()) == generate_latest(registry)


def test_the_text_has_every_series_of_a_peer_and_remembers_none_that_is_gone() -> None:
    metrics, exposition = Metrics("north", 0.7), Exposition()
    for round in range(3):
        metrics(seen.LinkMeasured(f"remote-{round}", 0.1, 5e6))
        text = exposition.text(metrics.registry.collect())
        assert f'remote="remote-{round}"' in text.decode()
        assert series(text) == series(generate_latest(metrics.registry))
        metrics(seen.PeerLost("Qm", f"remote-{round}", 5.0))
    exposition.text(metrics.registry.collect())
    assert "remote-" not in str(exposition._known)


def series(text: bytes) -> list[str]:
    return [line if line.startswith("#") else line.rpartition(" ")[0] for line in text.decode().splitlines()]


# ---------------------------------------------------------------- clients


@pytest.mark.fault
@pytest.mark.case("C110")
def test_twenty_clients_a_second_and_fifty_idle_connections_cost_a_page_a_second(server: MetricsServer) -> None:
    """For five seconds of the page's clock, while a thread trains and a loop runs: neither of them renders."""
    rendered: list[threading.Thread] = []

    class Watched(CollectorRegistry):
        def collect(self) -> Iterator[Any]:
            rendered.append(threading.current_thread())
            return super().collect()

    now = [0.0]
    server._server.page = Page(Watched(), lambda: now[0])
    rendered.clear()  # making a registry asks it once
    idle: list[socket.socket] = []
    inject(lambda: idle.extend(connect(server, 50)))
    fired(len(idle) == 50 and all(one.getpeername()[1] == server.port for one in idle), "fifty clients are connected")

    async def beside_a_loop() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(20, "client") as clients:
            for _ in range(5):
                pages = [loop.run_in_executor(clients, scrape, server) for _ in range(20)]
                assert len(await asyncio.gather(*pages)) == 20
                now[0] += RENDER_SECONDS

    asyncio.run(beside_a_loop())
    assert len(rendered) == 5
    assert all(thread.daemon and "process_request_thread" in thread.name for thread in rendered)
    assert threading.main_thread() not in rendered
    for one in idle:
        one.close()
    until(lambda: handlers() == 0, "their threads to end", 60.0)


@pytest.mark.fault
@pytest.mark.case("C110")
def test_connections_that_pile_up_cost_a_bounded_number_of_threads_and_starve_nobody(server: MetricsServer) -> None:
    idle: list[socket.socket] = []
    inject(lambda: idle.extend(connect(server, 2 * MOST_CONNECTIONS)))
    fired(len(idle) == 2 * MOST_CONNECTIONS, "twice as many clients as there may be are connected")
    assert 'site="north"' in scrape(server)
    until(lambda: handlers() <= MOST_CONNECTIONS, "the oldest to make place", 60.0)
    assert [one.recv(1) for one in idle[:MOST_CONNECTIONS]] == [b""] * MOST_CONNECTIONS, "they were closed, in order of age"
    for one in idle:
        one.close()


@pytest.mark.fault
@pytest.mark.case("C110")
def test_a_connection_on_which_nothing_comes_is_closed(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.1)
    idle: list[socket.socket] = []
    inject(lambda: idle.extend(connect(server)))
    fired(bool(idle), "a client is connected")
    assert idle[0].recv(1) == b""
    until(lambda: handlers() == 0, "its thread to end", 60.0)


@pytest.mark.fault
def test_a_client_that_goes_away_leaves_nothing_in_the_log(server: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []

    class Page:
        def text(self) -> bytes:
            """The client resets its connection while its page is made."""
            inject(reset)
            ended.append(threading.current_thread().name)
            return b"x" * 10_000_000

    def reset() -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()

    server._server.page = Page()  # type: ignore[assignment]
    (client,) = connect(server)
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    until(lambda: ended, "the page", 60.0)
    fired(client.fileno() == -1, "the client has closed its end")
    until(lambda: handlers() == 0, "its thread to end", 60.0)
    assert capsys.readouterr().err == ""
