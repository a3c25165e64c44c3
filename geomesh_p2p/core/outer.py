"""The outer step: the committed mean moves the anchor, the same way on every machine.

SGD with (Nesterov) momentum on the mean delta g (a pseudo-gradient; Sutskever et al. 2013, as in DiLoCo):

    momentum = mu * momentum + g        step = g + mu * momentum  (plain: momentum)        anchor = anchor - lr * step

every multiplication, addition and subtraction on its own, fp32, element by element: never fused, never reordered, and with
subnormal numbers kept (a library built with -ffast-math may switch them off for a whole thread).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core.codec import CHUNK, Layout, Mean, Part, part_bytes, payload_bytes
from geomesh_p2p.core.section import Bytes
from geomesh_p2p.core.types import Update
from geomesh_p2p.errors import DataError

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class OuterState:
    """The shared weights and the outer momentum after the last committed round; both arrays are changed in place."""

    anchor: Vector
    momentum: Vector

    @classmethod
    def founded(cls, anchor: Vector) -> OuterState:
        return cls(anchor, np.zeros_like(anchor))


def apply_mean(state: OuterState, mean: Vector, start: int, stop: int, settings: OuterSection) -> None:
    """Moves parameters [start, stop) by `mean` (stop - start elements, read only)."""
    rate, mu = np.float32(settings.learning_rate), np.float32(settings.momentum)
    scratch = np.empty(min(CHUNK, stop - start), np.float32)
    for begin in range(start, stop, CHUNK):
        end = min(begin + CHUNK, stop)
        g, step = mean[begin - start : end - start], scratch[: end - begin]
        momentum, anchor = state.momentum[begin:end], state.anchor[begin:end]
        np.multiply(momentum, mu, out=momentum)
        np.add(momentum, g, out=momentum)
        if settings.nesterov:
            np.multiply(momentum, mu, out=step)
            np.add(g, step, out=step)
            np.multiply(step, rate, out=step)
        else:
            np.multiply(momentum, rate, out=step)
        np.subtract(anchor, step, out=anchor)


def expected_anchor(state: OuterState, weights: Vector, share: float, settings: OuterSection) -> Vector:
    """A new vector: where the anchor will be, as far as one contributor can tell before the others' contributions are here.

    `weights` are what its own contribution is made from, `share` is its part of the round's tokens. For the others stands what
    all gave in the rounds before, (1 - mu) * momentum, which is the exponential mean of the committed means. `state` stays as
    it is; unlike its own steps, this one may differ from machine to machine."""
    found, own = np.array(weights, np.float32), np.float32(share)
    others = np.float32((1 - share) * (1 - settings.momentum))
    for begin in range(0, found.size, CHUNK):
        piece = slice(begin, begin + CHUNK)
        then = OuterState(np.array(state.anchor[piece]), np.array(state.momentum[piece]))
        mean = own * (then.anchor - found[piece]) + others * then.momentum
        apply_mean(then, mean, 0, mean.size, settings)
        found[piece] = then.anchor
    return found


def apply_update(
    state: OuterState, layout: Layout, codec: CodecSection, outer: OuterSection, update: Update, body: Any
) -> None:
    """Folds one committed update into the state. Without contributors nothing moves, momentum neither.

    `body` is any buffer of bytes: a gather's payloads in contributor order, or a reduce's parts in share order (only shares
    that are not empty); or a list of those payloads or parts. Raises, before anything moved, ValueError if its length does not
    fit and DataError if this thread's arithmetic is not that of the others."""
    if np.array([2**-126], np.float32)[0] * np.float32(0.5) == 0:
        raise DataError(
            "this process flushes subnormal numbers to zero, so its weights would part from the others': find the library that "
            "was built with -ffast-math, or call torch.set_flush_denormal(False) after loading it"
        )
    buffers = [np.frombuffer(one, np.uint8) for one in (body if isinstance(body, list) else [body])]
    if not update.contributors:
        if found := sum(buffer.size for buffer in buffers):
            raise ValueError(f"round {update.round} has no contributors but a body of {found} bytes")
        return
    if update.topology == "gather":
        payloads = _cut(buffers, [payload_bytes(layout, codec)] * len(update.contributors), update.round)
        mean = Mean(layout, codec, payloads, [c.tokens for c in update.contributors])
        _fold(state, outer, mean, 0, layout.parameters)
        return
    shares = [(share.start, share.stop) for share in update.shares if share.start < share.stop]
    if [start for start, _ in shares] + [layout.parameters] != [0] + [stop for _, stop in shares]:
        raise ValueError(f"the shares of round {update.round} do not cover the {layout.parameters} parameters in order")
    parts = _cut(buffers, [part_bytes(layout, codec, start, stop) for start, stop in shares], update.round)
    for (start, stop), part in zip(shares, parts, strict=True):
        _fold(state, outer, Part(layout, codec, part, start, stop), start, stop)


def _cut(buffers: list[Bytes], sizes: Sequence[int], round: int) -> list[Bytes]:
    """The payloads or parts, of `sizes` bytes, that a body consists of, whether it came whole or as these. Copies nothing."""
    found, total = [buffer.size for buffer in buffers], sum(sizes)
    if found == list(sizes):
        return buffers
    if len(found) > 1 or sum(found) != total:
        text = f"the body of round {round} has {sum(found)} bytes in {len(found)} buffers"
        raise ValueError(f"{text}, not {total} in 1 or {len(sizes)}")
    return [buffers[0][end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _fold(state: OuterState, outer: OuterSection, mean: Mean | Part, start: int, stop: int) -> None:
    scratch = np.empty(min(CHUNK, stop - start), np.float32)
    for begin in range(start, stop, CHUNK):
        end = min(begin + CHUNK, stop)
        apply_mean(state, mean.read(begin, end, scratch[: end - begin]), begin, end, outer)
