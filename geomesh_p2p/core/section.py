"""Sections: where magnitudes and bits of parameters [start, stop) lie in bytes (the format is described in codec.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.layout import Layout

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
MAX_MAGNITUDE = 1e6
"""A contribution that moves a parameter further than this in one round is absurd and refused by rule."""

_PAYLOAD_WIDTHS = {"sign": 1, "int8": 8, "fp16": 16, "fp32": 32}
NUMBERS: dict[int, Any] = {16: np.dtype("<f2"), 32: np.dtype("<f4")}


def payload_width(settings: CodecSection) -> int:
    """Bits a parameter of a contribution."""
    return _PAYLOAD_WIDTHS[settings.payload]


def part_width(settings: CodecSection) -> int:
    """Bits a parameter of a reducer's answer; plain payloads are answered in kind."""
    return settings.second_phase_bits if settings.payload == "sign" else payload_width(settings)


@dataclass(frozen=True)
class Section:
    """Parameters [start, stop) at `width` bits each, as bytes."""

    layout: Layout
    width: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.layout.parameters:
            raise ValueError(f"[{self.start}, {self.stop}) is not within the {self.layout.parameters} parameters")
        if self.start % 8:
            raise ValueError(f"start {self.start} is not a multiple of 8")

    @cached_property
    def first_magnitude(self) -> int:
        return self.layout.magnitude_range(self.start, self.stop)[0]

    @cached_property
    def magnitudes(self) -> int:
        first, last = self.layout.magnitude_range(self.start, self.stop) if self.width <= 8 else (0, 0)
        return last - first

    @property
    def head_bytes(self) -> int:
        return 4 * self.magnitudes

    @property
    def total_bytes(self) -> int:
        return self.head_bytes + self.span(self.start, self.stop)[1]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Bytes after the magnitudes that hold parameters [start, stop)."""
        return ((start - self.start) * self.width // 8, -(-(stop - self.start) * self.width // 8))

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        for start in range(self.start, self.stop, size):
            yield start, min(start + size, self.stop)

    def head(self, data: Bytes) -> Vector:
        return data[: self.head_bytes].view("<f4")

    def checked(self, data: Any) -> Bytes:
        """`data` as bytes of the right number; raises ValueError."""
        array: Bytes = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        if array.dtype != np.uint8 or array.size != self.total_bytes:
            where = f"[{self.start}, {self.stop})"
            raise ValueError(f"{array.size} bytes of {array.dtype} are not the {self.total_bytes} that {where} takes")
        return array


def whole(layout: Layout, settings: CodecSection) -> Section:
    return Section(layout, payload_width(settings), 0, layout.parameters)


def part_of(layout: Layout, settings: CodecSection, start: int, stop: int) -> Section:
    return Section(layout, part_width(settings), start, stop)
