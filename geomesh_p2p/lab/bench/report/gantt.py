"""Rounds site by site on one axis of time, as a picture. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from geomesh_p2p.lab.bench.report.style import PARTS, WIDTH, Report, methods_of, time_of

MOST_ROWS = 48          # of one picture



def gantts(report: Report) -> list[tuple[str, str, Figure | None]]:
    """As many pictures as it takes, all with the same axis of time."""
    groups: list[dict[str, Any]] = [{}]
    rows = 0
    for name, method in methods_of(report).items():
        sites = {site for one in method.get("gantt") or () for site in one["sites"]}
        if not sites:
            continue
        if rows and rows + len(sites) > MOST_ROWS:
            groups.append({})
            rows = 0
        groups[-1][name] = method
        rows += len(sites)
    caption = (
        "The first seconds of each method, site by site, on one axis of time; white lines end a round. Where there are no"
        " rounds (async, ddp), the time between two validations is shown as training first, then waiting."
    )
    if any(method["engine"] == "real" for method in report["methods"].values()):
        caption += " In real time all that follows the last site's training is waiting for links: exchange, commit, next plan."
    return [
        (f"gantt-{number}" if len(groups) > 1 else "gantt", caption, _gantt(report, group) if group else None)
        for number, group in enumerate(groups, 1)
    ]


def _gantt(report: Report, methods: Mapping[str, Any]) -> Figure:
    end = report["gantt_seconds"]
    sites = {name: sorted({site for one in m["gantt"] for site in one["sites"]}) for name, m in methods.items()}
    most = max(len(names) for names in sites.values())
    height = 0.2 if most <= 8 else 0.14
    tall = sum(height * len(names) + 0.42 for names in sites.values()) + 0.75
    figure = Figure(figsize=(WIDTH, tall), layout="constrained")
    panels = figure.subplots(len(methods), 1, sharex=True, squeeze=False, height_ratios=[len(n) for n in sites.values()])[:, 0]
    for axes, (name, method) in zip(panels, methods.items(), strict=True):
        for place, site in enumerate(sites[name]):
            _lane(axes, place, site, method["gantt"], end)
        axes.set_yticks(range(len(sites[name])), sites[name], fontsize=7.5 if most <= 8 else 6)
        axes.set_ylim(len(sites[name]) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", length=0 if axes is not panels[-1] else 3)
        axes.set_title(name, loc="left", fontsize=9.5, fontweight="bold", pad=3)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.grid(axis="x")
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel(f"seconds ({time_of(report)})")
    handles = [Patch(color=colour, label=label) for _, label, colour in PARTS]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _lane(axes: Axes, place: int, site: str, rounds: Sequence[Mapping[str, Any]], end: float) -> None:
    for key, _, colour in PARTS:
        spans = []
        for one in rounds:
            bars = one["sites"].get(site)
            if bars is None or one["begins"] >= end:
                continue
            start = one["begins"]
            for before, _, _ in PARTS:
                if before == key:
                    break
                start += bars[before] or 0.0
            if start < end and bars[key]:
                spans.append((start, min(bars[key], end - start)))
        axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour, linewidth=0)
    for one in rounds:
        if one["ends"] < end and site in one["sites"]:
            axes.plot([one["ends"]] * 2, [place - 0.4, place + 0.4], color="#ffffff", linewidth=0.7, solid_capstyle="butt")
