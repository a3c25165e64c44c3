"""What a scrape costs a peer: CPU milliseconds of its process, with 16 other sites in its metrics.

    python benchmarks/scrape.py              # as JSON: medians, with a fresh page each time and with one that is shared

The client is a process of its own, so that only the server's side counts. The time is that of this whole process: accepting,
the thread, the request, rendering, sending.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from geomesh_p2p.config import MetricsSection
from geomesh_p2p.core import observations as seen
from geomesh_p2p.telemetry.metrics import TABLE, Metrics
from geomesh_p2p.telemetry.metrics_server import RENDER_SECONDS, MetricsServer, Page

REMOTES, SCRAPES = 16, 200

#: Scrapes once for each line that it reads, and answers with the size of the page.
CLIENT = """
import sys, urllib.request
for line in sys.stdin:
    with urllib.request.urlopen(sys.argv[1], timeout=10) as page:
        print(len(page.read()), flush=True)
"""


def filled() -> Metrics:
    """Metrics with every series that so many remote sites bring."""
    metrics = Metrics("north", 0.7)
    metrics(seen.LogStands(1000, 10**9))
    for number in range(REMOTES):
        for name, (_, labels, _) in TABLE.items():
            for direction in ("sent", "received") if "direction" in labels else ("",) if "remote" in labels else ():
                of = {"remote": f"site-{number}"} | ({"direction": direction} if direction else {})
                metrics._of(name, **of).inc(1e6 / 7)
    return metrics


def main() -> None:
    metrics = filled()
    server = MetricsServer(metrics, MetricsSection())
    now = [0.0]
    server._server.page = Page(metrics.registry, lambda: now[0])
    command = [sys.executable, "-c", CLIENT, f"http://{server.host}:{server.port}/metrics"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None

        def scrape(seconds_later: float) -> tuple[float, int]:
            now[0] += seconds_later
            begun = time.process_time()
            print("now", file=client.stdin, flush=True)
            size = int(client.stdout.readline())
            return 1000 * (time.process_time() - begun), size

        size = scrape(RENDER_SECONDS)[1]
        fresh, shared = (
            statistics.median(scrape(later)[0] for _ in range(SCRAPES)) for later in (RENDER_SECONDS, 0.0)
        )
        client.stdin.close()
    server.close()
    figures = {"remotes": REMOTES, "bytes": size, "cpu_ms_fresh": round(fresh, 2), "cpu_ms_shared": round(shared, 2)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
