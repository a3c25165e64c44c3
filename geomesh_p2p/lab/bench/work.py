"""Who does how much of the work for its speed, and what the fastest site would do alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from geomesh_p2p.lab.bench.settings import Place, Setting

LITTLE = 0.25  # of a site's share of all sites' best speed: a smaller share of the tokens is far less

Figures = dict[str, Any]


def little_work(setting: Setting, seen: Sequence[Sequence[Mapping[str, Any]]], rounds: Sequence[int]) -> list[Figures]:
    """The sites whose share of the tokens is less than LITTLE of their share of all sites' best speed. `seen` has the peers of
    each seed, `rounds` how many its run had; of each site, the seed in which it trained least counts."""
    speed = sum(site.best_rate for site in setting.sites)
    least = dict[str, Figures]()
    for peers, of in zip(seen, rounds, strict=True):
        tokens = {peer["site"]: peer.get("tokens") for peer in peers}
        whole = sum(count for count in tokens.values() if count)
        if not whole or None in tokens.values():
            continue
        for site in setting.sites:
            peer = next((peer for peer in peers if peer["site"] == site.name), {})
            found = {"site": site.name, "rounds": peer.get("rounds") or 0, "of_rounds": of,
                     "tokens_share": (tokens.get(site.name) or 0) / whole, "speed_share": site.best_rate / speed}  # fmt: skip
            far_less = found["tokens_share"] < LITTLE * found["speed_share"]
            if far_less and found["tokens_share"] < least.get(site.name, {}).get("tokens_share", 1.0):
                least[site.name] = found
    return [least[name] for name in sorted(least)]


def fastest_alone(setting: Setting, sequences: float) -> tuple[str, float]:
    """The site that trains so many sequences soonest by itself, at its best batch and without an exchange, and its seconds. A
    site has the speed that the setting's changes give it, by share of these sequences."""
    seconds = {site.name: _alone(setting, site, sequences) for site in setting.sites}
    name = min(seconds, key=lambda one: seconds[one])
    return name, seconds[name]


def _alone(setting: Setting, site: Place, sequences: float) -> float:
    mine = [change for change in setting.changes if change.site == site.name]
    ends = sorted({0.0, 1.0, *(share for change in mine for share in (change.begins_share, change.ends_share))})
    slower = sum((b - a) / setting.speed(site.name, a) for a, b in pairwise(ends))
    return sequences / site.best_rate * slower
