"""What GeoMesh claims about itself, checked against a report: each claim with its figure, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OURS, REFERENCE, TUNED = "geomesh", "diloco", "diloco-tuned-H"
MAX_PERPLEXITY_LOSS = 0.02
NOTHING = 1e-9  # a share of time that is rounding alone


@dataclass(frozen=True)
class Claim:
    text: str
    figure: float | None
    wanted: str
    holds: bool

    def __str__(self) -> str:
        figure = "not known" if self.figure is None else f"{self.figure:.4g}"
        return f"{'holds' if self.holds else 'FAILS'}  {self.text}: {figure} (wanted: {self.wanted})"


def claims(report: Mapping[str, Any], max_perplexity_loss: float = MAX_PERPLEXITY_LOSS) -> list[Claim]:
    """Those that the methods of `report` allow to be checked; none without geomesh and diloco."""
    methods = report["methods"]
    if OURS not in methods or REFERENCE not in methods:
        return []
    return list(_against_diloco(methods[OURS], methods[REFERENCE], max_perplexity_loss)) + [
        _sooner(methods[OURS], methods[other], other, least)
        for other, least in ((TUNED, 0.5), ("async", 0.0), ("diloco-steps", 0.0), ("diloco-fp16", 0.0), ("diloco-int8", 0.0))
        if other in methods
    ]


def _against_diloco(ours: Mapping[str, Any], theirs: Mapping[str, Any], max_loss: float) -> Iterator[Claim]:
    yield _sooner(ours, theirs, REFERENCE, 0.75)
    yield _lower("straggler idle of the fastest site", ours, theirs, "straggler_idle_share_fastest", 10)
    yield _at_most("straggler idle of all sites", ours["straggler_idle_share"], 0.012)
    yield _lower("WAN idle", ours, theirs, "wan_idle_share", 8)
    yield _at_most("WAN idle", ours["wan_idle_share"], 0.08)
    yield _at_most("final perplexity above diloco's, as a share", ours["final_ppl"] / theirs["final_ppl"] - 1, max_loss)


def _sooner(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, least: float) -> Claim:
    mine, other = ours["time_to_target_seconds"], theirs["time_to_target_seconds"]
    text, wanted = f"time to target below that of {name}, as a share", f"at least {least:g}" if least else "above 0"
    if mine is None:
        return Claim(text, None, wanted, False)
    figure = 1.0 if other is None else 1 - mine / other
    return Claim(text, figure, wanted, figure >= least if least else figure > 0)


def _lower(text: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str, times: float) -> Claim:
    factor = math.inf if ours[key] < NOTHING else theirs[key] / ours[key]
    return Claim(f"{text}, so many times lower than diloco's", factor, f"at least {times:g}", factor >= times)


def _at_most(text: str, figure: float, most: float) -> Claim:
    return Claim(text, figure, f"at most {most:g}", figure <= most)
