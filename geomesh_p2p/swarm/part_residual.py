"""What a reducer's answers left unsaid (error feedback of the second phase). It advances only with the commit of the
attempt that used it, and follows its share when the planner moves it: parameters that are new to the share begin at zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from geomesh_p2p.core import codec
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.core.types import Range
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec


@dataclass(frozen=True)
class _Pending:
    """An answer whose update is not committed yet."""

    body: Digest
    share: Range
    mean: Vector
    part: Any


class PartResidual:
    """One peer's residual as a reducer, from where a snapshot left it (`restored`). Losing it costs a little of one round's
    precision."""

    def __init__(self, layout_and_codec: ExchangeCodec, restored: tuple[Range, Vector] | None = None) -> None:
        self._codec = layout_and_codec
        self._share, self._values = restored or (Range(0, 0), np.zeros(0, np.float32))
        self._pending: _Pending | None = None

    def of(self, share: Range) -> Vector:
        """The residual of `share`, as far as this peer has one."""
        values = np.zeros(len(share), np.float32)
        had = self._share
        start, stop = max(share.start, had.start), min(share.stop, had.stop)
        if start < stop:
            values[start - share.start : stop - share.start] = self._values[start - had.start : stop - had.start]
        return values

    def committed_values(self) -> tuple[Range, Vector] | None:
        """(share, values) as of the last commit, for a snapshot: not changed later. None if there is nothing."""
        return (self._share, self._values) if len(self._share) else None

    def forget(self) -> None:
        """What it is the rest of is undone."""
        self._share, self._values, self._pending = Range(0, 0), np.zeros(0, np.float32), None

    def answered(self, body: Digest, share: Range, mean: Vector, part: Any) -> None:
        """`part` was this peer's answer in the update with this body; it counts once that is committed."""
        self._pending = _Pending(body, share, mean, part)

    def committed(self, body: Digest) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and pending.body == body:
            share, layout, settings = pending.share, self._codec.layout, self._codec.settings
            before = self.of(share)
            self._values = codec.new_part_residual(
                layout, settings, pending.mean, share.start, share.stop, pending.part, before
            )
            self._share = share
