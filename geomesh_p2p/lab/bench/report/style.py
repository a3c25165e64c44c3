"""What the pictures of a report share: colours, scales, SVG.

Text stays text, the same figure gives the same bytes, and whatever is neither a series nor a grid line has the colour of the
text around it, so that it can be read on light and on dark pages. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from geomesh_p2p.lab.bench.report.figures import FIRST, REFERENCE, is_ours, short

Report = Mapping[str, Any]

INK = "#010203"     # stands for the colour of the text around
GRID = "#8a8a8a"
# Okabe and Ito's colours, which people with any kind of colour vision tell apart; yellow and black are left out.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
OURS = (BLUE, SKY, GREEN)
OTHERS = (RED, ORANGE, PURPLE, "#7f7f7f")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (2.5, 1)), (0, (8, 2)))
PARTS = (
    ("compute", "training", BLUE),
    ("straggler_idle", "waits for slower sites", ORANGE),
    ("wan_idle", "waits for links", PURPLE),
)
REST = "#999999"
WIDTH = 9.0
ROW = 0.30
FAR_APART = 12.0
STYLE: dict[Any, Any] = {
    "font.size": 9.5, "axes.titlesize": 10.5, "legend.fontsize": 8.5, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
    "svg.fonttype": "none", "svg.hashsalt": "geomesh", "axes.spines.top": False, "axes.spines.right": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "grid.alpha": 0.35, "grid.linewidth": 0.6, "axes.axisbelow": True, "hatch.linewidth": 0.5,
    "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False, "font.family": "sans-serif",
}  # fmt: skip
# Of a picture in a file of its own, which knows nothing of the page that shows it: a grey to be read on white and on black.
STYLE_SHEET = "<style>svg{color:#777}</style>"


def time_of(report: Report) -> str:
    engines = sorted({method["engine"] for method in report["methods"].values()})
    return "virtual time" if engines == ["virtual"] else f"{' and '.join(engines)} time"


def to_svg(figure: Figure, name: str) -> str:
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    found = text.getvalue().replace(INK, "currentColor")
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    found = re.sub(r"<!DOCTYPE.*?>", "", found, flags=re.DOTALL)
    # Ids are those of one picture; on a page there are several.
    found = re.sub(r'\bid="', f'id="{name}-', found)
    found = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", found)
    found = found.replace("<defs>", STYLE_SHEET + "<defs>", 1)
    return "\n".join(line.rstrip() for line in found.splitlines() if line.strip()) + "\n"


def inline(svg: str) -> str:
    """To be put into a page: no prolog, no names of namespaces, no style of its own; as wide as there is room."""
    body = svg[svg.index("<svg") :].replace(STYLE_SHEET, "").replace("xlink:href", "href")
    body = re.sub(r"<defs>\s*<style[^>]*>[^<]*</style>\s*</defs>", "", body, count=1)     # the page's style says it
    body = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", body)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', body, count=1)


# ---------------------------------------------------------------- what the pictures share


def methods_of(report: Report) -> dict[str, Any]:
    """Without those that repeat another."""
    return {name: method for name, method in report["methods"].items() if "is" not in method}


def looks_of(report: Report) -> dict[str, tuple[str, Any]]:
    """Colour and dashes by method: blues and greens are ours. The two that are compared first have the first ones."""
    counts, found = {True: 0, False: 0}, {}
    for name in sorted(methods_of(report), key=lambda one: one not in (REFERENCE, FIRST)):
        ours = is_ours(name)
        colours, place = (OURS if ours else OTHERS), counts[ours]
        found[name] = (colours[place % len(colours)], DASHES[place // len(colours) % len(DASHES)])
        counts[ours] += 1
    return found


def bars(axes: Axes, names: Sequence[str], values: Sequence[float | None], looks: Mapping[str, tuple[str, Any]],
          text: Callable[[float], str]) -> None:  # fmt: skip
    """Logarithmic where the values are far apart."""
    known = [value for value in values if value is not None and value > 0]
    far = len(known) > 1 and max(known) > FAR_APART * min(known)
    low = 10 ** math.floor(math.log10(min(known)) - 0.3) if far else 0.0
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        if value is None:
            axes.text(low, place, " not reached", va="center", fontsize=8, style="italic")
            continue
        axes.barh(place, value - low, left=low, height=0.7, color=looks[name][0])
        axes.annotate(text(value), (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
    if far:
        axes.set_xscale("log")
        axes.set_xlim(low, max(known) * (max(known) / low) ** 0.35)
        axes.xaxis.set_major_locator(LogLocator(numticks=4))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, max(known, default=0.0) * 1.42 or 1.0)
        axes.locator_params(axis="x", nbins=3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.grid(axis="x")


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def columns_for(names: Iterable[str]) -> int:
    """Of a legend, so that it fits the width."""
    return max(1, min(4, 100 // (6 + max(map(len, names)))))


def tall(rows: int, other: float = 1.0) -> Figure:
    return Figure(figsize=(WIDTH, other + ROW * max(rows, 2)), layout="constrained")
