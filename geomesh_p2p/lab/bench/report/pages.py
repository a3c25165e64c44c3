"""report.md and report.html of a benchmark, from report.json alone: the same report gives the same pages.

Pictures need matplotlib; without it the pages say so and have their tables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench.report.blocks import Block, Heading, Lines, Picture, Points, Text, html, markdown
from geomesh_p2p.lab.bench.report.figures import finite, target_text
from geomesh_p2p.lab.bench.report.setting import engines
from geomesh_p2p.lab.bench.report.tables import (
    about,
    agreement,
    how_work,
    links,
    methods,
    sites,
    time_table,
    training_table,
    waiting_table,
    work_table,
)
from geomesh_p2p.lab.bench.report.words import compared, summary

Report = Mapping[str, Any]
Pictures = Mapping[str, tuple[str, str]]
FOLDER = "pictures"
NO_PICTURES = "No pictures: matplotlib is not installed (pip install 'geomesh-p2p[bench]')."
NEEDED = ("setting", "setting_about", "parameters", "budget_tokens", "seeds", "target_ppl", "methods")
REPORT, MARKDOWN, HTML = "report.json", "report.md", "report.html"


def pages(report: Report) -> dict[str, str]:
    """The text of each file by its name below the report's folder."""
    drawn, inline = _drawn(report)
    title = f"Benchmark: setting {report['setting']}"
    found = {
        MARKDOWN: markdown(blocks(report, title, drawn)),
        HTML: html(title, blocks(report, title, {name: (caption, inline(svg)) for name, (caption, svg) in drawn.items()})),
    }
    return found | {f"{FOLDER}/{name}.svg": svg for name, (_, svg) in drawn.items()}


def _drawn(report: Report) -> tuple[Pictures, Callable[[str], str]]:
    try:
        from geomesh_p2p.lab.bench.report import plots, style
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return {}, str
    return plots.pictures(report), style.inline


def write(folder: Path, report: Report) -> None:
    """report.json, report.md, report.html and the pictures that report.md shows, each whole or not at all."""
    _put(folder, _texts(finite(report)))


def _texts(report: Report) -> dict[str, str]:
    return {REPORT: json.dumps(report, indent=1, allow_nan=False) + "\n", **pages(report)}


def _put(folder: Path, found: Mapping[str, str]) -> None:
    for name, text in found.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".new")
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)


def again(folder: Path) -> dict[str, Any]:
    """Makes the pages anew from the report.json in `folder`. Raises ConfigError."""
    path = folder / REPORT
    try:
        report = finite(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: run geomesh bench with --out {folder} first") from None
    except ValueError:
        raise ConfigError(f"{path} is not a report of geomesh bench: run geomesh bench with --out {folder} again") from None
    again = f"it is damaged, or of another version of geomesh bench: run that again with --out {folder}"
    if lacking := _lacking(report):
        raise ConfigError(f"{path} has no {lacking}: {again}")
    try:
        found = _texts(report)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # A report that was written has had its pages made of it: what fails now was changed since, or made by other code.
        raise ConfigError(f"{path} cannot be read as a report ({type(error).__name__}: {error}): {again}") from error
    _put(folder, found)
    return dict(report)


def _lacking(report: Any) -> str:
    """What of that which no report is without is not there; empty: nothing."""
    if not isinstance(report, dict):
        return NEEDED[0]
    if lacking := next((key for key in NEEDED if key not in report), ""):
        return lacking
    methods = report["methods"]
    if not isinstance(methods, dict) or not methods:
        return "methods"
    for name, method in methods.items():
        if not isinstance(method, dict) or not isinstance(method.get("engine"), str):
            return f"engine of {name}"
    return "" if isinstance(report["seeds"], list) else "seeds"


# ---------------------------------------------------------------- the page


def blocks(report: Report, title: str, drawn: Pictures) -> list[Block]:
    def picture(name: str) -> list[Block]:
        return [Picture(name, svg, caption, f"{FOLDER}/{key}.svg")
                for key, (caption, svg) in drawn.items() if key == name or key.startswith(f"{name}-")]  # fmt: skip

    found: list[Block] = [Heading(title, 1), Text(report["setting_about"]), Points(summary(report))]
    found += [] if drawn else [Text(NO_PICTURES)]
    found += [Heading("Time"), Text(_how_time(report)), time_table(report), *picture("effects"), *picture("gantt")]
    found += [Heading("Training"), training_table(report), *picture("perplexity")]
    found += [Heading("Waiting and bytes"), waiting_table(report), *picture("idle"), *picture("bytes"), *picture("changes")]
    found += agreement(report)
    found += [Heading("What was compared"), Points(about(report)), methods(report)]
    found += [Heading("Sites and links", 3), sites(report), *links(report)]
    found += [Heading("Site by site"), Text(how_work(report)), work_table(report)]
    found += _plan(report)
    found += [Heading("How to read this"), Points([*engines(report), *READING])]
    return found


READING = (
    "time to the target: seconds from the first inner step until the anchor's validation perplexity is at or below the target.",
    "waiting for slower sites: from its own last step to the last site's; for links: from then until the update is applied.",
    "shares are sums over sites and rounds, divided by the sums of their time; steady: from round 3 on.",
    "limit: the same tokens, all devices at their best rate (of all changes), no bytes. No method is faster at equal tokens.",
    "figures are medians over seeds, smallest and largest in brackets.",
    "a figure is missing (-) unless more than half of the seeds reach it, and if the engine does not have it.",
    "bytes: payload, sent by all sites together; the ring is an fp32 ring all-reduce once a round (ddp: once a step).",
)


def _how_time(report: Report) -> str:
    times = " and ".join(sorted({method["engine"] for method in report["methods"].values()}))
    target = target_text(report)
    return f"Seconds are {times} time (see the end); {f'the {target}' if target else 'there is no target'}."


def _plan(report: Report) -> list[Block]:
    found: list[Block] = []
    for pair in compared(report):
        if lines := pair.ours.get("plan"):
            said = f"The reasons for the plan of a round in the middle of {pair.name}'s run, as its leader gives them."
            found += [Text(said), Lines(list(lines))]
    return [Heading("Why it was planned so"), *found] if found else []
