"""A small internet of network namespaces: hosts with public addresses, and sites behind a router that lets them dial out alone.

Each host has a link of its own to a router in the middle. A site that can only dial out stands behind a router of its own,
which translates its address (masquerade) and drops what was not begun from inside, without an answer. Needs root, and the
commands ip and nft; a link's rate is limited with tc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAT = """
table ip translate {{
  chain outward {{
    type nat hook postrouting priority 100;
    oifname "wan" masquerade
  }}
}}
table ip wall {{
  chain through {{
    type filter hook forward priority 0; policy drop;
    iifname "lan" accept
    ct state established,related accept
  }}
  chain inward {{
    type filter hook input priority 0; policy accept;
    iifname "wan" ct state new counter name refused drop
  }}
  counter refused {{
  }}
}}
"""


def require() -> None:
    """Fails, saying what is missing: these tests are not to be skipped in silence."""
    missing = [tool for tool in ("ip", "nft", "tc") if shutil.which(tool) is None]
    assert not missing, f"these tests need {', '.join(missing)}: install iproute2 and nftables"
    assert os.geteuid() == 0, "these tests make network namespaces: run them as root (in a container: --privileged)"


def run(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, input=text, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}: network namespaces are needed for these tests"
    return done.stdout


class Internet:
    """`public` hosts have addresses that all can dial; `private` ones can only dial out."""

    def __init__(self, public: list[str], private: list[str]) -> None:
        require()
        self.prefix = f"gm{os.getpid()}"
        self.public, self.private = public, private
        self.address: dict[str, str] = {}
        self._made: list[str] = []

    def name(self, host: str) -> str:
        return f"{self.prefix}{host}"

    def on(self, host: str) -> list[str]:
        """The words in front of a command that is to run on `host`."""
        return ["ip", "netns", "exec", self.name(host)]

    def build(self) -> None:
        self._add("core")
        for number, host in enumerate([*self.public, *self.private], start=1):
            nat = host in self.private
            self._add(host)
            outer = f"{host}nat" if nat else host
            if nat:
                self._add(outer)
            self._link(outer, "wan", "core", f"c{number}")
            self._up(outer, "wan", f"45.10.{number}.2/24")
            self._up("core", f"c{number}", f"45.10.{number}.1/24")
            run("ip", "-n", self.name(outer), "route", "add", "default", "via", f"45.10.{number}.1")
            self.address[host] = f"45.10.{number}.2"
            if nat:
                self._link(host, "e0", outer, "lan")
                self._up(host, "e0", f"192.168.{number}.2/24")
                self._up(outer, "lan", f"192.168.{number}.1/24")
                run("ip", "-n", self.name(host), "route", "add", "default", "via", f"192.168.{number}.1")
                run(*self.on(outer), "nft", "-f", "-", text=NAT.format())
                self.address[host] = f"192.168.{number}.2"

    def _add(self, host: str) -> None:
        run("ip", "netns", "add", self.name(host))
        self._made.append(host)
        run("ip", "-n", self.name(host), "link", "set", "lo", "up")
        run(*self.on(host), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def _link(self, one: str, device: str, other: str, others_device: str) -> None:
        here, there = self.name(one), self.name(other)
        run(*("ip", "link", "add", device, "netns", here, "type", "veth", "peer", others_device, "netns", there))

    def _up(self, host: str, device: str, address: str) -> None:
        run("ip", "-n", self.name(host), "addr", "add", address, "dev", device)
        run("ip", "-n", self.name(host), "link", "set", device, "up")

    def dropped(self, host: str) -> int:
        """Packets that the wall in front of `host`, which can only dial out, has dropped; 0 without a wall."""
        where = self.name(f"{host}nat" if host in self.private else host)
        done = subprocess.run(
            ["ip", "netns", "exec", where, "nft", "list", "counter", "ip", "wall", "refused"], capture_output=True, text=True
        )
        words = done.stdout.split()
        return int(words[words.index("packets") + 1]) if "packets" in words else 0

    def limit(self, host: str, mbps: float) -> None:
        """The rate at which `host` sends, from now on."""
        device = "wan" if host in self.public else "e0"
        run(
            *("tc", "-n", self.name(host), "qdisc", "replace", "dev", device, "root", "tbf"),
            *("rate", f"{mbps}mbit", "burst", "64kb", "latency", "100ms"),
        )

    def wall_off(self, public: str) -> None:
        """From now on `public` can only dial out too (no answer to whoever dials it)."""
        run(*self.on(public), "nft", "-f", "-", text=WALL)

    def remove(self) -> None:
        for host in self._made:
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True)


WALL = """
table ip wall {
  chain inward {
    type filter hook input priority 0; policy accept;
    iifname "wan" ct state new counter name refused drop
  }
  counter refused {
  }
}
"""


@contextmanager
def internet(public: list[str], private: list[str]) -> Iterator[Internet]:
    net = Internet(public, private)
    try:
        net.build()
        yield net
    finally:
        net.remove()
