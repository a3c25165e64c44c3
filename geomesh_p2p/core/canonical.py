"""One byte string for one value: what is hashed, and what is sent.

Frozen dataclasses become lists of their fields in order (nested), tuples become lists, everything else is left to
msgpack. Two equal values therefore have equal bytes on every machine. Sets and dicts are refused: they have no order.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeVar

import msgpack

Digest = bytes
DIGEST_BYTES = 32
MAX_ITEMS = 2**20            # of any one tuple
MAX_TEXT = 2**16             # characters of any one string
MAY_BE_NOT_FINITE = "may be not finite"


def plain(value: Any) -> Any:
    """`value` as nested lists of str, bytes, int, float, bool and None. Raises TypeError on anything without an order."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no canonical form")


def pack(value: Any) -> bytes:
    """The canonical msgpack bytes of `value`."""
    return msgpack.packb(plain(value), use_bin_type=True)


class RecordError(ValueError):
    """Bytes that are not what they should be: the message says which field is wrong and why."""


T = TypeVar("T")


def unpack(kind: type[T], packed: bytes | memoryview) -> T:
    """The frozen dataclass `kind` whose `pack` gave `packed`. Strict: types, numbers of fields and items, and that numbers are
    finite (but for fields whose metadata says MAY_BE_NOT_FINITE). Raises RecordError, and nothing else, on anything."""
    decoder = decoder_of(typing.cast(Any, kind))
    return typing.cast(T, decoder(unpack_plain(packed), kind.__name__))


def unpack_plain(packed: Any) -> Any:
    """Nested lists and values from msgpack bytes. Raises RecordError."""
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=True, use_list=True)
    except Exception as error:  # msgpack raises a dozen kinds on garbage, ValueError and RecursionError among them
        raise RecordError(f"not msgpack: {error}"[:200]) from None


def digest(*values: Any) -> Digest:
    """BLAKE2b-256 over the canonical bytes of `values`."""
    return hashlib.blake2b(pack(list(values)), digest_size=DIGEST_BYTES).digest()


def digest_bytes(*buffers: Any) -> Digest:
    """BLAKE2b-256 over raw buffers, one after the other."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


# ---------------------------------------------------------------- strict decoding, by type hints

Decoder = Callable[[Any, str], Any]


def _scalar(kind: type, name: str) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise RecordError(f"{where}: {name} expected, got {type(value).__name__}")
        return value

    return decode


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise RecordError(f"{where}: text expected, got {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise RecordError(f"{where}: {len(value)} characters, at most {MAX_TEXT}")
    return value


def _number(value: Any, where: str) -> float:
    # An int stays an int: hashes are over the canonical bytes, where 1 and 1.0 differ.
    if type(value) is not float and type(value) is not int:
        raise RecordError(f"{where}: number expected, got {type(value).__name__}")
    if not math.isfinite(value):
        raise RecordError(f"{where}: finite number expected, got {value}")
    return value


def _any_number(value: Any, where: str) -> float:
    return value if type(value) is float else _number(value, where)


def _optional(inner: Decoder) -> Decoder:
    return lambda value, where: None if value is None else inner(value, where)


def _one_of(choices: tuple[Any, ...]) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        if type(value) is not str or value not in choices:
            raise RecordError(f"{where}: one of {', '.join(map(str, choices))} expected, got {str(value)[:40]!r}")
        return value

    return decode


def _many(inner: Decoder) -> Decoder:
    def decode(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise RecordError(f"{where}: list expected, got {type(value).__name__}")
        if len(value) > MAX_ITEMS:
            raise RecordError(f"{where}: {len(value)} items, at most {MAX_ITEMS}")
        return tuple(inner(item, f"{where}[{index}]") for index, item in enumerate(value))

    return decode


def _record(kind: Any) -> Decoder:
    """A frozen dataclass, sent as the list of its fields in order."""
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    decoders = [
        (field.name, _any_number if field.metadata.get(MAY_BE_NOT_FINITE) else decoder_of(hints[field.name]))
        for field in fields
    ]

    def decode(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise RecordError(f"{where}: {kind.__name__} expected, got {type(value).__name__}")
        if len(value) != len(decoders):
            raise RecordError(f"{where}: {len(value)} fields, {kind.__name__} has {len(decoders)}")
        return kind(*(inner(item, f"{where}.{name}") for (name, inner), item in zip(decoders, value, strict=True)))

    return decode


_SCALARS: dict[Any, Decoder] = {
    str: _text,
    float: _number,
    int: _scalar(int, "integer"),
    bool: _scalar(bool, "true or false"),
    bytes: _scalar(bytes, "bytes"),
}


@cache
def decoder_of(hint: Any) -> Decoder:
    """decoder(value, where): `value` (as unpack_plain gives it) as what the type hint says. Raises RecordError."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _many(decoder_of(arguments[0]))
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and types.NoneType in arguments:
        return _optional(decoder_of(next(a for a in arguments if a is not types.NoneType)))
    if origin is Literal:
        return _one_of(arguments)
    if dataclasses.is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"{hint} has no canonical form")
