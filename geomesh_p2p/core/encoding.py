"""Numbers to bytes: the passes over a section that codec.py's widths take. The format is described there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.layout import CHUNK
from geomesh_p2p.core.section import MAX_MAGNITUDE, NUMBERS, Bytes, Section, Vector

Fill = Callable[[int, int, Vector], Any]
"""fill(start, stop, out): writes parameters [start, stop) of what is encoded to `out`."""

_TOP = {4: 7, 8: 127}
HALF_STEP = 0.624  # of four levels, in mean |x|
ONE = np.float32(1)

# Least value that counts as positive, by parity of the index: zero, or the smallest above zero.
_LEAST = np.zeros(CHUNK + 1, np.float32)
_LEAST[1::2] = np.nextafter(np.float32(0), ONE)


@dataclass(frozen=True)
class NotFinite:
    """The delta of `tensor` has a NaN or an infinity, or is beyond MAX_MAGNITUDE or the format: the peer abstains."""

    tensor: str


def encode_section(section: Section, rms: bool, fill: Fill, out: Bytes | None, round: int) -> Bytes | NotFinite:
    data = np.empty(section.total_bytes, np.uint8) if out is None else section.checked(out)
    if section.width > 8:
        return _encode_numbers(section, fill, data)
    passes = Passes(section, rms, data, round)
    passes.feed(section.stop, fill)
    passes.feed_again(section.stop, fill)
    return passes.finish()


def _sealed(section: Section, magnitudes: npt.NDArray[np.float64], data: Bytes) -> Bytes | NotFinite:
    """`data` with its magnitudes, if all are fine."""
    fine = magnitudes <= MAX_MAGNITUDE  # false for a NaN
    if not fine.all():
        magnitude = section.first_magnitude + int(np.argmin(fine))
        first_magnitudes = section.layout.first_magnitudes
        return NotFinite(section.layout.tensors[bisect_right(first_magnitudes, magnitude) - 1].name)
    section.head(data)[:] = magnitudes
    return data


class Passes:
    """Encodes a section chunk by chunk, in the order of its parameters: a pass that measures (and packs signs), and, for more
    than one bit, another that packs levels. However it is fed the bytes are the same: sums are always over the same chunks."""

    def __init__(self, section: Section, rms: bool, data: Bytes, round: int) -> None:
        of = "maximum" if section.width > 2 else "square" if rms and section.width == 1 else "absolute"
        self._section, self._data, self._round = section, data, round
        body = data[section.head_bytes :]
        self._measure = _Measure(section, of, packed=body if section.width == 1 else None, round=round)
        self._scratch = np.empty(CHUNK, np.float32)
        self._levels: _Levels | None = None
        self._sealed: Bytes | NotFinite | None = None
        self.done = self.done_again = section.start

    def feed(self, ready: int, fill: Fill) -> None:
        """Take the whole chunks up to parameter `ready` (the last one ends with the section) from `fill`."""
        for start, stop in self._chunks(self.done, ready):
            self._measure.step(start, stop, fill, self._scratch)
            self.done = stop

    def feed_again(self, ready: int, fill: Fill) -> None:
        """The same numbers once more, when all were fed. Does nothing for one bit, or if they cannot be encoded."""
        if self._sealed is None:
            self._seal()
        if self._levels is not None:
            for start, stop in self._chunks(self.done_again, ready):
                self._levels.step(start, stop, fill, self._scratch)
                self.done_again = stop

    def finish(self) -> Bytes | NotFinite:
        """The bytes; raises ValueError if something was not fed."""
        sealed = self._seal() if self._sealed is None else self._sealed
        if self._levels is not None and self.done_again < self._section.stop:
            raise ValueError(f"what is encoded was fed again up to {self.done_again} of {self._section.stop}")
        return sealed

    def _seal(self) -> Bytes | NotFinite:
        section, measure = self._section, self._measure
        if self.done < section.stop:
            raise ValueError(f"what is encoded was fed up to {self.done} of {section.stop}")
        if section.width == 1:
            magnitudes = np.sqrt(measure.mean) if measure.of == "square" else measure.mean
        else:
            magnitudes = HALF_STEP * measure.mean if section.width == 2 else measure.sums / _TOP[section.width]
        self._sealed = _sealed(section, magnitudes, self._data)
        if section.width > 1 and not isinstance(self._sealed, NotFinite):
            self._levels = _Levels(section, section.head(self._data), self._data[section.head_bytes :], self._round)
        return self._sealed

    def _chunks(self, done: int, ready: int) -> Iterator[tuple[int, int]]:
        while done < self._section.stop and (end := min(done + CHUNK, self._section.stop)) <= ready:
            yield done, end
            done = end


class _Measure:
    """One pass over a section: the sum, by magnitude, of |x| or x*x (or the maximum of |x|), and the packed signs if asked."""

    def __init__(
        self,
        section: Section,
        of: str,
        packed: Bytes | None = None,
        round: int = 0,
    ) -> None:
        self.section, self.of, self.packed = section, of, packed
        self.sums = np.zeros(section.magnitudes)
        self.counts = np.zeros(section.magnitudes, np.int64)
        self._signs = np.empty(CHUNK if packed is not None else 0, np.bool_)
        self._least = _LEAST[round % 2 :]  # chunks begin at even indices

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        return self.sums / np.maximum(self.counts, 1)

    def step(self, start: int, stop: int, fill: Fill, scratch: Vector) -> None:
        """One chunk."""
        values = scratch[: stop - start]
        with np.errstate(invalid="ignore", over="ignore"):
            fill(start, stop, values)
            if self.packed is not None:
                begin, end = self.section.span(start, stop)
                bits = np.greater_equal(values, self._least[: stop - start], out=self._signs[: stop - start])
                self.packed[begin:end] = np.packbits(bits, bitorder="little")
            (np.square if self.of == "square" else np.abs)(values, out=values)
            self._add(start, stop, values)

    def _add(self, start: int, stop: int, values: Vector) -> None:
        origin = self.section.first_magnitude
        for piece in self.section.layout.pieces(start, stop):
            rows = values[piece.start - start : piece.stop - start].reshape(piece.rows, -1)
            at = slice(piece.magnitude - origin, piece.magnitude - origin + piece.rows)
            if self.of == "maximum":
                self.sums[at] = np.maximum(self.sums[at], rows.max(axis=1))
            else:
                self.sums[at] += rows.sum(axis=1)
                self.counts[at] += rows.shape[1]


class _Levels:
    """The second pass over a section: each number as the level next to it, given the steps."""

    def __init__(self, section: Section, steps: Vector, body: Bytes, round: int) -> None:
        self._section, self._body = section, body
        self._divisors = np.where(steps > 0, steps, ONE)
        self._least = _LEAST[round % 2 :]

    def step(self, start: int, stop: int, fill: Fill, scratch: Vector) -> None:
        """One chunk."""
        section, values = self._section, scratch[: stop - start]
        fill(start, stop, values)
        for piece in section.layout.pieces(start, stop):
            rows = values[piece.start - start : piece.stop - start].reshape(piece.rows, -1)
            at = slice(piece.magnitude - section.first_magnitude, piece.magnitude - section.first_magnitude + piece.rows)
            rows /= self._divisors[at, None]
        begin, end = section.span(start, stop)
        self._body[begin:end] = self._pairs(values) if section.width == 2 else self._numbers(values, end - begin)

    def _pairs(self, values: Vector) -> Bytes:
        positive = values >= self._least[: values.size]
        pairs = np.empty((values.size, 2), np.bool_)  # the low bit first: 01 is -3, 11 is -1, 00 is 1, 10 is 3
        pairs[:, 0] = (np.abs(values, out=values) >= 2) == positive
        np.logical_not(positive, out=pairs[:, 1])
        return np.packbits(pairs, bitorder="little")

    def _numbers(self, values: Vector, size: int) -> Bytes:
        width = self._section.width
        np.clip(np.rint(values, out=values), -_TOP[width], _TOP[width], out=values)
        levels = np.zeros(size * (8 // width), np.int8)
        levels[: values.size] = values
        columns = (levels.view(np.uint8) & (2**width - 1)).reshape(size, 8 // width)
        packed: Bytes = np.bitwise_or.reduce(columns << (width * np.arange(8 // width, dtype=np.uint8)), axis=1)
        return packed


def _encode_numbers(section: Section, fill: Fill, data: Bytes) -> Bytes | NotFinite:
    scratch, numbers = np.empty(CHUNK, np.float32), data.view(NUMBERS[section.width])
    with np.errstate(invalid="ignore", over="ignore"):
        for start, stop in section.chunks(CHUNK):
            values = scratch[: stop - start]
            fill(start, stop, values)
            coded = numbers[start - section.start : stop - section.start]
            coded[:] = values
            fine = np.isfinite(coded) & (np.abs(values) <= MAX_MAGNITUDE)
            if not fine.all():
                at = start + int(np.argmin(fine))
                return NotFinite(section.layout.tensors[next(section.layout.pieces(at, at + 1)).tensor].name)
    return data
