"""Reading the peers' recorded histories (history.jsonl), with nothing but JSON: what lab/verify.py checks.

A peer that was killed may leave half a line behind; what it had not finished to write had no consequence yet, because a
note is flushed before the actions that follow it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomesh_p2p.jsonlines import read_lines

HISTORY_FILE = "history.jsonl"

# Fields without which a line of that kind cannot be checked.
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "start": ("round", "digest", "term", "held"),
    "founding": ("base", "founder", "view"),
    "adopt": ("round", "digest", "view"),
    "anchor": ("round", "digest", "part", "hash"),
    "mismatch": ("round", "of", "odd"),
    "checked": ("round", "outcome"),
    "term": ("term",),
    "vote": ("term", "to", "round", "held"),
    "leader": ("term", "round", "voters"),
    "accept": ("round", "term", "attempt", "plan", "base", "members", "ranges"),
    "refuse": ("round", "plan"),
    "contribute": ("round", "plan", "base", "tokens", "ranges", "payload"),
    "held": ("round", "term", "attempt", "plan", "seal", "digest"),
    "commit": ("round", "digest", "base", "seal", "view", "contributors"),
    "discard": ("round", "plan", "reason"),
}

TermPair = tuple[int, str]


@dataclass(frozen=True)
class Line:
    """One line of a history; `number` counts from 1 in its file, earlier parts included."""

    number: int
    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    @property
    def time(self) -> float:
        return float(self.fields.get("time", 0.0))

    @property
    def moment(self) -> float:
        """Seconds on a clock that does not jump while its process lives."""
        return float(self.fields.get("uptime_seconds", self.time))

    @property
    def round(self) -> int:
        return int(self.fields["round"])

    @property
    def term(self) -> TermPair:
        number, candidate = self.fields["term"]
        return (int(number), str(candidate))

    @property
    def rank(self) -> tuple[TermPair, int]:
        return (self.term, int(self.fields["attempt"]))


@dataclass
class History:
    """What one identity recorded in one run, in its own order. `complete` false: lines are damaged, so that the absence
    of a line proves nothing."""

    run: str
    peer: str
    site: str
    lines: list[Line] = field(default_factory=list)
    complete: bool = True
    sequence_length: int | None = None


@dataclass
class Reading:
    histories: list[History] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)  # lines that parse but lack what their kind must say
    remarks: list[str] = field(default_factory=list)


def find_history_files(folders: Iterable[str | Path]) -> list[Path]:
    """Every history.jsonl at or below the folders, each once, in path order. Folders that were moved aside do not count."""
    found: set[Path] = set()
    for folder in map(Path, folders):
        candidates = [folder] if folder.name == HISTORY_FILE else folder.rglob(HISTORY_FILE)
        found.update(path.resolve() for path in candidates if path.is_file())
        # A process that ended between two parts has left parts alone.
        found.update(path.with_name(HISTORY_FILE).resolve() for path in folder.rglob("history-*.jsonl*") if path.is_file())
    return sorted(found)


def read_histories(folders: Iterable[str | Path]) -> Reading:
    """The histories below the folders, one for each (run, peer id) of each file."""
    reading = Reading()
    for path in find_history_files(folders):
        add_lines(reading, str(path), read_lines(path), _sequence_length(path.parent / "config.json"))
    return reading


def add_lines(reading: Reading, name: str, texts: Iterable[str], sequence_length: int | None = None) -> None:
    """Parse the lines of one file into `reading`; `name` is used in messages."""
    here: dict[tuple[str, str], History] = {}
    damaged_at: int | None = None
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        fields = _parse(text)
        if fields is None:
            if damaged_at is not None:
                _damage(reading, here.values(), name, damaged_at)
            damaged_at = number
            continue
        kind, run, peer = str(fields["kind"]), str(fields.get("run") or ""), str(fields.get("peer") or "")
        if damaged_at is not None and kind != "start":
            _damage(reading, here.values(), name, damaged_at)
        damaged_at = None
        if not run or not peer:
            continue  # said before the peer knew its run: nothing to compare
        missing = [key for key in REQUIRED_FIELDS.get(kind, ()) if key not in fields]
        if missing:
            reading.malformed.append(f"{name}:{number}: '{kind}' without {', '.join(missing)}")
            continue
        history = here.get((run, peer))
        if history is None:
            history = History(run, peer, str(fields.get("site", "?")), sequence_length=sequence_length)
            here[(run, peer)] = history
            reading.histories.append(history)
        if kind == "start" and fields.get("sequence_length"):
            history.sequence_length = int(fields["sequence_length"])
        history.lines.append(Line(number, kind, fields))
    if damaged_at is not None:
        reading.remarks.append(f"{name}:{damaged_at}: cut off in the middle of the last line (killed while writing)")


def _parse(text: str) -> dict[str, Any] | None:
    """The line as an object with a kind. A line begun by a killed process may have its successor's first line glued to it."""
    for candidate in (text, text[text.rfind('{"time"') :]):
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(value, dict) and "kind" in value:
            return value
    return None


def _damage(reading: Reading, histories: Iterable[History], name: str, number: int) -> None:
    reading.remarks.append(f"{name}:{number}: not readable; what is missing from this history is not held against the peer")
    for history in histories:
        history.complete = False


def _sequence_length(config: Path) -> int | None:
    try:
        loaded = json.loads(config.read_text(encoding="utf-8"))
        return int(loaded["run"]["model"]["sequence_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
