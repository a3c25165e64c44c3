"""Leaving in good order: what a peer that wants to go still waits for, and what it does with the round that it is in.

Decisions:
- A voter stays until a round whose voters do without it is committed, or nobody stays, or its time is up. It need not have
  that round's update: that others have committed it is enough.
- If the round that it trains for would last longer than it may stay, it ends its training in time to send what it has
  trained: its bytes arrive while the others still train, and its tokens count.
- A leader that goes says in its last heartbeat that it leads no more: the others elect at once.
"""

from __future__ import annotations

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.log import is_quorum
from geomesh_p2p.core.messages import Leave
from geomesh_p2p.core.round import Member
from geomesh_p2p.core.state import State
from geomesh_p2p.core.types import PeerId, Update


class Leaving:
    """`by`: when time is up. `let_go`: the next update, committed by others, whose voters do without this peer."""

    def __init__(self, state: State, member: Member) -> None:
        self.s, self.member = state, member
        self.by = float("inf")
        self.let_go: Update | None = None
        self._closed: Digest = b""           # the plan for which training was ended early

    def want(self, reason: str) -> None:
        s = self.s
        s.leaving, self.by = reason or "asked to", s.now + s.timing.leave_seconds
        s.note("leave", reason=s.leaving)
        for peer in s.others():
            s.send(peer, Leave(s.leaving))

    # -------------------------------------------------------------- the round going on

    def next_deadline(self) -> float:
        return min(self.by, self._close_at())

    def _close_at(self) -> float:
        """When training must end so that the contribution leaves before this peer does."""
        plan = self.member.plan
        mine = None if plan is None else plan.of(self.s.me)
        if not self.s.leaving or plan is None or mine is None or not plan.may_close or self.member.own_finished is not None:
            return float("inf")
        if plan.digest == self._closed or self.member.accepted_at + mine.finish_seconds + plan.exchange_seconds <= self.by:
            return float("inf")
        step = mine.finish_seconds / max(1, mine.inner_steps)
        return self.by - 2 * (step + plan.exchange_seconds + self.s.timing.retry_seconds)

    def close_in_time(self) -> None:
        plan = self.member.plan
        if plan is not None and self.s.now >= self._close_at():
            self._closed = plan.digest
            self.member.on_close(plan.digest)

    # -------------------------------------------------------------- the round without this peer

    def lets_go(self, update: Update) -> bool:
        """Whether `update`, which others have committed, is all that this peer waits for."""
        s = self.s
        follows = update.round == s.round + 1 and update.base == s.log.digest
        return bool(s.leaving) and follows and s.me not in update.voters and self.member.plan is None

    def still_let_go(self) -> bool:
        """Forgets an update that does not follow any more."""
        if self.let_go is not None and not self.lets_go(self.let_go):
            self.let_go = None
        return self.let_go is not None

    def last_words(self) -> str:
        """Why this peer may leave now, in words for its last line; "" if it must stay: it is a voter or the voters do not know
        yet that it is none, and somebody stays, and there is time."""
        s = self.s
        others = [peer for peer in s.view if peer != s.me]
        # With too few of them no round will ever be committed without this peer, unless newcomers get a vote before it goes.
        coming = [peer for peer, seen in s.peers.items() if peer not in s.view and s.alive(peer) and seen.beat.trains]
        heirs = [peer for peer in coming if not s.peers[peer].leaving]
        too_few = len(others) < s.settings.min_peers and (not heirs or len(others) + len(heirs) < s.settings.min_peers)
        voters = [peer for peer in s.view if peer != s.me and s.alive(peer)]
        nobody_stays = not heirs and all(s.peers[peer].leaving for peer in voters)
        if self.let_go is not None:
            gone = is_quorum((p for p, seen in s.peers.items() if s.alive(p) and seen.beat.round > s.round), self.let_go.voters)
        else:
            told = s.quorum(peer for peer in voters if s.peers[peer].beat.round >= s.round)
            gone = s.me not in s.view and self.member.plan is None and told
        if s.final or nobody_stays or too_few or gone or s.now >= self.by:
            return f"left: {s.leaving}{'' if gone else self._what_remains(heirs)}"
        return ""

    def _what_remains(self, heirs: list[PeerId]) -> str:
        """What the others can do if this peer goes with a vote that they need."""
        s = self.s
        others = [peer for peer in s.view if peer != s.me and s.alive(peer) and not s.peers[peer].leaving]
        if s.me not in s.view or s.quorum(others) or not (others or heirs):
            return ""
        waiting = s.sites([*others, *heirs])
        return f"; {waiting} cannot go on without this peer's vote, and will wait for it: start it again, its folder keeps all"
