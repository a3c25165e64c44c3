"""Who leads: election by pair terms, with a pre-vote and votes that carry held records.

Decisions:
- No safety rule depends on a clock. Timers only choose when to stand; heartbeats are leases that keep others from standing.
- A term is (number, candidate) and is on disk before it is used. A voter in term T has given T's candidate, and nobody
  else, its vote: a later vote goes to a higher pair. So `voted` needs no name beside it.
- Votes compare (last committed round, rank of the held record for the next one); digests are never ordered. A voter that
  is behind may vote: it has nothing for the candidate's next round, and promises to take nothing below the new term.
- Two held records of one rank and unequal seals come from a contribution that was not final or from a faulty machine. The
  winner then takes the one that alone can have been committed, and waits for more votes while two of them can.
- Answers are waited for as long as answers have taken: where round trips are longer than `election_seconds`, the time that a
  quorum took to answer (also to a request given up meanwhile) sets the pace, else everybody would stand again for ever.
- Followers take a higher term from who leads it or asks for a vote in it. A leader or candidate takes notice of any higher
  term it hears of, stands again above it, and so gathers the peers that went ahead of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geomesh_p2p.core.log import is_quorum
from geomesh_p2p.core.messages import Vote, VoteRequest
from geomesh_p2p.core.state import NO_RANK, Rank, State, held_fields
from geomesh_p2p.core.types import Held, PeerId, Term

Role = Literal["follower", "asking", "candidate", "leader"]

ANSWERS_MARGIN = 1.5             # times what a quorum took to answer
LONGEST_ANSWERS_SECONDS = 30.0
REQUESTS_KEPT = 8                # whose late answers still tell how long answers take


@dataclass(frozen=True)
class Won:
    """The votes of a quorum: what must be held again (None: nothing that can have been committed), and who has it."""

    held: Held | None
    sources: tuple[PeerId, ...]


class Ambiguous(Exception):
    """Two held records of one rank can both have been committed: more votes are needed."""


def choose_held(votes: dict[PeerId, Held | None], view: tuple[PeerId, ...]) -> Held | None:
    """The held record that a new leader must go on with, from the votes of a quorum of `view`: the highest rank.

    Raises Ambiguous if the voters not heard could complete a quorum for more than one of equal rank."""
    top = max((held.rank for held in votes.values() if held is not None), default=None)
    if top is None:
        return None
    holders: dict[bytes, list[PeerId]] = {}
    for peer, held in sorted(votes.items()):
        if held is not None and held.rank == top:
            holders.setdefault(held.update.seal, []).append(peer)
    unheard = [peer for peer in view if peer not in votes]
    possible = [seal for seal, peers in holders.items() if is_quorum([*peers, *unheard], view)]
    if len(holders) > 1 and len(possible) > 1:
        raise Ambiguous
    seal = possible[0] if possible else max(holders, key=lambda seal: (len(holders[seal]), seal))
    chosen = votes[holders[seal][0]]
    assert chosen is not None
    return chosen


def rank_of(held: Held | None, round: int) -> Rank:
    """The rank of a held record as a vote for the round after `round` sees it."""
    return held.rank if held is not None and held.update.round == round + 1 else NO_RANK


class Election:
    """This peer's part in elections. `leader` is whom it follows, empty if nobody."""

    def __init__(self, state: State) -> None:
        self.s = state
        self.role: Role = "follower"
        self.leader: PeerId = ""
        self.leader_heard = float("-inf")
        self.stand_at = float("inf")         # when to stand if no leader is heard before
        self.asked = state.term
        self.votes: dict[PeerId, Vote] = {}
        self.answers_seconds = 0.0           # what a quorum last took to answer a request
        self._requests: dict[tuple[bool, Term], tuple[float, set[PeerId]]] = {}     # when it was made, who has answered

    def start(self) -> None:
        """The first event: a voter that is a quorum by itself stands at once, others listen first."""
        alone = self.s.quorum([self.s.me])
        self.stand_at = self.s.now if alone else self.s.now + self._patience()

    @property
    def _election_seconds(self) -> float:
        """How long to wait for answers, and over what time candidates spread."""
        return max(self.s.timing.election_seconds, ANSWERS_MARGIN * self.answers_seconds)

    def _patience(self) -> float:
        return self.s.timing.heartbeat_limit_seconds + self.s.random.uniform(0.0, 0.5) * self._election_seconds

    def _pause(self) -> float:
        return self.s.random.uniform(0.3, 1.0) * self._election_seconds

    def next_deadline(self) -> float:
        return float("inf") if self.role == "leader" or self.s.me not in self.s.view else self.stand_at

    def lease_end(self, since: float) -> float:
        """When a leader since `since` must step down, unless a quorum is heard again before."""
        s = self.s
        if s.quorum([s.me]):
            return float("inf")
        heard = sorted(((s.peers[peer].at if peer in s.peers else float("-inf")), peer) for peer in s.view if peer != s.me)
        while heard and s.quorum([s.me, *(peer for _, peer in heard[1:])]):
            heard.pop(0)
        return max(since, heard[0][0] if heard else float("inf")) + s.timing.lease_seconds

    # -------------------------------------------------------------- following

    def heard_leader(self, sender: PeerId, term: Term) -> bool:
        """`sender` acts as leader of `term`: follow it unless the term is past. False if it is not to be obeyed."""
        s = self.s
        if term < s.term or term.candidate not in ("", sender):
            s.highest = max(s.highest, term)
            return False
        if term > s.term:
            self.adopt(term, "term", leader=sender)
        if self.role == "leader":
            return False                     # a second leader of one term: only without the rule pair_terms
        self.role, self.leader, self.leader_heard = "follower", sender, s.now
        self.stand_at = s.now + self._patience()
        return True

    def leader_gone(self) -> None:
        """The leader said that it leads no more: stand soon."""
        if self.role == "follower" and self.leader:
            self.leader, self.leader_heard = "", float("-inf")
            self.stand_at = min(self.stand_at, self.s.now + self._pause() / 2)

    def adopt(self, term: Term, why: str, leader: PeerId = "") -> None:
        """Go to a higher term as a follower; on disk before anything that follows in the actions."""
        self.s.save_term(term, why)
        self.s.note("term", term=term, leader=leader)
        self.role, self.leader = "follower", leader

    def step_down(self, hold_back: bool) -> None:
        """Lead no more, without a higher term; `hold_back` lets the others stand first."""
        self.role, self.leader = "follower", ""
        extra = self._election_seconds * 2 if hold_back else 0.0
        self.stand_at = self.s.now + self._patience() + extra

    def heard_higher(self, term: Term) -> Won | None:
        """Somebody is in `term`. A leader or candidate below it stands again above it."""
        s = self.s
        above_known = term > s.highest
        s.highest = max(s.highest, term)
        if term <= s.term or not s.rules.on("higher_term"):
            return None
        if self.role == "leader":
            return self.stand()
        if self.role == "candidate" and above_known:
            self.role, self.stand_at = "follower", s.now + self._pause() / 2
        return None

    # -------------------------------------------------------------- standing

    def tick(self) -> Won | None:
        s = self.s
        if s.me not in s.view and self.leader not in ("", s.me) and not s.alive(self.leader):
            self.leader = ""                 # who has no vote cannot stand, but does not go on waiting for somebody lost
        if self.role == "leader" or s.me not in s.view or s.now < self.stand_at:
            return None
        if s.catching_up or s.forgetful:
            self.stand_at = s.now + self._pause()
            return None
        if self.role in ("asking", "candidate"):     # not enough answers in time
            self.role, self.stand_at = "follower", s.now + self._pause()
            return None
        self.leader = ""
        if s.quorum([s.me]):
            return self.stand()
        return self._ask(pre=True)

    def _above(self) -> Term:
        number = max(self.s.highest.number, self.s.term.number) + 1
        return Term(number, self.s.me if self.s.rules.on("pair_terms") else "")

    def stand(self) -> Won | None:
        """Ask for votes in a new term, with one's own vote first."""
        return self._ask(pre=False)

    def _ask(self, pre: bool) -> Won | None:
        s = self.s
        self.asked = self._above()
        held = s.held_next()
        if not pre:
            self.adopt(self.asked, "vote")
            s.note("vote", term=self.asked, to=s.me, round=s.round, held=held_fields(held))
        self.role = "asking" if pre else "candidate"
        self.stand_at = s.now + self._election_seconds
        self._requests[(pre, self.asked)] = (s.now, {s.me})
        if len(self._requests) > REQUESTS_KEPT:
            del self._requests[next(iter(self._requests))]
        self.votes = {s.me: Vote(pre, self.asked, True, self.asked, "", s.round, s.log.digest, held)}
        request = VoteRequest(pre, self.asked, s.round, s.log.digest, held)
        for peer in s.view:
            if peer != s.me:
                s.send(peer, request)
        return self._count()

    def on_request(self, sender: PeerId, request: VoteRequest) -> None:
        """Answer a request for a vote; a real one that is granted, or that shows a higher term, is adopted first."""
        s, term = self.s, request.term
        up_to_date = (request.round, rank_of(request.held, request.round)) >= (
            s.round,
            s.held_rank() if request.round == s.round else NO_RANK,
        )
        if s.rules.on("pair_terms"):
            newer = term > s.term or (term == s.term and not request.pre and self.role == "follower")
        else:
            newer = term.number >= s.term.number
        if s.forgetful:
            granted = False
        elif request.pre:
            led = self.role == "leader" or (
                self.leader not in ("", sender) and s.now - self.leader_heard <= s.timing.heartbeat_limit_seconds
            )
            granted = up_to_date and newer and not led
        else:
            granted = up_to_date and newer
            if granted:
                if term != s.term or not s.rules.on("pair_terms"):
                    self.adopt(term, "vote")
                self.stand_at = s.now + self._patience()
                s.note("vote", term=term, to=sender, round=s.round, held=held_fields(s.held_next()))
        held = s.held_next()
        s.send(sender, Vote(request.pre, term, granted, s.term, self.leader, s.round, s.log.digest, held))
        if granted and not request.pre and not s.rules.on("held_survives"):
            s.held = None

    def on_vote(self, vote: Vote, sender: PeerId) -> Won | None:
        s = self.s
        s.highest = max(s.highest, vote.term)
        self._learn_pace(vote, sender)
        wanted: Role = "asking" if vote.pre else "candidate"
        if self.role != wanted or vote.asked != self.asked or not vote.granted or sender not in s.view or vote.round > s.round:
            return None
        self.votes[sender] = vote
        return self._count()

    def _learn_pace(self, vote: Vote, sender: PeerId) -> None:
        """However it was answered, and however late: once a quorum has, this is how long answers take."""
        s, request = self.s, self._requests.get((vote.pre, vote.asked))
        if request is None:
            return
        made_at, answered = request
        complete = s.quorum(answered)
        answered.add(sender)
        if not complete and s.quorum(answered):
            taken = min(s.now - made_at, LONGEST_ANSWERS_SECONDS)
            self.answers_seconds = max(taken, (self.answers_seconds + taken) / 2)

    def _enough(self) -> bool:
        s = self.s
        if s.rules.on("wait_quorum") or self.role == "asking":
            return s.quorum(self.votes) or not s.rules.on("wait_quorum")
        return is_quorum(self.votes, [peer for peer in s.view if s.alive(peer)])

    def _count(self) -> Won | None:
        """Enough answers: go from asking to standing, or from standing to leading."""
        s = self.s
        if not self._enough():
            return None
        if self.role == "asking":
            return self.stand()
        held_by = {peer: vote.held if rank_of(vote.held, s.round) > NO_RANK else None for peer, vote in self.votes.items()}
        try:
            held = choose_held(held_by, s.view)
        except Ambiguous:
            return None
        self.role, self.leader = "leader", s.me
        s.note("leader", term=s.term, round=s.round, voters=tuple(sorted(self.votes)))
        sources = () if held is None else tuple(
            peer for peer, other in sorted(held_by.items()) if other is not None and other.update.seal == held.update.seal
        )
        return Won(held, sources)
