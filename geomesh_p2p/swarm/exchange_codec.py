"""What an exchange needs to know about bytes: sizes, slices, means and parts, for one layout and one codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core import codec
from geomesh_p2p.core.agreement import Agreement, agreements
from geomesh_p2p.core.bounds import magnitude_fault, part_fault
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

    def encode_part(self, mean: Vector, share: Range, residual: Vector | None, round: int) -> Bytes:
        return _finite(codec.encode_part(self.layout, self.settings, mean, share.start, share.stop, residual, round))

    def part_encoder(self, share: Range, round: int) -> codec.PartEncoder | None:
        """None if a part of these settings takes the whole mean: with a residual, or of plain numbers."""
        if self.settings.residual or codec.part_width(self.settings) > 8:
            return None
        return codec.PartEncoder(self.layout, self.settings, share.start, share.stop, round)

    def feed(self, encoder: codec.PartEncoder, payloads: Sequence[Bytes], tokens: Sequence[int], ready: int) -> None:
        """Encode the mean of what has come up to parameter `ready`."""
        encoder.feed(ready, codec.Mean(self.layout, self.settings, payloads, tokens).read)

    def feed_again(self, encoder: codec.PartEncoder, payloads: Sequence[Bytes], tokens: Sequence[int], ready: int) -> None:
        """Once the whole mean was fed and only where `encoder.twice`: the same mean again, up to parameter `ready`."""
        encoder.feed_again(ready, codec.Mean(self.layout, self.settings, payloads, tokens).read)

    def finish(self, encoder: codec.PartEncoder) -> Bytes:
        return _finite(encoder.finish())

    def fault_in_payload(self, payload: Bytes) -> str:
        """Why a contribution is refused by rule, or nothing. Bytes outside a slice are zero and pass."""
        return codec.fault_in(self.layout, self.settings, payload)

    def odd_ones(self, payloads: Sequence[Bytes], share: Range | None) -> dict[int, str]:
        """Contributions (by index) that are too large beside the others to be meant, and why. `share`: as far as it goes."""
        start, stop = (share.start, share.stop) if share is not None else (0, self.layout.parameters)
        sizes = [codec.tensor_sizes(self.layout, self.settings, payload, start, stop) for payload in payloads]
        means, maxima = [size.means for size in sizes], [size.maxima for size in sizes]
        faults = {i: magnitude_fault(means[i], means) or magnitude_fault(maxima[i], maxima) for i in range(len(sizes))}
        return {index: fault for index, fault in faults.items() if fault}

    def odd_part(self, part: Bytes, share: Range, own: Bytes) -> str:
        """Why a reducer's answer is too large beside this peer's own contribution to be a mean, or nothing."""
        span = (share.start, share.stop)
        said = codec.part_sizes(self.layout, self.settings, part, *span)
        return part_fault(said.means, codec.tensor_sizes(self.layout, self.settings, own, *span).means)

    def agreement(
        self, payloads: Sequence[Bytes], tokens: Sequence[int], share: Range | None, seed: bytes
    ) -> list[Agreement]:
        """For each payload, how far its signs agree with the others', over a sample of the share."""
        start, stop = (share.start, share.stop) if share is not None else (0, self.layout.parameters)
        terms = codec.Terms(self.layout, self.settings, payloads, tokens)
        return agreements(terms.read, len(payloads), start, stop, seed)

    def fault_in_part(self, part: Bytes, share: Range) -> str:
        return codec.fault_in_part(self.layout, self.settings, part, share.start, share.stop)


def _finite(part: Bytes | codec.NotFinite) -> Bytes:
    if not isinstance(part, np.ndarray):
        raise ValueError(f"the mean of {part.tensor} is not finite although every contribution was")
    return part
