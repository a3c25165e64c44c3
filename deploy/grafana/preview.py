"""A picture of the *Run* dashboard, drawn from its own JSON and a Prometheus that has scraped a run (needs the `dev` extra).

    docker compose up -d                                     # or any Prometheus with a run in it
    python deploy/grafana/preview.py --prometheus http://127.0.0.1:9090 --minutes 10 --out docs/images/run-dashboard.png

Panels, places, titles, units, colours, legends and queries are those of the dashboard. Grafana has no part in it, and its look
is only roughly that of the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from matplotlib.transforms import IdentityTransform
from PIL import Image

BOARD = Path(__file__).parent / "dashboards/geomesh-run.json"
COLUMN, LINE, GAP, DPI = 62, 36, 4, 100        # pixels of the grid's cells
BACK, PANEL, TEXT, FAINT = "#111217", "#181b1f", "#d0d0dc", "#8a8d98"
NAMED = {"green": "#73bf69", "yellow": "#fade2a", "blue": "#5794f2", "red": "#f2495c", "purple": "#b877d9", "orange": "#ff9830",
         "gray": "#6e7078", "text": TEXT}  # fmt: skip
CYCLE = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#5ab3b0", "#c0d8ff")
STEP_SECONDS = 5
Series = tuple[str, list[tuple[float, float]]]          # legend; (time, value), without NaN


@dataclass(frozen=True)
class Source:
    """A Prometheus, and the values of the dashboard's variables."""

    url: str
    begin: float
    end: float
    window: str
    site: str

    def __call__(self, panel: dict[str, Any]) -> list[tuple[dict[str, str], Series]]:
        """Labels and samples of every series that the panel's queries find."""
        found = []
        for target in panel["targets"]:
            expression = target["expr"].replace("$window", self.window).replace("$site", self.site)
            asked = {"query": expression, "start": self.begin, "end": self.end, "step": STEP_SECONDS}
            with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(asked)}", timeout=60) as page:
                for one in json.load(page)["data"]["result"]:
                    samples = [(float(at), float(text)) for at, text in one["values"] if math.isfinite(float(text))]
                    if target["instant"]:                 # what is not there now is not shown
                        samples = [(at, value) for at, value in samples if at > self.end - STEP_SECONDS]
                    labels = {**one["metric"], "refId": target["refId"]}
                    legend = re.sub(r"{{(\w+)}}", lambda match, of=labels: of.get(match[1], ""), target["legendFormat"])
                    if samples:
                        found.append((labels, (legend, samples)))
        return found


# ---------------------------------------------------------------- figures in words


def scaled(value: float, steps: Sequence[tuple[float, str]], decimals: int | None) -> str:
    divisor, name = next(((size, name) for size, name in steps if abs(value) >= size), steps[-1])
    shown = value / divisor
    digits = decimals if decimals is not None else 0 if shown == round(shown) else 1 if abs(shown) >= 10 else 2
    return f"{shown:.{digits}f}{name}"


def in_words(value: float, unit: str, decimals: int | None = None) -> str:
    if unit == "percentunit":
        return f"{100 * value:.{1 if decimals is None else decimals}f}%"
    if unit == "s":
        return scaled(value, ((3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms")) if value else ((1, " s"),), decimals)
    return scaled(value, ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1, "")), decimals)


def limit_color(panel: dict[str, Any], value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return NAMED[[step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]]


def mapping(panel: dict[str, Any]) -> dict[str, dict[str, str]]:
    maps = panel["fieldConfig"]["defaults"].get("mappings", ())
    return {value: told for one in maps for value, told in one["options"].items()}


def overridden(panel: dict[str, Any], what: str) -> dict[str, Any]:
    """By a series' or column's name."""
    of = panel["fieldConfig"].get("overrides", ())
    return {one["matcher"]["options"]: p["value"] for one in of for p in one["properties"] if p["id"] == what}


# ---------------------------------------------------------------- panels


class Picture:
    def __init__(self, board: dict[str, Any], source: Source) -> None:
        self.source = source
        self.height = LINE * max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
        self.width = COLUMN * 24
        self.figure = Figure((self.width / DPI, self.height / DPI), DPI, facecolor=BACK)
        for panel in board["panels"]:
            draw = {"row": self.row, "stat": self.number, "timeseries": self.lines, "table": self.table,
                    "state-timeline": self.states}[panel["type"]]  # fmt: skip
            place = panel["gridPos"]
            box = (place["x"] * COLUMN, place["y"] * LINE, place["w"] * COLUMN, place["h"] * LINE)
            if draw != self.row:
                self.frame(panel["title"], *box)
            draw(panel, *box)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """In pixels from the top left; without anything in it."""
        axes = self.figure.add_axes((x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height))
        axes.set_facecolor("none")
        axes.tick_params(colors=FAINT, labelsize=8, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def write(self, text: str, x: float, y: float, size: float, color: str = TEXT, **how: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, color=color, **{"va": "center", **how})

    def row(self, panel: dict[str, Any], x: float, y: float, _: float, height: float) -> None:
        self.write(panel["title"], x + 2 * GAP, y + height / 2, 11, weight="bold")

    def frame(self, title: str, x: float, y: float, width: float, height: float) -> None:
        inside = (x + GAP, self.height - y - height + GAP)
        style = "round,pad=0,rounding_size=3"
        box = FancyBboxPatch(inside, width - 2 * GAP, height - 2 * GAP, boxstyle=style, fc=PANEL, ec="#2a2d33", lw=0.8)
        box.set(transform=IdentityTransform(), zorder=-1)
        self.figure.add_artist(box)
        self.write(title, x + 3 * GAP, y + 18, 9.5, weight="bold")

    def number(self, panel: dict[str, Any], x: float, y: float, width: float, height: float) -> None:
        found = self.source(panel)
        field = panel["fieldConfig"]["defaults"]
        if not found:
            self.write("No data", x + width / 2, y + 0.6 * height, 13, FAINT, ha="center")
            return
        samples = found[0][1][1]
        value = samples[-1][1]
        text, color = in_words(value, field["unit"], field.get("decimals")), limit_color(panel, value)
        if told := mapping(panel).get(f"{value:g}"):
            text, color = told["text"], NAMED[told["color"]]
        self.write(text, x + width / 2, y + 0.6 * height, 21, color, ha="center", weight="bold")
        if panel["options"]["graphMode"] == "area":
            axes = self.axes(x + 2 * GAP, y + 0.72 * height, width - 4 * GAP, 0.22 * height)
            axes.fill_between([at for at, _ in samples], [v for _, v in samples], color=color, alpha=0.25, lw=0)
            axes.set_axis_off()

    def lines(self, panel: dict[str, Any], x: float, y: float, width: float, height: float) -> None:
        field, custom = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["defaults"].get("custom", {})
        found = sorted((series for _, series in self.source(panel)), key=lambda series: order(panel, series[0]))
        fixed = {legend: NAMED[color["fixedColor"]] for legend, color in overridden(panel, "color").items()}
        colors = [fixed.get(legend, CYCLE[place % len(CYCLE)]) for place, (legend, _) in enumerate(found)]
        legend_width = 95 + 7 * max((len(legend) for legend, _ in found), default=0)
        axes = self.axes(x + 62, y + 40, width - 62 - legend_width - 3 * GAP, height - 72)
        if custom.get("stacking", {}).get("mode") == "normal":
            times = sorted({at for _, samples in found for at, _ in samples})
            levels = [[dict(samples).get(at, 0.0) for at in times] for _, samples in found]
            axes.stackplot(times, levels, colors=colors, alpha=0.7, lw=0.5)
        else:
            for (_, samples), color in zip(found, colors, strict=True):
                axes.plot([at for at, _ in samples], [value for _, value in samples], color=color, lw=1.2)
            if custom.get("scaleDistribution", {}).get("type") == "log":
                axes.set_yscale("log", base=custom["scaleDistribution"]["log"])
        if "min" in field:
            axes.set_ylim(bottom=field["min"])
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=field.get("decimals") == 0, min_n_ticks=1))
            if not any(value for _, samples in found for _, value in samples):
                axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_words(value, field["unit"])))
        axes.grid(color="#2a2d33", lw=0.6)
        self.times(axes)
        left = x + width - legend_width
        self.write("Last", x + width - 4 * GAP, y + 40, 8, FAINT, ha="right")
        for place, ((legend, samples), color) in enumerate(zip(found, colors, strict=True)):
            line = y + 60 + 21 * place
            self.write("━", left, line, 9, color)
            self.write(legend, left + 20, line, 8.5)
            newest = in_words(samples[-1][1], field["unit"], field.get("decimals"))
            self.write(newest, x + width - 4 * GAP, line, 8.5, ha="right")

    def times(self, axes: Axes) -> None:
        least = 70 * (self.source.end - self.source.begin) / axes.bbox.width    # seconds from one label to the next
        step = next((step for step in (60, 120, 300, 600, 1800, 3600, 10_800) if step >= least), 86_400)
        axes.set_xlim(self.source.begin, self.source.end)
        axes.xaxis.set_major_locator(MultipleLocator(step))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M", time.gmtime(at))))

    def table(self, panel: dict[str, Any], x: float, y: float, width: float, height: float) -> None:
        (named,) = (one["options"]["renameByName"] for one in panel["transformations"] if one["id"] == "organize")
        columns = {name.removeprefix("Value #"): title for name, title in named.items()}
        units = overridden(panel, "unit")
        rows: dict[str, dict[str, float]] = {}
        for labels, (_, samples) in self.source(panel):
            rows.setdefault(labels["site"], {})[columns[labels["refId"]]] = samples[-1][1]
        place = [x + 4 * GAP + (width - 8 * GAP) * number / (len(columns) + 1) for number in range(len(columns) + 1)]
        for at, title in zip(place, ["site", *columns.values()], strict=True):
            self.write(title, at, y + 50, 9, "#6e9fff", weight="bold")
        for number, (site, values) in enumerate(sorted(rows.items())):
            line = y + 82 + 32 * number
            self.write(site, place[0], line, 9.5)
            for at, title in zip(place[1:], columns.values(), strict=True):
                unit = units.get(title, panel["fieldConfig"]["defaults"]["unit"])
                self.write(in_words(values[title], unit) if title in values else "", at, line, 9.5)

    def states(self, panel: dict[str, Any], x: float, y: float, width: float, height: float) -> None:
        told = mapping(panel)
        axes = self.axes(x + 90, y + 40, width - 90 - 5 * GAP, height - 100)
        by_site: dict[str, dict[float, float]] = {}
        for _, (legend, samples) in self.source(panel):
            by_site.setdefault(legend, {}).update(samples)
        seen: dict[str, str] = {}
        for place, (_, values) in enumerate(sorted(by_site.items())):
            for at, value in sorted(values.items()):
                state = told[f"{value:g}"]
                seen[state["text"]] = NAMED[state["color"]]
                axes.barh(place, STEP_SECONDS, left=at - STEP_SECONDS, height=0.8, color=NAMED[state["color"]], lw=0)
        axes.set_yticks(range(len(by_site)), sorted(by_site))
        axes.invert_yaxis()
        self.times(axes)
        at = x + 90.0
        for text, color in seen.items():
            self.write("■", at, y + height - 22, 10, color)
            self.write(text, at + 18, y + height - 22, 8.5)
            at += 36 + 7 * len(text)


def order(panel: dict[str, Any], legend: str) -> tuple[int, str]:
    """As Grafana orders them: by query, then by name."""
    forms = [target["legendFormat"] for target in panel["targets"]]
    return (forms.index(legend) if legend in forms else len(forms), legend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60, help="how far back")
    parser.add_argument("--window", default="5m", help="the dashboard's variable: Average over")
    parser.add_argument("--site", default=".*", help="the dashboard's variable: Site")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    end = time.time()
    source = Source(asked.prometheus.rstrip("/"), end - 60 * asked.minutes, end, asked.window, asked.site)
    Picture(json.loads(BOARD.read_text()), source).figure.savefig(asked.out)
    Image.open(asked.out).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(asked.out, optimize=True)


if __name__ == "__main__":
    main()
