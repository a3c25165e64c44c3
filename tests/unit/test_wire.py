"""Frames: every message survives a round trip, and nothing that arrives raises anything but FrameError."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import MAX_ITEMS, RecordError, pack, unpack
from geomesh_p2p.core.types import NO_TERM, Contribution, Founding, Range, Term, Update
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.wire import FrameError, FrameReader, VersionMismatch

RUN = bytes(range(32))
TEXT = st.text(max_size=12)
INTEGERS = st.integers(-(2**63), 2**64 - 1)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, written apart from wire.py's own reading of the hints."""
    simple = {str: TEXT, bytes: st.binary(max_size=40), int: INTEGERS, bool: st.booleans()}
    if hint in simple:
        return simple[hint]
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if a is types.NoneType else values(a) for a in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{f.name: values(hints[f.name]) for f in dataclasses.fields(hint)})


MESSAGES = {kind: values(kind) for kind in typing.get_args(m.Message)}
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def body_of(message: m.Message, run: bytes = RUN, sequence: int | None = None) -> bytes:
    return wire.encode_bytes(message, run, sequence)[wire.LENGTH_BYTES :]


def test_every_message_has_a_tag_and_a_limit() -> None:
    assert set(wire.TAGS.values()) == set(typing.get_args(m.Message)) == set(wire.LIMITS)
    assert all(0 < tag < 128 for tag in wire.TAGS)


@pytest.mark.parametrize("kind", list(MESSAGES), ids=lambda kind: kind.__name__)
def test_round_trip(kind: type) -> None:
    @QUICK
    @given(MESSAGES[kind], st.sampled_from([b"", RUN]), st.none() | st.integers(0, 2**63))
    def check(message: m.Message, run: bytes, sequence: int | None) -> None:
        frame = wire.decode(body_of(message, run, sequence))
        assert frame == wire.Frame(run, sequence, message)
        assert pack(frame.message) == pack(message)  # types too: 1 and 1.0 hash differently

    check()


@QUICK
@given(
    st.lists(st.one_of(*MESSAGES.values()), max_size=6),
    st.lists(st.integers(1, 90_000), min_size=1, max_size=8),
    st.integers(0, 200_000),
)
def test_reader_cuts_any_split_into_the_same_frames(sent: list[m.Message], cuts: list[int], size: int) -> None:
    sent.append(m.Chunk(b"", "part", "p", b"", 0, 0, size, bytes(size)))
    stream = b"".join(wire.encode_bytes(message, RUN) for message in sent)
    reader, got, at, turn = FrameReader(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        got += [wire.decode(body).message for body in reader.feed(stream[at : at + step])]
        at, turn = at + step, turn + 1
    assert got == sent


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x95\x01\xc4\x00\x12\xc0" + b"\x91" * 3000)
def test_garbage_raises_only_frame_error(garbage: bytes) -> None:
    for body in (garbage, b"\x95\x01\xc4\x00" + garbage, b"\x95\x01\xc4\x20" + RUN + garbage):
        with contextlib.suppress(FrameError):
            wire.decode(body)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_stream_raises_only_frame_error(garbage: bytes) -> None:
    try:
        for body in FrameReader().feed(garbage):
            wire.decode(body)
    except FrameError:
        pass


@pytest.mark.parametrize("kind", list(MESSAGES), ids=lambda kind: kind.__name__)
def test_damaged_frames_raise_only_frame_error(kind: type) -> None:
    @QUICK
    @given(MESSAGES[kind], st.data())
    def check(message: m.Message, data: st.DataObject) -> None:
        body = bytearray(body_of(message))
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(FrameError):
            wire.decode(bytes(body))

    check()


def forged(tag: int, fields: Any, version: int = wire.PROTOCOL_VERSION, sequence: Any = None) -> bytes:
    return msgpack.packb([version, RUN, tag, sequence, fields])


@pytest.mark.parametrize(
    ("tag", "fields", "says"),
    [
        (4, ["soon"], "HeartbeatEcho.sent_at"),
        (4, [True], "HeartbeatEcho.sent_at"),
        (4, [float("nan")], "HeartbeatEcho.sent_at"),
        (4, [float("inf")], "HeartbeatEcho.sent_at"),
        (4, [], "HeartbeatEcho"),
        (4, [1.0, 2.0], "HeartbeatEcho"),
        (4, {"sent_at": 1.0}, "HeartbeatEcho"),
        (15, [b"bytes"], "Leave.reason"),
        (15, ["x" * 70_000], "Leave"),
        (10, ["text"], "Close.plan"),
        (11, [b"", ["a", 1]], "Lost.peers[1]"),
        (11, [b"", "ab"], "Lost.peers"),
        (12, [True, ["n", ""], 0, b"", b""], "HeldReport.round"),
        (12, [1, [1], 0, b"", b""], "HeldReport.term"),
        (12, [1, [1, 2], 0, b"", b""], "HeldReport.term.candidate"),
        (99, [], "tag"),
        (0, [], "tag"),
    ],
)
def test_refusal_names_the_field(tag: int, fields: Any, says: str) -> None:
    with pytest.raises(FrameError) as caught:
        wire.decode(forged(tag, fields))
    assert str(caught.value).startswith(says)


def test_literal_fields_take_only_their_words() -> None:
    update = Update(1, RUN, "gather", (), (), ("a",), RUN, 0)
    fields = msgpack.unpackb(pack(m.Commit(NO_TERM, update)))
    fields[1][2] = "star"
    with pytest.raises(FrameError, match=r"^Commit\.update\.topology: one of gather, reduce"):
        wire.decode(forged(14, fields))


def test_bad_sequence_is_refused() -> None:
    for sequence in (-1, "1", 1.5, [1]):
        with pytest.raises(FrameError, match="sequence"):
            wire.decode(forged(10, [b""], sequence=sequence))


def test_a_diverged_loss_can_be_told() -> None:
    told = m.Finished(RUN, Contribution("p", "s", 1, RUN, 0, (Range(0, 8),), b"", 0, float("nan"), 10), 1.0)
    back = wire.decode(body_of(told)).message
    assert pack(back) == pack(told)


@pytest.mark.case("C017")
def test_other_version_is_recognised_before_anything_else() -> None:
    with pytest.raises(VersionMismatch) as caught:
        wire.decode(b"\x95\x07 anything at all")
    assert caught.value.version == 7
    reader = FrameReader()
    with pytest.raises(VersionMismatch):
        reader.feed((500).to_bytes(4, "big") + b"\x95\x07")


def test_size_is_checked_from_the_prefix_before_the_body_is_there() -> None:
    reader = FrameReader()
    close = bytes((0x95, wire.PROTOCOL_VERSION, 0xC4, 0)) + bytes([10])
    with pytest.raises(FrameError, match=r"^Close: 5000 bytes, at most 1024"):
        reader.feed((5000).to_bytes(4, "big") + close)
    with pytest.raises(FrameError, match=r"^frame: 4294967295 bytes"):
        FrameReader().feed(b"\xff\xff\xff\xff\x95\x01")


def test_too_large_messages_are_refused_at_the_sender() -> None:
    with pytest.raises(FrameError, match=r"^Leave: "):
        wire.encode(m.Leave("x" * 70_000), RUN)
    with pytest.raises(FrameError, match=r"^Chunk: "):
        wire.encode(m.Chunk(RUN, "part", "p", RUN, 0, 0, 1, bytes(wire.MAX_CHUNK_BYTES + 4096)), RUN)
    wire.encode(m.Chunk(RUN, "part", "p" * 52, RUN, 0, 0, 1, bytes(wire.MAX_CHUNK_BYTES)), RUN)


def test_chunk_data_is_not_copied_by_encode() -> None:
    data = bytearray(1000)
    buffers = wire.encode(m.Chunk(RUN, "part", "p", RUN, 0, 0, 1, memoryview(data)), RUN)  # type: ignore[arg-type]
    data[0] = 7
    assert len(buffers) == 2
    assert buffers[1][0] == 7
    assert isinstance(wire.decode(b"".join(buffers)[4:]).message.data, bytes)  # type: ignore[union-attr]


def test_unpack() -> None:
    founding = Founding(RUN, b"nonce", 5, RUN, "p")
    assert unpack(Founding, pack(founding)) == founding
    assert unpack(Term, pack(Term(3, "c"))) == Term(3, "c")
    for bad in (b"", b"\xc1", pack(Term(3, "c")) + b"\x00", pack([1, 2])):
        with pytest.raises(RecordError):
            unpack(Term, bad)
    with pytest.raises(RecordError, match=r"Lost\.peers: .* items, at most"):
        unpack(m.Lost, pack([b"", [""] * (MAX_ITEMS + 1)]))
