"""Bytes on their way: which of a stream are here, which have been sent, and where they lie in a buffer.

A *stream* is what one member sends to another in an exchange: a contribution (or the slices of it that one reducer needs)
or a reducer's part. Its bytes are numbered from 0, whatever places they take in the buffer. No I/O and no clock here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.canonical import DIGEST_BYTES, Digest
from geomesh_p2p.core.types import PeerId, Range

Bytes = npt.NDArray[np.uint8]

CONTRIBUTION = "contribution"
PART = "part"


class StreamKey(NamedTuple):
    """`owner` made the bytes; `share` is the reducer share that they belong to (0 in a gather)."""

    kind: str
    owner: PeerId
    share: int


class Ranges:
    """The half-open ranges of a buffer that make up a stream, one after the other."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._parts: list[tuple[int, int, int]] = []  # first byte of the stream, start and stop in the buffer
        self.total = 0
        for start, stop in ranges:
            self._parts.append((self.total, start, stop))
            self.total += stop - start

    @property
    def tail_bytes(self) -> int:
        """Length of the last range."""
        return self._parts[-1][2] - self._parts[-1][1] if self._parts else 0

    def _places(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        end = offset + length
        for first, start, stop in self._parts:
            low, high = max(offset, first), min(end, first + stop - start)
            if low < high:
                yield low - offset, start + low - first, start + high - first

    def read(self, buffer: memoryview, offset: int, length: int) -> Any:
        """Bytes [offset, offset + length) of the stream; a view if they lie together."""
        places = list(self._places(offset, length))
        if len(places) == 1:
            return buffer[places[0][1] : places[0][2]]
        return b"".join(buffer[start:stop] for _, start, stop in places)

    def write(self, buffer: memoryview, offset: int, data: Any) -> None:
        for at, start, stop in self._places(offset, len(data)):
            buffer[start:stop] = data[at : at + stop - start]


class Coverage:
    """A set of byte numbers, kept as ascending half-open spans."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._spans: list[tuple[int, int]] = []
        self.bytes = 0
        for start, stop in spans:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        before, after = [], []
        for low, high in self._spans:
            if high < start:
                before.append((low, high))
            elif low > stop:
                after.append((low, high))
            else:
                self.bytes -= high - low
                start, stop = min(start, low), max(stop, high)
        self.bytes += stop - start
        self._spans = [*before, (start, stop), *after]

    @property
    def prefix(self) -> int:
        """Bytes [0, prefix) are all in."""
        return self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) is not in, ascending."""
        found = []
        for low, high in self._spans:
            if high <= start:
                continue
            if low >= stop:
                break
            if low > start:
                found.append((start, low))
            start = high
        if start < stop:
            found.append((start, stop))
        return found


class Incoming:
    """A stream being received. `payload` is the hash that its chunks name. With `verify` the hash of the bytes must be it."""

    def __init__(self, ranges: Ranges, size: int, payload: Digest, verify: bool) -> None:
        self.ranges = ranges
        self.payload = payload
        # zeroed and not merely reserved: a reducer reads whole headers of which it has received its own slice alone
        self.buffer: Bytes = np.zeros(size, np.uint8)
        self.coverage = Coverage()
        self.senders: set[PeerId] = set()
        self.acked = 0
        self._view = memoryview(self.buffer.data)
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES) if verify else None
        self._hashed = 0

    @property
    def complete(self) -> bool:
        return self.coverage.bytes == self.ranges.total

    @property
    def sound(self) -> bool:
        """Whether the complete stream is what its hash says (always, if it is not to be verified)."""
        return self._hash is None or self._hash.digest() == self.payload

    def take(self, offset: int, data: Any) -> int:
        """Returns the number of new bytes."""
        view, new = memoryview(data), 0
        # bytes that are here already are never written again: they may be in use
        for start, stop in self.coverage.gaps(offset, offset + len(view)):
            self.ranges.write(self._view, start, view[start - offset : stop - offset])
            new += stop - start
        self.coverage.add(offset, offset + len(view))
        if self._hash is not None and self.coverage.prefix > self._hashed:
            self._hash.update(self._view[self._hashed : self.coverage.prefix])
            self._hashed = self.coverage.prefix
        return new


class Outgoing:
    """A stream being sent to one peer. What was sent and not acknowledged is sent again after a failure."""

    def __init__(self, key: StreamKey, payload: Digest, buffer: Bytes, ranges: Ranges) -> None:
        self.key = key
        self.payload = payload
        self.ranges = ranges
        self._view = memoryview(buffer.data).cast("B").toreadonly()
        self._sent = Coverage()
        self._acked = 0

    def next_span(self, limit: int) -> tuple[int, int] | None:
        """The next at most `limit` bytes to be sent, which count as sent from now on."""
        for start, stop in self._sent.gaps(0, self.ranges.total):
            stop = min(stop, start + limit)
            self._sent.add(start, stop)
            return start, stop
        return None

    def read(self, start: int, stop: int) -> Any:
        return self.ranges.read(self._view, start, stop - start)

    def acknowledge(self, offset: int) -> None:
        """The receiver has [0, offset)."""
        self._acked = max(self._acked, min(offset, self.ranges.total))
        self._sent.add(0, self._acked)

    def again(self) -> None:
        """The connection failed: whatever is not acknowledged is to be sent once more."""
        self._sent = Coverage([(0, self._acked)])

    def want(self, gaps: Iterable[Range]) -> None:
        """The receiver lacks exactly `gaps`."""
        lacking = Coverage((gap.start, min(gap.stop, self.ranges.total)) for gap in gaps)
        self._sent = Coverage(lacking.gaps(0, self.ranges.total))
