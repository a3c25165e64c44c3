"""What GeoMesh claims about itself, checked against a report: each claim with its figure, and whether it holds.

A figure that cannot fail is no claim: where the reference hardly waits, so many times less of it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any

from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.report.figures import listed, little_text, measured, percent, unequal_tokens

REFERENCE = "diloco"
PAIRS = {"geomesh": (REFERENCE, 0.08), "geomesh-delayed": (REFERENCE, 0.02), "geomesh-lion": ("diloco-lion", 0.08)}
"""What each of ours is compared with, and the largest share of its time that it may wait for links."""
OTHERS = {"diloco-tuned-H": 0.5, "async": 0.0, "diloco-steps": 0.0, "diloco-fp16": 0.0, "diloco-int8": 0.0}
"""What geomesh is sooner than besides, and by what share of time at least."""
SEEDS_FOR_MEDIANS = 3
MAX_PERPLEXITY_LOSS, MAX_LOSS_OF_ONE_SEED = 0.01, 0.02
CHANCE = 0.25  # of four continuations
MAX_CHOICE_LOSS = 0.01
NOTHING = 1e-9          # a share of time that is rounding alone
MOST_UNEQUAL_TOKENS = 0.02  # where they differ by more, what models end with is no claim
HARDLY = 0.001          # a share of time of which so many times less is no claim
NEEDED = ("time_to_target_seconds_by_seed", "final_ppl_by_seed", "straggler_idle_share", "straggler_idle_share_fastest",
          "wan_idle_share")  # fmt: skip
AGAIN = "it is damaged, or of another version: run geomesh bench again (nothing that is trained is trained again)"

Method = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """`holds` is None where there is nothing to claim, for the reason in `note`. A figure that is not known is None."""

    text: str
    figure: float | None
    wanted: str
    holds: bool | None
    note: str = ""

    def __str__(self) -> str:
        if self.holds is None:
            return f"none   {self.text}: {self.note}"
        finite = self.figure is not None and math.isfinite(self.figure)
        known = _figure(self.figure) if self.figure is not None and finite else self.note or "not known"
        note = f" ({self.note})" if self.note and finite else ""
        return f"{'holds' if self.holds else 'FAILS'}  {self.text}: {known}{note} (wanted: {self.wanted})"


def _figure(value: float) -> str:
    """What is rounding alone is none."""
    return "0" if abs(value) < NOTHING else f"{value:.4g}"


def checked(report: Mapping[str, Any]) -> tuple[list[str], bool]:
    """In words, a line each, and whether all holds: something was claimed, and none of it fails. Raises ConfigError for a
    report without the figures."""
    found = claims(report)
    if any(claim.holds is not None for claim in found):
        return [str(claim) for claim in found], all(claim.holds is not False for claim in found)
    pairs = "; or ".join(f"{name} and {reference}" for name, (reference, _) in PAIRS.items())
    return [f"no claim can be checked: the report has none of the pairs {pairs} (methods of --vary have other names)"], False


def claims(report: Mapping[str, Any]) -> list[Claim]:
    """Those that the methods of `report` allow to be checked: of each of ours of which the reference was played as well."""
    methods = report["methods"]
    max_perplexity_loss = MAX_PERPLEXITY_LOSS if len(report["seeds"]) >= SEEDS_FOR_MEDIANS else MAX_LOSS_OF_ONE_SEED
    found: list[Claim] = []
    for name, (reference, most_waiting) in PAIRS.items():
        if name not in methods or reference not in methods:
            continue
        others = {other: least for other, least in OTHERS.items() if other in methods and reference == REFERENCE}
        for one in (name, reference, *others):
            _refuse_without_figures(one, methods[one])
        ours, theirs = methods[name], methods[reference]
        of_it = [*_of_pair(ours, theirs, reference, most_waiting), _perplexity(ours, theirs, reference, max_perplexity_loss)]
        of_it += [_sooner(ours, methods[other], other, least) for other, least in others.items()]
        if reference == REFERENCE:
            of_it += [_perplexity(ours, methods["async"], "async", 0.0)] if "async" in methods else []
            of_it += _choice(ours, theirs)
        found += [replace(claim, text=f"{name}: {claim.text}") for claim in of_it]
    return found


def _refuse_without_figures(name: str, method: Method) -> None:
    for key in NEEDED:
        if key not in method or (key.endswith("_by_seed") and not isinstance(method[key], list)):
            raise ConfigError(f"the report's method {name} has no {key}: {AGAIN}")


def _of_pair(ours: Method, theirs: Method, name: str, most_waiting: float) -> Iterator[Claim]:
    without = ours.get("sites_without_work")
    left_out = f"{listed(list(without))} never trained, and is not in it" if without else ""
    left_out = "; ".join([*([left_out] if left_out else []), *_little(ours)])
    yield _sooner(ours, theirs, name, 0.75)
    yield _lower("straggler idle of the fastest site", ours, theirs, name, "straggler_idle_share_fastest", 10, left_out)
    yield _at_most("straggler idle of all sites", ours["straggler_idle_share"], 0.012, left_out)
    yield _lower("WAN idle", ours, theirs, name, "wan_idle_share", 8, left_out)
    yield _at_most("WAN idle", ours["wan_idle_share"], most_waiting, left_out)


def _little(method: Method) -> list[str]:
    """Sites that trained, but far less than their speed allows: little of their time is in the idle shares."""
    without = method.get("sites_without_work") or ()
    return [little_text(one) for one in method.get("sites_with_little_work") or () if one["site"] not in without]


def _sooner(ours: Method, theirs: Method, name: str, least: float) -> Claim:
    """Seed by seed, because each has a target of its own, and then the median; the lower one of two."""
    text, wanted = f"time to target below that of {name}, as a share", f"at least {least:g}" if least else "above 0"
    pairs = list(zip(ours["time_to_target_seconds_by_seed"], theirs["time_to_target_seconds_by_seed"], strict=False))
    shares = [_share_sooner(mine, other) for mine, other in pairs]
    if not shares:
        return Claim(text, None, wanted, False)
    middle = median(shares) if all(math.isfinite(share) for share in shares) else median_low(shares)
    late = sum(not measured(mine) for mine, _ in pairs)
    notes = [_of_seeds(late, len(pairs), "does not reach it", "do not reach it")] if late else []
    if middle == math.inf:
        return Claim(text, None, wanted, True, "; ".join([f"not reached by {name}", *notes]))
    if middle == -math.inf:
        at_once = all(measured(mine) for mine, _ in pairs)
        return Claim(text, None, wanted, False, f"{name} has it at the start" if at_once else "not reached")
    alone = sum(share == math.inf for share in shares)
    if alone:
        notes.append(f"{name}: {_of_seeds(alone, len(pairs), 'does not reach it', 'do not reach it')}")
    return Claim(text, middle, wanted, middle >= least if least else middle > 0, "; ".join(notes))


def _share_sooner(mine: float | None, other: float | None) -> float:
    """Without end where only one of them gets there. Nothing is sooner than the start."""
    if not measured(mine):
        return -math.inf
    if not measured(other):
        return math.inf
    if other == 0:
        return 0.0 if mine == 0 else -math.inf
    return 1 - mine / other


def _of_seeds(count: int, seeds: int, one: str, several: str) -> str:
    return f"{count} of {seeds} seeds {one if count == 1 else several}"


def _perplexity(ours: Method, theirs: Method, name: str, most: float) -> Claim:
    """Seed by seed, because each holds out other text, and then the median."""
    text = f"final perplexity above that of {name}, as a share, median over seeds"
    pairs = list(zip(ours["final_ppl_by_seed"], theirs["final_ppl_by_seed"], strict=False))
    if not pairs or not all(measured(mine) and measured(other) and other > 0 for mine, other in pairs):
        lost = sum(not measured(mine) for mine, _ in pairs)
        who = _of_seeds(lost, len(pairs), "ends", "end") if lost else f"of {name} not all seeds end"
        return Claim(text, None, f"at most {most:g}", False, f"{who} with a perplexity that is a number")
    if unequal := unequal_tokens(ours, theirs, name, MOST_UNEQUAL_TOKENS):
        return Claim(text, None, f"at most {most:g}", None, f"not comparable, this {unequal}")
    unequal = unequal_tokens(ours, theirs, name)
    return _at_most(text, median([mine / other - 1 for mine, other in pairs]), most, f"this {unequal}" if unequal else "")


def _choice(ours: Method, theirs: Method) -> Iterator[Claim]:
    """Continuation choice, where it was asked: it says something only if diloco is well above chance."""
    paired = ours.get("continuation_against_diloco")
    if paired is None:
        return
    accuracy, error = theirs.get("continuation_accuracy"), theirs.get("continuation_stderr")
    above = (accuracy - CHANCE) / max(error, NOTHING) if measured(accuracy) and measured(error) else None
    text = "continuation choice of diloco above chance, in standard errors"
    yield Claim(text, above, "at least 5", above is not None and above >= 5)
    text = "continuation choice against diloco's, the low end of the paired 95% interval over items"
    low, wanted = paired.get("low"), f"at least {-MAX_CHOICE_LOSS:g}"
    if unequal := unequal_tokens(ours, theirs, REFERENCE, MOST_UNEQUAL_TOKENS):
        yield Claim(text, None, wanted, None, f"not comparable, this {unequal}")
    else:
        yield Claim(text, low, wanted, measured(low) and low >= -MAX_CHOICE_LOSS)


def _lower(text: str, ours: Method, theirs: Method, name: str, key: str, times: float, note: str = "") -> Claim:
    mine, other = ours[key], theirs[key]
    text, wanted = f"{text}, so many times lower than that of {name}", f"at least {times:g}"
    if not measured(mine) or not measured(other):
        return Claim(text, None, wanted, False)
    if other < HARDLY:
        return Claim(text, None, wanted, None, f"not comparable, {name} has {percent(other)} of it, this {percent(mine)}")
    if mine < NOTHING:
        none = f"none of it, {name} {percent(other)}"
        return Claim(text, math.inf, wanted, True, f"{none}; {note}" if note else none)
    return Claim(text, other / mine, wanted, other / mine >= times, note)


def _at_most(text: str, figure: float | None, most: float, note: str = "") -> Claim:
    if not measured(figure):
        return Claim(text, None, f"at most {most:g}", False)
    return Claim(text, figure, f"at most {most:g}", figure <= most, note)
