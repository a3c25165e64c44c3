"""One byte string for one value: what is hashed, and what is sent.

Frozen dataclasses become lists of their fields in order (nested), tuples become lists, everything else is left to
msgpack. Two equal values therefore have equal bytes on every machine. Sets and dicts are refused: they have no order.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from typing import Any

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


def digest(*values: Any) -> Digest:
    """BLAKE2b-256 over the canonical bytes of `values`."""
    return hashlib.blake2b(pack(list(values)), digest_size=DIGEST_BYTES).digest()


def digest_bytes(*buffers: Any) -> Digest:
    """BLAKE2b-256 over raw buffers, one after the other."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for buffer in buffers:
        state.update(buffer)
    return state.digest()
