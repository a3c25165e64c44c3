"""Frames to be refused: random messages of every type, and what becomes of them when bytes are changed, cut or lied about.

Everything comes from one `random.Random`, so a seed names a run.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal

import msgpack

from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import MAY_BE_NOT_FINITE
from geomesh_p2p.swarm import wire

KINDS: tuple[type, ...] = typing.get_args(m.Message)
LENGTH = wire.LENGTH_BYTES


class Values:
    """Random values of any field's type. `words` and `hashes` are such as the run itself uses, so that a message is heard."""

    def __init__(self, random: Random, words: tuple[str, ...], hashes: tuple[bytes, ...]) -> None:
        self.random, self.words, self.hashes = random, words, hashes
        self._makers: dict[Any, Callable[[], Any]] = {}

    def message(self, kind: type | None = None) -> Any:
        return self._of(kind or self.random.choice(KINDS))()

    def _of(self, hint: Any) -> Callable[[], Any]:
        if hint not in self._makers:
            self._makers[hint] = self._maker(hint)
        return self._makers[hint]

    def _maker(self, hint: Any) -> Callable[[], Any]:
        simple: dict[Any, Callable[[], Any]] = {
            str: self._text,
            bytes: self._bytes,
            int: self._integer,
            float: self._number,
            bool: lambda: self.random.random() < 0.5,
        }
        if hint in simple:
            return simple[hint]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            inner = self._of(arguments[0])
            return lambda: tuple(inner() for _ in range(min(3, int(self.random.expovariate(1)))))
        if origin in (types.UnionType, typing.Union):
            (inner_hint,) = (a for a in arguments if a is not types.NoneType)
            some = self._of(inner_hint)
            return lambda: some() if self.random.random() < 0.7 else None
        if origin is Literal:
            return lambda: self.random.choice(arguments)
        hints = typing.get_type_hints(hint)
        fields = []
        for field in dataclasses.fields(hint):
            if field.init:
                wild = self._wild_number if field.metadata.get(MAY_BE_NOT_FINITE) else self._of(hints[field.name])
                fields.append((field.name, wild))
        return lambda: hint(**{name: make() for name, make in fields})

    def _text(self) -> str:
        if self.random.random() < 0.8:
            return self.random.choice(self.words)
        return "".join(chr(self.random.choice((0, 10, 27, 65, 0x2028, 0x1F600))) for _ in range(self.random.randrange(20)))

    def _bytes(self) -> bytes:
        if self.random.random() < 0.8:
            return self.random.choice(self.hashes)
        return self.random.randbytes(self.random.randrange(80))

    def _integer(self) -> int:
        choice = self.random.random()
        if choice < 0.7:
            return self.random.randrange(-1, 12)
        if choice < 0.9:
            return self.random.randrange(-(2**20), 2**20)
        return self.random.choice((-(2**63), 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1))

    def _number(self) -> float:
        choice = self.random.random()
        if choice < 0.6:
            return self.random.random() * 10
        if choice < 0.8:
            return float(self.random.randrange(-5, 100))
        return self.random.choice((0.0, -0.0, 1e-308, 1e308, -1e300, 5e-324, 1e-30, 1e30))

    def _wild_number(self) -> float:
        return self.random.choice((math.nan, math.inf, -math.inf, self._number()))


# ---------------------------------------------------------------- mutations of a body (the frame without its length)

NESTED = b"\x91" * 1500
BOMBS = (
    *(head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")),                 # four billion items
    b"\xc9\xff\xff\xff\xff\x50", b"\xd4\x50\x00", b"\xc7\x04\x40\x94\x01\x02\x03", b"\xd7\xff" + bytes(8),   # extension types
    b"\xcb\x7f\xf8" + bytes(6), b"\xcb\xff\xf0" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),      # numbers
    b"\xc1", b"\xa2\xff\xfe", b"\x81\x90\x90", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x95", NESTED,
)  # fmt: skip
ODD = (None, True, 0, -1, 2**63, 1.5, math.nan, "x", b"x", [], [[]], {})


def mutated(random: Random, body: bytes, other: bytes) -> bytes:
    """`body` after one to four random changes."""
    data = bytearray(body)
    for _ in range(1 + int(random.expovariate(1.2)) % 4):
        at = random.randrange(len(data)) if data else 0
        match random.randrange(10):
            case 0:
                if data:
                    data[at] ^= 1 << random.randrange(8)
            case 1:
                if data:
                    data[at] = random.randrange(256)
            case 2:
                del data[at : at + 1 + random.randrange(8)]
            case 3:
                data[at:at] = random.randbytes(1 + random.randrange(8))
            case 4:
                del data[at:]
            case 5:
                data += random.randbytes(random.randrange(64))
            case 6:
                data[at:] = other[random.randrange(len(other)) :]
            case 7:
                data[at:at] = random.choice(BOMBS)
            case 8:
                data[at : at + 5] = random.choice(BOMBS)
            case 9:
                _set_tag(random, data)
    return bytes(data)


def _set_tag(random: Random, data: bytearray) -> None:
    if len(data) > 4:
        at = 4 + data[3]
        if at < len(data):
            data[at] = random.randrange(0, 30)


def forged(random: Random, values: Values) -> bytes:
    """A well-formed msgpack body of wrong contents: fields of another type, too many or too few."""
    fields = [random.choice(ODD) for _ in range(random.randrange(12))]
    run = random.choice((b"", values.hashes[0], b"x", bytes(33)))
    version = random.choice((0, *[wire.PROTOCOL_VERSION] * 3, 255))
    return bytes(msgpack.packb([version, run, random.randrange(0, 30), random.choice((None, 0, 7, -1)), fields]))


def bodies(random: Random, values: Values, run: bytes) -> Iterator[tuple[str, bytes]]:
    """(how it was made, body), without end; a fifth of them are whole."""
    last = wire.encode_bytes(m.Leave("first"), run)[LENGTH:]
    while True:
        try:
            message, sequence = values.message(), random.choice((None, None, 1))
            body = wire.encode_bytes(message, random.choice((run, run, run, b"")), sequence)[LENGTH:]
        except wire.FrameError:
            continue
        yield "whole", body
        for _ in range(4):
            choice = random.random()
            if choice < 0.8:
                yield "mutated", mutated(random, body, last)
            elif choice < 0.92:
                yield "forged", forged(random, values)
            else:
                yield "random", random.randbytes(random.randrange(200))
        last = body


def framed(random: Random, body: bytes) -> bytes:
    """The body behind its length, which is a lie now and then."""
    length = len(body)
    if random.random() < 0.1:
        lies = (length - 1, length + 1, length * 2, 0, 5, 2**31, 2**32 - 1, wire.MAX_BODY, wire.MAX_BODY + 1)
        length = max(0, random.choice(lies))
    return length.to_bytes(LENGTH, "big") + body
