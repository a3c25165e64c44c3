"""Two test runs beside each other, or a connection of anybody's, never get the port of a peer that is down."""

from __future__ import annotations

import subprocess
import sys

from tests.injection import ports

TAKE = "from tests.injection import ports; ports.LOWEST, ports.HIGHEST = {0}, {0} + 1; print(ports.free_port())"


def test_a_port_is_taken_though_nothing_listens_there() -> None:
    port = ports.free_port()
    low, high = map(int, ports.HANDED_OUT.read_text().split())
    assert not low <= port <= high
    other = subprocess.run([sys.executable, "-c", TAKE.format(port)], capture_output=True, text=True)
    assert "no port is free" in other.stderr
    with ports._kept.pop():
        pass
    assert subprocess.run([sys.executable, "-c", TAKE.format(port)], capture_output=True, text=True).stdout == f"{port}\n"
