"""One peer's whole part in the protocol, as a pure state machine: `handle(event, now) -> actions`.

It is put together from an election (core/election.py), a reign while this peer leads (core/leading.py), its part in a round
(core/round.py) and catching up (core/behind.py), over one shared state (core/state.py). Here is what concerns them all:
which part hears what, and what follows from a higher term, a commit, a wish to leave.

The way of a round, in messages: plan -> (training, chunks) -> held report -> commit; the next plan follows its commit at once.
Everything is driven by events. Ticks (`next_deadline`) only repeat what may have been lost, and give up what takes too long.

Decisions:
- Commits are sent before the leader's own append: a quorum has the update on disk, so the commit stands whatever happens.
- If anything cannot be saved the peer stops (exit 75): it may have promised, in memory, what its disk does not know.
- One committed digest against another for one round: the peer stops (exit 4) and names both.
"""

from __future__ import annotations

from math import inf
from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.anchors import AnchorWatch
from geomesh_p2p.core.behind import Behind
from geomesh_p2p.core.bounds import term_fits
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.election import Election, Won
from geomesh_p2p.core.leading import Leading, more_peers
from geomesh_p2p.core.leaving import Leaving
from geomesh_p2p.core.log import BrokenChain, RoundLog
from geomesh_p2p.core.round import Member
from geomesh_p2p.core.state import Seen, Settings, State, commit_fields, held_fields
from geomesh_p2p.core.types import NO_TERM, Held, PeerId, Plan, Term, Update

__all__ = ["Replica", "Settings"]


def _cannot_save(reason: str) -> str:
    return f"cannot save: {reason}; free the disk and start this peer again"


class Replica:
    """The protocol of one peer. `log` is the replica's own from here on: it appends to it (read it, do not write it).

    `durable` and `held` are what the folder remembers (`Durable(NO_TERM, False)` and None in a new one), `newest_ever` the
    newest round it ever had committed, if the log has lost some."""

    def __init__(
        self,
        me: PeerId,
        site: str,
        log: RoundLog,
        durable: ev.Durable,
        held: Held | None,
        settings: Settings,
        newest_ever: int = 0,
    ) -> None:
        self.s = State(me, site, log, durable, held, settings)
        self.s.had = max(newest_ever, log.round)
        self.election = Election(self.s)
        self.member = Member(self.s, self._report, self._accuse)
        self.behind = Behind(self.s)
        self.anchors = AnchorWatch(self.s)
        self.leading: Leading | None = None
        self.leaving = Leaving(self.s, self.member)
        self._started = False
        if not settings.rules.on("held_survives"):
            self.s.held = None

    # -------------------------------------------------------------- the machine

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """Actions, in the order in which the driver must carry them out."""
        s = self.s
        s.now, s.out = now, []
        if s.halted:
            # The list that ended with the Halt may have been dropped, with the save that failed in it: say it again.
            return s.halt_again(_cannot_save(event.reason)) if isinstance(event, ev.SaveFailed) else []
        if not self._started:
            self._started = True
            s.note("start", round=s.round, digest=s.log.digest, term=s.term, held=held_fields(s.held))
            self.election.start()
        term = s.term
        self._dispatch(event)
        self._follow_up(term)
        return s.out

    def next_deadline(self) -> float:
        """When a Tick is due at the latest, on the clock of `handle`."""
        deadlines = [self.election.next_deadline(), self.member.next_deadline(), self.leaving.next_deadline()]
        if self.leaving.let_go is None:
            deadlines.append(self.behind.next_deadline())
        if self.leading is not None:
            deadlines += [self.leading.next_deadline(), self.election.lease_end(self.leading.since)]
        if not self._started:
            return self.s.now
        return min(deadlines)

    def _dispatch(self, event: ev.Event) -> None:
        s, member, leading = self.s, self.member, self.leading
        match event:
            case ev.Received(sender, message):
                if sender != s.me:
                    self._receive(sender, message)
            case ev.Tick():
                self._tick()
            case ev.Ready(profile):
                s.profile = profile
                if leading is not None:
                    leading.heard()
            case ev.Planned(plan, reason):
                if leading is not None:
                    mine = leading.on_planned(plan, reason)
                    if mine is not None:
                        self._own_offer(mine)
            case ev.Trained():
                finished = member.on_trained(event)
                if finished is not None and leading is not None:
                    leading.on_finished(s.me, finished)
            case ev.Assembled(plan, update):
                if member.on_assembled(plan, update):
                    self._overtaken()
            case ev.ExchangeLost(plan, peers):
                self._exchange_lost(plan, peers)
            case ev.ExchangeMoved(plan):
                member.on_moved(plan)
                if member.overtaken is not None:
                    self.behind.wait(s.round + 1, self._assembly_seconds())
                if leading is not None:
                    leading.on_moved(plan)
            case ev.FetchedHeld(held):
                if member.on_fetched(held):
                    if leading is not None:
                        leading.on_held()
                    else:
                        member.report_as(member.wanted_as)
            case ev.CaughtUp():
                self._caught_up(event)
            case ev.FetchFailed(what, _):
                if what == "catch_up":
                    self.behind.failed()
                else:
                    member.wanted = None
            case ev.ClaimAnswered(peer, base, proof):
                self.behind.answered(peer, base, proof)
                self._look_around()
            case ev.SaveFailed(reason):
                s.halt(75, _cannot_save(reason))
            case ev.Hashed(round, of, value):
                self.anchors.hashed(round, of, value)
            case ev.StateChecked(round, outcome):
                self.anchors.checked(round, outcome)
                if leading is not None:
                    leading.heard()
            case ev.LeaveWanted(reason, exit_code):
                s.leave_code = exit_code
                self._want_to_leave(reason)
            case ev.StopWanted():
                self._stop_run()
            case ev.RollbackWanted(rollback):
                if leading is not None:
                    leading.rollback = rollback
                    leading.heard()

    def _receive(self, sender: PeerId, message: m.Message) -> None:
        s, member, leading = self.s, self.member, self.leading
        term = message.plan.term if isinstance(message, m.PlanOffer) else getattr(message, "term", NO_TERM)
        if not term_fits(term, s.highest):
            s.note("blame", peer_id=sender, peer_site=s.site_of(sender), round=s.round + 1, reason=f"term {term.number}")
            return
        match message:
            case m.Heartbeat():
                self._heartbeat(sender, message)
            case m.VoteRequest():
                if not message.pre or message.round > s.round:
                    self._learn(sender, message.round, message.digest)
                self.election.on_request(sender, message)
                if not message.pre:
                    self._higher(message.term)
            case m.Vote():
                self._learn(sender, message.round, message.digest)
                self._higher(message.term)
                self._won(self.election.on_vote(message, sender))
            case m.PlanOffer(plan):
                if self.election.heard_leader(sender, plan.term):
                    self._learn(sender, plan.round - 1, plan.base)
                    member.on_offer(sender, plan, self.election.leader)
                else:
                    self._refuse_lower(sender, plan.digest)
            case m.PlanRefused():
                self._learn(sender, message.round, message.digest)
                self._higher(message.term)
                if self.leading is not None:
                    self.leading.on_refused(sender, message)
            case m.Finished():
                if member.on_finished(sender, message):
                    self._accuse(sender)
                elif leading is not None:
                    leading.on_finished(sender, message)
            case m.Close(plan):
                member.on_close(plan)
            case m.Lost(plan, peers):
                if leading is not None:
                    leading.on_lost(sender, plan, peers)
            case m.HeldReport():
                self._learn(sender, message.round - 1, message.update.base)
                if leading is not None:
                    leading.on_report(sender, message)
            case m.HoldAgain():
                self._hold_again(sender, message)
            case m.Commit():
                self._commit_heard(sender, message)
            case m.Leave():
                if sender in s.peers:
                    s.peers[sender].leaving = True
            case _:
                pass

    def _follow_up(self, term: Term) -> None:
        """What follows from the event for the other parts."""
        s = self.s
        if s.term != term:
            self.member.on_new_term()
        self._end_reign()
        while self.leading is not None and self.leading.chosen is not None and not s.halted:
            update = self.leading.chosen
            for peer in s.others():
                s.send(peer, m.Commit(s.term, update))
            self._advance(update, "leader", s.term)
            self._end_reign()
        if s.halted:
            return
        let_go = self.leaving.still_let_go()
        if not let_go:
            self.behind.ask()
        if not let_go and self.behind.due():
            if self.election.role != "follower":     # nobody stands or leads from a round that is past
                self.election.step_down(hold_back=False)
                self._end_reign()
            self.member.abandon("this peer is behind")
            self.behind.start()
        self._maybe_left()

    def _tick(self) -> None:
        s = self.s
        for peer, seen in s.peers.items():
            if not seen.silent and not s.alive(peer):
                seen.silent, seen.ready_since = True, None
                left = seen.leaving and peer not in s.view
                if seen.beat.round < s.last_round:  # else it has reached the end of the run, and ended
                    s.note("lost", peer_id=peer, peer_site=seen.beat.site, seconds=s.now - seen.at, left=left)
        for peer in [p for p, seen in s.peers.items() if s.now - seen.at > s.timing.forget_seconds and p not in s.view]:
            del s.peers[peer]
            self.behind.forget(peer)
        self._won(self.election.tick())
        self.member.tick()
        if s.now >= self.member.overtaken_until:
            self.member.overtaken_until = float("inf")
            self.behind.now()
        if self.leading is not None:
            if s.now >= self.election.lease_end(self.leading.since):
                self.election.step_down(hold_back=False)
            else:
                self.leading.tick()

    # -------------------------------------------------------------- leading

    def _won(self, won: Won | None) -> None:
        self._end_reign()  # at once: nothing more is done as the leader of a term that is past
        if won is not None:
            self.leading = Leading(self.s, self.member, won)

    def _higher(self, term: Term) -> None:
        self._won(self.election.heard_higher(term))

    def _end_reign(self) -> None:
        """Leave the leader's part if this peer leads no more, or cannot go on leading."""
        leading = self.leading
        if leading is None:
            return
        if leading.failed:
            self.election.step_down(hold_back=True)
        if self.election.role == "leader" and leading.term == self.s.term and not leading.failed:
            return
        self.leading = None
        plan = leading.plan
        if plan is not None and leading.stage == "open":
            reason = "stepped_down" if leading.term == self.s.term else "higher_term"
            self.s.discard(plan, reason)

    def _own_offer(self, plan: Plan) -> None:
        reason = self.member.on_offer(self.s.me, plan, self.s.me)
        if reason and self.leading is not None:
            refused = m.PlanRefused(plan.digest, self.s.term, self.s.me, self.s.round, self.s.log.digest, reason)
            self.leading.on_refused(self.s.me, refused)

    def _report(self, report: m.HeldReport) -> None:
        leader = report.term.candidate or self.election.leader
        if leader == self.s.me:
            if self.leading is not None:
                self.leading.on_report(self.s.me, report)
        elif leader:
            self.s.send(leader, report)

    def _exchange_lost(self, plan: Digest, peers: tuple[PeerId, ...]) -> None:
        if not self.member.current(plan):
            return
        if self.member.overtaken is not None:
            self.behind.now()
        elif self.leading is not None:
            self.leading.on_lost(self.s.me, plan, peers)
        elif self.election.leader:
            self.s.send(self.election.leader, m.Lost(plan, peers))

    def _accuse(self, peer: PeerId) -> None:
        """`peer`'s contribution to the plan being carried out was refused by rule: there will be no exchange with it."""
        if self.member.plan is not None:
            self._exchange_lost(self.member.plan.digest, (peer,))

    # -------------------------------------------------------------- what others say

    def _heartbeat(self, sender: PeerId, beat: m.Heartbeat) -> None:
        s = self.s
        seen = s.peers.get(sender)
        if seen is None:
            seen = s.peers[sender] = Seen(beat, s.now)
        seen.beat, seen.at, seen.lag, seen.silent = beat, s.now, s.round - beat.round, False
        if beat.ready and beat.trains and seen.ready_since is None:
            seen.ready_since = s.now
            s.note("join", peer_id=sender, peer_site=beat.site)
        seen.leaving = beat.leaving
        if beat.stop_after:
            s.stop(beat.stop_after)
        if beat.leader == sender:
            self.election.heard_leader(sender, beat.term)
        elif sender == self.election.leader:
            self.election.leader_gone()
        self._higher(beat.term)
        self._learn(sender, beat.round, beat.digest)
        self._look_around()
        if self.leading is not None:
            if beat.round == s.round - 1 and s.last_update is not None:
                s.send(sender, m.Commit(s.term, s.last_update))
            self.leading.heard()

    def _look_around(self) -> None:
        """A peer that (re)starts says that it is ready only once it has what the others it hears have."""
        s = self.s
        rounds = [seen.beat.round if self.behind.believes(peer) else 0 for peer, seen in s.peers.items()]
        s.up_to_date = s.up_to_date or s.round >= max(rounds, default=s.round + 1)

    def _learn(self, peer: PeerId, round: int, digest: Digest, proved: bool = False) -> None:
        awaited = bool(self.s.leaving) and self.member.plan is None     # the commit that lets this peer go
        soon_seconds = 0.0
        if self.member.overtaken is not None:
            soon_seconds = self._assembly_seconds()
        elif self.member.exchanging or self.s.held_next() is not None or awaited:
            soon_seconds = 2 * self.s.timing.retry_seconds
        self.behind.learn(peer, round, digest, soon_seconds, proved)

    def _refuse_lower(self, sender: PeerId, plan: Digest) -> None:
        """Tell the leader of a past term which term is known here."""
        s = self.s
        s.send(sender, m.PlanRefused(plan, s.term, self.election.leader, s.round, s.log.digest, "a higher term"))

    def _hold_again(self, sender: PeerId, message: m.HoldAgain) -> None:
        s = self.s
        if not self.election.heard_leader(sender, message.term):
            self._refuse_lower(sender, b"")
            return
        update = message.held.update
        self._learn(sender, update.round - 1, update.base)
        if update.round == s.round + 1 and update.base == s.log.digest and not s.catching_up:
            self.member.on_hold_again(sender, message)

    def _commit_heard(self, sender: PeerId, commit: m.Commit) -> None:
        s, update = self.s, commit.update
        self._learn(sender, update.round - 1, update.base)
        if update.round != s.round + 1 or s.catching_up or s.halted:
            self._learn(sender, update.round, update.digest)
            return
        held = s.held_next()
        assembled = self.member.assembled
        if (held is not None and held.update.seal == update.seal) or (assembled is not None and assembled.seal == update.seal):
            self._advance(update, "message", commit.term)
            return
        self.member.take_contributions(sender, commit)
        if self.member.assembling(update):
            self.member.wait_for_assembly(sender, commit)
            self.behind.wait(update.round, self._assembly_seconds())
            self.behind.learn(sender, update.round, update.digest, self._assembly_seconds(), proved=update.base == s.log.digest)
        elif update.body_bytes == 0:
            s.save_held(Held(commit.term, 0, b"", update))
            self._advance(update, "message", commit.term)
        elif self.leaving.lets_go(update):
            self.leaving.let_go = update
        else:
            self.behind.learn(sender, update.round, update.digest, 0.0, proved=update.base == s.log.digest)

    def _assembly_seconds(self) -> float:
        """For how long the exchange may still bring what others have committed; none once it was waited for in vain."""
        until = self.member.overtaken_until
        return max(0.0, until - self.s.now) if until < inf else 0.0

    def _overtaken(self) -> None:
        """The exchange has brought the update whose commit came before it."""
        waiting, assembled = self.member.overtaken, self.member.assembled
        assert waiting is not None
        assert assembled is not None
        sender, commit = waiting
        if assembled.seal == commit.update.seal:
            self._advance(commit.update, "message", commit.term)
        else:
            self.behind.learn(sender, commit.update.round, commit.update.digest, 0.0, proved=True)

    # -------------------------------------------------------------- the log grows

    def _advance(self, update: Update, by: str, term: Term) -> None:
        """`update` is committed: append it and begin the next round."""
        s, voters = self.s, set(self.s.view)
        self.member.before_commit(update)
        try:
            s.log.append(update)
        except BrokenChain as broken:
            s.halt(4, f"the committed update of round {update.round} cannot be appended: {broken}")
            return
        s.out.append(ev.AppendCommit(update))
        odd = self._appended(update, by, term)
        if self.leading is not None:
            mine = by == "leader" and not self.leading.recovering
            if mine or set(s.view) == voters or not s.rules.on("elected_by_view"):
                self.leading.committed(odd)
            else:
                self._stand_before_new_voters()
        self._next_offer()

    def _stand_before_new_voters(self) -> None:
        """The round that is committed now may have been committed long ago, and its voters may have gone on without this
        leader: it leads them only if they elect it."""
        if self.s.me in self.s.view:
            self._won(self.election.stand())
        else:
            self.election.step_down(hold_back=False)
            self._end_reign()

    def _appended(self, update: Update, by: str, term: Term | None) -> tuple[PeerId, ...]:
        """Returns the peers whose anchors were found to differ."""
        s = self.s
        s.note("commit", **commit_fields(update), term=term, committed_by=by)
        if s.held is not None and s.held.update.round <= update.round:
            s.held = None
        s.last_update = update
        self.member.reset()
        if update.rollback is not None:
            self.anchors.rolled_back(update.round)
        return self.anchors.committed(update)

    def _next_offer(self) -> None:
        offer, self.member.next_offer = self.member.next_offer, None
        if offer is not None and self.election.heard_leader(offer[0], offer[1].term):
            self._learn(offer[0], offer[1].round - 1, offer[1].base)
            self.member.on_offer(offer[0], offer[1], self.election.leader)

    def _caught_up(self, event: ev.CaughtUp) -> None:
        s = self.s
        s.catching_up = False
        if event.state is not None and event.state.round > s.round:
            s.log = RoundLog(event.state)
            s.note("adopt", round=s.round, digest=s.log.digest, view=s.view)
        for update in event.updates:
            if update.round > s.round:
                try:
                    s.log.append(update)
                except BrokenChain as broken:
                    s.halt(4, f"the update of round {update.round} that was fetched cannot be appended: {broken}")
                    return
                self._appended(update, "catch_up", None)
            elif s.log.digest_of(update.round) not in (None, update.digest):
                s.diverged(update.round, update.digest, "")
        if s.held is not None and s.held.update.round <= s.round:
            s.held = None
        self._look_around()
        self._next_offer()

    # -------------------------------------------------------------- the end

    def _stop_run(self) -> None:
        """After the round going on, which the leader alone knows for certain: it commits first, others are at most one behind.
        Without a leader there is no further round. Heartbeats tell everybody."""
        further = 1 if self.leading is not None else 2 if self.election.leader else 0
        self.s.stop(self.s.round + further)

    def _want_to_leave(self, reason: str) -> None:
        if self.s.leaving:
            return
        self.leaving.want(reason)
        if self.leading is not None:
            self.leading.heard()

    def _maybe_left(self) -> None:
        s = self.s
        if not s.leaving or s.halted:
            return
        if words := self.leaving.last_words():
            if self.leading is not None and not s.final:
                self.election.step_down(hold_back=True)
                self._end_reign()
            s.halt(s.leave_code, words)
        else:
            self.leaving.close_in_time()

    # -------------------------------------------------------------- what can be seen from outside

    @property
    def log(self) -> RoundLog:
        return self.s.log

    @property
    def term(self) -> Term:
        return self.s.term

    @property
    def leader(self) -> PeerId:
        """Whom this peer follows; empty if nobody."""
        return self.election.leader

    @property
    def is_leader(self) -> bool:
        return self.leading is not None

    @property
    def round(self) -> int:
        return self.s.round

    @property
    def digest(self) -> Digest:
        return self.s.log.digest

    @property
    def view(self) -> tuple[PeerId, ...]:
        return self.s.view

    @property
    def held(self) -> Held | None:
        return self.s.held

    @property
    def plan(self) -> Plan | None:
        """The newest plan this peer has accepted for the next round, in this life."""
        return self.member.plan

    @property
    def members(self) -> tuple[PeerId, ...]:
        return () if self.member.plan is None else self.member.plan.peers

    @property
    def halted(self) -> bool:
        return self.s.halted

    @property
    def lacking(self) -> int:
        """How many more peers min_peers asks for before this peer has anything to do: those ready if it leads, else those
        that it hears."""
        s, member = self.s, self.member
        if s.catching_up or s.checking or s.forgetful or s.leaving or not self.election.leader:
            return 0
        if self.leading is not None:
            return 0 if member.plan is not None and member.phase == "training" else self.leading.lacking
        if member.plan is not None:
            lost = any(not s.alive(peer) for peer in member.plan.peers if peer not in member.finished)
            if member.phase != "straggler_idle" or not lost:
                return 0
        others = sum(s.alive(peer) and seen.beat.trains and not seen.leaving for peer, seen in s.peers.items())
        return max(0, s.settings.min_peers - others - int(s.settings.trains))

    @property
    def phase(self) -> str:
        """One of observations.PHASES: what this peer does, for a person. Whoever waits for what must come before there can be
        a plan is idle, or plans, even if it still keeps the work of an attempt that was given up."""
        work = self._work_phase
        if work in ("straggler_idle", "exchange", "commit"):
            if self.leading is not None and self.leading.stage in ("collect", "planning"):
                return "planning"
            if self.lacking:
                return "idle"
        return work

    @property
    def _work_phase(self) -> str:
        """By the plan accepted last, as the leader has to know it."""
        s, member = self.s, self.member
        if s.catching_up:
            return "catch_up"
        if s.checking and member.plan is None:
            return "catch_up"
        if member.plan is not None:
            return member.phase
        if s.leaving:
            return "leaving"
        if s.profile is None and s.settings.trains:
            return "starting"
        if self.leading is not None:
            return "planning"
        return "idle" if s.me in s.view or not s.settings.trains else "joining"

    @property
    def waiting_for(self) -> str:
        """For whom or what this peer waits, in words; empty if it waits for nothing but its own work."""
        s, member = self.s, self.member
        if s.catching_up:
            return f"the updates up to round {self.behind.round}"
        if s.checking and member.plan is None:
            return "this peer's own anchor, made anew from its snapshot and the log"
        if self.leading is not None and self.leading.waiting:
            return self.leading.waiting
        if s.forgetful:
            return f"somebody who has the updates up to round {s.had}, which this peer has lost"
        if not self.election.leader:
            missing = [peer for peer in s.view if not s.alive(peer)]
            return f"a leader; voters not heard: {s.sites(missing)}" if missing else "a leader to be elected"
        if s.leaving and member.plan is None:
            return "a round without this peer"
        if lacking := self.lacking:
            return more_peers(lacking, s.settings.min_peers)
        if member.plan is None:
            return f"a plan of {s.site_of(self.election.leader)}"
        if self.phase == "straggler_idle":
            return f"the contributions of {s.sites(peer for peer in member.plan.peers if peer not in member.finished)}"
        return {"exchange": "the exchange", "commit": f"the commit of {s.site_of(self.election.leader)}"}.get(self.phase, "")

    def heartbeat_fields(self) -> dict[str, Any]:
        """The replica's part of a Heartbeat."""
        s = self.s
        return {
            "site": s.site,
            "term": s.term,
            "leader": self.election.leader,
            "round": s.round,
            "digest": s.log.digest,
            "phase": self._work_phase,
            "trains": s.settings.trains,
            "ready": s.ready and s.up_to_date,
            "leaving": bool(s.leaving),
            "stop_after": s.stop_after or 0,
            "profile": s.profile,
        }

