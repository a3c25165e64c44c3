"""A benchmark's setting in words: which site and which link are slow, and which engine produced which figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from geomesh_p2p.lab.bench.report.figures import listed, measured, short

Report = Mapping[str, Any]



def slow(report: Report) -> list[str]:
    """Which site and which link are slowest, and by how much."""
    return [*_slow_site(report), *_slow_link(report)]


def rate_of(site: Mapping[str, Any]) -> float:
    """Sequences a second at its largest batch."""
    return float(site["max_batch"] / (site["fixed_seconds"] + site["max_batch"] * site["sequence_seconds"]))


def _slow_site(report: Report) -> list[str]:
    rates = {site["name"]: rate_of(site) for site in report.get("sites") or ()}
    if len(rates) < 2:
        return []
    slowest, fastest = min(rates, key=lambda name: rates[name]), max(rates, key=lambda name: rates[name])
    if rates[fastest] < rates[slowest] * 1.01:
        return ["All sites are equally fast."]
    facts = f"{short(rates[slowest])} sequences/s, {rates[fastest] / rates[slowest]:.1f} times slower than {fastest}"
    return [f"The slowest site is {slowest}: {facts}."]


def pairs_of(report: Report) -> list[tuple[str, str, float, float]]:
    """(site, site, Mbit/s of the slower direction, round trip in ms) of every two sites."""
    names = [site["name"] for site in report.get("sites") or ()]
    links = report.get("links") or {}
    rates, trips = links.get("mbps"), links.get("rtt_ms")
    if not rates or not trips:
        return []
    found = []
    for i, one in enumerate(names):
        for j in range(i + 1, len(names)):
            both = [rate for rate in (rates[i][j], rates[j][i]) if measured(rate)]
            if both:
                found.append((one, names[j], min(both), max(trips[i][j] or 0.0, trips[j][i] or 0.0)))
    return found


def _slow_link(report: Report) -> list[str]:
    pairs = pairs_of(report)
    if not pairs:
        return []
    slowest = min(pairs, key=lambda pair: pair[2])
    usual = median(pair[2] for pair in pairs)
    scale, trip = report.get("rate_scale"), max(pairs, key=lambda pair: pair[3])
    rate = f"{short(slowest[2])} Mbit/s"
    if len(pairs) == 1 or slowest[2] > 0.99 * max(pair[2] for pair in pairs):
        text = f"All links have the same rate, {rate}" if len(pairs) > 1 else f"The link has {rate}"
    else:
        same = [pair for pair in pairs if pair[2] == slowest[2]]
        text = f"The slowest link is {_between(report, same)}: {rate}, the median is {short(usual)}"
    if measured(scale):
        text += f" (as written in the setting; {scale:.3g} times that for this model)"
    if trip[3]:
        text += f". The longest round trip is {trip[0]} to {trip[1]}: {short(trip[3])} ms"
    return [text + "."]


def _between(report: Report, pairs: Sequence[tuple[str, str, float, float]]) -> str:
    """The first of them; the two regions if all are between those."""
    first = f"{pairs[0][0]} to {pairs[0][1]}"
    if len(pairs) == 1:
        return first
    region = {site["name"]: site.get("region") or site["name"] for site in report["sites"]}
    ends = {tuple(sorted((region[one], region[other]))) for one, other, _, _ in pairs}
    return f"{first} (and {len(pairs) - 1} more, {'all ' if len(ends) == 1 else ''}between {listed(_regions(ends))})"


def _regions(ends: set[tuple[str, ...]]) -> list[str]:
    return [" and ".join(pair) for pair in sorted(ends)]


def engines(report: Report) -> Sequence[str]:
    """Which engine produced which figures, and what that means."""
    by_engine: dict[str, list[str]] = {}
    for name, method in report["methods"].items():
        by_engine.setdefault(method["engine"], []).append(name)
    meaning = {
        "virtual": "virtual time: gradients, codec and outer steps are real, plans are the product's; seconds are computed from"
        " the setting's devices and links, exchange and commit included. Validation, saving and planning cost nothing there",
        "real": "real processes on one machine, with real sockets; devices and links are emulated, seconds are measured and"
        " divided by the time scale",
    }
    lines = []
    for engine, names in by_engine.items():
        scales = sorted({f"{m['emulation_time_scale']:.4g}" for name in names
                         if measured((m := report["methods"][name]).get("emulation_time_scale"))})  # fmt: skip
        scale = f"; time scale {', '.join(scales)}" if scales else ""
        lines.append(f"{', '.join(names)}: {meaning.get(engine, engine)}{scale}.")
    return lines
