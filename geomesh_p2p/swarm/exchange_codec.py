"""What an exchange needs to know about bytes: sizes, slices, means and parts, for one layout and one codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core import codec
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.chunks import Bytes


@dataclass(frozen=True)
class ExchangeCodec:
    layout: Layout
    settings: CodecSection

    @cached_property
    def payload_bytes(self) -> int:
        return codec.payload_bytes(self.layout, self.settings)

    def part_bytes(self, share: Range) -> int:
        return codec.part_bytes(self.layout, self.settings, share.start, share.stop)

    def slices(self, share: Range) -> list[tuple[int, int]]:
        """Byte ranges of a payload that the reducer of `share` needs; the last one holds the parameters, in order."""
        return codec.slice_payload(self.layout, self.settings, share.start, share.stop)

    def mean(self, payloads: Sequence[Bytes], tokens: Sequence[int], start: int, stop: int, out: Vector) -> None:
        codec.mean_of(self.layout, self.settings, payloads, tokens, start, stop, out)

    def encode_part(self, mean: Vector, share: Range, residual: Vector | None) -> Bytes:
        return _finite(codec.encode_part(self.layout, self.settings, mean, share.start, share.stop, residual))

    def part_encoder(self, share: Range) -> codec.PartEncoder | None:
        """None if a part of these settings takes the whole mean."""
        if self.settings.residual or codec.part_width(self.settings) != 1:
            return None
        return codec.PartEncoder(self.layout, self.settings, share.start, share.stop)

    def feed(self, encoder: codec.PartEncoder, payloads: Sequence[Bytes], tokens: Sequence[int], ready: int) -> None:
        """Encode the mean of what has come up to parameter `ready`."""
        encoder.feed(ready, codec.Mean(self.layout, self.settings, payloads, tokens).read)

    def finish(self, encoder: codec.PartEncoder) -> Bytes:
        return _finite(encoder.finish())

    def fault_in_payload(self, payload: Bytes) -> str:
        """Why a contribution is refused by rule, or nothing. Bytes outside a slice are zero and pass."""
        return codec.fault_in(self.layout, self.settings, payload)

    def fault_in_part(self, part: Bytes, share: Range) -> str:
        return codec.fault_in_part(self.layout, self.settings, part, share.start, share.stop)


def _finite(part: Bytes | codec.NotFinite) -> Bytes:
    if not isinstance(part, np.ndarray):
        raise ValueError(f"the mean of {part.tensor} is not finite although every contribution was")
    return part
