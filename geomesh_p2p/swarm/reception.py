"""The receiving half of an exchange: chunks to whole, checked streams. Neither clock nor transport here.

    chunk -> (fits? of the contribution announced?) -> incoming buffer -> whole -> (header known? hash? rules?) -> stored

Chunks may come before the header that names their stream, twice, and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.messages import Chunk
from geomesh_p2p.core.types import PeerId, Plan
from geomesh_p2p.swarm.chunks import CONTRIBUTION, PART, Bytes, Incoming, Ranges, StreamKey
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec
from geomesh_p2p.swarm.gather import Gather
from geomesh_p2p.swarm.reduce import Reduce


class Stored(NamedTuple):
    """A whole stream, which others may be given."""

    payload: Digest
    buffer: Bytes
    ranges: Ranges


@dataclass(frozen=True)
class Taken:
    """What became of a chunk: `new` bytes of it were kept. `refused` is a reason to name its sender, `ignored` is not (the
    chunk is late, of an older contribution, or nobody asked for it). The sender is told that it need not send [0, acknowledge)
    again."""

    new: int = 0
    acknowledge: int | None = None
    refused: str = ""
    ignored: str = ""


class Reception:
    def __init__(self, plan: Plan, codec: ExchangeCodec, streams: Gather | Reduce, acknowledge_bytes: int) -> None:
        self._plan = plan
        self._codec = codec
        self._streams = streams
        self._acknowledge_bytes = acknowledge_bytes
        self._incoming: dict[StreamKey, Incoming] = {}
        self._rejected: set[StreamKey] = set()
        self._done: set[StreamKey] = set()
        self._relays: dict[StreamKey, Ranges] = {}
        self.stored: dict[StreamKey, Stored] = {}

    def clear(self) -> None:
        for held in (self._incoming, self.stored, self._relays):
            held.clear()

    def is_done(self, key: StreamKey) -> bool:
        """Whether the stream has been received whole (it may have been used and dropped since)."""
        return key in self._done

    def is_rejected(self, key: StreamKey) -> bool:
        """Whether what its owner meant was refused by rule: no better bytes will come."""
        return key in self._rejected

    @property
    def buffered_bytes(self) -> int:
        """Of streams that are not whole yet."""
        return sum(incoming.coverage.bytes for incoming in self._incoming.values())

    def ranges_of(self, key: StreamKey) -> Ranges | None:
        """The layout of a stream that this peer takes, for itself or for another; None of any other."""
        return self._relays.get(key) or self._streams.inbound(key)

    def open_keys(self, owner: PeerId) -> list[StreamKey]:
        """Streams of `owner` that have begun to come and are not settled."""
        return [key for key in self._incoming if key.owner == owner]

    def senders(self, key: StreamKey) -> frozenset[PeerId]:
        """Who sent what is here of a stream that is not settled."""
        return frozenset(self._incoming[key].senders)

    def relay(self, key: StreamKey, ranges: Ranges) -> None:
        """Take a stream that this peer has no use for itself."""
        self._relays[key] = ranges

    def gaps(self, key: StreamKey) -> list[tuple[int, int]]:
        """What is missing of the stream, in its own bytes."""
        ranges, incoming = self.ranges_of(key), self._incoming.get(key)
        total = ranges.total if ranges else 0
        return incoming.coverage.gaps(0, total) if incoming else [(0, total)]

    def open(self, key: StreamKey, payload: Digest) -> Incoming:
        """The buffer of a stream that is on its way, or will be."""
        incoming = self._incoming.get(key)
        if incoming is None:
            ranges = self.ranges_of(key)
            assert ranges is not None
            is_slice = self._plan.topology == "reduce" and key.kind == CONTRIBUTION and key not in self._relays
            size = self._codec.payload_bytes if is_slice else ranges.total
            incoming = self._incoming[key] = Incoming(ranges, size, payload, self._streams.verifies(key))
        return incoming

    def take(self, sender: PeerId, key: StreamKey, chunk: Chunk, expected: Digest | None, may_send: bool) -> Taken:
        """`expected` is the hash that the stream's header names, if that is known. `may_send` says whether the stream is the
        sender's own, or one that it was asked for."""
        ranges, size = self.ranges_of(key), len(chunk.data)
        if ranges is None or key in self._rejected:
            return Taken(refused="a chunk that is not for this peer")
        if chunk.total != ranges.total or not size or not 0 <= chunk.offset <= chunk.total - size:
            return Taken(refused="a chunk that does not fit")
        if key in self._done:
            return Taken(acknowledge=ranges.total, ignored="duplicate")
        if not may_send:
            return Taken(ignored="not asked for")
        incoming = self._incoming.get(key)
        named = expected or (incoming.payload if incoming else chunk.payload)
        if named != chunk.payload:
            return Taken(ignored="another contribution")
        incoming = self.open(key, chunk.payload)
        new, prefix = incoming.take(chunk.offset, chunk.data), incoming.coverage.prefix
        if not new:
            return Taken(acknowledge=prefix, ignored="duplicate")
        incoming.senders.add(sender)
        if not incoming.complete and prefix - incoming.acked < self._acknowledge_bytes:
            return Taken(new)
        incoming.acked = prefix
        return Taken(new, acknowledge=prefix)

    def settle(self, key: StreamKey, expected: Digest | None) -> str | None:
        """Look whether a stream that changed, or whose header has come, is whole: "" if it now is stored, None if it is not
        whole yet, otherwise why it was dropped."""
        incoming = self._incoming.get(key)
        if incoming is None or expected is None:
            return None
        if incoming.payload != expected:  # early bytes of something else
            del self._incoming[key]
            return None
        if not incoming.complete:
            return None
        del self._incoming[key]
        if not incoming.sound:
            return "bytes that are not what their hash says"
        if fault := self._fault_in(key, incoming.buffer):
            self._rejected.add(key)  # these are the bytes that the owner meant: no better ones will come
            return fault
        self.keep(key, Stored(incoming.payload, incoming.buffer, incoming.ranges))
        return ""

    def keep(self, key: StreamKey, stored: Stored) -> None:
        """What has begun to come of it is needed no more."""
        self._incoming.pop(key, None)
        self.stored[key] = stored
        self._done.add(key)

    def _fault_in(self, key: StreamKey, buffer: Bytes) -> str:
        if key in self._relays:
            return ""
        if key.kind == PART:
            return self._codec.fault_in_part(buffer, self._plan.shares[key.share])
        return self._codec.fault_in_payload(buffer)
