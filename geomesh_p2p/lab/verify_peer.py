"""What one peer's history must satisfy by itself, line after line: the sequential half of the checker."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from geomesh_p2p.lab.histories import History, Line, TermPair

# A wait may outlast its own deadline by this much before it counts as unbounded (a stopped process, a slow disk).
WAIT_SLACK_SECONDS = 60.0
# Assumed where an accepted plan does not record its deadline.
WAIT_LIMIT_SECONDS = 1800.0


@dataclass(frozen=True)
class Violation:
    """A broken invariant (numbers as in the protocol; 0: the file itself is not a history)."""

    invariant: int
    text: str
    peers: tuple[str, ...] = ()
    round: int | None = None
    term: TermPair | None = None

    @property
    def place(self) -> tuple[int, int | None, TermPair | None]:
        """What stays the same when more is known of the same violation, unlike its text and who had a part in it."""
        return self.invariant, self.round, self.term

    def __str__(self) -> str:
        where = [] if self.round is None else [f"round {self.round}"]
        where += [] if self.term is None else [f"term {show_term(self.term)}"]
        where += [] if not self.peers else [", ".join(self.peers)]
        return f"invariant {self.invariant}: {self.text}" + (f" [{'; '.join(where)}]" if where else "")


def show_term(term: TermPair) -> str:
    return f"{term[0]}/{term[1][-6:]}"


def short(digest: str | None) -> str:
    return str(digest or "none")[:12]


def as_ranges(value: Any) -> list[tuple[int, int]]:
    return [(int(start), int(stop)) for start, stop in value]


def within(inner: list[tuple[int, int]], outer: list[tuple[int, int]]) -> bool:
    """Whether every position of `inner` is in `outer`, whose ranges may touch each other."""
    merged: list[list[int]] = []
    for start, stop in sorted(outer):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return all(any(start >= low and stop <= high for low, high in merged) for start, stop in inner)


def held_rank(held: dict[str, Any] | None) -> tuple[TermPair, int] | None:
    if not held:
        return None
    number, candidate = held["term"]
    return ((int(number), str(candidate)), int(held["attempt"]))


@dataclass
class Walker:
    """The state that a peer's own lines imply; `run()` yields the violations in the order of the lines.

    `committed`: the seals that anybody committed, for the one rule that needs them."""

    history: History
    committed: Set[str] = frozenset()
    round: int | None = None
    digest: str | None = None
    term: TermPair = (0, "")
    voted: TermPair = (0, "")
    held: dict[str, Any] | None = None
    held_may_be_gone: bool = False
    accepted: dict[tuple[int, TermPair, int], str] = field(default_factory=dict)
    newest_accept: tuple[int, TermPair, int] | None = None
    plans: dict[str, Line] = field(default_factory=dict)
    plans_before_restart: set[str] = field(default_factory=set)
    payloads: dict[str, str] = field(default_factory=dict)
    open: Line | None = None
    overdue: Line | None = None
    started: bool = False

    def run(self) -> Iterator[Violation]:
        for line in self.history.lines:
            if self.open is not None and self.overdue is None and line.moment > self.open.moment + _wait_limit(self.open):
                self.overdue = line
            handler = getattr(self, "on_" + line.kind, None)
            if handler is not None:
                yield from handler(line)
        if self.history.lines:
            yield from self._close(self.history.lines[-1])

    # ------------------------------------------------------------ where the peer stands

    def on_start(self, line: Line) -> Iterator[Violation]:
        if self.started:
            if line.term < self.term:
                yield self._says(3, f"came back in a lower term after it had been in {show_term(self.term)}", line)
            yield from self._keeps_held(line, "came back")
        self.started = True
        self.term = max(self.term, line.term)
        self.round, self.digest = line.round, line["digest"] or None
        if line["held"]:
            self.held, self.held_may_be_gone = line["held"], False
        self._forget_committed_held()
        self.plans_before_restart.update(self.plans)
        self.plans.clear()
        self.open = self.overdue = None

    def on_founding(self, line: Line) -> Iterator[Violation]:
        if not self.round:
            self.round, self.digest = 0, line["base"]
        yield from ()

    def on_adopt(self, line: Line) -> Iterator[Violation]:
        if self.round is not None and line.round < self.round:
            yield self._says(4, f"went back from its committed round {self.round} to round {line.round}", line)
        self.round, self.digest = line.round, line["digest"]
        self._forget_committed_held()
        yield from self._close(line)

    def on_commit(self, line: Line) -> Iterator[Violation]:
        if self.round is not None and self.digest is not None:
            if line.round > self.round + 1:
                yield self._says(2, f"committed round {line.round} straight after round {self.round}", line)
            elif line.round == self.round + 1 and line["base"] != self.digest:
                mine = f"but its round {self.round} is {short(self.digest)}"
                yield self._says(2, f"committed on base {short(line['base'])}, {mine}", line)
        if self.round is None or line.round > self.round:
            self.round, self.digest = line.round, line["digest"]
        self._forget_committed_held()
        if self.open is not None and self.open.round <= line.round:
            yield from self._close(line)

    def _forget_committed_held(self) -> None:
        if self.held and self.round is not None and int(self.held["round"]) <= self.round:
            self.held = None

    # ------------------------------------------------------------ terms and votes

    def on_term(self, line: Line) -> Iterator[Violation]:
        yield from self._in_term(line, "adopted")

    def on_leader(self, line: Line) -> Iterator[Violation]:
        yield from self._in_term(line, "led in")
        if line.term[1] != self.history.peer:
            yield self._says(3, "became leader of a term that is another candidate's", line)

    def on_vote(self, line: Line) -> Iterator[Violation]:
        yield from self._in_term(line, "voted in")
        if line["to"] != line.term[1]:
            yield self._says(3, f"gave a vote to {line['to'][-6:]} in a term of another candidate", line)
        if line.term < self.voted:
            yield self._says(3, f"voted downwards after its vote in term {show_term(self.voted)}", line)
        self.voted = max(self.voted, line.term)
        yield from self._keeps_held(line, "voted")

    def _in_term(self, line: Line, did: str) -> Iterator[Violation]:
        if line.term < self.term:
            yield self._says(3, f"{did} a lower term after it had been in {show_term(self.term)}", line)
        self.term = max(self.term, line.term)

    # ------------------------------------------------------------ plans and contributions

    def on_accept(self, line: Line) -> Iterator[Violation]:
        yield from self._in_term(line, "accepted a plan of")
        yield from self._on_own_base(line, "accepted a plan")
        key = (line.round, line.term, int(line["attempt"]))
        if self.accepted.get(key, line["plan"]) != line["plan"]:
            text = f"accepted two plans for attempt {key[2]}: {short(self.accepted[key])} and {short(line['plan'])}"
            yield self._says(3, text, line)
        elif self.newest_accept is not None and key < self.newest_accept:
            yield self._says(3, f"accepted attempt {key[2]} after attempt {self.newest_accept[2]} of a later rank", line)
        self.accepted.setdefault(key, line["plan"])
        self.newest_accept = max(self.newest_accept or key, key)
        self.plans[line["plan"]] = line
        before = held_rank(self.held)
        if self.held and before is not None and int(self.held["round"]) == line.round and line.rank > before:
            self.held_may_be_gone = True
        yield from self._close(line)
        self.open = line

    def on_contribute(self, line: Line) -> Iterator[Violation]:
        plan = line["plan"]
        if plan in self.plans_before_restart:
            yield self._says(3, f"contributed to plan {short(plan)}, which it had accepted before its restart", line)
        elif plan not in self.plans and self.history.complete:
            yield self._says(2, f"contributed to plan {short(plan)}, which it had not accepted", line)
        yield from self._on_own_base(line, "contributed")
        if self.payloads.setdefault(plan, line["payload"]) != line["payload"]:
            yield self._says(4, f"contributed two different payloads to plan {short(plan)}", line)
        accepted = self.plans.get(plan)
        if accepted is not None:
            given = as_ranges(accepted["ranges"].get(self.history.site, ()))
            if not within(as_ranges(line["ranges"]), given):
                yield self._says(6, f"contributed ranges {line['ranges']} outside those given by its plan, {given}", line)

    def _on_own_base(self, line: Line, did: str) -> Iterator[Violation]:
        if self.round is None or self.digest is None:
            return
        if line.round != self.round + 1 or line["base"] != self.digest:
            text = f"{did} on base {short(line['base'])}, while its last commit is round {self.round}, {short(self.digest)}"
            yield self._says(2, text, line)

    # ------------------------------------------------------------ held records

    def on_held(self, line: Line) -> Iterator[Violation]:
        if line.term < self.term:
            yield self._says(3, f"held an update of a lower term after it had been in {show_term(self.term)}", line)
        before = held_rank(self.held)
        if self.held and before is not None and int(self.held["round"]) == line.round:
            if line.rank < before and line["seal"] not in self.committed:  # a round's commit replaces what was held
                yield self._says(5, f"replaced its held record of term {show_term(before[0])} by one of a lower rank", line)
            if line.rank == before and line["seal"] != self.held["seal"]:
                yield self._says(5, f"held two updates in one attempt: {short(self.held['seal'])}, {short(line['seal'])}", line)
        if self.round is None or line.round > self.round:
            fields = line.fields
            self.held = {key: fields[key] for key in ("round", "term", "attempt", "seal")}
            self.held_may_be_gone = False
        if self.open is not None and self.open.round <= line.round:
            yield from self._close(line)

    def _keeps_held(self, line: Line, did: str) -> Iterator[Violation]:
        """A held record is lost only to the commit of its round or to a plan of a higher rank."""
        if self.held is None or not self.history.complete or line.round >= int(self.held["round"]):
            return
        shown = line["held"]
        if shown is None and self.held_may_be_gone:
            return
        mine, theirs = held_rank(self.held), held_rank(shown)
        if mine is None or theirs is None or int(shown["round"]) < int(self.held["round"]) or theirs < mine:
            text = f"{did} without its held record of round {self.held['round']}, {short(self.held['seal'])}"
            yield self._says(5, text, line)

    # ------------------------------------------------------------ bounded waits

    def on_discard(self, line: Line) -> Iterator[Violation]:
        if self.open is not None and line["plan"] == self.open["plan"]:
            yield from self._close(line)

    on_refuse = on_discard

    def on_leave(self, line: Line) -> Iterator[Violation]:
        yield from self._close(line)

    def _close(self, line: Line) -> Iterator[Violation]:
        """The accepted plan came to something (or the history ends): it must not have stayed open, with the peer alive and
        recording, long past its deadline."""
        if self.open is not None and self.overdue is not None and line.moment - self.overdue.moment > WAIT_SLACK_SECONDS:
            waited = line.moment - self.open.moment
            text = f"waited {waited:.0f} s on plan {short(self.open['plan'])} without holding, committing or discarding"
            yield self._says(7, text, self.open)
        self.open = self.overdue = None

    def _says(self, invariant: int, text: str, line: Line) -> Violation:
        number = line.get("round")
        term = line.term if line.get("term") else None
        site = f"{self.history.site} ({self.history.peer[-6:]}, line {line.number})"
        return Violation(invariant, f"{self.history.site} {text}", (site,), None if number is None else int(number), term)


def _wait_limit(accepted: Line) -> float:
    given = accepted.get("deadline_seconds")
    return WAIT_LIMIT_SECONDS if given is None else float(given)
