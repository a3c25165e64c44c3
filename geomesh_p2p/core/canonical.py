"""One byte string for one value: what is hashed, and what is sent.

Frozen dataclasses become lists of their fields in order (nested), tuples become lists, everything else is left to
msgpack. Two equal values therefore have equal bytes on every machine. Sets and dicts are refused: they have no order.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
import typing
from typing import Any, TypeVar

import msgpack

Digest = bytes
DIGEST_BYTES = 32


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


T = TypeVar("T")


def unpack(kind: type[T], data: bytes | memoryview) -> T:
    """The frozen dataclass `kind` whose `pack` gave `data`. Raises ValueError if the fields are not those of `kind`."""
    try:
        rebuilt: T = _rebuilt(kind, msgpack.unpackb(data, strict_map_key=False))
    except (msgpack.UnpackException, TypeError, ValueError) as error:
        raise ValueError(f"not the bytes of a {kind.__name__}: {error}") from None
    return rebuilt


def _rebuilt(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        names = [field.name for field in dataclasses.fields(hint) if field.init]
        if not isinstance(value, list) or len(value) != len(names):
            raise ValueError(f"{hint.__name__} has {len(names)} fields")
        hints = typing.get_type_hints(hint)
        return hint(*(_rebuilt(hints[name], item) for name, item in zip(names, value, strict=True)))
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError("a list was expected")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_rebuilt(arguments[0], item) for item in value)
        return tuple(_rebuilt(inner, item) for inner, item in zip(arguments, value, strict=True))
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and value is not None:
        return _rebuilt(next(a for a in arguments if a is not types.NoneType), value)
    if hint in (str, bytes, int, bool) and type(value) is not hint:
        raise ValueError(f"{hint.__name__} expected, not {type(value).__name__}")
    return value


def digest(*values: Any) -> Digest:
    """BLAKE2b-256 over the canonical bytes of `values`."""
    return hashlib.blake2b(pack(list(values)), digest_size=DIGEST_BYTES).digest()


def digest_bytes(*buffers: Any) -> Digest:
    """BLAKE2b-256 over raw buffers, one after the other."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for buffer in buffers:
        state.update(buffer)
    return state.digest()
