"""Which runs of tokens of one text stand in another: what a model may have seen word for word."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 20
_TABLE_BITS = 22
_MODULUS = 1 << 64
_BASE = 0x9E3779B97F4A7C15 & ~7 | 5  # 5 modulo 8: its powers have the longest period there is
_INVERSE = pow(_BASE, -1, _MODULUS)

Hashes = npt.NDArray[np.uint64]


def occurs_in(tokens: npt.NDArray[np.integer], length: int, other: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """For each run of `length` tokens of `tokens`, (len(tokens) - length + 1,): does it stand anywhere in `other`?

    One pass over `other` in pieces, which may lie on disk. By 64-bit hashes: True is wrong once in 10**13 or so, False never.
    """
    if length < 1:
        raise ValueError(f"length is {length}: must be at least 1")
    wanted = _hashes(tokens, length)
    table = np.zeros(1 << _TABLE_BITS, bool)
    table[_row(wanted)] = True
    found = [np.empty(0, np.uint64)]
    for start in range(0, len(other) - length + 1, _CHUNK):
        here = _hashes(other[start : start + _CHUNK + length - 1], length)
        found.append(here[table[_row(here)]])
    return np.isin(wanted, np.concatenate(found))


def _row(hashes: Hashes) -> Hashes:
    return hashes >> np.uint64(64 - _TABLE_BITS)


def _hashes(tokens: npt.NDArray[np.integer], length: int) -> Hashes:
    """Of each run: the sum over its tokens of mixed(token) * base**place, modulo 2**64 (Rabin and Karp), mixed once more."""
    if len(tokens) < length:
        return np.empty(0, np.uint64)
    sums = np.zeros(len(tokens) + 1, np.uint64)
    np.cumsum(_mixed(np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * _powers(_BASE, len(tokens)), out=sums[1:])
    return _mixed((sums[length:] - sums[:-length]) * _powers(_INVERSE, len(tokens) - length + 1))


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(values: Hashes) -> Hashes:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
