"""What GeoMesh claims about itself, checked against a report: each claim with its figure, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OURS, REFERENCE, DELAYED = "geomesh", "diloco", "geomesh-delayed"
PAIRS = ((OURS, REFERENCE), ("geomesh-lion", "diloco-lion"))
OTHERS = {"diloco-tuned-H": 0.5, "async": 0.0, "diloco-steps": 0.0, "diloco-fp16": 0.0, "diloco-int8": 0.0}
"""What geomesh is sooner than besides, and by what share of time at least."""
SEEDS_FOR_MEDIANS = 3
MAX_PERPLEXITY_LOSS, MAX_LOSS_OF_ONE_SEED = 0.01, 0.02
CHANCE = 0.25  # of four continuations
MAX_CHOICE_LOSS = 0.01
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


def claims(report: Mapping[str, Any]) -> list[Claim]:
    """Those that the methods of `report` allow to be checked; none without geomesh and diloco, or both with Lion."""
    methods = report["methods"]
    max_perplexity_loss = MAX_PERPLEXITY_LOSS if len(report["seeds"]) >= SEEDS_FOR_MEDIANS else MAX_LOSS_OF_ONE_SEED
    found: list[Claim] = []
    for ours, reference in PAIRS:
        if ours in methods and reference in methods:
            found += _of_pair(methods[ours], methods[reference], reference, max_perplexity_loss)
    if OURS in methods and REFERENCE in methods:
        found += [_sooner(methods[OURS], methods[name], name, least) for name, least in OTHERS.items() if name in methods]
        if "async" in methods:
            found.append(_better(methods[OURS], methods["async"], "async"))
        found += _choice(methods[OURS], methods[REFERENCE])
    if DELAYED in methods:
        found.append(_at_most(f"WAN idle of {DELAYED}", methods[DELAYED]["wan_idle_share"], 0.02))
    return found


def _of_pair(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, max_loss: float) -> Iterator[Claim]:
    yield _sooner(ours, theirs, name, 0.75)
    yield _lower("straggler idle of the fastest site", ours, theirs, name, "straggler_idle_share_fastest", 10)
    yield _at_most(f"straggler idle of all sites (beside {name})", ours["straggler_idle_share"], 0.012)
    yield _lower("WAN idle", ours, theirs, name, "wan_idle_share", 8)
    yield _at_most(f"WAN idle (beside {name})", ours["wan_idle_share"], 0.08)
    yield _at_most(f"final perplexity above that of {name}, as a share", ours["final_ppl"] / theirs["final_ppl"] - 1, max_loss)


def _sooner(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, least: float) -> Claim:
    mine, other = ours["time_to_target_seconds"], theirs["time_to_target_seconds"]
    text, wanted = f"time to target below that of {name}, as a share", f"at least {least:g}" if least else "above 0"
    if mine is None:
        return Claim(text, None, wanted, False)
    figure = 1.0 if other is None else 1 - mine / other
    return Claim(text, figure, wanted, figure >= least if least else figure > 0)


def _better(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> Claim:
    figure = ours["final_ppl"] / theirs["final_ppl"] - 1
    return Claim(f"final perplexity against that of {name}, as a share", figure, "below 0", figure < 0)


def _choice(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Claim]:
    """Continuation choice, where it was asked: it says something only if diloco is well above chance."""
    paired = ours.get("continuation_against_diloco")
    if paired is None:
        return
    above = (theirs["continuation_accuracy"] - CHANCE) / theirs["continuation_stderr"]
    text = "continuation choice of diloco above chance, in standard errors"
    yield Claim(text, above, "at least 5", above >= 5)
    text = "continuation choice against diloco's, the low end of the paired 95% interval over items"
    yield Claim(text, paired["low"], f"at least {-MAX_CHOICE_LOSS:g}", paired["low"] >= -MAX_CHOICE_LOSS)


def _lower(text: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, key: str, times: float) -> Claim:
    factor = math.inf if ours[key] < NOTHING else theirs[key] / ours[key]
    return Claim(f"{text}, so many times lower than that of {name}", factor, f"at least {times:g}", factor >= times)


def _at_most(text: str, figure: float, most: float) -> Claim:
    return Claim(text, figure, f"at most {most:g}", figure <= most)
