"""Ways through a relay (libp2p circuit relay v2), for peers that cannot be dialled.

Every peer with `net.relay` relays for others, within the caps of its settings, and takes a place at relays itself if nobody
can dial it. A relayed connection is encrypted and authenticated from end to end: the relay sees bytes, and can cut them off.

The caps (bytes each way, seconds) hold for one relayed connection, and every relay states them when a place is taken: so
they are known before a transfer starts, and a transfer that would break them starts on, or goes on over, a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import ConfigError, TemporaryError
from geomesh_p2p.swarm.addresses import parse
from geomesh_p2p.swarm.daemon import Daemon, OnExit

log = logging.getLogger("geomesh.relay")

HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x08\x00"            # HopMessage of type RESERVE
OK_STATUS = 100
REFUSALS = {200: "it has no place left", 201: "it is at its limits", 202: "it does not allow this peer"}
ASK_SECONDS = 5.0
MOST_STARTS = 12
PLACES_WANTED = 2                # relays at which a peer that cannot be dialled takes a place
RENEW_SECONDS = 10.0             # a relay forgets the place when the connection to it breaks
HEADROOM_BYTES = 256 * 1024      # of a cap, for encryption and multiplexing; besides, OVERHEAD_SHARE of what is sent
OVERHEAD_SHARE = 0.02


@dataclass(frozen=True)
class Caps:
    """Of one relayed connection: bytes each way, and its life. Infinite: no cap."""

    bytes: float = math.inf
    seconds: float = math.inf

    @property
    def words(self) -> str:
        if self == Caps():
            return "no caps"
        size = "any number of bytes" if math.isinf(self.bytes) else f"{self.bytes / 2**20:,.0f} MiB each way"
        return f"{size} and {self.seconds:,.0f} s a connection"


@dataclass(frozen=True)
class Place:
    """What a relay granted: until when (seconds from now) it lets others through to this peer, and its caps."""

    seconds: float
    caps: Caps


# ---------------------------------------------------------------- addresses


def relay_of(address: str) -> PeerId:
    """The relay that `address` leads through; "" if it is direct."""
    if "/p2p-circuit" not in address:
        return ""
    return address.split("/p2p-circuit")[0].rpartition("/p2p/")[2]


def circuit(relay_address: str, peer: PeerId) -> str:
    """The address of `peer` through the relay at `relay_address` (which names the relay's peer id)."""
    return f"{relay_address}/p2p-circuit/p2p/{peer}"


@dataclass(frozen=True)
class Route:
    """How a peer that is not connected is to be dialled: at `addresses`, all direct or all relayed; none: `why`."""

    addresses: tuple[str, ...] = ()
    relayed: bool = False
    why: str = ""


def choose_route(addresses: Iterable[str], refused: str, caps: Callable[[PeerId], Caps | None]) -> Route:
    """Direct, if a direct address answers (`refused` is empty), else relayed, else none. `caps` of a relay: None if it is
    not known to relay for this peer; those are the last resort."""
    addresses = tuple(addresses)
    direct = tuple(a for a in addresses if not relay_of(a))
    circuits = [a for a in addresses if relay_of(a)]
    if direct and not refused:
        return Route(direct)
    if circuits:
        known = [a for a in circuits if caps(relay_of(a)) is not None]
        return Route(tuple(known or circuits), relayed=True)
    return Route(why=refused or "no address of it is known")


# ---------------------------------------------------------------- what a relay grants


def read_answer(packed: bytes, now: float) -> Place:
    """The place in a relay's answer; `now` in seconds since 1970. Raises Unreachable with the reason if there is none."""
    message = _fields(packed)
    status = message.get(5)
    if not isinstance(status, int) or status != OK_STATUS:
        reason = REFUSALS.get(status) if isinstance(status, int) else None
        raise Unreachable(f"no place at the relay: {reason or f'status {status!r}'}")
    reservation, limit = message.get(3), message.get(4)
    expires = _fields(reservation).get(1) if isinstance(reservation, bytes) else None
    caps = _fields(limit) if isinstance(limit, bytes) else {}
    seconds, size = caps.get(1) or math.inf, caps.get(2) or math.inf
    if not isinstance(expires, int) or isinstance(seconds, bytes) or isinstance(size, bytes):
        raise Unreachable("no place at the relay: its answer is not one")
    return Place(max(0.0, expires - now), Caps(float(size), float(seconds)))


def _fields(packed: bytes) -> dict[int, int | bytes]:
    """A protobuf message of numbers and bytes, by field (the last of each). Raises Unreachable if it is not one."""
    found: dict[int, int | bytes] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while shift < 70:
            byte = packed[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise IndexError

    try:
        while at < len(packed):
            key = number()
            if key & 7 == 0:
                found[key >> 3] = number()
            elif key & 7 == 2:
                size = number()
                if at + size > len(packed):
                    raise IndexError
                found[key >> 3] = packed[at : at + size]
                at += size
            else:
                raise IndexError
    except IndexError:
        raise Unreachable("no place at the relay: its answer is not one") from None
    return found


async def take_place(daemon: Daemon, relay: PeerId) -> Place:
    """Ask `relay`, which is connected, to let others through to this peer. Raises Unreachable."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            answer = await daemon.ask_peer(relay, HOP, RESERVE)
    except TimeoutError:
        raise Unreachable(f"no place at the relay: no answer within {ASK_SECONDS:g} s") from None
    return read_answer(answer, time.time())


async def learn_caps(daemon: Daemon, circuits: Iterable[str], known: Circuits) -> None:
    """Ask the relays of these addresses for their caps, unless they are known. One that does not tell is left to the dial."""
    for address in circuits:
        relay = relay_of(address)
        if relay in known.caps:
            continue
        try:
            async with asyncio.timeout(ASK_SECONDS):
                if not await daemon.connected(relay):
                    await daemon.connect(relay, (address.split("/p2p-circuit")[0],))
            known.caps[relay] = (await take_place(daemon, relay)).caps
        except (Unreachable, TimeoutError) as error:
            log.debug("%s: %s", relay, error or "no answer")


async def start_daemon(net: NetSection, identity_path: Path, on_exit: OnExit) -> Daemon:
    """Daemon.start; with net.relay, a daemon that really relays within the caps of the settings.

    The daemon starts two relay services at once, one with its caps from the command line and one with libp2p's own (128 KiB,
    120 s), and whichever comes last serves. So it is asked what it grants, and started again if that is too little.
    """
    if not net.relay:
        return await Daemon.start(net, identity_path, on_exit)
    for _ in range(MOST_STARTS):
        daemon = await Daemon.start(net, identity_path, on_exit)
        try:
            caps = await _own_caps(daemon, net, identity_path)
        except BaseException:
            await daemon.stop()
            raise
        if caps is None or (caps.bytes >= net.relay_bytes and caps.seconds >= net.relay_seconds):
            return daemon
        log.debug("the daemon relays with %s: started again", caps.words)
        await daemon.stop()
    raise TemporaryError(
        f"the libp2p daemon does not take net.relay_bytes and net.relay_seconds, after {MOST_STARTS} starts: start this peer "
        "again, or set net.relay = false"
    )


async def _own_caps(daemon: Daemon, net: NetSection, identity_path: Path) -> Caps | None:
    """What this host's daemon grants, asked by a second daemon that has no name; None: where it listens is not known."""
    target = parse((await daemon.addresses())[0], "net.listen")
    listening = parse(net.listen, "net.listen")
    port = listening.port or (0 if net.announce else target.port)
    if port == 0:
        return None
    version = "ip6" if ":" in listening.host else "ip4"
    host = listening.host if not listening.wildcard else ("::1" if version == "ip6" else "127.0.0.1")
    me = target.peer
    asking = await Daemon.start(net, None, lambda code, output: None)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            await asking.connect(me, (f"/{version}/{host}/tcp/{port}",))
        return (await take_place(asking, me)).caps
    except (Unreachable, TimeoutError) as error:
        log.debug("what this peer grants as a relay is not known: %s", error)
        return Caps(0.0, 0.0)
    finally:
        await asking.stop()


# ---------------------------------------------------------------- the caps of connections that are open


@dataclass
class Circuit:
    """A relayed connection, as far as it is seen from here: what it has carried each way, and since when."""

    relay: PeerId
    caps: Caps
    since: float
    sent_before: int
    received_before: int

    def fits(self, sent: int, received: int, more: float, seconds: float, now: float) -> bool:
        """Whether `more` bytes either way, which take `seconds`, are within the caps. `sent` and `received` are totals."""
        used = max(sent - self.sent_before, received - self.received_before)
        with_overhead = (used + more) * (1 + OVERHEAD_SHARE) + HEADROOM_BYTES
        return with_overhead <= self.caps.bytes and now - self.since + seconds <= self.caps.seconds


class Circuits:
    """Which peers are reached through a relay just now, and what their connections may still carry."""

    def __init__(self) -> None:
        self.caps: dict[PeerId, Caps] = {}
        self.open: dict[PeerId, Circuit] = {}
        self.renewed: Counter[PeerId] = Counter()
        self._carried: dict[PeerId, tuple[int, int]] = {}
        self._counted: dict[PeerId, tuple[int, int]] = {}  # totals up to which an open circuit's bytes are in `_carried`

    def seen(self, peer: PeerId, address: str, sent: int, received: int, now: float) -> None:
        """A stream with `peer` runs over a connection to `address`."""
        relay = relay_of(address)
        if relay == self.relay(peer):
            return
        if relay:
            self.open[peer] = Circuit(relay, self.caps.get(relay, Caps()), now, sent, received)
            self._counted[peer] = sent, received
        else:
            del self.open[peer]

    def closed(self, peer: PeerId) -> None:
        """No connection is left: the next one begins anew."""
        self.open.pop(peer, None)

    def carried(self, peer: PeerId, sent: int, received: int) -> tuple[int, int]:
        """Bytes sent to and received from `peer` through relays, up to these totals. To be asked before a circuit ends."""
        so_far = self._carried.get(peer, (0, 0))
        if peer in self.open:
            before = self._counted[peer]
            so_far = self._carried[peer] = so_far[0] + sent - before[0], so_far[1] + received - before[1]
            self._counted[peer] = sent, received
        return so_far

    def forget(self, peer: PeerId) -> None:
        """`peer`'s totals begin anew."""
        self.closed(peer)
        self._carried.pop(peer, None)
        self._counted.pop(peer, None)

    def renew(self, peer: PeerId) -> None:
        """This end closes the connection, to begin anew."""
        self.closed(peer)
        self.renewed[peer] += 1

    def relay(self, peer: PeerId) -> PeerId:
        return self.open[peer].relay if peer in self.open else ""

    def must_renew(
        self, peer: PeerId, sent: int, received: int, whole: int, piece: int, bytes_per_second: float | None, now: float
    ) -> bool:
        """Whether a new connection is due before `piece` bytes, the next of a transfer of `whole` bytes, are sent.

        A transfer that fits into one connection starts on one that has room for all of it; a larger one goes on until the
        next piece does not fit. A new connection with no room for even that is of no use: then it is tried all the same.
        """
        circuit = self.open.get(peer)
        if circuit is None:
            return False
        rate = bytes_per_second or math.inf
        fresh = Circuit(circuit.relay, circuit.caps, now, 0, 0)

        def fits(which: Circuit, size: int) -> bool:
            before = (sent, received) if which is circuit else (0, 0)
            return which.fits(*before, size, size / rate, now)

        needed = whole if fits(fresh, whole) else piece
        return not fits(circuit, needed) and fits(fresh, needed)


# ---------------------------------------------------------------- taking places


class Host(Protocol):
    """What is needed of the transport."""

    peer: PeerId
    circuits: Circuits

    @property
    def daemon(self) -> Daemon | None: ...

    def dialable(self) -> Sequence[tuple[PeerId, str]]:
        """Peers with a direct connection and an address to dial, the likeliest relay first."""
        ...

    def relayed_through(self, addresses: tuple[str, ...]) -> None:
        """The addresses under which relays let others through to this peer: announce them too."""
        ...


class Places:
    """Keeps a place at PLACES_WANTED relays, for a peer that cannot be dialled."""

    def __init__(self, host: Host, on_change: Callable[[tuple[PeerId, ...], str], None] | None = None) -> None:
        self._host = host
        self._on_change = on_change or (lambda relays, why: None)
        self.held: dict[PeerId, str] = {}
        self._told: tuple[tuple[PeerId, ...], str] | None = None

    async def keep(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        while True:
            await self.renew()
            await sleep(RENEW_SECONDS if self.held else 1.0)

    async def renew(self) -> None:
        """Once: renew what is held, and look for more if that is too little."""
        candidates = dict(self._host.dialable())
        why = "no peer that can be dialled is connected"
        held: dict[PeerId, str] = {}
        for relay in [*self.held, *(peer for peer in candidates if peer not in self.held)]:
            address = candidates.get(relay) or self.held[relay]
            if len(held) == PLACES_WANTED:
                break
            try:
                place = await self._take(relay)
            except (Unreachable, ConfigError) as error:
                why = f"{relay}: {error}"
            else:
                self._host.circuits.caps[relay] = place.caps
                held[relay] = circuit(address, self._host.peer)
                candidates[relay] = address
        self.held = {relay: candidates[relay] for relay in held}
        self._host.relayed_through(tuple(held.values()))
        told = tuple(held), "" if held else why
        if told != self._told:
            self._told = told
            self._on_change(*told)

    async def _take(self, relay: PeerId) -> Place:
        daemon = self._host.daemon
        if daemon is None:
            raise Unreachable("the libp2p daemon is not running")
        return await take_place(daemon, relay)


# ---------------------------------------------------------------- whom to relay for


class Bouncer:
    """The daemon relays for whoever is connected: strangers are disconnected after GRACE_SECONDS."""

    GRACE_SECONDS = 20.0

    def __init__(self) -> None:
        self._since: dict[PeerId, float] = {}

    def unwelcome(self, connected: Iterable[PeerId], admitted: Callable[[PeerId], bool], now: float) -> list[PeerId]:
        strangers = {peer for peer in connected if not admitted(peer)}
        self._since = {peer: self._since.get(peer, now) for peer in strangers}
        return sorted(peer for peer, since in self._since.items() if now - since >= self.GRACE_SECONDS)
