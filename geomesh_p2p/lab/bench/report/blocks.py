"""A page as a list of blocks, as Markdown and as HTML that needs no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from geomesh_p2p.lab.report_text import table as markdown_table

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --page: #ffffff; --faint: #6b6b70; --line: #d6d6da; --band: #f4f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e7; --page: #16171a; --faint: #a0a0a8; --line: #3a3b40; --band: #1f2024; }
}
body { margin: 2rem auto; padding: 0 1rem; max-width: 66rem; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin-bottom: 0.4rem; }
ul { padding-left: 1.2rem; } li { margin: 0.25rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; margin: 0.6rem 0; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { color: var(--faint); font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
tbody tr:nth-child(even) { background: var(--band); }
table.text th, table.text td { text-align: left; }
figure { margin: 1.2rem 0; } figcaption { color: var(--faint); font-size: 0.85rem; }
svg { width: 100%; height: auto; color: var(--ink); }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
pre { overflow-x: auto; font-size: 0.8rem; background: var(--band); padding: 0.6rem; }
@media print {
  :root { --ink: #000; --page: #fff; --faint: #444; --line: #bbb; --band: #f6f6f6; color-scheme: light; }
  body { margin: 0; max-width: none; font-size: 10pt; } .wide { overflow: visible; } table { font-size: 7.5pt; }
  figure, tr, pre { break-inside: avoid; } h2, h3 { break-after: avoid; } pre { white-space: pre-wrap; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
""".strip()


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Points:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """The first column is on the left; `words`: all are."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


@dataclass(frozen=True)
class Lines:
    """Text with the line breaks it has."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """`svg` to be put into HTML; `file` is what Markdown refers to."""

    name: str
    svg: str
    caption: str
    file: str


Block = Heading | Text | Points | Table | Lines | Picture


def markdown(blocks: Iterable[Block]) -> str:
    return "\n\n".join("\n".join(_markdown(block)) for block in blocks) + "\n"


def _markdown(block: Block) -> list[str]:
    match block:
        case Heading():
            return [f"{'#' * block.level} {block.text}"]
        case Text():
            return [block.text]
        case Points():
            return [f"- {item}" for item in block.items]
        case Table():
            return markdown_table([_cell(text) for text in block.head], [[_cell(text) for text in row] for row in block.rows])
        case Lines():
            return ["```", *block.lines, "```"]
        case Picture():
            return [f"![{block.name}]({block.file})", "", block.caption]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def html(title: str, blocks: Iterable[Block]) -> str:
    body = "\n".join(_html(block) for block in blocks)
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"\n<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>"
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
        case Text():
            return f"<p>{escape(block.text)}</p>"
        case Points():
            return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in block.items) + "\n</ul>"
        case Table():
            head = "".join(f"<th>{escape(text)}</th>" for text in block.head)
            rows = "\n".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in block.rows)
            kind = ' class="text"' if block.words else ""
            return f'<div class="wide"><table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'
        case Lines():
            return f"<pre>{escape(chr(10).join(block.lines))}</pre>"
        case Picture():
            return f"<figure>\n{block.svg}<figcaption>{escape(block.caption)}</figcaption>\n</figure>"
