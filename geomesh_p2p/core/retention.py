"""What a peer keeps on disk of its past, by count and by bytes, and how long the disk then lasts. Pure: sizes are arguments."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

from geomesh_p2p.config import SaveSection

LEAST_SNAPSHOTS = 2
PAST_SECONDS = 6 * 3600.0        # that growth is taken from
LEAST_PAST_SECONDS = 1800.0      # less says more about the hour than about the run
APART_SECONDS, FEW_SAMPLES = 60.0, 4


# ---------------------------------------------------------------- limits


@dataclass(frozen=True)
class Retained:
    """`going`: rounds of the snapshots that go; `first_update`: the oldest update that stays; `size_bytes` of what stays."""

    going: tuple[int, ...]
    first_update: int
    size_bytes: int


def retained(
    snapshots: Mapping[int, int], updates: Mapping[int, int], limit_bytes: int | None, read: Collection[int] = ()
) -> Retained:
    """What stays of snapshots and updates (bytes by round) within the limit: the oldest go first, but never the newest two
    snapshots, one that somebody reads (`read`), or an update that follows the oldest snapshot kept."""
    kept, log = sorted(snapshots), sorted(updates)
    size = sum(snapshots.values()) + sum(updates.values())
    going: list[int] = []
    at = 0
    while limit_bytes is not None and size > limit_bytes and kept:
        if at < len(log) and log[at] <= kept[0]:
            size -= updates[log[at]]
            at += 1
        elif len(kept) > LEAST_SNAPSHOTS and kept[0] not in read:
            size -= snapshots[kept[0]]
            going.append(kept.pop(0))
        else:
            break
    return Retained(tuple(going), log[at] if at < len(log) else max(log, default=0) + 1, size)


@dataclass(frozen=True)
class Fullest:
    """The most that snapshots and log come to: `number` snapshots, of which one is being written, and `updates` updates;
    less, if save.keep_bytes says so. `least_bytes` is what is kept whatever the limit, `pair_bytes` the snapshots of it."""

    number: int
    updates: int
    size_bytes: int
    least_bytes: int
    pair_bytes: int


def fullest(save: SaveSection, snapshot_bytes: int, update_bytes: int) -> Fullest:
    """For snapshots and updates of these sizes."""
    between = save.snapshot_every_rounds
    number, updates = save.keep_snapshots + 1, save.keep_updates + save.keep_snapshots * between
    size = number * snapshot_bytes + updates * update_bytes
    pair = LEAST_SNAPSHOTS * snapshot_bytes
    least = pair + between * update_bytes
    if save.keep_bytes is not None:  # it is looked to after each snapshot: until then there is one more, and the updates since
        size = min(size, max(save.keep_bytes, least) + snapshot_bytes + between * update_bytes)
    return Fullest(number, updates, size, least, pair)


def above_limit(limit_bytes: int, most: Fullest) -> tuple[str, str]:
    """Where even the least is more than save.keep_bytes: that, and what to do about it."""
    what = (
        f"save.keep_bytes is {limit_bytes / 1e6:,.0f} MB, but the last {LEAST_SNAPSHOTS} snapshots and the updates after them "
        f"take {most.least_bytes / 1e6:,.0f} MB and are kept"
    )
    if most.pair_bytes <= limit_bytes or most.least_bytes - most.pair_bytes > most.pair_bytes:
        return what, "raise it, or lower save.snapshot_every_rounds"
    return what, f"raise it ({LEAST_SNAPSHOTS} snapshots alone take {most.pair_bytes / 1e6:,.0f} MB)"


# ---------------------------------------------------------------- forecast


@dataclass(frozen=True)
class DiskSample:
    """`free_bytes` on the disk and `kept_bytes` in snapshots and log, of which `fullest_bytes` is the most."""

    at_seconds: float
    free_bytes: float
    kept_bytes: int
    fullest_bytes: int


class DiskForecast:
    """How long the disk lasts at the growth of the last hours. Snapshots and log grow to their limit and no further; all else
    that takes space there, whoever's it is, is taken to go on as it does."""

    def __init__(self) -> None:
        self._samples: deque[DiskSample] = deque()

    def add(self, sample: DiskSample) -> None:
        """`sample` is of a moment right after old snapshots and updates were deleted."""
        samples, now = self._samples, sample.at_seconds
        if samples and now - samples[-1].at_seconds < APART_SECONDS:
            return
        samples.append(sample)
        while len(samples) > FEW_SAMPLES and now - samples[0].at_seconds > PAST_SECONDS:
            samples.popleft()

    def full_in_seconds(self) -> float:
        """From the last sample on; inf if the disk does not fill, NaN if that cannot be told yet."""
        samples = self._samples
        if not samples or samples[-1].at_seconds - samples[0].at_seconds < LEAST_PAST_SECONDS:
            return math.nan
        last, times = samples[-1], [sample.at_seconds for sample in samples]
        others = max(0.0, -_growth(times, [sample.free_bytes + sample.kept_bytes for sample in samples]))
        kept = max(0.0, _growth(times, [float(sample.kept_bytes) for sample in samples]))
        until = max(0, last.fullest_bytes - last.kept_bytes) / kept if kept else 0.0
        if (others + kept) * until > last.free_bytes:
            return last.free_bytes / (others + kept)
        return until + (last.free_bytes - (others + kept) * until) / others if others else math.inf


def _growth(times: Sequence[float], sizes: Sequence[float]) -> float:
    """Bytes a second, by least squares; what comes to less than a byte is the arithmetic's."""
    slope = linear_regression(times, sizes).slope
    return slope if abs(slope) * (times[-1] - times[0]) >= 1 else 0.0
