"""Sending: one lane to each member, each with a few workers, so that all links are busy at once."""

from __future__ import annotations

import asyncio

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.messages import Chunk
from geomesh_p2p.core.ports import Transport, Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.chunks import Bytes, Outgoing, Ranges, StreamKey

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0


class Lane:
    """The streams to one member, sent one after the other in the order in which they were offered.

    A chunk that cannot be delivered is tried again, later and later, until the workers are cancelled; with it goes
    whatever the receiver has not acknowledged, since a broken connection takes more with it than the last chunk.
    """

    def __init__(self, peer: PeerId, plan: Digest, transport: Transport, chunk_bytes: int) -> None:
        self.peer = peer
        self._plan = plan
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._streams: dict[StreamKey, Outgoing] = {}
        self._wake = asyncio.Event()
        self._under_way = self._failures = 0
        self.idle = asyncio.Event()
        """Set while everything that was offered is on its way."""
        self.idle.set()

    def offer(self, key: StreamKey, payload: Digest, buffer: Bytes, ranges: Ranges) -> Outgoing:
        """Send the whole stream; returns it, so that less can be asked for. One that was offered before is left as it is."""
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = Outgoing(key, payload, buffer, ranges)
        self._wake.set()
        self.idle.clear()
        return stream

    def acknowledge(self, key: StreamKey, offset: int) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            stream.acknowledge(offset)

    async def work(self) -> None:
        """Send whatever is offered, for ever."""
        while True:
            piece = self._next()
            if piece is None:
                if not self._under_way:
                    self.idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            stream, chunk = piece
            self._under_way += 1
            try:
                await self._transport.send_bulk(self.peer, chunk)
                self._failures = 0
            except Unreachable:
                stream.again()
                self._failures += 1
                await asyncio.sleep(min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(self._failures, 10)))
            finally:
                self._under_way -= 1

    def _next(self) -> tuple[Outgoing, Chunk] | None:
        for stream in self._streams.values():
            span = stream.next_span(self._chunk_bytes)
            if span is not None:
                key = stream.key
                data = stream.read(*span)
                return stream, Chunk(
                    self._plan, key.kind, key.owner, stream.payload, key.share, span[0], stream.ranges.total, data
                )
        return None

    def clear(self) -> None:
        self._streams.clear()
        self.idle.set()
