"""Whether something grows: samples of a running peer, and the slope of each figure with its error."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.injection.proxy import family
from tests.process.sites import Site, Sites

PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def sample(site: Site) -> dict[str, float]:
    """Figures of one peer now: memory, descriptors and threads of its process and its daemon, series of its metrics page,
    and the sizes that it tells of itself (struck.py)."""
    assert site.process is not None
    figures: dict[str, float] = {"round": site.round}
    mine, *helpers = list(family(site.process.pid))
    for name, pids in (("peer", [mine]), ("daemon", helpers)):
        for pid in pids:
            for key, value in _process(pid).items():
                figures[f"{name}_{key}"] = figures.get(f"{name}_{key}", 0) + value
    series = [line for line in site.metrics().splitlines() if line and not line.startswith("#")]
    figures["metric_series"] = len(series)
    figures["metric_remotes"] = len({part for line in series for part in line.split('"') if "remote=" in line})
    return figures | {f"size_{key}": value for key, value in site.sizes().items()}


def _process(pid: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        figures["rss_mib"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MIB
        figures["descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        figures["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    return figures


@dataclass(frozen=True)
class Slope:
    """By least squares, per 1,000 rounds. `error` is the standard error, from the scatter about the line, for as many
    independent samples as there are: what is remembered for minutes is alike from one sample to the next."""

    name: str
    first: float
    last: float
    per_thousand: float
    error: float

    def __str__(self) -> str:
        return f"{self.name:28} {self.first:10.1f} -> {self.last:10.1f}   {self.per_thousand:+9.2f} ± {self.error:.2f}"


def slope(name: str, points: Sequence[tuple[float, float]]) -> Slope:
    """`points` are (round, value); the ends are medians of a tenth of them."""
    xs, ys = [x / 1000 for x, _ in points], [y for _, y in points]
    tenth = max(1, len(ys) // 10)
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    rate = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    scatter = [y - mean_y - rate * (x - mean_x) for x, y in zip(xs, ys, strict=True)]
    rest = sum(one**2 for one in scatter)
    alike = max(0.0, sum(map(math.prod, pairwise(scatter))) / rest) if rest else 0.0  # autocorrelation at lag 1
    error = math.sqrt(rest / (len(xs) - 2) / spread * (1 + alike) / (1 - alike)) if len(xs) > 2 and spread else math.inf
    return Slope(name, statistics.median(ys[:tenth]), statistics.median(ys[-tenth:]), rate, error)


# What a figure may grow by in 1,000 rounds with a hundred joins and leaves and still be called flat. Memory: what an allocator
# that is not compacted may well do. Sizes of tables: nothing, but a table that holds whoever is there now goes up and down.
ALLOWED = {"peer_rss_mib": 4.0, "daemon_rss_mib": 4.0}
ALLOWED_OTHERWISE = 2.0


def growing(slopes: Sequence[Slope]) -> list[Slope]:
    """Those whose growth is beyond what is allowed by more than twice its error."""
    return [
        one for one in slopes if one.per_thousand - 2 * one.error > ALLOWED.get(one.name.partition(" ")[2], ALLOWED_OTHERWISE)
    ]


def keep_logs(mesh: Sites) -> None:
    """For whoever looks into a finding: copies the mesh's folder below the one that GEOMESH_SOAK_KEEP names."""
    if target := os.environ.get("GEOMESH_SOAK_KEEP"):
        shutil.copytree(mesh.folder, Path(target) / f"{mesh.folder.name}-{time.time():.0f}")
