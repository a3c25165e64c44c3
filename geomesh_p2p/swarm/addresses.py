"""Which addresses may be listened on, announced and dialled: checked before anything is started."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from geomesh_p2p.addresses import Address, address_problems, parse_address
from geomesh_p2p.config import NetSection
from geomesh_p2p.errors import ConfigError, TemporaryError
from geomesh_p2p.swarm.connections import connected
from geomesh_p2p.swarm.sockets import PREFIX

__all__ = ["Address", "answering", "check_addresses", "check_port_free", "parse", "port_owner", "remembering_port"]

MOST_ADDRESSES = 8           # of one peer that are dialled
PROBE_SECONDS = 6.0
DAEMON = "p2pd"              # the libp2p daemon's process
OF_ANOTHER_PEER = ", the libp2p daemon of another geomesh peer"
LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"


def parse(text: str, setting: str) -> Address:
    """Raises ConfigError naming `setting`."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise ConfigError(f'{setting}: "{text}" {error}') from None


async def answering(addresses: Iterable[str], limit_seconds: float | None = None) -> str:
    """Empty if a peer answers at one of `addresses`, or if that cannot be asked (a relay), else why not, in a few words."""
    tries = [asyncio.create_task(_answers(text, limit_seconds or PROBE_SECONDS)) for text in addresses]
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
    """A libp2p peer speaks first: without that, a port that a proxy or a firewall accepts for it would pass for one."""
    try:
        address = parse(text, "address")
    except ConfigError:
        return ""
    if "/p2p-circuit" in text:
        return ""
    taken = ""
    try:
        async with asyncio.timeout(limit_seconds):
            async with connected(asyncio.open_connection(address.host, address.port)) as (reader, _):
                taken = ", though connections are taken"
                if await reader.readexactly(len(LIBP2P_GREETING)) != LIBP2P_GREETING:
                    return "what answers there is no peer"
    except TimeoutError:
        return f"no answer within {limit_seconds:g} s{taken}"
    except ConnectionRefusedError:
        return "connection refused: nothing listens there"
    except asyncio.IncompleteReadError:
        return "the connection was closed at once"
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def check_addresses(listen: str, announce: str, seeds: Iterable[str]) -> tuple[Address, tuple[Address, ...]]:
    """The parsed address to listen on and the seeds. Raises ConfigError on what others could not dial."""
    seeds = tuple(seeds)
    for _, problem in address_problems(listen, announce, seeds):
        raise ConfigError(problem)
    return parse(listen, "net.listen"), tuple(parse(seed, "net.seeds") for seed in seeds)


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
                owner = port_owner(address.port)
                step = "choose another port" if owner.endswith(OF_ANOTHER_PEER) else "stop that process, or choose another port"
                raise TemporaryError(f"net.listen: port {address.port} of {address.text} is in use{owner}: {step}") from None
        time.sleep(0.05)


def port_owner(port: int) -> str:
    """Who listens on TCP `port`, as far as this user may see: " by process 123 (name)", and whether that is a living peer's."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f" by process {process.pid} ({process.name()}){OF_ANOTHER_PEER if _of_a_peer(process) else ''}"
    except (psutil.Error, OSError):
        pass
    return " by another process"


def _of_a_peer(process: psutil.Process) -> bool:
    """Whether it is the libp2p daemon of a peer: it ends with the peer, and the peer would start it again."""
    return process.name().startswith(DAEMON) and any(PREFIX in word for word in process.cmdline())


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
