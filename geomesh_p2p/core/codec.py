"""Contributions and parts as bytes: signs with magnitudes, or plain numbers for comparison.

    delta = anchor - weights (+ residual)      bit = sign of delta      magnitude = mean |delta| over a tensor (or a row of it)

A *section* encodes parameters [start, stop), `start` a multiple of 8: little-endian fp32 magnitudes (one for each tensor or
row that the section touches), then `width` bits a parameter, the lowest bits of a byte first. A payload is the section of the
whole vector. A reducer's part is the section of its share. Widths:

    1    a sign: ±magnitude                            magnitude: L1 mean, or root mean square, of what is encoded
    2    -3, -1, 1, 3 times the magnitude              0.624 mean |x|: of four even levels the best for normal x (Max 1960)
    4    -7 ... 7 times the magnitude (the step)       max |x| / 7
    8    -127 ... 127 times the magnitude (the step)   max |x| / 127
    16   fp16, 32 fp32                                 none

From width 4 on a section can say zero, so a tie stays one. One bit and two cannot: a zero (a parameter without a gradient, a
tie in a mean) is sent as + where index + round is even and as - where it is odd. So its errors cancel from round to round and
between neighbours instead of adding up; a tensor or row of zeros alone has magnitude zero and does not move at all.

Values decoded are fp32 and the same on every machine: only separate IEEE
multiplications and additions, element by element, in a fixed order. Kernels work in chunks that stay in the cache: no
full-size delta or mean ever exists. Nothing here is a reduction but the magnitudes, which are computed once and then sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.encoding import HALF_STEP, ONE, Fill, NotFinite, Passes, encode_section
from geomesh_p2p.core.layout import CHUNK, Layout, Piece, Tensor, layout_of
from geomesh_p2p.core.section import MAX_MAGNITUDE, NUMBERS, Bytes, Section, Vector, part_of, part_width, payload_width, whole

__all__ = [
    "CHUNK", "MAX_MAGNITUDE", "Layout", "Mean", "NotFinite", "Part", "PartEncoder", "Piece", "Tensor", "decode_part",
    "encode", "encode_part", "fault_in", "fault_in_part", "layout_of", "mean_of", "new_part_residual", "new_residual",
    "part_bytes", "part_width", "payload_bytes", "payload_width", "slice_payload",
]  # fmt: skip


def _table(width: int) -> Vector:
    """For each byte the `8 / width` fp32 numbers it stands for (to be scaled by a magnitude)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
    if width == 1:
        return 2 * bits - 1
    worth = 2.0 ** np.arange(width, dtype=np.float32)
    worth[-1] *= -1
    levels = bits.reshape(256, 8 // width, width) @ worth
    return np.ascontiguousarray(2 * levels + 1 if width == 2 else levels, dtype=np.float32)


_TABLES = {width: _table(width) for width in (1, 2, 4, 8)}


# ---------------------------------------------------------------- encoding


def encode(
    layout: Layout,
    anchor: Vector,
    weights: Vector,
    settings: CodecSection,
    residual: Vector | None = None,
    out: Bytes | None = None,
    round: int = 0,
) -> Bytes | NotFinite:
    """The payload of anchor - weights (+ residual), in `out` if given. The residual is read only: see `new_residual`.
    `round` decides the sign of zeros, nothing else."""
    return encode_section(whole(layout, settings), settings.magnitude == "rms", _delta(anchor, weights, residual), out, round)


def encode_part(
    layout: Layout,
    settings: CodecSection,
    mean: Vector,
    start: int,
    stop: int,
    residual: Vector | None = None,
    round: int = 0,
) -> Bytes | NotFinite:
    """A reducer's answer for its share [start, stop): `mean` (and `residual`) have stop - start elements."""
    section = part_of(layout, settings, start, stop)
    return encode_section(section, settings.magnitude == "rms", _shifted(mean, start, residual), None, round)


def new_residual(
    layout: Layout,
    anchor: Vector,
    weights: Vector,
    settings: CodecSection,
    payload: Any,
    residual: Vector | None = None,
) -> Vector:
    """What `payload` left unsaid, decayed: the residual from the moment that the payload's round is committed."""
    return _unsaid(whole(layout, settings), settings, _delta(anchor, weights, residual), payload)


def new_part_residual(
    layout: Layout,
    settings: CodecSection,
    mean: Vector,
    start: int,
    stop: int,
    part: Any,
    residual: Vector | None = None,
) -> Vector:
    """As `new_residual`, for a reducer's share (stop - start elements)."""
    return _unsaid(part_of(layout, settings, start, stop), settings, _shifted(mean, start, residual), part)


def _delta(anchor: Vector, weights: Vector, residual: Vector | None) -> Fill:
    def fill(start: int, stop: int, out: Vector) -> None:
        np.subtract(anchor[start:stop], weights[start:stop], out=out)
        if residual is not None:
            np.add(out, residual[start:stop], out=out)

    return fill


def _shifted(mean: Vector, origin: int, residual: Vector | None) -> Fill:
    def fill(start: int, stop: int, out: Vector) -> None:
        if residual is None:
            np.copyto(out, mean[start - origin : stop - origin])
        else:
            np.add(mean[start - origin : stop - origin], residual[start - origin : stop - origin], out=out)

    return fill


class PartEncoder(Passes):
    """`encode_part` without the whole mean in memory, for answers of up to 8 bits without a residual: fed chunk by chunk while
    the mean is being made, and with more than one bit (`twice`) fed the same mean again. The same bytes as encode_part."""

    def __init__(self, layout: Layout, settings: CodecSection, start: int, stop: int, round: int = 0) -> None:
        section = part_of(layout, settings, start, stop)
        if section.width > 8:
            raise ValueError(f"answers of {section.width} bits a parameter are plain numbers, which nothing is measured for")
        self.twice = section.width > 1
        super().__init__(section, settings.magnitude == "rms", np.empty(section.total_bytes, np.uint8), round)


def _unsaid(section: Section, settings: CodecSection, fill: Fill, data: Any) -> Vector:
    rest = np.empty(section.stop - section.start, np.float32)
    decoder, said = _Decoder(section, data), np.empty(CHUNK, np.float32)
    for start, stop in section.chunks(CHUNK):
        left = rest[start - section.start : stop - section.start]
        fill(start, stop, left)
        left -= decoder.decode(start, stop, list(section.layout.pieces(start, stop)), said[: stop - start])
        left *= np.float32(settings.residual_decay)
    return rest


# ---------------------------------------------------------------- decoding


class _Decoder:
    """Reads one section chunk by chunk: coefficient * level, the coefficient being fp32(weight * magnitude)."""

    def __init__(self, section: Section, data: Any, weight: np.float32 = ONE) -> None:
        checked = section.checked(data)
        self.section = section
        self.body = checked[section.head_bytes :]
        self.weight = weight
        self.coefficients = section.head(checked) * weight

    def decode(self, start: int, stop: int, pieces: Sequence[Piece], out: Vector) -> Vector:
        """Writes parameters [start, stop), `start` a multiple of 8, cut into `pieces`, to `out`."""
        section = self.section
        begin, end = section.span(start, stop)
        coded = self.body[begin:end]
        if section.width > 8:
            return np.multiply(coded.view(NUMBERS[section.width]), self.weight, out=out, dtype=np.float32)
        table, origin = _TABLES[section.width], section.first_magnitude
        if len(pieces) == 1 and pieces[0].rows == 1:
            return _look_up(table * self.coefficients[pieces[0].magnitude - origin], coded, out)
        _look_up(table, coded, out)
        for first, last, magnitude, rows, _ in pieces:
            stretch = out[first - start : last - start].reshape(rows, -1)
            np.multiply(stretch, self.coefficients[magnitude - origin : magnitude - origin + rows, None], out=stretch)
        return out


def _look_up(table: Vector, coded: Bytes, out: Vector) -> Vector:
    per_byte = table.shape[1]
    whole = out.size // per_byte
    table.take(coded[:whole], axis=0, out=out[: whole * per_byte].reshape(whole, per_byte), mode="clip")
    if whole < coded.size:
        out[whole * per_byte :] = table[coded[whole], : out.size - whole * per_byte]
    return out


def weights_of(tokens: Sequence[int]) -> tuple[np.float32, ...]:
    """fp32(tokens_i / sum of tokens), in the order given. Raises ValueError unless all are positive."""
    if not tokens or min(tokens) <= 0:
        raise ValueError(f"tokens {tuple(tokens)}: a mean needs at least one contribution, each with tokens")
    total = sum(tokens)
    return tuple(np.float32(count / total) for count in tokens)


class Mean:
    """The token-weighted mean of whole payloads, read stretch by stretch (`start` a multiple of 8).

    c_i = fp32(weight_i * magnitude_i), then ((±c_1) ± c_2) ± c_3 ... in the order given (site order), one fp32 addition after
    the other. Payloads are whole-size buffers; only the bytes that `slice_payload(start, stop)` names are used."""

    def __init__(self, layout: Layout, settings: CodecSection, payloads: Sequence[Any], tokens: Sequence[int]) -> None:
        if len(payloads) != len(tokens):
            raise ValueError(f"{len(payloads)} payloads but {len(tokens)} token counts")
        section = whole(layout, settings)
        self._layout = layout
        self._decoders = [_Decoder(section, p, w) for p, w in zip(payloads, weights_of(tokens), strict=True)]

    def read(self, start: int, stop: int, out: Vector) -> Vector:
        """Parameters [start, stop) in `out` (stop - start elements)."""
        Section(self._layout, 1, start, stop)
        scratch = np.empty(min(CHUNK, stop - start), np.float32)
        for begin in range(start, stop, CHUNK):
            end = min(begin + CHUNK, stop)
            pieces = list(self._layout.pieces(begin, end))
            into, term = out[begin - start : end - start], scratch[: end - begin]
            self._decoders[0].decode(begin, end, pieces, into)
            for decoder in self._decoders[1:]:
                np.add(into, decoder.decode(begin, end, pieces, term), out=into)
        return out


def mean_of(
    layout: Layout,
    settings: CodecSection,
    payloads: Sequence[Any],
    tokens: Sequence[int],
    start: int,
    stop: int,
    out: Vector,
) -> Vector:
    """`Mean(layout, settings, payloads, tokens).read(start, stop, out)`."""
    return Mean(layout, settings, payloads, tokens).read(start, stop, out)


class Terms:
    """What each payload alone adds to `Mean`, for whoever compares them."""

    def __init__(self, layout: Layout, settings: CodecSection, payloads: Sequence[Any], tokens: Sequence[int]) -> None:
        section = whole(layout, settings)
        self._layout = layout
        self._decoders = [_Decoder(section, p, w) for p, w in zip(payloads, weights_of(tokens), strict=True)]

    def read(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """[payload, parameter] for parameters [start, stop), at most CHUNK of them, `start` a multiple of 8."""
        terms = np.empty((len(self._decoders), stop - start), np.float32)
        pieces = list(self._layout.pieces(start, stop))
        for decoder, out in zip(self._decoders, terms, strict=True):
            decoder.decode(start, stop, pieces, out)
        return terms


class Part:
    """A reducer's answer for its share [start, stop), read stretch by stretch."""

    def __init__(self, layout: Layout, settings: CodecSection, part: Any, start: int, stop: int) -> None:
        self._layout = layout
        self._decoder = _Decoder(part_of(layout, settings, start, stop), part)

    def read(self, start: int, stop: int, out: Vector) -> Vector:
        """Parameters [start, stop) of the share in `out` (stop - start elements), `start` a multiple of 8."""
        for begin in range(start, stop, CHUNK):
            end = min(begin + CHUNK, stop)
            self._decoder.decode(begin, end, list(self._layout.pieces(begin, end)), out[begin - start : end - start])
        return out


def decode_part(layout: Layout, settings: CodecSection, part: Any, start: int, stop: int, out: Vector) -> Vector:
    """The mean that a reducer's answer for [start, stop) stands for, in `out` (stop - start elements)."""
    return Part(layout, settings, part, start, stop).read(start, stop, out)


# ---------------------------------------------------------------- sizes, slices and checks


def payload_bytes(layout: Layout, settings: CodecSection) -> int:
    return whole(layout, settings).total_bytes


def part_bytes(layout: Layout, settings: CodecSection, start: int, stop: int) -> int:
    return part_of(layout, settings, start, stop).total_bytes


def slice_payload(layout: Layout, settings: CodecSection, start: int, stop: int) -> list[tuple[int, int]]:
    """Half-open byte ranges of a payload that a reducer of [start, stop) needs: its magnitudes (if any) and its bits."""
    section = whole(layout, settings)
    Section(layout, section.width, start, stop)
    begin, end = section.span(start, stop)
    first, last = layout.magnitude_range(start, stop) if section.magnitudes else (0, 0)
    ranges = [(4 * first, 4 * last), (section.head_bytes + begin, section.head_bytes + end)]
    return [(low, high) for low, high in ranges if low < high]


class Sizes(NamedTuple):
    """How large what is said is, tensor by tensor: mean and maximum of |x|. With one bit or two the magnitudes of its rows say
    it: nothing is decoded, and with two the mean is the one that the sender measured, as far as it is honest (at most 1.9
    times that is said)."""

    means: list[float]
    maxima: list[float]


def tensor_sizes(layout: Layout, settings: CodecSection, payload: Any, start: int, stop: int) -> Sizes:
    """Of each tensor that parameters [start, stop) touch, in order, as far as they touch it. `payload` need hold no more than
    the bytes that `slice_payload(start, stop)` names."""
    return _sizes(whole(layout, settings), payload, start, stop)


def part_sizes(layout: Layout, settings: CodecSection, part: Any, start: int, stop: int) -> Sizes:
    """As `tensor_sizes`, for a reducer's answer for [start, stop)."""
    return _sizes(part_of(layout, settings, start, stop), part, start, stop)


def _sizes(section: Section, data: Any, start: int, stop: int) -> Sizes:
    if start >= stop:
        return Sizes([], [])
    if section.width <= 2:
        return _sizes_of_rows(section, data, start, stop)
    decoder, scratch = _Decoder(section, data), np.empty(CHUNK, np.float32)
    sums, counts, maxima = dict[int, float](), dict[int, int](), dict[int, float]()
    for begin in range(start, stop, CHUNK):
        end = min(begin + CHUNK, stop)
        pieces = list(section.layout.pieces(begin, end))
        values = decoder.decode(begin, end, pieces, scratch[: end - begin])
        np.abs(values, out=values)
        for piece in pieces:
            some = values[piece.start - begin : piece.stop - begin]
            sums[piece.tensor] = sums.get(piece.tensor, 0.0) + float(some.sum(dtype=np.float64))
            counts[piece.tensor] = counts.get(piece.tensor, 0) + some.size
            maxima[piece.tensor] = max(maxima.get(piece.tensor, 0.0), float(some.max()))
    return Sizes([sums[tensor] / counts[tensor] for tensor in sums], list(maxima.values()))


def _sizes_of_rows(section: Section, data: Any, start: int, stop: int) -> Sizes:
    layout = section.layout
    first, last = layout.magnitude_range(start, stop)
    head = section.head(section.checked(data))[first - section.first_magnitude : last - section.first_magnitude]
    edges = [first, *(edge for edge in layout.first_magnitudes if first < edge < last), last]
    rows = [head[low - first : high - first] for low, high in pairwise(edges)]
    mean, largest = (1 / HALF_STEP, 3.0) if section.width == 2 else (1.0, 1.0)  # in magnitudes
    return Sizes([mean * float(some.mean(dtype=np.float64)) for some in rows], [largest * float(some.max()) for some in rows])


def fault_in(layout: Layout, settings: CodecSection, payload: Any) -> str:
    """Why a received payload is refused (its length, a magnitude that is negative, absurd or not finite), or nothing."""
    return _fault(whole(layout, settings), payload)


def fault_in_part(layout: Layout, settings: CodecSection, part: Any, start: int, stop: int) -> str:
    """As `fault_in`, for a reducer's answer."""
    return _fault(part_of(layout, settings, start, stop), part)


def _fault(section: Section, data: Any) -> str:
    try:
        checked = section.checked(data)
    except ValueError as error:
        return str(error)
    numbers = section.head(checked) if section.width <= 8 else checked.view(NUMBERS[section.width])
    for start in range(0, numbers.size, CHUNK):
        some = numbers[start : start + CHUNK].astype(np.float32)
        lowest, highest = float(some.min()), float(some.max())
        if math.isnan(lowest + highest) or max(-lowest, highest) > MAX_MAGNITUDE or (lowest < 0 and section.width <= 8):
            return f"holds {lowest:g} ... {highest:g}: magnitudes are finite, not negative and at most {MAX_MAGNITUDE:g}"
    return ""
