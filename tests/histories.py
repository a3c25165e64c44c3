"""Synthetic histories: a run in which much goes wrong and every rule is kept. Tests plant single faults into it.

Written by hand after the protocol's rules, line by line as a peer would note them; no state machine is involved.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomesh_p2p.core.canonical import digest
from geomesh_p2p.core.types import Contribution, Range, Update

SEQUENCE_LENGTH = 32
SITES = ("alder", "birch", "cedar", "dogwood", "elm")
RUN = digest("a synthetic run").hex()


def peer_of(site: str) -> str:
    return "12D3KooW" + site.rjust(12, "x")


def pairs(ranges: Sequence[Range]) -> list[list[int]]:
    return [[r.start, r.stop] for r in ranges]


@dataclass
class Attempt:
    """One attempt of a round as its plan names it."""

    round: int
    term: tuple[int, str]
    attempt: int
    members: tuple[str, ...]
    ranges: dict[str, Range]
    base: str
    plan: str = ""

    def __post_init__(self) -> None:
        parts = [(site, self.ranges[site].start, self.ranges[site].stop) for site in self.members]
        self.plan = digest("plan", self.round, list(self.term), self.attempt, parts).hex()


@dataclass
class Story:
    """What every site has noted so far, and what the run's log holds."""

    lines: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {site: [] for site in SITES})
    updates: list[Update] = field(default_factory=list)
    base: str = field(default_factory=lambda: digest("round-0").hex())
    clock: float = 1_000.0

    # ------------------------------------------------------------ single notes

    def note(self, site: str, kind: str, **fields: Any) -> None:
        self.clock += 0.01
        line = {"time": round(self.clock, 3), "peer": peer_of(site), "site": site, "run": RUN, "kind": kind, **fields}
        self.lines[site].append(line)

    def start(self, site: str, round: int = 0, term: tuple[int, str] = (0, ""), held: dict[str, Any] | None = None) -> None:
        digest_now = self.digest(round) if self.lines[site] else ""
        self.note(site, "start", round=round, digest=digest_now, term=list(term), held=held, sequence_length=SEQUENCE_LENGTH)

    def learn(self, site: str) -> None:
        self.note(site, "founding", base=self.base, founder=peer_of(SITES[0]), view=[peer_of(SITES[0])])

    def digest(self, round: int) -> str:
        return self.base if round == 0 else self.updates[round - 1].digest.hex()

    @property
    def round(self) -> int:
        return len(self.updates)

    # ------------------------------------------------------------ what peers do together

    def elect(
        self, site: str, voters: Sequence[str], number: int, held: dict[str, dict[str, Any]] | None = None
    ) -> tuple[int, str]:
        """`held`: the held record that a voter's vote carries, by site."""
        term = (number, peer_of(site))
        for voter in voters:
            self.note(voter, "term", term=list(term), leader="")
            carried = (held or {}).get(voter)
            self.note(voter, "vote", term=list(term), to=peer_of(site), round=self.round, held=carried)
        self.note(site, "leader", term=list(term), round=self.round, voters=[peer_of(voter) for voter in voters])
        return term

    def plan(self, term: tuple[int, str], attempt: int, ranges: dict[str, tuple[int, int]]) -> Attempt:
        """A plan for the next round, accepted by all its members."""
        given = {site: Range(*pair) for site, pair in sorted(ranges.items())}
        plan = Attempt(self.round + 1, term, attempt, tuple(given), given, self.digest(self.round))
        for site in plan.members:
            self.accept(site, plan)
        return plan

    def accept(self, site: str, plan: Attempt) -> None:
        self.note(
            site, "accept", round=plan.round, term=list(plan.term), attempt=plan.attempt, plan=plan.plan, base=plan.base,
            members=[peer_of(member) for member in plan.members],
            ranges={member: pairs([plan.ranges[member]]) for member in plan.members}, deadline_seconds=30.0,
        )  # fmt: skip

    def contribute(self, site: str, plan: Attempt, abstains: bool = False) -> Contribution:
        ranges = () if abstains else (plan.ranges[site],)
        tokens = sum(map(len, ranges)) * SEQUENCE_LENGTH
        payload = b"" if abstains else digest("payload", site, plan.round)
        base = bytes.fromhex(plan.base)
        made = Contribution(peer_of(site), site, plan.round, base, tokens, ranges, payload, 0 if abstains else 1000)
        self.note(
            site, "contribute", round=plan.round, plan=plan.plan, base=plan.base, tokens=tokens, ranges=pairs(ranges),
            payload=payload.hex(),
        )  # fmt: skip
        return made

    def assemble(self, plan: Attempt, made: Sequence[Contribution], voters: Sequence[str]) -> Update:
        contributors = tuple(one for one in made if one.tokens)
        view = tuple(peer_of(site) for site in voters)
        body = digest("body", *(one.payload for one in contributors))
        return Update(plan.round, bytes.fromhex(plan.base), "gather", (), contributors, view, body, 1000 * len(contributors))

    def hold(self, site: str, plan: Attempt, update: Update, again_in: tuple[int, str] | None = None) -> None:
        term, attempt = (plan.term, plan.attempt) if again_in is None else (again_in, 0)
        self.note(
            site, "held", round=plan.round, term=list(term), attempt=attempt, plan=plan.plan,
            seal=update.seal.hex(), digest=update.digest.hex(),
        )  # fmt: skip

    def held(self, plan: Attempt, update: Update) -> dict[str, Any]:
        return {"round": plan.round, "term": list(plan.term), "attempt": plan.attempt, "seal": update.seal.hex()}

    def commit(self, sites: Sequence[str], update: Update, term: tuple[int, str] | None) -> None:
        """Append `update` at the first of `sites`, the leader, and at the others."""
        if update.round == self.round + 1:
            self.updates.append(update)
        for site in sites:
            leads = term is not None and term[1] == peer_of(site)
            by = "leader" if leads else "message" if term is not None else "catch_up"
            self.note(
                site, "commit", round=update.round, digest=update.digest.hex(), base=update.base.hex(), seal=update.seal.hex(),
                term=None if term is None else list(term), view=list(update.voters), committed_by=by,
                contributors=[
                    {"site": c.site, "peer": c.peer, "tokens": c.tokens, "ranges": pairs(c.ranges), "payload": c.payload.hex()}
                    for c in update.contributors
                ],
                topology=update.topology, shares=pairs(update.shares), body=update.body.hex(),
            )  # fmt: skip
            now, part = f"{update.round:064x}", update.round % 8
            self.note(site, "anchor", round=update.round, digest=update.digest.hex(), part=part, hash=now)

    def full_round(
        self, leader: str, term: tuple[int, str], ranges: dict[str, tuple[int, int]], abstains: Sequence[str] = ()
    ) -> None:
        """A round without trouble; every member becomes (or stays) a voter."""
        plan = self.plan(term, 1, ranges)
        made = [self.contribute(site, plan, site in abstains) for site in plan.members]
        update = self.assemble(plan, made, plan.members)
        for site in plan.members:
            self.hold(site, plan, update)
        self.commit([leader, *(site for site in plan.members if site != leader)], update, term)

    def write(self, folder: Path) -> Path:
        """One folder a site below `folder`, as a mesh leaves them."""
        for site, lines in self.lines.items():
            (folder / site).mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / site / "history.jsonl").write_text(text)
        return folder

    def copy(self) -> Story:
        return copy.deepcopy(self)

    def find(self, site: str, kind: str, **fields: Any) -> dict[str, Any]:
        """The first line of `site` of that kind whose fields have these values."""
        for line in self.lines[site]:
            if line["kind"] == kind and all(line.get(key) == value for key, value in fields.items()):
                return line
        raise LookupError(f"{site} has no {kind} with {fields}")


def good_story() -> Story:
    """Eight rounds: a lost member, a restart, a leader that dies with an update held, a joiner, an abstention, a leaver."""
    story = Story()
    alder, birch, cedar, dogwood, elm = SITES
    four = (alder, birch, cedar, dogwood)
    for site in four:
        story.start(site)
        story.learn(site)
    first = story.elect(alder, [alder], 1)
    story.full_round(alder, first, {alder: (0, 40), birch: (40, 60), cedar: (60, 72), dogwood: (72, 80)})
    story.full_round(alder, first, {alder: (80, 120), birch: (120, 140), cedar: (140, 152), dogwood: (152, 160)})

    # Round 3: dogwood is killed before its contribution is there; a second attempt reuses what the others made.
    plan = story.plan(first, 1, {alder: (160, 200), birch: (200, 220), cedar: (220, 232), dogwood: (232, 240)})
    made = [story.contribute(site, plan) for site in (alder, birch, cedar)]
    for site in (alder, birch, cedar):
        story.note(site, "lost", peer_id=peer_of(dogwood), peer_site=dogwood, seconds=5.0)
        story.note(site, "discard", round=3, term=list(first), attempt=1, plan=plan.plan, reason="member_lost")
    again = story.plan(first, 2, {alder: (160, 200), birch: (200, 220), cedar: (220, 232)})
    made = [story.contribute(site, again) for site in (alder, birch, cedar)]
    update = story.assemble(again, made, (alder, birch, cedar))
    for site in (alder, birch, cedar):
        story.hold(site, again, update)
    story.commit((alder, birch, cedar), update, first)

    # Dogwood comes back, catches up, and the range that it lost is handed out again.
    story.start(dogwood, round=2, term=first)
    story.commit([dogwood], update, None)
    story.full_round(alder, first, {alder: (240, 280), birch: (280, 300), cedar: (300, 312), dogwood: (232, 240)})

    # Round 5: alder dies with the update held by three; birch has it held again in its own term, and only then commits.
    plan = story.plan(first, 1, {alder: (312, 352), birch: (352, 372), cedar: (372, 384), dogwood: (384, 392)})
    made = [story.contribute(site, plan) for site in four]
    update = story.assemble(plan, made, four)
    for site in (alder, birch, cedar):
        story.hold(site, plan, update)
    record = story.held(plan, update)
    second = story.elect(birch, (birch, cedar, dogwood), 2, {birch: record, cedar: record})
    for site in (birch, cedar, dogwood):
        story.hold(site, plan, update, again_in=second)
    story.commit((birch, cedar, dogwood), update, second)
    story.start(alder, round=4, term=first, held=record)
    story.note(alder, "term", term=list(second), leader=peer_of(birch))
    story.commit([alder], update, None)

    # Elm joins from a snapshot of round 5; cedar's delta is not finite and it abstains, keeping its vote.
    story.start(elm)
    story.learn(elm)
    story.note(elm, "adopt", round=5, digest=story.digest(5), view=[peer_of(site) for site in four])
    five = {alder: (392, 432), birch: (432, 452), cedar: (452, 464), dogwood: (464, 472), elm: (472, 476)}
    story.full_round(birch, second, five, abstains=[cedar])

    # Dogwood leaves: it trains on until a round without its vote is committed.
    story.note(dogwood, "leave", reason="signal 15")
    given = {alder: (476, 516), birch: (516, 536), cedar: (536, 548), dogwood: (548, 556), elm: (556, 560)}
    plan = story.plan(second, 1, given)
    made = [story.contribute(site, plan) for site in SITES]
    update = story.assemble(plan, made, (alder, birch, cedar, elm))
    for site in SITES:
        story.hold(site, plan, update)
    story.commit((birch, alder, cedar, dogwood, elm), update, second)
    story.note(dogwood, "stop", exit_code=0, reason="left")
    story.full_round(birch, second, {alder: (560, 600), birch: (600, 620), cedar: (620, 632), elm: (632, 636)})
    for site in (alder, birch, cedar, elm):
        story.note(site, "stop", exit_code=0, reason="all rounds are done")
    return story
