"""Giving and taking state: updates, held records and snapshots, slice by slice, with a deadline on every wait.

When asked for an update, a held record or a snapshot, a peer answers from its disk with at most one slice; it never
blocks its own round for it. Whoever asks turns to the next source when one fails, and verifies what it got by hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from geomesh_p2p.core.canonical import RecordError, digest_bytes, pack, unpack
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import SnapshotReceiver, SnapshotStore, Store, Transport, Unreachable
from geomesh_p2p.core.types import Held, PeerId, Update
from geomesh_p2p.errors import DataError

SLICE_BYTES = 1 << 20
SLICES_AT_ONCE = 4


class Donor:
    """Answers Fetch requests from disk. The last body read stays at hand, since slices of it are asked for next."""

    def __init__(self, store: Store, snapshots: SnapshotStore) -> None:
        self.store, self.snapshots = store, snapshots
        self._last: tuple[Any, bytes, bytes] | None = None
        self._reading = asyncio.Lock()

    async def answer(self, fetch: Fetch) -> Fetched:
        async with self._reading:
            try:
                return await asyncio.to_thread(self._answer, fetch)
            except (LookupError, OSError, DataError):
                return self._nothing()

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
        """(header, body) of an update, a held record or the newest snapshot's manifest."""
        key = (fetch.what, fetch.round, fetch.seal)
        if self._last and self._last[0] == key:
            return self._last[1:]
        found: tuple[bytes, bytes] | None = None
        if fetch.what == "update" and (update := self.store.read_update(fetch.round)) is not None:
            found = (pack(update[0]), update[1])
        elif fetch.what == "held" and (held := self.store.load_held()) is not None and held[0].update.seal == fetch.seal:
            found = (pack(held[0]), held[1])
        elif fetch.what == "manifest" and (rounds := self.snapshots.rounds()):
            return (self.snapshots.manifest(rounds[-1]).pack(), b"")
        if found is not None:
            self._last = (key, *found)
        return found


class Fetcher:
    """Gets state from other peers."""

    def __init__(self, transport: Transport, slice_timeout_seconds: float = 15.0) -> None:
        self.transport = transport
        self.slice_timeout_seconds = slice_timeout_seconds

    async def body(self, source: PeerId, what: str, round: int, seal: bytes = b"") -> tuple[bytes, bytes] | None:
        """(header, whole body) from one source; None if it does not have it. Raises Unreachable."""
        first = await self._slice(source, what, round, seal, 0)
        if not first.found:
            return None
        parts = {0: first.data}
        offsets = iter(range(len(first.data), first.total, SLICE_BYTES)) if first.data else iter(())

        async def lane() -> None:
            for offset in offsets:
                got = await self._slice(source, what, round, seal, offset)
                if not got.found or got.total != first.total:
                    raise Unreachable(f"{source} no longer has {what} of round {round}")
                parts[offset] = got.data

        async with asyncio.TaskGroup() as lanes:
            for _ in range(SLICES_AT_ONCE):
                lanes.create_task(lane())
        body = b"".join(parts[offset] for offset in sorted(parts))
        if len(body) != first.total:
            raise Unreachable(f"{source} sent {len(body)} of {first.total} bytes of {what}")
        return first.header, body

    async def _slice(self, source: PeerId, what: str, round: int, seal: bytes, offset: int) -> Fetched:
        return await self.transport.request(source, Fetch(what, round, seal, offset, SLICE_BYTES), self.slice_timeout_seconds)

    async def update(self, round: int, sources: Iterable[PeerId]) -> tuple[Update, bytes] | None:
        """Round `round` of the log from the first source that has it, its body verified against the update's hash."""
        found = await self._first(sources, "update", round, b"", lambda header: unpack(Update, header))
        return found if found and found[0].round == round and digest_bytes(found[1]) == found[0].body else None

    async def held(self, wanted: Held, sources: Iterable[PeerId]) -> bytes | None:
        """The body of a held update, verified against its hash; a source may have it as an update by now."""
        for what, seal in (("held", wanted.update.seal), ("update", b"")):
            found = await self._first(sources, what, wanted.update.round, seal, lambda header: header)
            if found and digest_bytes(found[1]) == wanted.update.body:
                return found[1]
        return None

    async def _first(
        self, sources: Iterable[PeerId], what: str, round: int, seal: bytes, decode: Callable[[bytes], Any]
    ) -> tuple[Any, bytes] | None:
        for source in sources:
            try:
                found = await self.body(source, what, round, seal)
                if found is not None:
                    return decode(found[0]), found[1]
            except (Unreachable, RecordError, ExceptionGroup):
                continue
        return None

    async def manifests(self, sources: Sequence[PeerId]) -> list[tuple[bytes, PeerId]]:
        """The packed manifest of each source's newest snapshot, and whose it is."""
        found = await asyncio.gather(*(self._first([source], "manifest", 0, b"", lambda header: header) for source in sources))
        return [(answer[0], source) for source, answer in zip(sources, found, strict=True) if answer is not None]

    async def snapshot(self, round: int, receiver: SnapshotReceiver, sources: Sequence[PeerId]) -> bool:
        """Fill `receiver` from all of `sources` at once; a source that fails or sends bytes that do not fit is left out, and
        the others do its part."""
        wanted = receiver.missing()

        async def from_one(source: PeerId) -> bool:
            while wanted:
                piece = wanted.pop(0)
                try:
                    fetch = Fetch("snapshot", round, b"", piece.start, len(piece))
                    got = await self.transport.request(source, fetch, self.slice_timeout_seconds)
                    if not got.found:
                        raise Unreachable(f"{source} has no snapshot of round {round}")
                    receiver.write(piece.start, got.data)
                except (Unreachable, DataError):
                    wanted.insert(0, piece)
                    return False
            return True

        good = list(sources)
        while wanted and good:
            went = await asyncio.gather(*(from_one(source) for source in good))
            good = [source for source, well in zip(good, went, strict=True) if well]
        return not wanted
