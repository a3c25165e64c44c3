"""Ports for peers that come and go: a port stays its taker's while nothing listens there."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10_000, 65_535
_kept: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of the loopback address that nobody else gets until this process ends: not from the kernel, as it is none
    of those that it hands out by itself, and not from here, as its name is taken."""
    low, high = map(int, HANDED_OUT.read_text().split())
    candidates = [port for port in range(LOWEST, HIGHEST) if not low <= port <= high]
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0geomesh-test-port-{port}")  # no file, and gone with this process
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _kept.append(name)
        return port
    raise RuntimeError("no port is free")
