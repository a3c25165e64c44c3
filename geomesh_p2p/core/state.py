"""What the parts of one replica share: who it is, what it must not forget, whom it hears, and the actions it is writing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.events import Action, Durable, Halt, Note, SaveDurable, SaveHeld, Send
from geomesh_p2p.core.log import RoundLog, is_quorum
from geomesh_p2p.core.messages import Heartbeat, Message
from geomesh_p2p.core.types import NO_TERM, Held, PeerId, Plan, Profile, Rules, Term, Timing, Update


@dataclass(frozen=True)
class Settings:
    """How a replica behaves: the same in all peers of a run, but for `trains` (an observer never trains) and `seed`."""

    timing: Timing = field(default_factory=Timing)
    rules: Rules = field(default_factory=Rules)
    trains: bool = True
    min_peers: int = 1
    final_round: int | None = None
    seed: int = 0


@dataclass
class Seen:
    """What another peer last said of itself, and when."""

    beat: Heartbeat
    at: float
    lag: int = 0                         # rounds that it was behind this peer when it said so
    ready_since: float | None = None
    leaving: bool = False
    silent: bool = False


Rank = tuple[Term, int]
NO_RANK: Rank = (NO_TERM, 0)


class State:
    """Shared by the parts of one replica. `out` collects the actions of the event being handled, in order."""

    def __init__(self, me: PeerId, site: str, log: RoundLog, durable: Durable, held: Held | None, settings: Settings) -> None:
        self.me, self.site, self.settings = me, site, settings
        self.timing, self.rules = settings.timing, settings.rules
        self.log, self.durable, self.held = log, durable, held
        self.random = Random(f"{settings.seed}/{me}")
        self.now = 0.0
        self.out: list[Action] = []
        self.peers: dict[PeerId, Seen] = {}
        self.profile: Profile | None = None
        self.stop_after: int | None = None   # by order: the run's last round, for now
        self.leaving = ""
        self.leave_code = 0
        self.highest = durable.term          # the highest term heard of, adopted or not
        self.last_update: Update | None = None
        self.halted = False
        self.halt_code = 0
        self._discarded: Digest = b""
        self.catching_up = False
        self.checking = False                # the anchor may be wrong (core/anchors.py)
        self.had = log.round                 # the newest round committed here in an earlier life, though it may be lost
        self.up_to_date = set(log.voters) <= {me}  # latched: a peer that comes back does not know yet what it has missed

    # -------------------------------------------------------------- changing

    def stop(self, after: int) -> None:
        """End with that round, unless it ends sooner."""
        if after < self.last_round:
            self.stop_after = after
            self.note("stop_after", round=after)

    # -------------------------------------------------------------- reading

    @property
    def term(self) -> Term:
        return self.durable.term

    @property
    def view(self) -> tuple[PeerId, ...]:
        return self.log.voters

    @property
    def round(self) -> int:
        return self.log.round

    @property
    def last_round(self) -> float:
        """The round with which the run ends: its goal, or an earlier one by order."""
        return min(end for end in (self.settings.final_round, self.stop_after, inf) if end is not None)

    @property
    def final(self) -> bool:
        """Whether the run has reached its last round here."""
        return self.round >= self.last_round

    @property
    def ready(self) -> bool:
        """Holds the anchor of its last round and can train."""
        return self.profile is not None and self.settings.trains and not self.catching_up and not self.checking

    @property
    def forgetful(self) -> bool:
        """Lacks rounds that it once had committed: its vote could undo one. It catches up first, if there are others."""
        return self.round < self.had and self.view != (self.me,)

    def held_next(self) -> Held | None:
        """The held record, if it is for the round after the last committed one."""
        return self.held if self.held is not None and self.held.update.round == self.round + 1 else None

    def held_rank(self) -> Rank:
        held = self.held_next()
        return NO_RANK if held is None else held.rank

    def accepted_rank(self) -> Rank:
        """(term, attempt) of the plan accepted for the next round, in this life or an earlier one."""
        d = self.durable
        return (d.accepted_term, d.accepted_attempt) if d.accepted_round == self.round + 1 else NO_RANK

    def alive(self, peer: PeerId) -> bool:
        if peer == self.me:
            return True
        seen = self.peers.get(peer)
        return seen is not None and self.now - seen.at <= self.timing.heartbeat_limit_seconds

    def site_of(self, peer: PeerId) -> str:
        if peer == self.me:
            return self.site
        seen = self.peers.get(peer)
        return seen.beat.site if seen is not None else self.log.sites.get(peer, f"...{peer[-8:]}")

    def sites(self, peers: Iterable[PeerId]) -> str:
        return ", ".join(sorted(self.site_of(peer) for peer in peers))

    def quorum(self, peers: Iterable[PeerId]) -> bool:
        return is_quorum(peers, self.view)

    def others(self) -> list[PeerId]:
        """Everybody known or entitled to vote, but this peer."""
        return sorted({*self.peers, *self.view} - {self.me})

    # -------------------------------------------------------------- writing

    def send(self, to: PeerId, message: Message) -> None:
        self.out.append(Send(to, message))

    def note(self, kind: str, **fields: Any) -> None:
        self.out.append(Note(kind, fields))

    def discard(self, plan: Plan, reason: str) -> None:
        """Note that an attempt was given up; once, though a leader gives it up both as leader and as member."""
        if plan.digest != self._discarded:
            self._discarded = plan.digest
            self.note("discard", round=plan.round, term=plan.term, attempt=plan.attempt, plan=plan.digest, reason=reason)

    def save_term(self, term: Term, why: str) -> None:
        self.durable = replace(self.durable, term=term, voted=why == "vote")
        self.highest = max(self.highest, term)
        if self.rules.on("saved_terms"):
            self.out.append(SaveDurable(self.durable, why))

    def save_held(self, held: Held) -> None:
        """Durable before anything that follows it in `out`."""
        self.held = held
        self.out.append(SaveHeld(held))
        self.note(
            "held",
            round=held.update.round,
            term=held.term,
            attempt=held.attempt,
            plan=held.plan,
            seal=held.update.seal,
            digest=held.update.digest,
        )

    def halt(self, exit_code: int, reason: str) -> None:
        if not self.halted:
            self.halted = True
            self.note("stop", exit_code=exit_code, reason=reason)
            self.out.append(Halt(exit_code, reason))
            self.halt_code = exit_code

    def halt_again(self, reason: str) -> list[Action]:
        """The Halt once more, for a driver that could not save what came before it; a reason to stop for good is kept."""
        code = self.halt_code or 75
        return [Note("stop", {"exit_code": code, "reason": reason}), Halt(code, reason)]

    def diverged(self, round: int, other: bytes, peer: PeerId) -> None:
        """Another committed digest for a round committed here: nothing may go on from here by itself."""
        mine = self.log.digest_of(round)
        self.halt(
            4,
            f"round {round}: this peer committed {mine.hex()[:16] if mine else '?'}, {self.site_of(peer)} committed "
            f"{other.hex()[:16]}; keep both folders, decide which history goes on, and start the peers of the other one anew "
            "(--run.fresh moves a folder aside)",
        )


def held_fields(held: Held | None) -> dict[str, Any] | None:
    """A held record as history lines name it."""
    if held is None:
        return None
    return {"round": held.update.round, "term": held.term, "attempt": held.attempt, "seal": held.update.seal}


def commit_fields(update: Update) -> dict[str, Any]:
    """What a history line of kind commit says of the update."""
    return {
        "round": update.round,
        "digest": update.digest,
        "base": update.base,
        "seal": update.seal,
        "view": update.voters,
        "contributors": [
            {
                "site": c.site,
                "peer": c.peer,
                "tokens": c.tokens,
                "ranges": c.ranges,
                "payload": c.payload,
                "anchor_part": c.anchor_part,
                "state": c.state,
            }
            for c in update.contributors
        ],
        "topology": update.topology,
        "shares": update.shares,
        "body": update.body,
        **({} if update.rollback is None else {"rollback": update.rollback}),
    }
