"""Reduce: each member averages one share of the parameters and sends the encoded mean to all. 2 (N-1)/N payloads up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.core.types import Contribution, PeerId, Plan, Range
from geomesh_p2p.swarm.chunks import CONTRIBUTION, PART, Bytes, Incoming, Ranges, StreamKey
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec
from geomesh_p2p.swarm.offload import Offload

AVERAGE_PARAMETERS = 1 << 20
"""A share is averaged in blocks of at least this many parameters, as their bytes arrive."""


class Reduce:
    """Which streams there are for `me`: slices of contributions to each reducer, and parts from each reducer to all.

    A slice has no hash of its own (the link authenticates it); a part is verified by the hash in its header."""

    def __init__(self, me: PeerId, plan: Plan, codec: ExchangeCodec) -> None:
        self._me = me
        self._peers = plan.peers
        self._codec = codec
        self._shares = plan.shares
        self.index = self._peers.index(me)
        self._slices = [Ranges(codec.slices(share)) if share else None for share in plan.shares]
        self._parts = [Ranges([(0, codec.part_bytes(share))]) if share else None for share in plan.shares]

    @property
    def share(self) -> Range:
        return self._shares[self.index]

    def sends(self) -> list[tuple[PeerId, StreamKey, Ranges]]:
        """The streams of the own contribution."""
        return [
            (peer, StreamKey(CONTRIBUTION, self._me, index), ranges)
            for index, (peer, ranges) in enumerate(zip(self._peers, self._slices, strict=True))
            if peer != self._me and ranges is not None
        ]

    def contribution_of(self, owner: PeerId) -> StreamKey:
        return StreamKey(CONTRIBUTION, owner, self.index)

    @property
    def own_part(self) -> StreamKey:
        return StreamKey(PART, self._me, self.index)

    def part_ranges(self, share: int) -> Ranges | None:
        return self._parts[share] if 0 <= share < len(self._parts) else None

    def inbound(self, key: StreamKey) -> Ranges | None:
        """The layout of a stream that this peer is to receive, None of any other."""
        if key.owner == self._me or key.owner not in self._peers or not 0 <= key.share < len(self._peers):
            return None
        if key.kind == CONTRIBUTION:
            return self._slices[key.share] if key.share == self.index else None
        if key.kind == PART:
            return self._parts[key.share] if self._peers[key.share] == key.owner else None
        return None

    def verifies(self, key: StreamKey) -> bool:
        return key.kind == PART

    def body(self, contributors: Sequence[Contribution]) -> list[StreamKey]:
        """The streams that make up the update's body, in order."""
        if not contributors:
            return []
        return [StreamKey(PART, peer, index) for index, peer in enumerate(self._peers) if self._parts[index] is not None]

    def needs_contributions(self) -> bool:
        return bool(self.share)

    def relays(self, key: StreamKey, sender: PeerId) -> Ranges | None:
        """The layout of a stream that this peer does not need, but would fetch for `sender`: a slice for its share."""
        if key.kind != CONTRIBUTION or key.owner not in self._peers or not 0 <= key.share < len(self._peers):
            return None
        ranges = self._slices[key.share]
        return Ranges([(0, ranges.total)]) if ranges is not None and self._peers[key.share] == sender else None


class ShareMean:
    """The mean of one share, computed block by block behind the bytes of the slowest contributor, and its encoding.

    `mean` is kept whole only where the encoding needs it: with residuals, or for plain numbers. Else signs are packed on the
    way; levels of more bits depend on the whole share's magnitudes, so for them the mean is made again when all has come."""

    def __init__(
        self, codec: ExchangeCodec, share: Range, payloads: Sequence[Bytes], tokens: Sequence[int], round: int
    ) -> None:
        self._codec = codec
        self._share = share
        self._round = round
        self._payloads = payloads
        self._tokens = tokens
        self._done = share.start
        self._encoder = codec.part_encoder(share, round)
        self.mean: Vector | None = np.empty(len(share), np.float32) if self._encoder is None else None

    async def run(self, arriving: Sequence[Incoming], changed: asyncio.Event, offload: Offload) -> None:
        """Returns when the mean is whole. `changed` is set whenever bytes arrive."""
        start, stop = self._share.start, self._share.stop
        while self._done < stop:
            ready = start + min((self._ready(incoming) for incoming in arriving), default=len(self._share))
            if ready == stop or ready - self._done >= AVERAGE_PARAMETERS:
                await offload(partial(self._average, ready))
                self._done = ready
            else:
                changed.clear()
                await changed.wait()

    def _average(self, ready: int) -> None:
        if self._encoder is not None:
            self._codec.feed(self._encoder, self._payloads, self._tokens, ready)
        elif self.mean is not None:
            out = self.mean[self._done - self._share.start : ready - self._share.start]
            self._codec.mean(self._payloads, self._tokens, self._done, ready, out)

    def _ready(self, incoming: Incoming) -> int:
        """Parameters of the share whose bytes are here, from its start on: a multiple of 8, or all."""
        size, tail = len(self._share), incoming.ranges.tail_bytes
        if incoming.complete:
            return size
        here = incoming.coverage.prefix - (incoming.ranges.total - tail)
        return max(0, here * size // tail // 8 * 8)

    async def encode(self, residual: Vector | None, offload: Offload) -> tuple[Bytes, bytes]:
        """The part and its hash, once `run` has returned."""
        if self._encoder is not None and self._encoder.twice:
            for done in range(self._share.start, self._share.stop, AVERAGE_PARAMETERS):
                ready = min(done + AVERAGE_PARAMETERS, self._share.stop)
                await offload(partial(self._codec.feed_again, self._encoder, self._payloads, self._tokens, ready))
        return await offload(partial(self._finish, residual))

    def _finish(self, residual: Vector | None) -> tuple[Bytes, bytes]:
        if self._encoder is not None:
            part = self._codec.finish(self._encoder)
        else:
            assert self.mean is not None
            part = self._codec.encode_part(self.mean, self._share, residual, self._round)
        return part, digest_bytes(part)
