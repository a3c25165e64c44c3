"""Frames: messages as bytes and back, strictly, with a limit per message type that is checked before decoding.

    frame  = length of body (4 bytes, big endian), body
    body   = msgpack [version, run id, tag, sequence or nil, [fields in order]]

The first two bytes of every body of every version are 0x95 and the version, so that a mismatch is recognised before
anything else is read. Version, run id and tag lie in the first bytes at fixed places: a frame whose length is above its
type's limit is refused from those, before its body is buffered. Values are checked against the type hints of the frozen
dataclasses in core/messages.py; anything else raises FrameError naming the field. Nothing received is ever unpickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from geomesh_p2p import PROTOCOL_VERSION
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import DIGEST_BYTES, RecordError, decoder_of, plain, unpack_plain
from geomesh_p2p.core.messages import Message

LENGTH_BYTES = 4
KIB, MIB = 1024, 1024 * 1024
MAX_CHUNK_BYTES = MIB
MAX_FETCH_BYTES = 4 * MIB

# Numbers on the wire are for ever: a type that is dropped leaves its number unused.
TAGS: dict[int, type] = {
    1: m.Hello, 2: m.Refused, 3: m.Heartbeat, 4: m.HeartbeatEcho, 5: m.VoteRequest, 6: m.Vote, 7: m.PlanOffer,
    8: m.PlanRefused, 9: m.Finished, 10: m.Close, 11: m.Lost, 12: m.HeldReport, 13: m.HoldAgain, 14: m.Commit,
    15: m.Leave, 16: m.Fetch, 17: m.Fetched, 18: m.Chunk, 19: m.ChunkAck, 20: m.PartHeader,
    21: m.ChunkWanted, 22: m.ChunkMissing, 23: m.Order,
}  # fmt: skip

# Largest body in bytes. What carries a plan, an update or a held header grows with the number of members.
LIMITS: dict[type, int] = {
    m.Hello: 128 * KIB,
    m.Refused: 16 * KIB,
    m.Heartbeat: 128 * KIB,
    m.HeartbeatEcho: KIB,
    m.VoteRequest: MIB,
    m.Vote: MIB,
    m.PlanOffer: MIB,
    m.PlanRefused: 16 * KIB,
    m.Finished: 256 * KIB,
    m.Close: KIB,
    m.Lost: 64 * KIB,
    m.HeldReport: MIB,
    m.HoldAgain: MIB,
    m.Commit: MIB,
    m.Leave: 16 * KIB,
    m.Fetch: KIB,
    m.Fetched: MAX_FETCH_BYTES + 4 * MIB,
    m.Chunk: MAX_CHUNK_BYTES + KIB,
    m.ChunkAck: KIB,
    m.PartHeader: 64 * KIB,
    m.ChunkWanted: 4 * KIB,
    m.ChunkMissing: 64 * KIB,
    m.Order: KIB,
}

MAX_BODY = max(LIMITS.values())
PREFIX_BYTES = 5 + DIGEST_BYTES


class FrameError(RecordError):
    """A frame that is not to be trusted: the message says which field is wrong and why."""


class VersionMismatch(FrameError):
    """The other end speaks another protocol version (`version`)."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}, this peer speaks {PROTOCOL_VERSION}: run the same release everywhere")
        self.version = version


@dataclass(frozen=True)
class Frame:
    run: bytes
    sequence: int | None
    message: Message


_DECODERS = {tag: decoder_of(kind) for tag, kind in TAGS.items()}
_TAG_OF = {kind: tag for tag, kind in TAGS.items()}
_LIMIT_OF_TAG = {tag: LIMITS[kind] for tag, kind in TAGS.items()}


# ---------------------------------------------------------------- frames


def encode(message: Message, run: bytes, sequence: int | None = None) -> list[bytes | memoryview]:
    """The frame of `message` as buffers to be written one after the other; a chunk's data is not copied.

    Raises FrameError if it is larger than its type's limit.
    """
    tag = _TAG_OF[type(message)]
    head = b"".join((b"\x95", bytes((PROTOCOL_VERSION,)), msgpack.packb(run), bytes((tag,)), msgpack.packb(sequence)))
    buffers: list[bytes | memoryview]
    if isinstance(message, m.Chunk):
        data = memoryview(message.data).cast("B")
        buffers = [_chunk_fields(message, len(data)), data]
    elif isinstance(message, m.Fetched):
        buffers = [msgpack.packb(plain(dataclasses.replace(message, data=bytes(message.data))))]
    else:
        buffers = [msgpack.packb(plain(message))]
    size = len(head) + sum(len(buffer) for buffer in buffers)
    if size > _LIMIT_OF_TAG[tag]:
        raise FrameError(f"{type(message).__name__}: {size} bytes, at most {_LIMIT_OF_TAG[tag]}")
    buffers[0] = b"".join((size.to_bytes(LENGTH_BYTES, "big"), head, buffers[0]))
    return buffers


def _chunk_fields(chunk: m.Chunk, size: int) -> bytes:
    """The fields of `chunk` up to its data, whose header (bin 32) is included."""
    pack = msgpack.packb
    return b"".join((
        b"\x98", pack(chunk.plan), pack(chunk.kind), pack(chunk.owner), pack(chunk.payload), pack(chunk.share),
        pack(chunk.offset), pack(chunk.total), b"\xc6", size.to_bytes(4, "big"),
    ))  # fmt: skip


def encode_bytes(message: Message, run: bytes, sequence: int | None = None) -> bytes:
    return b"".join(encode(message, run, sequence))


def _prefix(body: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """(tag, where the sequence starts), or None if `body` is still too short to tell."""
    if len(body) < 2:
        return None
    if body[0] != 0x95:
        raise FrameError("frame: does not begin as one")
    if body[1] != PROTOCOL_VERSION:
        raise VersionMismatch(body[1])
    if len(body) < 4:
        return None
    if body[2] != 0xC4 or body[3] not in (0, DIGEST_BYTES):
        raise FrameError(f"run: 0 or {DIGEST_BYTES} bytes expected")
    at = 4 + body[3]
    if len(body) <= at:
        return None
    if body[at] not in _LIMIT_OF_TAG:
        raise FrameError(f"tag: {body[at]} is not a message type")
    return body[at], at + 1


def check_prefix(length: int, start: bytes | bytearray | memoryview) -> bool:
    """Check the first bytes of a body of `length` bytes; False if there are too few yet. Raises FrameError."""
    if length > MAX_BODY:
        raise FrameError(f"frame: {length} bytes, at most {MAX_BODY}")
    found = _prefix(start)
    if found is None:
        if len(start) >= length:
            raise FrameError(f"frame: {length} bytes are too few")
        return False
    limit = _LIMIT_OF_TAG[found[0]]
    if length > limit:
        raise FrameError(f"{TAGS[found[0]].__name__}: {length} bytes, at most {limit}")
    return True


def kind_of(body: bytes | bytearray | memoryview) -> type:
    """The message type of a whole body whose prefix and length are in order. Raises FrameError, and nothing else."""
    check_prefix(len(body), body)
    found = _prefix(body)
    assert found is not None
    return TAGS[found[0]]


def decode(body: bytes | bytearray | memoryview) -> Frame:
    """The frame whose body (without the length) this is. Raises FrameError, and nothing else."""
    check_prefix(len(body), body)
    found = _prefix(body)
    assert found is not None
    tag, _ = found
    try:
        values = unpack_plain(body)
        if type(values) is not list or len(values) != 5:
            raise FrameError("frame: five parts expected")
        run, sequence = values[1], values[3]
        if sequence is not None and (type(sequence) is not int or sequence < 0):
            raise FrameError("sequence: whole number expected")
        return Frame(run, sequence, _DECODERS[tag](values[4], TAGS[tag].__name__))
    except RecordError as error:
        raise FrameError(str(error)) from None


def concerns(run: bytes, frame: Frame) -> bool:
    """Whether a peer of `run` (empty: not known yet) should hear `frame`. Greetings and questions about the run are for all."""
    message = frame.message
    if isinstance(message, (m.Hello, m.Refused)) or (isinstance(message, m.Fetch) and message.what in ("founding", "status")):
        return True
    return not run or not frame.run or frame.run == run


class FrameReader:
    """Cuts a byte stream into bodies, and reads large ones straight into place (an asyncio.BufferedProtocol's buffer).

    `buffer()` gives where to write next; `advance(n)` returns the bodies that n more bytes complete. Raises FrameError
    as soon as a frame is known to be bad, which is before its body is buffered.

    `begin(type, length)`, if set, is asked once for each frame before its body is buffered, and `end(length)` told once it is
    handed out or abandoned; a frame that `begin` does not want is skipped as it comes.
    """

    STAGING_BYTES = 64 * KIB

    def __init__(self) -> None:
        self.begin: Callable[[type, int], bool] | None = None
        self.end: Callable[[int], None] = lambda length: None
        self._begun = 0              # length of the frame that `begin` took and that is not whole yet
        self._skip = 0               # bytes still to come of one that it did not take
        self._staging = bytearray(self.STAGING_BYTES)
        self._view = memoryview(self._staging)
        self._start = 0              # unread bytes of the staging buffer are [start, stop)
        self._stop = 0
        self._body: bytearray | None = None   # a large body being filled
        self._filled = 0

    def buffer(self) -> memoryview:
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        return self._view[self._stop :]

    def abandon(self) -> None:
        """No more will come: what was begun is let go."""
        begun, self._begun, self._body = self._begun, 0, None
        if begun:
            self.end(begun)

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        bodies: list[bytes | bytearray] = []
        view = memoryview(data)
        while view:
            room = self.buffer()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            bodies += self.advance(count)
            view = view[count:]
        return bodies

    def advance(self, count: int) -> list[bytes | bytearray]:
        if self._body is not None:
            self._filled += count
            if self._filled < len(self._body):
                return []
            body, self._body = self._body, None
            self._ended(len(body))
            return [body]
        self._stop += count
        self._drop_skipped()
        bodies: list[bytes | bytearray] = []
        while self._cut(bodies):
            pass
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start > 0:  # what is left is the beginning of one frame: move it to the front
            left = bytes(self._view[self._start : self._stop])
            self._view[: len(left)] = left
            self._start, self._stop = 0, len(left)
        return bodies

    def _cut(self, bodies: list[bytes | bytearray]) -> bool:
        """Take one frame off the staging buffer; False if it is not whole (a large one then gets a buffer of its own)."""
        at, have = self._start + LENGTH_BYTES, self._stop - self._start - LENGTH_BYTES
        if have < 0:
            return False
        length = int.from_bytes(self._view[self._start : at], "big")
        prefix = self._view[at : at + min(have, length, PREFIX_BYTES)]
        if not check_prefix(length, prefix):
            return False
        if not self._wanted(length, prefix):
            self._start, self._skip = at, length
            self._drop_skipped()
            return True
        if have >= length:
            bodies.append(bytes(self._view[at : at + length]))
            self._start = at + length
            self._ended(length)
            return True
        if length + LENGTH_BYTES > self.STAGING_BYTES:
            self._body, self._filled = bytearray(length), have
            self._body[:have] = self._view[at : self._stop]
            self._start = self._stop
        return False

    def _wanted(self, length: int, prefix: memoryview) -> bool:
        if self.begin is None or self._begun:
            return True
        found = _prefix(prefix)
        assert found is not None
        if not self.begin(TAGS[found[0]], length):
            return False
        self._begun = length
        return True

    def _ended(self, length: int) -> None:
        if self._begun:
            self._begun = 0
            self.end(length)

    def _drop_skipped(self) -> None:
        gone = min(self._skip, self._stop - self._start)
        self._start += gone
        self._skip -= gone
