"""What a benchmark came to in plain words. Every sentence follows from the figures: what is worse is said as what is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from geomesh_p2p.lab.bench.report.figures import (
    DELAYED,
    FIRST,
    REFERENCE,
    TUNED,
    is_ours,
    listed,
    little_text,
    measured,
    number,
    of_seeds,
    overlap,
    percent,
    ratio,
    reached,
    signed,
    target_text,
    unequal_tokens,
)
from geomesh_p2p.lab.bench.report.setting import slow

Report = Mapping[str, Any]
Method = Mapping[str, Any]
MAX_OVERRUN_SHARE = 0.01
ALIKE = 0.0005          # differences smaller than this are none


@dataclass(frozen=True)
class Pair:
    """Ours, and what it is set against."""

    name: str
    ours: Method
    other_name: str
    other: Method


def pair_of(report: Report, other: str = REFERENCE) -> Pair | None:
    """`geomesh` against `other`. Where there are only variants of one of them, the one that is first at the target stands for
    it; where there is no diloco at all, the first of the others."""
    methods: Mapping[str, Method] = report["methods"]
    ours = [name for name in methods if is_ours(name)]
    others = [name for name in methods if not is_ours(name)]
    if other not in methods and other == REFERENCE and others:
        other = _soonest(methods, [name for name in others if name.startswith(f"{REFERENCE}[")] or others)
    if not ours or other not in methods:
        return None
    name = FIRST if FIRST in methods else _soonest(methods, ours)
    return Pair(name, methods[name], other, methods[other])


def compared(report: Report) -> list[Pair]:
    """The pair, and training ahead against the same; of its variants the one that is first at the target."""
    pair = pair_of(report)
    if pair is None:
        return []
    ahead = [name for name in report["methods"] if _is_ahead(name)]
    if not ahead or _is_ahead(pair.name):
        return [pair]
    name = _soonest(report["methods"], ahead)
    return [pair, replace(pair, name=name, ours=report["methods"][name])]


def _is_ahead(name: str) -> bool:
    return name.partition("[")[0] == DELAYED


def _soonest(methods: Mapping[str, Method], names: list[str]) -> str:
    def seconds(name: str) -> float:
        return value if measured(value := methods[name].get("time_to_target_seconds")) else float("inf")

    return min(names, key=seconds)


def summary(report: Report) -> list[str]:
    """A few sentences: how much sooner, why, what is worse, which site and link are slow, what the figures are worth."""
    pairs = compared(report)
    lines = _failed(report)
    if pairs:
        pair, *ahead = pairs
        lines += [_sooner(report, pair) + _limit(pair), *_target(report), *_against_tuned(report, pair), *_why(pair)]
        lines += [*_alone(report, pair), _worse(report, pair), *_others(report, pair)]
        for one in ahead:
            lines += [f"{_sooner(report, one)} {_worse(report, one)}", *_against_tuned(report, one), *_others(report, one)]
        lines += _ours_later(report)
    else:
        lines += [_fastest(report), *_target(report)]
    lines += [*_one_site(report, pairs), *_while_changed(report)]
    return [*lines, *slow(report), *_worth(report)]


def _failed(report: Report) -> list[str]:
    """The methods that are not compared, and why: of an error with several lines the last, as of a traceback."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for one in report.get("failed") or ():
        error = (one["error"].strip().splitlines() or ["-"])[-1].rstrip(".")
        seeds.setdefault((one["method"], error), []).append(one["seed"])
    return [f"{name} failed with {of_seeds(of)} and is not compared: {error}." for (name, error), of in seeds.items()]


# ---------------------------------------------------------------- time


def _fastest(report: Report) -> str:
    seconds = {name: m.get("time_to_target_seconds") for name, m in report["methods"].items()}
    there = {name: value for name, value in seconds.items() if measured(value)}
    target = f"perplexity {number(report['target_ppl'], '.3f')}"
    finals = {name: value for name, m in report["methods"].items() if measured(value := m.get("final_ppl"))}
    best = min(finals, key=lambda one: float(finals[one]), default=None)
    lowest = f" The lowest final perplexity is {finals[best]:.3f}, of {best}." if best is not None else ""
    if not there:
        now_and_then = [f"{name} ({reached(m)})" for name, m in report["methods"].items() if reached(m).some]
        most = f" with more than half of its seeds; with some: {listed(now_and_then)}" if now_and_then else ""
        return f"No method reaches {target}{most}.{lowest}"
    name = min(there, key=lambda one: float(there[one]))
    return f"{name} reaches {target} first, after {there[name]:.1f} s{reached(report['methods'][name]).note}.{lowest}"


def _target(report: Report) -> list[str]:
    return [f"The {target_text(report)}."] if report.get("target_rule") and target_text(report) else []


def _sooner(report: Report, pair: Pair) -> str:
    target = f"perplexity {number(report['target_ppl'], '.3f')}"
    mine, theirs = (m.get("time_to_target_seconds") for m in (pair.ours, pair.other))
    ours, other = reached(pair.ours), reached(pair.other)
    if not measured(mine):
        text = f"{pair.name} reaches {target} with {ours} seeds only" if ours.some else f"{pair.name} does not reach {target}"
        if measured(theirs):
            return f"{text}; {pair.other_name} does after {theirs:.1f} s{other.note}."
        return f"{text}; {pair.other_name} {f'does with {other} seeds only' if other.some else 'does not either'}."
    text = f"{pair.name} reaches {target} after {mine:.1f} s{ours.note}"
    if not measured(theirs):
        return f"{text}; {pair.other_name} does {f'with {other} seeds only' if other.some else 'not'}."
    return text + f", {pair.other_name} after {theirs:.1f} s{other.note}: {_difference(mine, theirs)}."


def _limit(pair: Pair) -> str:
    """Behind how much sooner ours is, where both get there."""
    theirs = pair.other.get("time_to_target_seconds")
    limit = ratio({"x": pair.other.get("limit_to_target_seconds")}, {"x": theirs}, "x")
    if limit is None or not measured(pair.ours.get("time_to_target_seconds")):
        return ""
    return f" The limit is {1 - limit:.1%} less: {pair.other_name}'s tokens with all devices busy and no byte moved."


def _difference(mine: float, theirs: float) -> str:
    if not theirs and mine:
        return "it is slower"
    if mine == theirs or abs(mine / theirs - 1) < ALIKE:
        return "no difference"
    if mine < theirs:
        return f"{1 - mine / theirs:.1%} less time" + (f" ({theirs / mine:.1f} times as fast)" if mine else "")
    if mine >= 2 * theirs:
        return f"{mine / theirs:.1f} times as long, it is slower"
    return f"{mine / theirs - 1:.1%} more time, it is slower"


def _against_tuned(report: Report, pair: Pair) -> list[str]:
    tuned = report["methods"].get(TUNED)
    if tuned is None or pair.other_name == TUNED:
        return []
    mine, theirs = pair.ours.get("time_to_target_seconds"), tuned.get("time_to_target_seconds")
    if not measured(mine) or not measured(theirs):
        return []
    text = f"{pair.name} against {TUNED} (the best of three round lengths, here {tuned.get('is', '-')}): "
    text += _difference(mine, theirs) + reached(tuned).note
    limit = ratio({"x": tuned.get("limit_to_target_seconds")}, {"x": theirs}, "x")
    return [text + (f"; the limit is {1 - limit:.1%} less." if limit is not None else ".")]


# ---------------------------------------------------------------- reasons


def _why(pair: Pair) -> list[str]:
    lines = []
    keys = ("compute_share", "straggler_idle_share", "wan_idle_share")
    shares = [[m.get(key) for key in keys] for m in (pair.ours, pair.other)]
    if all(measured(value) for row in shares for value in row):
        said = [
            f"{name}'s sites train {row[0]:.1%} of the time, wait {row[1]:.1%} for slower sites and {row[2]:.1%} for links"
            for name, row in zip((pair.name, pair.other_name), shares, strict=True)
        ]
        lines.append(f"Why: {said[0]}; {said[1]}.")
    tokens, time = (ratio(pair.ours, pair.other, key) for key in ("tokens_to_target", "time_to_target_seconds"))
    if tokens and time:
        rounds = ratio(pair.ours, pair.other, "rounds_to_target")
        text = f"{pair.name} needs {tokens:.3f} times {pair.other_name}'s tokens, {time / tokens:.3f} times the time for each"
        if rounds:
            text += f"; in rounds: {rounds:.3f} times as many, each {time / rounds:.3f} times as long"
        lines.append(text + ".")
    return lines


def _alone(report: Report, pair: Pair) -> list[str]:
    """What each half brings alone, if that was measured."""
    halves = {"planning": f"{FIRST}-fp32", "signs": f"{REFERENCE}-1bit"}
    if pair.name != FIRST or pair.other_name != REFERENCE:
        return []
    said = []
    for what, name in halves.items():
        change = ratio(report["methods"].get(name, {}), pair.other, "time_to_target_seconds")
        if change is not None:
            said.append(f"{what} alone ({name}) {signed(change)}")
    both = ratio(pair.ours, pair.other, "time_to_target_seconds")
    return [f"Time to the target against {REFERENCE}: {', '.join(said)}, both {signed(both)}."] if said and both else []


def _one_site(report: Report, pairs: list[Pair]) -> list[str]:
    """Whether many sites are sooner than one, which exchanges nothing."""
    said = []
    for name in (pairs[0].other_name, *(pair.name for pair in pairs)) if pairs else report["methods"]:
        mine, alone = (report["methods"][name].get(key) for key in ("wall_seconds", "fastest_alone_seconds"))
        if measured(mine) and measured(alone) and alone:
            said.append(f"{name} {mine:.1f} s instead of {alone:.1f} s, {_difference(mine, alone)}")
    if not said:
        return []
    site = report.get("fastest_alone_site") or "The fastest site"
    how = "the same tokens at its best batch, no exchange"
    return [f"Against {site} alone ({how}): {'; '.join(said)}. Perplexity is not compared."]


# ---------------------------------------------------------------- what is worse

# (key, what, whether more is better)
JUDGED: tuple[tuple[str, str, bool], ...] = (
    ("time_to_target_seconds", "time to the target", False),
    ("wall_seconds", "time for all tokens", False),
    ("final_ppl", "final perplexity", False),
    ("continuation_accuracy", "continuation choice", True),
    ("tokens_to_target", "tokens to the target", False),
    ("straggler_idle_share", "waiting for slower sites", False),
    ("wan_idle_share", "waiting for links", False),
    ("bytes_payload", "bytes sent", False),
)


def _worse(report: Report, pair: Pair) -> str:
    worse, better = list[str](), list[str]()
    for key, what, more in JUDGED:
        a, b = pair.ours.get(key), pair.other.get(key)
        if measured(a) and measured(b):
            if paired := _paired(pair, key):  # item by item, over all seeds, which medians say nothing of
                a = b + paired["difference"]
            if abs(a - b) > ALIKE * abs(b) and not (key.endswith("_share") and percent(a) == percent(b)):
                kind = better if (a > b) == more else worse
                kind.append(f"{what} {_change(a, b, key)}{_certain(report, pair, key)}")
        elif measured(a) and key == "time_to_target_seconds":
            better.append(f"{what} ({_stays_away(pair.other_name, pair.other)})")
        elif measured(b) and key == "time_to_target_seconds":
            worse.append(f"{what} ({_stays_away(pair.name, pair.ours)})")
    mine, theirs = reached(pair.ours), reached(pair.other)
    if mine.seeds * theirs.of != theirs.seeds * mine.of and (mine.some or theirs.some):
        kind = better if mine.seeds * theirs.of > theirs.seeds * mine.of else worse
        kind.append(f"seeds that reach the target {mine} instead of {theirs}")
    known = {one["site"] for one in pair.other.get("sites_with_little_work") or ()}
    for one in pair.ours.get("sites_with_little_work") or ():
        if one["site"] not in known:
            part = f"{percent(one['tokens_share'])} of the tokens, with {percent(one['speed_share'])} of the speed"
            worse.append(f"work for {one['site']} ({part})")
    text = f"Worse than {pair.other_name}: {listed(worse)}. Better: {listed(better)}."
    if unequal := unequal_tokens(pair.ours, pair.other, pair.other_name):
        text += f" Final figures are not at equal tokens: {pair.name} {unequal}."
    return text


def _stays_away(name: str, method: Method) -> str:
    return f"{name} gets there with {reached(method)} seeds only" if reached(method).some else f"{name} does not get there"


def _change(mine: float, theirs: float, key: str) -> str:
    if key == "continuation_accuracy":
        return f"{100 * (mine - theirs):+.2f} points"
    if key.endswith("_share"):
        return f"{percent(mine)} instead of {percent(theirs)}"
    return signed(mine / theirs) if theirs else f"{mine:.3g} instead of none"


def _paired(pair: Pair, key: str) -> Mapping[str, Any] | None:
    """The difference between answers to the same items, if `key` is about those."""
    known = key == "continuation_accuracy" and pair.other_name == REFERENCE
    return pair.ours.get("continuation_against_diloco") if known else None


def _certain(report: Report, pair: Pair, key: str) -> str:
    """A difference of medians means little where the seeds overlap. Of answers to the same items the interval is known."""
    if paired := _paired(pair, key):
        return f" (95% interval {100 * paired['low']:+.2f} to {100 * paired['high']:+.2f})"
    several = len(pair.ours.get("seeds") or report["seeds"]) > 1
    return " (the seeds' ranges overlap)" if several and overlap(pair.ours, pair.other, key) else ""


def _others(report: Report, pair: Pair) -> list[str]:
    """The other methods that are not ours, in brief."""
    said = []
    for name, other in report["methods"].items():
        if is_ours(name) or name in (pair.other_name, TUNED):
            continue
        changes = [ratio(pair.ours, other, key) for key in ("time_to_target_seconds", "final_ppl")]
        if changes != [None, None]:
            said.append(f"{name} {signed(changes[0])}, {signed(changes[1])}")
    return [f"{pair.name}'s time to the target and final perplexity against the others: {'; '.join(said)}."] if said else []


def _ours_later(report: Report) -> list[str]:
    """Methods of ours that lose to plain DiLoCo."""
    reference = report["methods"].get(REFERENCE)
    if reference is None or not measured(reference.get("time_to_target_seconds")):
        return []
    late = []
    for name, method in report["methods"].items():
        change = ratio(method, reference, "time_to_target_seconds")
        if is_ours(name) and (change is None or change > 1 + ALIKE):
            own = method.get("time_to_target_seconds")
            if own == reference["time_to_target_seconds"]:
                continue
            partly = f"with {reached(method)} seeds only" if reached(method).some else "not at all"
            partly = f"after {own:.1f} s" if measured(own) else partly
            late.append(f"{name} ({signed(change) if change else partly})")
    return [f"Later at the target than {REFERENCE}: {listed(late)}."] if late else []


def _while_changed(report: Report) -> list[str]:
    known = {name: m.get("straggler_idle_share_settled") for name, m in report["methods"].items() if "is" not in m}
    said = [f"{name} {percent(value)}" for name, value in known.items() if measured(value)]
    if not said:
        return []
    return [f"From the third round of a change of the setting until its end, sites wait for slower ones: {', '.join(said)}."]


# ---------------------------------------------------------------- what the figures are worth


def _worth(report: Report) -> list[str]:
    lines = []
    if len(report["seeds"]) == 1:
        lines.append("One seed: how far the figures scatter is not known.")
    left_out = [f"{listed(names)} ({name})" for name, m in report["methods"].items()
                if "is" not in m and (names := list(m.get("sites_without_work") or ()))]  # fmt: skip
    if left_out:
        lines.append(f"Sites that never trained, and are not in the idle shares: {listed(left_out)}.")
    lines += _defaults(report)
    for name, m in report["methods"].items():
        if (little := m.get("sites_with_little_work")) and "is" not in m:
            lines.append(f"Far less work than their speed allows, with {name}: {'; '.join(map(little_text, little))}.")
    overrun = [name for name, m in report["methods"].items() if (m.get("emulation_overrun_share") or 0.0) > MAX_OVERRUN_SHARE]
    if overrun:
        lines.append(f"Emulated speeds were not kept (overrun above 1%), so the idle figures are not valid: {listed(overrun)}.")
    return lines


def _defaults(report: Report) -> list[str]:
    keys: Mapping[str, list[str]] = report.get("outer_defaults") or {}
    names = list(dict.fromkeys(name for of in keys.values() for name in of if name in report["methods"]))
    if not names:
        return []
    advice = f"--vary {' '.join(f'{key}=VALUE,VALUE,...' for key in keys)} sweeps them"
    why = "because the run file does not set them: they are not tuned for this model"
    return [f"{listed(names)} ran with GeoMesh's defaults of {listed(list(keys))}, {why}; {advice}."]
