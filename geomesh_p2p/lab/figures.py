"""What the peers' rounds add up to: the live table, the line of a round and the report all take their figures from here.

A `line` is a peer's own account of a round, as in metrics.jsonl (kind "round") and as the peer tells it to its mesh. Shares
are sums over peers and rounds, divided by the sums of wall time; rounds in which a peer was no member do not count for it.
Tokens are those that the log credits.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from geomesh_p2p.jsonlines import read_lines

PARTS = ("compute", "data_wait", "straggler_idle", "wan_idle", "codec", "control")
Line = dict[str, Any]


def is_member(line: Line) -> bool:
    """Whether the peer trained for the round, or should have."""
    return bool(line.get("inner_steps"))


@dataclass
class Tally:
    """Sums over lines: seconds by part and wall seconds of the rounds in which their peers were members, bytes of all."""

    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    bytes_sent: int = 0
    bytes_received: int = 0

    @staticmethod
    def of(lines: Iterable[Line]) -> Tally:
        tally = Tally()
        for line in lines:
            tally.add(line)
        return tally

    @staticmethod
    def total(tallies: Iterable[Tally]) -> Tally:
        total = Tally()
        for one in tallies:
            total.wall += one.wall
            total.bytes_sent += one.bytes_sent
            total.bytes_received += one.bytes_received
            for part in PARTS:
                total.seconds[part] += one.seconds[part]
        return total

    def add(self, line: Line, sign: int = 1) -> None:
        """`sign` -1 takes a line away again."""
        times = line.get("times")
        if times and is_member(line):
            self.wall += sign * float(times.get("wall") or 0.0)
            for part in PARTS:
                self.seconds[part] += sign * float(times.get(part) or 0.0)
        self.bytes_sent += sign * (traffic_of(line, "payload_sent") + traffic_of(line, "overhead_sent"))
        self.bytes_received += sign * (traffic_of(line, "payload_received") + traffic_of(line, "overhead_received"))

    def share(self, part: str) -> float | None:
        return share(self.seconds[part], self.wall)


@dataclass
class PeerRecord:
    """What one site has said of itself, in its files or to its mesh."""

    site: str
    peer_id: str = ""
    rounds: dict[int, Line] = field(default_factory=dict)
    commits: dict[int, Line] = field(default_factory=dict)  # history lines of kind "commit"
    final_ppl: dict[int, float] = field(default_factory=dict)
    discards: dict[tuple[int, str], set[str]] = field(default_factory=lambda: defaultdict(set))  # (round, plan): reasons
    starts: int = 0
    parameters: int | None = None
    tally: Tally = field(default_factory=Tally)  # of all `rounds`

    def take(self, line: Line) -> None:
        """Its account of a round. One that it gave twice counts as given last."""
        number = int(line["round"])
        if number in self.rounds:
            self.tally.add(self.rounds[number], -1)
        self.rounds[number] = line
        self.tally.add(line)

    @property
    def trained(self) -> list[Line]:
        """Rounds in which this peer was a member, in order."""
        return [self.rounds[number] for number in sorted(self.rounds) if is_member(self.rounds[number])]


class Credits:
    """Tokens that the log credits, by round and site: by any peer's history or account; a site's own word where nobody's
    tells of it."""

    def __init__(self, peers: Iterable[PeerRecord] = ()) -> None:
        self._rounds: dict[int, dict[str, int]] = {}
        self._by_word: set[int] = set()  # rounds of which only the sites' own word is known
        self.tokens = 0
        self.by_site: dict[str, int] = defaultdict(int)
        for peer in peers:
            for number, line in peer.commits.items():
                self.credit(number, {item["site"]: int(item["tokens"]) for item in line.get("contributors") or ()})
            for line in peer.rounds.values():
                self.take(peer.site, line)

    def take(self, site: str, line: Line) -> None:
        """One peer's account of a round."""
        number, known = int(line["round"]), line.get("credited")
        if known:
            self.credit(number, {str(name): int(tokens) for name, tokens in known.items()})
        elif number not in self._rounds or number in self._by_word:
            self._by_word.add(number)
            self._set(number, {**self.of(number), site: int(line.get("tokens") or 0)})

    def credit(self, number: int, tokens: dict[str, int]) -> None:
        if number not in self._rounds or number in self._by_word:
            self._by_word.discard(number)
            self._set(number, tokens)

    def _set(self, number: int, tokens: dict[str, int]) -> None:
        for sign, some in ((-1, self._rounds.get(number, {})), (1, tokens)):
            self.tokens += sign * sum(some.values())
            for site, count in some.items():
                self.by_site[site] += sign * count
        self._rounds[number] = tokens

    def of(self, number: int) -> Mapping[str, int]:
        return self._rounds.get(number, {})


# ---------------------------------------------------------------- one round


def summarise_round(number: int, peers: Iterable[PeerRecord], credits: Credits) -> dict[str, Any]:
    """`seconds` is the median of the members' wall times; `finish_error_share` the largest relative difference between a
    member's planned and real finish. The digest is a list when the peers show different ones."""
    known = list(peers)
    said = [peer.rounds[number] for peer in known if number in peer.rounds]
    commits = [peer.commits[number] for peer in known if number in peer.commits]
    commit = commits[-1] if commits else {}
    members = [line for line in said if is_member(line)]
    first = (members or said or [{}])[0]
    digests = {str(line["digest"]) for line in (*said, *commits) if line.get("digest")}
    finishes = {
        peer.site: [line["planned_finish_seconds"], line["finish_seconds"]]
        for peer in known
        if (line := peer.rounds.get(number)) and is_member(line) and not line.get("reused")
    }
    errors = [abs(real - planned) / planned for planned, real in finishes.values() if planned > 0]
    contributors = [item["site"] for item in commit.get("contributors") or ()] or list(first.get("contributors") or ())
    tally = Tally.of(members)
    return {
        "round": number,
        "term": first.get("term"),
        "members": first.get("members") or [item["site"] for item in commit.get("contributors") or ()],
        "contributors": contributors,
        "topology": first.get("topology") or commit.get("topology"),
        "tokens": sum(credits.of(number).values()),
        "planned_seconds": first.get("planned_seconds"),
        "seconds": median([line["times"]["wall"] for line in members]) if members else 0.0,
        "validation_seconds": max((line.get("validation_seconds") or 0.0 for line in members), default=0.0),
        "straggler_idle_share": tally.share("straggler_idle"),
        "wan_idle_share": tally.share("wan_idle"),
        "finish_seconds": finishes,
        "finish_error_share": max(errors, default=None),
        "loss": weighted([(line["loss"], line.get("tokens") or 0) for line in members if line.get("loss") is not None]),
        "digest": digests.pop() if len(digests) == 1 else sorted(digests),
        "digests_equal": len(digests) <= 1,
        "val_ppl": None,
    }


def perplexity_before(number: int, peers: Iterable[PeerRecord]) -> float | None:
    """Of the anchor from which round `number` began: its contributions bring it."""
    said = (peer.rounds[number].get("validation_ppl") for peer in peers if number in peer.rounds)
    return next((float(perplexity) for perplexity in said if perplexity is not None), None)


# ---------------------------------------------------------------- reading


def read_peer(folder: Path, site: str) -> PeerRecord:
    """A site's record; an empty one if the folder has nothing. What of killed peers' files is short or missing is left out."""
    record = PeerRecord(site)
    for line in _json_lines(folder / "metrics.jsonl"):
        if line.get("kind") == "round" and isinstance(line.get("round"), int):
            record.take(line)
        elif line.get("kind") == "validated" and line.get("final") and line.get("perplexity") is not None:
            record.final_ppl[int(line["round"])] = float(line["perplexity"])
    for line in _json_lines(folder / "history.jsonl"):
        record.peer_id = str(line.get("peer") or record.peer_id)
        match line.get("kind"):
            case "start":
                record.starts += 1
            case "commit":
                record.commits[int(line["round"])] = line
            case "discard":
                record.discards[(int(line["round"]), str(line.get("plan")))].add(str(line.get("reason")))
    for path in [folder / "config.json", *sorted(folder.glob("snapshot-*/*.json"))]:
        found = _json(path).get("parameters")
        if isinstance(found, int):
            record.parameters = found
    return record


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for line in read_lines(path):
            try:
                value = json.loads(line)
            except ValueError:
                continue  # half a line of a killed peer
            if isinstance(value, dict):
                yield value


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- sums


def traffic_of(line: Line, key: str) -> int:
    """Bytes of a line, over all remotes."""
    return sum((line.get(key) or {}).values())


def share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def weighted(pairs: Sequence[tuple[float, int]]) -> float | None:
    return share(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))
