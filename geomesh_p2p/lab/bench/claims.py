"""What GeoMesh claims about itself, checked against a report: each claim with its figure, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

REFERENCE = "diloco"
PAIRS = {"geomesh": (REFERENCE, 0.08), "geomesh-delayed": (REFERENCE, 0.02), "geomesh-lion": ("diloco-lion", 0.08)}
"""What each of ours is compared with, and the largest share of its time that it may wait for links."""
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
    """Those that the methods of `report` allow to be checked: of each of ours of which the reference was played as well."""
    methods = report["methods"]
    max_perplexity_loss = MAX_PERPLEXITY_LOSS if len(report["seeds"]) >= SEEDS_FOR_MEDIANS else MAX_LOSS_OF_ONE_SEED
    found: list[Claim] = []
    for name, (reference, most_waiting) in PAIRS.items():
        if name not in methods or reference not in methods:
            continue
        ours, theirs = methods[name], methods[reference]
        of_it = [*_of_pair(ours, theirs, reference, most_waiting), _perplexity(ours, theirs, reference, max_perplexity_loss)]
        if reference == REFERENCE:
            of_it += [_sooner(ours, methods[other], other, least) for other, least in OTHERS.items() if other in methods]
            of_it += [_perplexity(ours, methods["async"], "async", 0.0)] if "async" in methods else []
            of_it += _choice(ours, theirs)
        found += [replace(claim, text=f"{name}: {claim.text}") for claim in of_it]
    return found


def _of_pair(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, most_waiting: float) -> Iterator[Claim]:
    yield _sooner(ours, theirs, name, 0.75)
    yield _lower("straggler idle of the fastest site", ours, theirs, name, "straggler_idle_share_fastest", 10)
    yield _at_most("straggler idle of all sites", ours["straggler_idle_share"], 0.012)
    yield _lower("WAN idle", ours, theirs, name, "wan_idle_share", 8)
    yield _at_most("WAN idle", ours["wan_idle_share"], most_waiting)


def _sooner(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, least: float) -> Claim:
    mine, other = ours["time_to_target_seconds"], theirs["time_to_target_seconds"]
    text, wanted = f"time to target below that of {name}, as a share", f"at least {least:g}" if least else "above 0"
    if mine is None:
        return Claim(text, None, wanted, False)
    figure = 1.0 if other is None else 1 - mine / other
    return Claim(text, figure, wanted, figure >= least if least else figure > 0)


def _perplexity(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str, most: float) -> Claim:
    """Seed by seed, because each holds out other text, and then the median."""
    losses = [mine / other - 1 for mine, other in zip(ours["final_ppl_by_seed"], theirs["final_ppl_by_seed"], strict=True)]
    return _at_most(f"final perplexity above that of {name}, as a share, median over seeds", median(losses), most)


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
