"""One round at a member: accept a plan, train, exchange, hold, and wait for the commit.

Decisions:
- A plan is accepted once: its rank is on disk before training begins, and a plan found there after a restart is refused
  with the word RESTARTED, upon which the leader opens the next attempt.
- A plan for the round after the next is kept until the commit before it is known, so that plan and commit may overtake.
- A contribution, whole or in the making, serves later attempts of its round as long as its ranges are among those given.
- A held record is never dropped here: only a newer one (higher rank) or the round's commit replaces it.
- A plan that has come to nothing here long after its deadline, with its leader not heard, is given up; the work is kept.
- If the commit overtakes the exchange, the exchange is given its predicted time once more before the update is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from geomesh_p2p.core.bounds import contribution_fault, plan_fault
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.events import (
    CloseTraining,
    FetchHeld,
    MemberFinished,
    Rewind,
    SaveDurable,
    StartExchange,
    StopExchange,
    Train,
    Trained,
)
from geomesh_p2p.core.log import covers
from geomesh_p2p.core.messages import Commit, Finished, HeldReport, HoldAgain, PlanRefused
from geomesh_p2p.core.state import NO_RANK, Rank, State
from geomesh_p2p.core.types import Contribution, Held, PeerId, Plan, Range, Update

RESTARTED = "restarted"      # accepted in an earlier life: a new attempt is needed
BEHIND = "behind"            # misses committed rounds
NOT_READY = "not ready"      # its engine is not there yet
LEAVING = "leaving"

GIVE_UP_LIMITS = 4           # heartbeat limits beyond its deadline, after which a plan is given up if its leader is silent
STILL_SHARE = 0.25            # of what an exchange takes: nothing of it comes for so long where links are slow
STASH = 64                   # Finished messages kept that came before their plan


@dataclass
class Work:
    """Training done, or being done, since the anchor."""

    round: int
    base: Digest
    ranges: tuple[Range, ...]
    final: Contribution | None = None


class Member:
    """This peer's part in the newest plan that it accepted in this life."""

    def __init__(
        self, state: State, report: Callable[[HeldReport], None], accuse: Callable[[PeerId], None] = lambda peer: None
    ) -> None:
        self.s = state
        self.report = report
        self.accuse = accuse
        self.plan: Plan | None = None
        self.exchanging = False
        self.finished: dict[PeerId, Contribution] = {}
        self.own_finished: Finished | None = None
        self.assembled: Update | None = None
        self.work: Work | None = None
        self.given_up: Plan | None = None        # the plan that this peer no longer waits for; its work may still serve
        self.accepted_at = self.give_up_at = float("inf")
        self.next_offer: tuple[PeerId, Plan] | None = None
        self.blamed: set[PeerId] = set()         # members of the plan whose contributions were refused by rule
        self.early: dict[tuple[Digest, PeerId], Finished] = {}
        self.wanted: Held | None = None          # a held record being fetched, with the rank it will have here
        self.wanted_as: Rank = NO_RANK           # the rank under which it is then reported
        self.exchange_since = float("inf")       # since when all contributions are final
        self.overtaken: tuple[PeerId, Commit] | None = None
        self.overtaken_until = self.overtaken_limit = float("inf")
        self.overtaken_patience = 0.0
        self.repeat_at = float("inf")

    # -------------------------------------------------------------- plans

    def on_offer(self, sender: PeerId, plan: Plan, leader: PeerId) -> str:
        """Accept, keep for later or refuse; returns the reason of a refusal, empty if there is none."""
        s = self.s
        if plan.round == s.round + 2:
            self.next_offer = (sender, plan)
            return ""
        reason = self._objection(plan)
        if reason == "known":
            return ""
        if reason:
            s.note("refuse", round=plan.round, term=plan.term, attempt=plan.attempt, plan=plan.digest, reason=reason)
            if sender != s.me:
                s.send(sender, PlanRefused(plan.digest, s.term, leader, s.round, s.log.digest, reason))
            return reason
        self.accept(plan)
        return ""

    def _objection(self, plan: Plan) -> str:
        s = self.s
        if plan.round != s.round + 1 or s.catching_up:
            return BEHIND if plan.round > s.round else "the round is committed"
        if plan.base != s.log.digest:
            return "another base"
        rank, accepted = (plan.term, plan.attempt), s.accepted_rank()
        if self.plan is not None and plan.digest == self.plan.digest:
            return "known"
        if rank < accepted:
            return "a newer plan was accepted"
        if rank == accepted:
            if plan.digest != s.durable.accepted_plan:
                return "another plan of this attempt was accepted"
            if s.rules.on("no_retrain"):
                return RESTARTED
        if s.rules.on("plan_has_quorum") and not s.quorum(plan.peers):
            return "its members are no quorum of the view"
        if fault := plan_fault(plan):
            leader = plan.term.candidate
            s.note("blame", peer_id=leader, peer_site=s.site_of(leader), round=plan.round, reason=f"a plan with {fault}")
            return f"it has {fault}"
        if plan.of(s.me) is None:
            return "known"
        if s.leaving and s.me not in s.view:
            return LEAVING
        return "" if s.ready else NOT_READY

    def accept(self, plan: Plan) -> None:
        s = self.s
        mine = plan.of(s.me)
        assert mine is not None
        old = self.plan
        if old is not None:
            reason = "higher_term" if plan.term > old.term else "member_lost"
            self.stop_exchange(reason)
            s.discard(old, reason)
        s.durable = replace(
            s.durable,
            accepted_round=plan.round,
            accepted_term=plan.term,
            accepted_attempt=plan.attempt,
            accepted_plan=plan.digest,
        )
        s.out.append(SaveDurable(s.durable, "plan"))
        s.note(
            "accept",
            round=plan.round,
            term=plan.term,
            attempt=plan.attempt,
            plan=plan.digest,
            base=plan.base,
            members=plan.peers,
            ranges={member.site: member.ranges for member in plan.members},
            deadline_seconds=plan.train_seconds + plan.exchange_seconds + plan.grace_seconds,
        )
        if not s.rules.on("held_survives"):
            s.held = None
        self.plan, self.finished, self.own_finished, self.assembled = plan, {}, None, None
        self.exchanging, self.given_up, self.exchange_since = True, None, float("inf")
        self.repeat_at = s.now + s.timing.retry_seconds
        allowed = plan.train_seconds + plan.exchange_seconds + plan.grace_seconds
        self.accepted_at = s.now
        self.give_up_at = s.now + allowed + GIVE_UP_LIMITS * s.timing.heartbeat_limit_seconds
        reuse = self._reusable(plan, mine.ranges)
        if not reuse:
            if self.work is not None:
                s.out.append(Rewind("the new plan gives other ranges"))
            self.work = Work(plan.round, plan.base, mine.ranges)
        s.out.append(StartExchange(plan))
        s.out.append(Train(plan, reuse))
        self.blamed = set()
        for key in [key for key in self.early if key[0] == plan.digest]:
            if self.on_finished(key[1], self.early.pop(key)):
                self.accuse(key[1])

    def _reusable(self, plan: Plan, given: tuple[Range, ...]) -> bool:
        work = self.work
        if work is None or (work.round, work.base) != (plan.round, plan.base):
            return False
        trained = work.ranges if work.final is None else work.final.ranges
        return covers(given, trained) or not self.s.rules.on("ranges_within")

    # -------------------------------------------------------------- training and exchange

    def current(self, plan: Digest) -> bool:
        """Whether `plan` is the one being carried out, and not of a term that this peer has left behind."""
        mine = self.plan
        if mine is None or mine.digest != plan or mine.round != self.s.round + 1:
            return False
        return mine.term == self.s.term or not self.s.rules.on("stop_lower_terms")

    def on_trained(self, event: Trained) -> Finished | None:
        """The contribution is final; returns what all members are to be told, None if this plan is past."""
        s, c = self.s, event.contribution
        if self.work is not None and (self.work.round, self.work.base) == (c.round, c.base):
            self.work.final = c
        if not self.current(event.plan) or self.own_finished is not None:
            return None
        plan = self.plan
        assert plan is not None
        s.note(
            "contribute",
            round=c.round,
            plan=event.plan,
            base=c.base,
            tokens=c.tokens,
            ranges=c.ranges,
            payload=c.payload,
        )
        self.own_finished = Finished(event.plan, c, event.train_seconds)
        self.repeat_at = s.now + s.timing.retry_seconds
        for peer in self._partners():
            s.send(peer, self.own_finished)
        self.on_finished(s.me, self.own_finished)
        return self.own_finished

    def _partners(self) -> list[PeerId]:
        assert self.plan is not None
        return [peer for peer in sorted({*self.plan.peers, self.plan.term.candidate}) if peer not in (self.s.me, "")]

    def on_finished(self, sender: PeerId, message: Finished) -> str:
        """Why the contribution is refused by rule (said once), empty if it is not."""
        c = message.contribution
        if self.plan is None or self.plan.digest != message.plan:
            if len(self.early) < STASH:
                self.early[(message.plan, sender)] = message
            return ""
        if self.plan.of(sender) is None or sender in self.finished or sender in self.blamed or not self.exchanging:
            return ""
        if fault := self._fault(self.plan, sender, c):
            self.blamed.add(sender)
            self.s.note("blame", peer_id=sender, peer_site=self.s.site_of(sender), round=self.plan.round, reason=fault)
            return fault
        self.finished[sender] = c
        if len(self.finished) == len(self.plan.members):
            self.exchange_since = self.s.now
        self.s.out.append(MemberFinished(message.plan, c))
        return ""

    def _fault(self, plan: Plan, peer: PeerId, c: Contribution) -> str:
        return contribution_fault(plan, peer, c) if self.s.rules.on("ranges_within") else ""

    def on_close(self, plan: Digest) -> None:
        if self.current(plan) and self.own_finished is None:
            self.s.out.append(CloseTraining(plan))

    def on_assembled(self, plan: Digest, update: Update) -> bool:
        """The whole update is here: hold it and report it. True if a waiting commit names just this update instead."""
        s = self.s
        if self.overtaken is not None and self.plan is not None and self.plan.digest == plan:
            self.assembled = update
            return True
        if not self.current(plan) or update.base != s.log.digest:
            return False
        assert self.plan is not None
        self.assembled = update
        rank = (self.plan.term, self.plan.attempt)
        if s.held_rank() < rank:
            s.save_held(Held(self.plan.term, self.plan.attempt, plan, update))
            self.report_held()
        return False

    def report_held(self) -> None:
        """Tell the leader of the held record's term, unless this peer has seen a higher one."""
        s, held = self.s, self.s.held_next()
        if held is None or (held.term != s.term and s.rules.on("stop_lower_terms")):
            return
        self.repeat_at = s.now + s.timing.retry_seconds
        self.report(HeldReport(held.update.round, held.term, held.attempt, held.plan, held.update))

    # -------------------------------------------------------------- holding again

    def on_hold_again(self, sender: PeerId, message: HoldAgain) -> None:
        """Hold the leader's update under its rank, fetching the body if it is not here; then report it."""
        s = self.s
        rank = (message.term, message.attempt)
        held = s.held_next()
        if rank < max(s.accepted_rank(), s.held_rank()):
            return
        again = replace(message.held, term=message.term, attempt=message.attempt)
        if not s.rules.on("held_again") and message.held.rank < rank:
            again = message.held
        if held is not None and held.update.seal == again.update.seal:
            if held.rank < again.rank:
                s.save_held(again)
            self.report_as(rank)
        elif again.update.body_bytes == 0:
            s.save_held(again)
            self.report_as(rank)
        elif self.wanted is None or (self.wanted.update.seal, self.wanted.rank) != (again.update.seal, again.rank):
            self.want(again, rank, (sender,))

    def want(self, held: Held, rank: Rank, sources: tuple[PeerId, ...]) -> None:
        """Fetch the body of `held`, to be held as it says and reported under `rank`."""
        self.wanted, self.wanted_as = held, rank
        self.s.out.append(FetchHeld(held, sources))

    def report_as(self, rank: Rank) -> None:
        held = self.s.held_next()
        if held is not None:
            self.report(HeldReport(held.update.round, *rank, held.plan, held.update))

    def on_fetched(self, fetched: Held) -> bool:
        """The body asked for by FetchHeld is here. True if the record is now held."""
        s, wanted = self.s, self.wanted
        if wanted is None or wanted.update.seal != fetched.update.seal:
            return False
        self.wanted = None
        if wanted.update.round != s.round + 1 or wanted.update.base != s.log.digest:
            return False
        if wanted.term != s.term and s.rules.on("stop_lower_terms") and s.rules.on("held_again"):
            return False
        if wanted.rank < max(s.held_rank(), s.accepted_rank()) and s.rules.on("held_again"):
            return False
        s.save_held(wanted)
        return True

    # -------------------------------------------------------------- the end of a round

    def assembling(self, update: Update) -> bool:
        """Whether the exchange going on here will bring the body of `update`."""
        if not self.exchanging or self.plan is None or self.plan.round != update.round or not update.contributors:
            return False
        return self._agrees_with(update) and all(c.peer in self.finished for c in update.contributors)

    def _agrees_with(self, update: Update) -> bool:
        """Whether what is known here of contributions is in `update`, no more and no less: it may be another attempt's."""
        known = {peer: c for peer, c in self.finished.items() if not c.abstains}
        named = {c.peer: c for c in update.contributors}
        return known.keys() <= named.keys() and all(self.finished.get(peer, c) == c for peer, c in named.items())

    def take_contributions(self, sender: PeerId, commit: Commit) -> None:
        """The leader's commit names every contribution to the plan at work here: whose own word is still under way, over a
        longer link or behind its bytes, has finished for all that."""
        plan, update = self.plan, commit.update
        if plan is None or not self.exchanging or self.own_finished is None or sender != plan.term.candidate:
            return
        ours = (plan.term, plan.round, plan.base, plan.topology, plan.shares)
        if (commit.term, update.round, update.base, update.topology, update.shares) != ours or not self._agrees_with(update):
            return
        named = {c.peer: c for c in update.contributors}
        missing = [peer for peer in plan.peers if peer not in self.finished]
        if all(peer in named and not self._fault(plan, peer, named[peer]) for peer in missing):
            for peer in missing:
                self.on_finished(peer, Finished(plan.digest, named[peer], 0.0))

    def wait_for_assembly(self, sender: PeerId, commit: Commit) -> None:
        """The exchange has as long again as it took others, or as was planned, for to fetch its update takes the links twice;
        but only while some of it comes: others that have gone on send what is left, and for so long only."""
        assert self.plan is not None
        if self.overtaken is None:
            seconds = max(self.plan.exchange_seconds, self.s.now - self.exchange_since)
            self.overtaken_limit = self.s.now + seconds + 2 * self.s.timing.retry_seconds
            self.overtaken_patience = max(self.s.timing.heartbeat_limit_seconds / 2, STILL_SHARE * seconds)
            self.overtaken_until = self._while_moving()
        self.overtaken = (sender, commit)

    def on_moved(self, plan: Digest) -> None:
        """Some of the exchange of `plan` has come."""
        if self.overtaken_until < float("inf") and self.plan is not None and plan == self.plan.digest:
            self.overtaken_until = self._while_moving()

    def _while_moving(self) -> float:
        return min(self.overtaken_limit, self.s.now + self.overtaken_patience)

    def stop_exchange(self, reason: str) -> None:
        if self.exchanging and self.plan is not None:
            self.s.out.append(StopExchange(self.plan.digest, reason))
        self.exchanging = False

    def on_new_term(self) -> None:
        """Nothing of a lower term is sent any more; the work itself may serve the new leader's plan."""
        lower = self.plan is not None and self.plan.term < self.s.term
        if lower and self.overtaken is None and self.s.rules.on("stop_lower_terms"):
            self.stop_exchange("higher_term")
        if not self.s.rules.on("held_survives"):
            self.s.held = None

    def before_commit(self, update: Update) -> None:
        """`update` is about to be appended: whatever it does not contain is void."""
        s = self.s
        included = any(c.peer == s.me for c in update.contributors)
        if self.work is not None and (self.work.final is None or not included):
            s.out.append(Rewind("the round was committed without it"))
        if self.assembled is None or self.assembled.seal != update.seal:
            self.stop_exchange("committed")

    def reset(self) -> None:
        """The next round begins."""
        self.plan, self.finished, self.own_finished, self.assembled, self.work = None, {}, None, None, None
        self.given_up = None
        self.exchanging, self.wanted, self.overtaken = False, None, None
        self.overtaken_until = self.overtaken_limit = self.repeat_at = float("inf")
        self.early = {key: value for key, value in self.early.items() if value.contribution.round > self.s.round}

    def abandon(self, reason: str) -> None:
        """This peer is behind: it catches up and takes part again from there."""
        if self.work is not None:
            self.s.out.append(Rewind(reason))
        self.stop_exchange(reason)
        self.reset()

    def _give_up(self, plan: Plan) -> None:
        """Wait no longer for `plan`, unless its update is here: that stays until the round is committed."""
        if self.assembled is not None or self.s.held_rank() >= (plan.term, plan.attempt):
            return
        self.stop_exchange("exchange_failed")
        self.s.discard(plan, "exchange_failed")
        self.plan, self.finished, self.own_finished, self.given_up = None, {}, None, plan

    @property
    def phase(self) -> str:
        """Where this peer is in the plan that it carries out."""
        assert self.plan is not None
        if self.assembled is not None or self.s.held_rank()[0] == self.plan.term:
            return "commit"
        if self.own_finished is None:
            return "training"
        return "exchange" if len(self.finished) == len(self.plan.members) else "straggler_idle"

    # -------------------------------------------------------------- time

    def next_deadline(self) -> float:
        return min(self.repeat_at, self.overtaken_until)

    def tick(self) -> None:
        """Messages may be lost: say again what the others must know."""
        s = self.s
        if s.now < self.repeat_at:
            return
        self.repeat_at = s.now + 2 * s.timing.retry_seconds
        if self.plan is not None and s.now >= self.give_up_at and not s.alive(self.plan.term.candidate):
            self._give_up(self.plan)
        if self.plan is not None and self.own_finished is not None and self.current(self.plan.digest):
            for peer in self._partners():
                s.send(peer, self.own_finished)
        held = s.held_next()
        if held is not None and held.term == s.term:
            self.report_held()
