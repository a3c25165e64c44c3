"""Which addresses may be listened on, announced and dialled: checked before anything is started."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

from geomesh_p2p.config import NetSection
from geomesh_p2p.errors import ConfigError, TemporaryError

EXAMPLE = "/ip4/203.0.113.5/tcp/4100"
MOST_ADDRESSES = 8           # of one peer that are dialled


@dataclass(frozen=True)
class Address:
    """A TCP multiaddress: `host` is an IP address or a name, `peer` is empty if the address names none."""

    text: str
    host: str
    port: int
    peer: str

    @property
    def wildcard(self) -> bool:
        return self.host in ("0.0.0.0", "::")

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(text: str, setting: str) -> Address:
    """Raises ConfigError naming `setting`."""
    try:
        parts = Multiaddr(text)
        found = {protocol.name: value for protocol, value in parts.items()}
    except Exception as error:
        raise ConfigError(f"{setting}: {text!r} is not a multiaddress ({error}): write it like {EXAMPLE}") from None
    host = next((str(found[name]) for name in ("ip4", "ip6", "dns", "dns4", "dns6") if name in found), None)
    if host is None or "tcp" not in found:
        raise ConfigError(f"{setting}: {text!r} has no host or no TCP port: write it like {EXAMPLE}")
    return Address(text, host, int(found["tcp"]), str(found.get("p2p", "")))


async def answering(addresses: Iterable[str], limit_seconds: float = 3.0) -> str:
    """Empty if a TCP port answers at one of `addresses`, or if that cannot be asked (a relay), else why not, in a few words."""
    tries = [asyncio.create_task(_answers(text, limit_seconds)) for text in addresses]
    why = ""
    try:
        for tried in asyncio.as_completed(tries):
            if not (why := await tried):
                return ""
    finally:
        for task in tries:
            task.cancel()
    return why


async def _answers(text: str, limit_seconds: float) -> str:
    try:
        address = parse(text, "address")
    except ConfigError:
        return ""
    if "/p2p-circuit" in text:
        return ""
    try:
        async with asyncio.timeout(limit_seconds):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"no answer within {limit_seconds:g} s"
    except ConnectionRefusedError:
        return "connection refused: nothing listens there"
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    writer.close()
    return ""


def check_addresses(listen: str, announce: str, seeds: Iterable[str]) -> tuple[Address, tuple[Address, ...]]:
    """The parsed address to listen on and the seeds. Raises ConfigError on what others could not dial."""
    listening = parse(listen, "net.listen")
    targets = tuple(parse(seed, "net.seeds") for seed in seeds)
    for seed in targets:
        if not seed.peer:
            raise ConfigError(f"net.seeds: {seed.text!r} names no peer id: it must end in /p2p/ID, as that peer prints it")
    remote = next((seed for seed in targets if not seed.loopback), None)
    shown, setting = (parse(announce, "net.announce"), "net.announce") if announce else (listening, "net.listen")
    if shown.wildcard:
        what = "is a wildcard that nobody can dial" if announce else "is a wildcard and net.announce is empty"
        raise ConfigError(f"{setting}: {shown.text!r} {what}: set net.announce to the address that others dial")
    if announce and shown.port == 0:
        raise ConfigError(f"net.announce: {announce!r} has port 0: give the port that others dial, and listen on a fixed one")
    if shown.loopback and remote is not None:
        raise ConfigError(
            f"{setting}: {shown.text!r} is this host's loopback, but the seed {remote.text} is elsewhere: "
            f"set net.announce to the address that others dial"
        )
    return listening, targets


def check_port_free(address: Address, patience_seconds: float = 3.0) -> None:
    """Raises TemporaryError if another process listens there, for longer than a dying daemon takes to go.

    The daemon itself would share the port silently (it binds with SO_REUSEPORT).
    """
    if address.port == 0:
        return
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            _try_bind(address)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"net.listen: cannot listen on {address.text}: {error.strerror}") from None
            if time.monotonic() >= deadline:
                raise TemporaryError(
                    f"net.listen: port {address.port} of {address.text} is in use by another process: "
                    f"stop it, or choose another port"
                ) from None
        time.sleep(0.05)


def _try_bind(address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))
        probe.listen(1)


def remembering_port(net: NetSection, memory: Path) -> NetSection:
    """With a free port (tcp/0) to listen on: the one that this folder had last time, if nobody else has it now."""
    if not net.listen.endswith("/tcp/0") or not memory.exists():
        return net
    remembered = net.model_copy(update={"listen": net.listen.removesuffix("0") + memory.read_text().strip()})
    try:
        check_port_free(parse(remembered.listen, "net.listen"))
    except (ConfigError, TemporaryError):
        return net
    return remembered
