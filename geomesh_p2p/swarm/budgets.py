"""What each remote may cost this peer: streams, requests, frames and bytes, checked before anything is decoded.

Whoever has not been admitted (a stranger) gets just enough to greet and to be told why not; a member gets more than normal
use ever needs, so that a limit here means a fault or an attack. What is in use (streams, requests being answered, frames
half read) goes back to zero when the remote is done; rates are buckets that refill. Strangers also share one allowance, so
that thousands of ids together cost no more than a few, and what is remembered of them is bounded.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from geomesh_p2p.core import messages as m
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.wire import KIB, MIB, FrameError

STRANGERS_SAY = (m.Hello, m.Refused, m.Fetch, m.Order)
"""What is read of a stranger."""
BEATS_AT_ONCE, BEATS_PER_SECOND = 4.0, 0.5
"""Heartbeats read of a stranger: one may be a member that this peer does not know again yet, and is greeted then."""
REMEMBERED_STRANGERS = 512
LINES_AT_ONCE, SECONDS_PER_LINE = 16, 60.0
"""Log lines about strangers: so many at once, then one in so many seconds; the next one says how many were left out."""
LINE_CHARACTERS = 600
QUIET_SECONDS = 60.0
"""A member's fault of one kind is said again after this long."""


class OverBudget(FrameError):
    """More than the sender may have. Said already, if it is to be said at all: the stream ends, that is all."""


@dataclass(frozen=True)
class Allowance:
    """`frames` and `bytes` are for everything but chunks (which the exchange bounds by what it expects): so many at once, and
    so many a second after that. `held_bytes`: of frames that are not read to their end yet."""

    streams: int
    requests: int
    held_bytes: int
    frames: float
    frames_per_second: float
    bytes: float
    bytes_per_second: float


# A stranger may be a member that is not known for one yet: control, as many bulk streams as net.streams allows (16), requests.
STRANGER = Allowance(
    streams=24, requests=4, held_bytes=256 * KIB, frames=24, frames_per_second=2, bytes=512 * KIB, bytes_per_second=16 * KIB
)
ALL_STRANGERS = Allowance(
    streams=256, requests=16, held_bytes=8 * MIB, frames=512, frames_per_second=64, bytes=8 * MIB,
    bytes_per_second=MIB,
)  # fmt: skip
MEMBER = Allowance(
    streams=48, requests=16, held_bytes=64 * MIB, frames=8192, frames_per_second=2000, bytes=64 * MIB, bytes_per_second=16 * MIB
)


@dataclass
class Usage:
    """What one remote takes now; all zero when it is done."""

    streams: int = 0
    requests: int = 0
    held_bytes: int = 0

    @property
    def idle(self) -> bool:
        return not (self.streams or self.requests or self.held_bytes)


@dataclass
class _Bucket:
    level: float
    at: float

    def take(self, amount: float, size: float, per_second: float, now: float) -> bool:
        self.level, self.at = min(size, self.level + (now - self.at) * per_second), now
        if amount > self.level:
            return False
        self.level -= amount
        return True


@dataclass
class _Account:
    """One remote's, or that of all strangers together."""

    frames: _Bucket
    bytes: _Bucket
    beats: _Bucket       # heartbeats of a stranger, apart from its greetings: those must come through
    waste: _Bucket       # bytes of a stranger that are skipped
    usage: Usage = field(default_factory=Usage)
    admitted: bool = False

    @classmethod
    def of(cls, allowance: Allowance, now: float) -> _Account:
        full = [_Bucket(size, now) for size in (allowance.frames, allowance.bytes, BEATS_AT_ONCE, allowance.bytes)]
        return cls(full[0], full[1], full[2], full[3])


class Complaints:
    """Log lines about remotes, in bounded number: one for each stranger, few for all; a member's once in QUIET_SECONDS."""

    def __init__(self, warn: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._warn, self._clock = warn, clock
        self._lines = _Bucket(LINES_AT_ONCE, clock())
        self._said: OrderedDict[tuple[PeerId, str], float] = OrderedDict()
        self._left_out = 0

    def say(self, peer: PeerId, admitted: bool, reason: str, text: str) -> None:
        """`reason` is from a fixed list."""
        now, key = self._clock(), (peer, reason if admitted else "")
        last = self._said.get(key)
        if last is not None and (not admitted or now - last < QUIET_SECONDS):
            self._said.move_to_end(key)
            return
        self._said[key] = now
        while len(self._said) > REMEMBERED_STRANGERS:
            self._said.popitem(last=False)
        if not admitted and not self._lines.take(1, LINES_AT_ONCE, 1 / SECONDS_PER_LINE, now):
            self._left_out += 1
            return
        more = f" ({self._left_out} more strangers were refused since the last such line)" if self._left_out else ""
        self._left_out = 0
        self._warn(reason, plain_line(f"{text}{more}"))


def plain_line(text: str) -> str:
    """`text`, part of which a stranger may have chosen, as one line without control characters and of bounded length."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line[:LINE_CHARACTERS])


class Budgets:
    """`admitted` says who is a member now. A refusal is counted in `refused`, by what ran out."""

    def __init__(
        self,
        admitted: Callable[[PeerId], bool] = lambda peer: True,
        warn: Callable[[str, str], None] = lambda reason, text: None,
        clock: Callable[[], float] = time.monotonic,
        member: Allowance = MEMBER,
    ) -> None:
        self.admitted = admitted
        self.member = member
        self.refused: Counter[str] = Counter()
        self.complaints = Complaints(warn, clock)
        self._clock = clock
        self._accounts: OrderedDict[PeerId, _Account] = OrderedDict()
        self._strangers = _Account.of(ALL_STRANGERS, clock())
        self._streams: dict[int, tuple[PeerId, Callable[[], None]]] = {}
        self._last_stream = 0

    # ------------------------------------------------------------ accounts

    def _account(self, peer: PeerId) -> _Account:
        account, now = self._accounts.get(peer), self._clock()
        admitted = self.admitted(peer)
        if account is None:
            self._forget()
            account = self._accounts[peer] = _Account.of(self.member if admitted else STRANGER, now)
            account.admitted = admitted
        elif account.admitted != admitted:
            full = _Account.of(self.member if admitted else STRANGER, now)
            account.frames, account.bytes, account.admitted = full.frames, full.bytes, admitted
        self._accounts.move_to_end(peer)
        return account

    def _forget(self) -> None:
        """Strangers beyond REMEMBERED_STRANGERS, those heard longest ago first, unless something of theirs is in use."""
        if len(self._accounts) < REMEMBERED_STRANGERS:
            return
        idle = [peer for peer, account in self._accounts.items() if account.usage.idle and not self.admitted(peer)]
        for peer in idle[: len(self._accounts) - REMEMBERED_STRANGERS + 1]:
            del self._accounts[peer]

    def usage(self, peer: PeerId) -> Usage:
        account = self._accounts.get(peer)
        return account.usage if account else Usage()

    @property
    def remembered(self) -> int:
        return len(self._accounts)

    def _refuse(self, peer: PeerId, what: str, text: str) -> str:
        self.refused[what] += 1
        self.complaints.say(peer, self.admitted(peer), "over_budget", f"{peer} {text}")
        return text

    # ------------------------------------------------------------ streams

    def open_stream(self, peer: PeerId, abort: Callable[[], None]) -> int:
        """A number for close_stream(), which must follow. Raises OverBudget. `abort` may be called to end the stream: if
        strangers have too many, those opened first give way, so that whoever is honest finds room."""
        account = self._account(peer)
        limit = (self.member if account.admitted else STRANGER).streams
        if account.usage.streams >= limit:
            raise OverBudget(self._refuse(peer, "streams", f"has {limit} streams open: no more are taken from it"))
        account.usage.streams += 1
        self._last_stream += 1
        self._streams[self._last_stream] = peer, abort
        if not account.admitted and self._of_strangers("streams") > ALL_STRANGERS.streams:
            number, oldest = next((n, a) for n, (p, a) in self._streams.items() if not self.admitted(p))
            self.refused["streams"] += 1
            self.close_stream(number)
            oldest()
        return self._last_stream

    def _of_strangers(self, what: str) -> int:
        return sum(getattr(account.usage, what) for peer, account in self._accounts.items() if not self.admitted(peer))

    def close_stream(self, number: int) -> None:
        """Once is enough; again does no harm."""
        peer, _ = self._streams.pop(number, ("", None))
        account = self._accounts.get(peer)
        if account is not None:
            account.usage.streams -= 1

    # ------------------------------------------------------------ frames

    def begin_frame(self, peer: PeerId, kind: type, length: int) -> bool:
        """Asked as soon as a frame's length and type are known. False: skip it unread, and nothing more. True: it is being
        read, and end_frame() must follow. Raises OverBudget if the stream should end."""
        account, now = self._account(peer), self._clock()
        if account.admitted:
            if kind is not m.Chunk and not self._afford(account, self.member, length, now):
                much = f"{self.member.frames_per_second:g} messages or {self.member.bytes_per_second / MIB:g} MiB"
                self._refuse(peer, "rate", f"sends more than {much} a second beside its chunks: some are left unread")
                return False
            return self._hold(account, peer, length, self.member)
        beat = kind is m.Heartbeat and account.beats.take(1, BEATS_AT_ONCE, BEATS_PER_SECOND, now)
        if beat and length <= STRANGER.held_bytes // 2:
            return self._hold(account, peer, length, STRANGER)
        if kind not in STRANGERS_SAY:
            self.refused["stranger"] += 1
            if not account.waste.take(length, STRANGER.bytes, STRANGER.bytes_per_second, now):
                raise OverBudget("not admitted, and sends more than greetings")
            return False
        if self._afford(account, STRANGER, length, now) and self._afford(self._strangers, ALL_STRANGERS, length, now):
            return self._hold(account, peer, length, STRANGER)
        self._refuse(peer, "rate", "has not been admitted and speaks too often: it is left unread for a while")
        return False

    def _afford(self, account: _Account, allowance: Allowance, length: int, now: float) -> bool:
        return account.frames.take(1, allowance.frames, allowance.frames_per_second, now) and account.bytes.take(
            length, allowance.bytes, allowance.bytes_per_second, now
        )

    def _hold(self, account: _Account, peer: PeerId, length: int, allowance: Allowance) -> bool:
        if account.usage.held_bytes + length > allowance.held_bytes:
            text = f"has begun more than {allowance.held_bytes} bytes of frames without ending them"
            raise OverBudget(self._refuse(peer, "held", text))
        account.usage.held_bytes += length
        return True

    def end_frame(self, peer: PeerId, length: int) -> None:
        """The frame was read, or its stream is gone."""
        account = self._accounts.get(peer)
        if account is not None:
            account.usage.held_bytes = max(0, account.usage.held_bytes - length)

    # ------------------------------------------------------------ requests

    def begin_request(self, peer: PeerId) -> None:
        """A question of `peer` is about to be answered: end_request() must follow. Raises OverBudget."""
        account = self._account(peer)
        limit = (self.member if account.admitted else STRANGER).requests
        if account.usage.requests >= limit:
            raise OverBudget(self._refuse(peer, "requests", f"has {limit} requests unanswered: no more are taken from it"))
        if not account.admitted and self._of_strangers("requests") >= ALL_STRANGERS.requests:
            raise OverBudget(self._refuse(peer, "requests", "is one of too many strangers that ask"))
        account.usage.requests += 1

    def end_request(self, peer: PeerId) -> None:
        account = self._accounts.get(peer)
        if account is not None:
            account.usage.requests = max(0, account.usage.requests - 1)
