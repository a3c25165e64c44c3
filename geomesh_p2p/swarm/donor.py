"""Giving state to others: updates, held records and snapshots, slice by slice, and never at the cost of this peer's rounds.

When asked, a peer answers from its disk, in a thread, with at most one slice: always with what is committed and saved, also
while it trains or exchanges. Snapshots are large, so they are rationed: a donor gives them to a few clients at a time and
sends the others elsewhere. What it gives is paced in small slices, so that little of it is ahead of the bytes of an exchange
that begins; while one is under way clients get a small share of the link.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geomesh_p2p.core.canonical import pack
from geomesh_p2p.core.messages import Busy, Fetch, Fetched
from geomesh_p2p.core.ports import Clock, SnapshotStore, Store
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import DataError

SLICE_BYTES = 1 << 20
LEAST_SLICE_BYTES = 1 << 14


@dataclass(frozen=True)
class DonorLimits:
    """How much of a peer joiners may have. A client that asks for nothing for `client_seconds` gives its place up."""

    clients: int = 2
    client_seconds: float = 5.0
    busy_seconds: float = 3.0
    slice_seconds: float = 0.25
    """What a slice may take on the link."""
    idle_share: float = 0.8
    exchange_share: float = 0.1
    """Shares of the link that clients get, the second one while this peer's own exchange is under way."""
    unmeasured_bytes_per_second: float = 12.5e6
    """What the link is taken for as long as it was not measured."""


@dataclass(frozen=True)
class DonorView:
    """What a donor knows of its peer: whether its exchange is under way, whom else to ask, how fast it can send (bytes a
    second; None: not measured)."""

    exchanging: Callable[[], bool] = lambda: False
    elsewhere: Callable[[], Sequence[PeerId]] = tuple
    rate: Callable[[], float | None] = lambda: None


class Donor:
    """Answers Fetch requests from disk. The last body read stays at hand, since slices of it are asked for next."""

    def __init__(
        self,
        store: Store,
        snapshots: SnapshotStore,
        view: DonorView | None = None,
        limits: DonorLimits | None = None,
        clock: Clock = time.monotonic,
        on_given: Callable[[str, int], None] = lambda what, size: None,
    ) -> None:
        """`on_given(what, bytes)` hears of each answer that holds any."""
        self._on_given = on_given
        self.store, self.snapshots = store, snapshots
        self.given: Counter[PeerId] = Counter()
        """Bytes of snapshots, by client."""
        self.turned_away = 0
        self._view, self._limits, self._clock = view or DonorView(), limits or DonorLimits(), clock
        self._clients: dict[PeerId, float] = {}
        self._next_at = float("-inf")
        self._last: tuple[Any, bytes, bytes] | None = None
        self._reading = asyncio.Lock()

    async def answer(self, sender: PeerId, fetch: Fetch) -> Fetched:
        if fetch.what == "snapshot":
            fetch = replace(fetch, length=min(fetch.length, self._slice_bytes()))
            if (busy := await self._ration(sender, fetch.length)) is not None:
                self.turned_away += 1
                return Fetched(False, pack(busy), 0, 0, b"", 0)
        async with self._reading:
            try:
                fetched = await asyncio.to_thread(self._answer, fetch)
            except (LookupError, OSError, DataError):
                return self._nothing()
        if fetch.what == "snapshot":
            self.given[sender] += len(fetched.data)
        if given := len(fetched.header) + len(fetched.data):
            self._on_given(fetch.what, given)
        return fetched

    # ---------------------------------------------------------------- rationing

    async def _ration(self, sender: PeerId, size: int) -> Busy | None:
        """None once `sender` may have `size` bytes, else what to tell it."""
        limits, now = self._limits, self._clock()
        self._clients = {peer: at for peer, at in self._clients.items() if now - at <= limits.client_seconds}
        if sender not in self._clients and len(self._clients) >= limits.clients:
            return self._busy(sender, limits.busy_seconds)
        self._clients[sender] = now
        begins = max(now, self._next_at)
        if begins - now > limits.busy_seconds:
            return self._busy(sender, begins - now)
        exchanging = self._view.exchanging()
        self._next_at = begins + size / ((limits.exchange_share if exchanging else limits.idle_share) * self._rate())
        while exchanging == self._view.exchanging() and (wait := begins - self._clock()) > 0:  # noqa: ASYNC110 (a rate)
            await asyncio.sleep(min(wait, 0.2))
        if exchanging and not self._view.exchanging():
            self._next_at = self._clock()
        self._clients[sender] = self._clock()
        return None

    def _rate(self) -> float:
        return self._view.rate() or self._limits.unmeasured_bytes_per_second

    def _slice_bytes(self) -> int:
        return max(LEAST_SLICE_BYTES, min(SLICE_BYTES, int(self._rate() * self._limits.slice_seconds)))

    def _busy(self, sender: PeerId, seconds: float) -> Busy:
        return Busy(seconds, tuple(peer for peer in self._view.elsewhere() if peer != sender))

    # ---------------------------------------------------------------- reading

    def _nothing(self) -> Fetched:
        rounds = self.store.rounds()
        return Fetched(False, b"", 0, 0, b"", rounds.start if len(rounds) else 0)

    def _answer(self, fetch: Fetch) -> Fetched:
        length = min(fetch.length, SLICE_BYTES)
        if fetch.what == "snapshot":
            manifest = self.snapshots.manifest(fetch.round)
            data = self.snapshots.read_chunk(fetch.round, fetch.offset, length)
            return Fetched(True, b"", fetch.offset, manifest.size_bytes, data, 0)
        found = self._whole(fetch)
        if found is None:
            return self._nothing()
        header, body = found
        return Fetched(True, header, fetch.offset, len(body), bytes(body[fetch.offset : fetch.offset + length]), 0)

    def _whole(self, fetch: Fetch) -> tuple[bytes, bytes] | None:
        """(header, body) of an update, of its header alone, of a held record or of a snapshot's manifest."""
        key = (fetch.what, fetch.round, fetch.seal)
        if self._last and self._last[0] == key and (fetch.what != "manifest" or fetch.offset):  # else there may be a newer one
            return self._last[1:]
        found: tuple[bytes, bytes] | None = None
        if fetch.what == "header":
            header = self.store.read_header(fetch.round)
            return None if header is None else (pack(header), b"")
        if fetch.what == "update" and (update := self.store.read_update(fetch.round)) is not None:
            found = (pack(update[0]), update[1])
        elif fetch.what == "held" and (held := self.store.load_held()) is not None and held[0].update.seal == fetch.seal:
            found = (pack(held[0]), held[1])
        elif fetch.what == "manifest":
            rounds = [round for round in self.snapshots.rounds() if not fetch.round or round <= fetch.round]
            found = (b"", self.snapshots.manifest(rounds[-1]).pack()) if rounds else None  # as a body: it grows with the model
        if found is not None:
            self._last = (key, *found)
        return found
