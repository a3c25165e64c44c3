"""Getting state from others, slice by slice, with a deadline on every wait.

Whoever asks turns to the next source when one fails, and verifies what it got by hash. A source that is no longer heard of
is left at once, not at the deadline of its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from geomesh_p2p.core.canonical import RecordError, digest_bytes, unpack
from geomesh_p2p.core.messages import Busy, Fetch, Fetched
from geomesh_p2p.core.ports import SnapshotReceiver, Transport, Unreachable
from geomesh_p2p.core.types import Held, PeerId, Range, Update
from geomesh_p2p.errors import DataError
from geomesh_p2p.swarm.donor import SLICE_BYTES

SLICES_AT_ONCE = 4
LOOK_SECONDS = 0.5           # how often a wait for an answer looks whether the source is still there
LONGEST_BUSY_SECONDS = 10.0
PATIENCE_SECONDS = 120.0     # with donors that are all busy
MAX_SENT_ELSEWHERE = 8

Fault = Callable[[PeerId, str], None]


class Fetcher:
    """Gets state from other peers. `alive` says whether a peer is still heard of; `fault` hears of a source whose bytes do not
    fit, in words; `donors` are all that may have a snapshot, as far as this peer knows by now."""

    def __init__(
        self,
        transport: Transport,
        slice_timeout_seconds: float = 15.0,
        alive: Callable[[PeerId], bool] = lambda peer: True,
        fault: Fault = lambda peer, text: None,
        donors: Callable[[], Sequence[PeerId]] = tuple,
    ) -> None:
        self.transport = transport
        self.slice_timeout_seconds = slice_timeout_seconds
        self.alive = alive
        self.fault = fault
        self.donors = donors

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
        return await self._request(source, Fetch(what, round, seal, offset, SLICE_BYTES))

    async def _request(self, source: PeerId, fetch: Fetch) -> Fetched:
        """The source's answer; Unreachable at the deadline, or as soon as the source is gone."""
        asked = asyncio.ensure_future(self.transport.request(source, fetch, self.slice_timeout_seconds))
        try:
            while not (await asyncio.wait([asked], timeout=LOOK_SECONDS))[0]:
                if not self.alive(source):
                    raise Unreachable(f"{source} is no longer heard of")
            return asked.result()
        finally:
            asked.cancel()

    # ---------------------------------------------------------------- updates

    async def update(self, round: int, sources: Iterable[PeerId]) -> tuple[Update, bytes] | None:
        """Round `round` of the log from the first source that has it, its body verified against the update's hash."""
        return await self._first(
            sources, "update", round, b"", lambda header: unpack(Update, header),
            lambda update, body: update.round == round and digest_bytes(body) == update.body,
        )  # fmt: skip

    async def header(self, round: int, sources: Iterable[PeerId]) -> Update | None:
        """Round `round` of the log without its body."""
        found = await self._first(
            sources, "header", round, b"", lambda header: unpack(Update, header), lambda update, _: update.round == round
        )
        return found[0] if found else None

    async def held(self, wanted: Held, sources: Iterable[PeerId]) -> bytes | None:
        """The body of a held update, verified against its hash; a source may have it as an update by now."""
        for what, seal in (("held", wanted.update.seal), ("update", b"")):
            found = await self._first(
                sources, what, wanted.update.round, seal, lambda header: header,
                lambda _, body: digest_bytes(body) == wanted.update.body,
            )  # fmt: skip
            if found:
                return found[1]
        return None

    async def _first(
        self,
        sources: Iterable[PeerId],
        what: str,
        round: int,
        seal: bytes,
        decode: Callable[[bytes], Any],
        fits: Callable[[Any, bytes], bool] = lambda header, body: True,
    ) -> tuple[Any, bytes] | None:
        """(decoded header, body) of the first source whose answer `fits`; those that are not heard of are asked last."""
        for source in sorted(sources, key=lambda source: not self.alive(source)):
            try:
                found = await self.body(source, what, round, seal)
                if found is not None and fits(header := decode(found[0]), found[1]):
                    return header, found[1]
            except (Unreachable, RecordError, ExceptionGroup):
                continue
        return None

    # ---------------------------------------------------------------- snapshots

    async def manifests(self, sources: Sequence[PeerId], up_to: int = 0) -> list[tuple[bytes, PeerId]]:
        """The packed manifest of each source's newest snapshot (up to a round), and whose it is."""
        found = await asyncio.gather(
            *(self._first([source], "manifest", up_to, b"", lambda header: header) for source in sources)
        )
        return [(answer[1], source) for source, answer in zip(sources, found, strict=True) if answer is not None]

    async def snapshot(self, round: int, receiver: SnapshotReceiver, sources: Sequence[PeerId]) -> bool:
        """Fill `receiver` from all of `sources` at once; a source that fails or sends bytes that do not fit is left out, and
        the others do its part. One that is busy is asked again, and those whom it names meanwhile."""
        return await _Download(self, round, receiver, sources).run()


class _Download:
    """One snapshot from several donors. Pieces wait in `wanted` or are under way; at the end idle donors take over pieces that
    others are slow to send."""

    def __init__(self, fetcher: Fetcher, round: int, receiver: SnapshotReceiver, sources: Sequence[PeerId]) -> None:
        self._fetcher, self._round, self._receiver, self._sources = fetcher, round, receiver, list(sources)
        self._wanted: list[Range] = receiver.missing()
        self._under_way: dict[Range, set[PeerId]] = {}
        self._begun: dict[tuple[PeerId, Range], bytes] = {}
        self._group = asyncio.TaskGroup()
        self._lanes: list[asyncio.Task[None]] = []
        self._progress_at = asyncio.get_running_loop().time()

    async def run(self) -> bool:
        async with asyncio.TaskGroup() as group:
            self._lanes = [group.create_task(self._from(source)) for source in self._sources]
            self._group = group
            while any(not lane.done() for lane in self._lanes):
                self._also(self._fetcher.donors())  # a joiner knows few others when it begins
                await asyncio.wait(self._lanes, timeout=LOOK_SECONDS)
        return not self._receiver.missing()

    def _also(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            if peer not in self._sources and self._fetcher.alive(peer):
                self._sources.append(peer)
                self._lanes.append(self._group.create_task(self._from(peer)))

    def _next(self, source: PeerId) -> Range | None:
        if self._wanted:
            return self._wanted.pop(0)
        others = [piece for piece, senders in self._under_way.items() if source not in senders and len(senders) < 2]
        return others[0] if others else None

    async def _from(self, source: PeerId) -> None:
        """Take pieces from `source` until there are none, or it fails."""
        loop = asyncio.get_running_loop()
        while self._fetcher.alive(source):
            piece = self._next(source)
            if piece is None:
                if not self._under_way:
                    return
                await asyncio.sleep(LOOK_SECONDS / 5)  # a piece that another loses comes back
                continue
            self._under_way.setdefault(piece, set()).add(source)
            wait, failed = 0.0, False
            try:
                wait = await self._take(source, piece)
                failed = wait > 0
            except (Unreachable, DataError) as error:
                failed = True
                if isinstance(error, DataError):
                    self._fetcher.fault(source, str(error))
                return
            finally:
                self._settle(source, piece, failed)
            if wait:
                if loop.time() + wait > self._progress_at + PATIENCE_SECONDS:
                    return
                await asyncio.sleep(wait)

    def _settle(self, source: PeerId, piece: Range, failed: bool) -> None:
        senders = self._under_way.get(piece, set())
        senders.discard(source)
        if not failed:
            self._under_way.pop(piece, None)
            self._progress_at = asyncio.get_running_loop().time()
        elif not senders and self._under_way.pop(piece, None) is not None:
            self._wanted.insert(0, piece)

    async def _take(self, source: PeerId, piece: Range) -> float:
        """One piece, in as many slices as the source makes of it, checked and written; how long to wait if the source is busy.
        Raises Unreachable, DataError."""
        begun = self._begun.pop((source, piece), b"")
        while len(begun) < len(piece):
            got = await self._fetcher._request(
                source, Fetch("snapshot", self._round, b"", piece.start + len(begun), len(piece) - len(begun))
            )
            if not got.found:
                if got.header and begun:
                    self._begun[source, piece] = begun
                return self._busy(source, got)
            if not got.data:
                raise Unreachable(f"{source} sends nothing of the snapshot of round {self._round}")
            begun += got.data
            if piece not in self._under_way:  # somebody else was faster
                return 0.0
        await asyncio.to_thread(self._receiver.write, piece.start, begun)
        return 0.0

    def _busy(self, source: PeerId, answer: Fetched) -> float:
        """How long to wait for `source`. Whoever it names instead is asked too, if this peer knows it."""
        if not answer.header:
            raise Unreachable(f"{source} has no snapshot of round {self._round}")
        try:
            busy = unpack(Busy, answer.header)
        except RecordError:
            raise Unreachable(f"{source} answers nonsense") from None
        self._also(busy.elsewhere[:MAX_SENT_ELSEWHERE])
        return min(max(0.1, busy.seconds), LONGEST_BUSY_SECONDS)
