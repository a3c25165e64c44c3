"""Where each tensor lies in the flat parameter vector, and which magnitude scales which parameters.

The vector is fp32, tensors one after the other without padding. A tensor has one magnitude, or one for each of its rows.
A *piece* is a stretch of whole rows, or a part of one row, that a kernel handles in one go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from geomesh_p2p.core.canonical import Digest, digest

CHUNK = 32_768
"""Parameters a kernel works on at a time: a few scratch arrays of this many fp32 stay in a core's second-level cache."""


@dataclass(frozen=True)
class Tensor:
    """`size` parameters in `rows` equal rows, each with a magnitude of its own."""

    name: str
    size: int
    rows: int = 1

    def __post_init__(self) -> None:
        if self.size <= 0 or self.rows <= 0 or self.size % self.rows:
            raise ValueError(f"tensor {self.name}: {self.size} parameters do not make {self.rows} equal rows")

    @property
    def row_length(self) -> int:
        return self.size // self.rows


class Piece(NamedTuple):
    """Parameters `start <= p < stop`: `rows` equal stretches, scaled by the magnitudes `magnitude ... magnitude + rows - 1`."""

    start: int
    stop: int
    magnitude: int
    rows: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """The tensors of the flat vector, in order."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("a layout needs at least one tensor")

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def magnitudes(self) -> int:
        return sum(tensor.rows for tensor in self.tensors)

    @cached_property
    def digest(self) -> Digest:
        return digest("layout", self.tensors)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First parameter of each tensor."""
        return tuple(accumulate((tensor.size for tensor in self.tensors[:-1]), initial=0))

    @cached_property
    def first_magnitudes(self) -> tuple[int, ...]:
        """First magnitude of each tensor."""
        return tuple(accumulate((tensor.rows for tensor in self.tensors[:-1]), initial=0))

    def magnitude_range(self, start: int, stop: int) -> tuple[int, int]:
        """Magnitudes `first <= m < last` that parameters [start, stop) need."""
        if start >= stop:
            return (0, 0)
        return (self._magnitude_of(start), self._magnitude_of(stop - 1) + 1)

    def _magnitude_of(self, parameter: int) -> int:
        index = bisect_right(self.starts, parameter) - 1
        return self.first_magnitudes[index] + (parameter - self.starts[index]) // self.tensors[index].row_length

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """[start, stop) cut into pieces, ascending: a cut row stands alone, whole rows of one tensor stay together."""
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            tensor, origin, first = self.tensors[index], self.starts[index], self.first_magnitudes[index]
            end, length = min(stop, origin + tensor.size), tensor.row_length
            while start < end:
                row, within = divmod(start - origin, length)
                rows = 1 if within else max(1, (end - start) // length)
                until = min(end, start - within + rows * length)
                yield Piece(start, until, first + row, rows, index)
                start = until
            index += 1


def layout_of(
    shapes: Iterable[tuple[str, tuple[int, ...], bool]], granularity: Literal["tensor", "row"] = "tensor"
) -> Layout:
    """The layout of tensors given as (name, shape, is_embedding): embedding-like tensors get a magnitude for each row (so
    that rows no batch touched stay where they are), matrices too with granularity "row"."""
    tensors = []
    for name, shape, is_embedding in shapes:
        size = 1
        for extent in shape:
            size *= extent
        by_row = len(shape) > 1 and (is_embedding or granularity == "row")
        tensors.append(Tensor(name, size, shape[0] if by_row else 1))
    return Layout(tuple(tensors))
