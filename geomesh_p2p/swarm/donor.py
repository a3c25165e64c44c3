"""Giving and taking state: updates, held records and snapshots, slice by slice, with a deadline on every wait.

When asked for an update, a held record or a snapshot, a peer answers from its disk with at most one slice; it never
blocks its own round for it. Whoever asks turns to the next source when one fails, and verifies what it got by hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from geomesh_p2p.core.canonical import digest_bytes, pack
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.ports import Store, Transport, Unreachable
from geomesh_p2p.core.types import Held, PeerId, Update
from geomesh_p2p.swarm.wire import FrameError, unpack_record

SLICE_BYTES = 1 << 20
SLICES_AT_ONCE = 4

NOT_FOUND = Fetched(found=False, header=b"", offset=0, total=0, data=b"", hint=0)


class Donor:
    """Answers Fetch requests from the store. The last body read stays at hand, since slices of it are asked for next."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._last: tuple[Any, bytes, bytes] | None = None
        self._reading = asyncio.Lock()

    async def answer(self, fetch: Fetch) -> Fetched:
        async with self._reading:
            found = await asyncio.to_thread(self._find, fetch)
        if found is None:
            oldest = self.store.rounds()
            return Fetched(False, b"", 0, 0, b"", oldest.start if len(oldest) else 0)
        header, body = found
        data = bytes(body[fetch.offset : fetch.offset + min(fetch.length, SLICE_BYTES)])
        return Fetched(True, header, fetch.offset, len(body), data, 0)

    def _find(self, fetch: Fetch) -> tuple[bytes, bytes] | None:
        key = (fetch.what, fetch.round, fetch.seal)
        if self._last and self._last[0] == key:
            return self._last[1:]
        found: tuple[bytes, bytes] | None = None
        if fetch.what == "update" and (update := self.store.read_update(fetch.round)) is not None:
            found = (pack(update[0]), update[1])
        elif fetch.what == "held" and (held := self.store.load_held()) is not None and held[0].update.seal == fetch.seal:
            found = (pack(held[0]), held[1])
        elif fetch.what == "manifest" and (manifest := self.store.newest_manifest()) is not None:
            found = (b"", manifest)
        elif fetch.what.startswith("snapshot/"):
            return self._snapshot_slice(fetch)
        if found is not None:
            self._last = (key, *found)
        return found

    def _snapshot_slice(self, fetch: Fetch) -> tuple[bytes, bytes] | None:
        """Files of a snapshot are read slice by slice: they are too large to be kept at hand."""
        return self.store.open_snapshot_file(fetch.round, fetch.what.removeprefix("snapshot/"))


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
        found = await self._first(sources, "update", round, b"", lambda header: unpack_record(Update, header))
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
            except (Unreachable, FrameError, ExceptionGroup):
                continue
        return None
