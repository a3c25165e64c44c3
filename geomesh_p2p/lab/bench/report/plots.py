"""Pictures of a benchmark's report: perplexity, what the time to the target is made of, idle time, bytes, changes on the way.

Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from geomesh_p2p.lab.bench.report.figures import is_ours, measured, short
from geomesh_p2p.lab.bench.report.gantt import gantts
from geomesh_p2p.lab.bench.report.style import (
    BLUE,
    FAR_APART,
    GRID,
    INK,
    PARTS,
    REST,
    STYLE,
    WIDTH,
    Report,
    bars,
    columns_for,
    looks_of,
    methods_of,
    name_rows,
    tall,
    time_of,
    to_svg,
)


def pictures(report: Report) -> dict[str, tuple[str, str]]:
    """(caption, SVG) by name, in the order in which they are read; those without anything to show are left out."""
    drawn: dict[str, tuple[str, str]] = {}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        for name, caption, figure in (*_plain(report), *gantts(report)):
            if figure is not None:
                drawn[name] = (caption, to_svg(figure, name))
    return drawn


def _plain(report: Report) -> list[tuple[str, str, Figure | None]]:
    seeds = "Thin: each seed; thick: the median. " if len(report["seeds"]) > 1 else ""
    product = (
        "Seconds to the target are rounds times seconds a round: fewer rounds and less waiting told apart. The mark is the"
        " limit for the same tokens: all devices busy, no bytes. Scales are logarithmic where values are far apart."
    )
    slower = "Time spent waiting for slower sites, round by round. Grey: while the setting is changed."
    return [
        ("perplexity", f"Validation perplexity of the anchor. {seeds}Dashed: the target.", _perplexity(report)),
        ("effects", product, _effects(report)),
        ("idle", "Where the sites' time goes, all sites and rounds together.", _idle(report)),
        ("bytes", "Bytes sent by all sites together. The scale is logarithmic.", _bytes(report)),
        ("changes", slower, _changes(report)),
    ]


# ---------------------------------------------------------------- perplexity


def _perplexity(report: Report) -> Figure | None:
    methods = {
        name: m for name, m in methods_of(report).items()
        if any(sum(measured(ppl) for ppl in curve["val_ppl"]) > 1 for curve in m["curves"])
    }  # fmt: skip
    if not methods:
        return None
    looks, target = looks_of(report), report["target_ppl"]
    figure = Figure(figsize=(WIDTH, 4.2 + 0.18 * math.ceil(len(methods) / columns_for(methods))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, method in sorted(methods.items(), key=lambda item: is_ours(item[0])):      # ours are drawn over the others
        colour, dashes = looks[name]
        for axes, along, unit in ((left, "seconds", 1.0), (right, "tokens", 1e6)):
            curves = [(np.array(c[along]) / unit, _numbers(c["val_ppl"])) for c in method["curves"] if c["val_ppl"]]
            if len(curves) > 1:
                for x, y in curves:
                    axes.plot(x, y, color=colour, linestyle=dashes, linewidth=0.7, alpha=0.5)
            axes.plot(*_median(curves), color=colour, linestyle=dashes, linewidth=2.0, label=name)
    ends = [curve["seconds"][-1] for method in methods.values() for curve in method["curves"] if curve["seconds"]]
    if min(ends) > 0 and max(ends) > FAR_APART * min(ends):
        left.set_xscale("log")
        left.set_xlim(left=min(ends) / FAR_APART)
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    else:
        left.set_xlim(left=0)
    right.set_xlim(left=0)
    for axes, label in ((left, f"seconds ({time_of(report)})"), (right, "million tokens")):
        axes.set_xlabel(label)
        axes.grid()
        if measured(target):
            axes.axhline(target, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    _perplexity_scale(left, methods, target)
    left.set_ylabel("validation perplexity")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=columns_for(methods))
    return figure


def _numbers(values: Sequence[float | None]) -> Any:
    return np.array([value if measured(value) else math.nan for value in values])


def _median(curves: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Of all curves, as far as all of them go."""
    if len(curves) == 1:
        return curves[0]
    end = min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x[x <= end] for x, _ in curves]))
    logs = [np.interp(grid, x, np.log(y)) for x, y in curves]
    return grid, np.exp(np.median(logs, axis=0))


def _perplexity_scale(axes: Axes, methods: Mapping[str, Any], target: float | None) -> None:
    """Logarithmic; the first moments, which would take most of the height, are cut off."""
    told = [ppl for method in methods.values() for curve in method["curves"] for ppl in curve["val_ppl"]]
    seen = [ppl for ppl in told if measured(ppl) and ppl > 0]
    low = min([*seen, *([target] if measured(target) else [])])
    high = max(seen)
    top = min(high, 5 * low) if high > 5 * low else high
    axes.set_yscale("log")
    axes.set_ylim(low * 0.96, top * 1.04)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


# ---------------------------------------------------------------- effects, idle time, bytes


def _effects(report: Report) -> Figure | None:
    methods = methods_of(report)
    if not any(measured(m.get("time_to_target_seconds")) for m in methods.values()):
        return None
    looks, names = looks_of(report), list(methods)
    figure = tall(len(names), 1.1)
    rows = figure.subplots(1, 4, sharey=True)

    def figures(key: str) -> list[float | None]:
        return [value if measured(value := methods[name].get(key)) else None for name in names]

    seconds, rounds = figures("time_to_target_seconds"), figures("rounds_to_target")
    each = [a / b if a is not None and b else None for a, b in zip(seconds, rounds, strict=True)]
    panels = (("tokens a round", figures("tokens_per_round")), ("rounds to target", rounds), ("× seconds a round", each),
              ("= seconds to target", seconds))  # fmt: skip
    for axes, (title, values) in zip(rows, panels, strict=True):
        bars(axes, names, values, looks, short)
        axes.set_title(title)
    for place, limit in enumerate(figures("limit_to_target_seconds")):
        if limit is not None:
            rows[-1].plot([limit, limit], [place - 0.42, place + 0.42], color=INK, linewidth=1.6)
    name_rows(rows[0], names)
    return figure


def _idle(report: Report) -> Figure | None:
    methods = {name: m for name, m in methods_of(report).items() if measured(m.get("compute_share"))}
    if not methods:
        return None
    figure = tall(len(methods), 1.2)
    axes = figure.subplots()
    for place, method in enumerate(methods.values()):
        start = 0.0
        for key, _, colour in PARTS:
            share = 100 * (method.get(f"{key}_share") or 0.0)
            axes.barh(place, share, left=start, height=0.7, color=colour)
            if share >= 5:
                dark = colour == BLUE
                axes.text(start + share / 2, place, f"{share:.1f}%", ha="center", va="center", fontsize=8,
                          color="#ffffff" if dark else "#000000")  # fmt: skip
            start += share
        axes.barh(place, max(0.0, 100 - start), left=start, height=0.7, color=REST)
    name_rows(axes, list(methods))
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the sites' time")
    handles = [Patch(color=colour, label=label) for _, label, colour in PARTS] + [Patch(color=REST, label="anything else")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _bytes(report: Report) -> Figure | None:
    methods = {name: m for name, m in methods_of(report).items() if measured(m.get("bytes_payload")) and m["bytes_payload"] > 0}
    if not methods:
        return None
    figure, looks = tall(len(methods), 0.8), looks_of(report)
    axes = figure.subplots()
    values = [method["bytes_payload"] / 1e6 for method in methods.values()]
    low = 10 ** math.floor(math.log10(min(values)) - 0.3)
    for place, (name, value) in enumerate(zip(methods, values, strict=True)):
        axes.barh(place, value - low, left=low, height=0.7, color=looks[name][0])
        axes.annotate(f"{short(value)} MB", (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(low, max(values) * (max(values) / low) ** 0.16)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel("MB sent")
    axes.grid(axis="x")
    name_rows(axes, list(methods))
    return figure


def _changes(report: Report) -> Figure | None:
    methods = {name: m for name, m in methods_of(report).items() if any(one["changed"] for one in m.get("rounds") or ())}
    if not methods:
        return None
    figure, looks = Figure(figsize=(WIDTH, 3.6), layout="constrained"), looks_of(report)
    axes = figure.subplots()
    for name, method in methods.items():
        x, y = [0.0], [100 * (one["straggler_idle_share"] or 0.0) for one in method["rounds"]]
        for one in method["rounds"]:
            x.append(x[-1] + one["tokens"] / 1e6)
        colour, dashes = looks[name]
        axes.plot(x, y[:1] + y, drawstyle="steps-pre", color=colour, linestyle=dashes, linewidth=1.6, label=name)
    whole = report["budget_tokens"] / 1e6
    for change in report.get("changes") or ():
        axes.axvspan(change["begins_share"] * whole, change["ends_share"] * whole, color=GRID, alpha=0.15, linewidth=0)
    axes.set_xlabel("million tokens")
    axes.set_ylabel("% of the sites' time")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns_for(methods))
    return figure
