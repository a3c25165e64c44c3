"""One reign: plan the round, watch its members, count held reports, commit, and begin the next.

    RECOVER -> (hold again) -> COLLECT -> PLANNING -> OPEN -> commit -> COLLECT -> ...

Decisions:
- There are no acknowledgements. A member shows its part by its contribution; a plan is offered again to members whose
  heartbeats do not show that they are at work.
- Once the leader itself holds the newest attempt's update, no further attempt is opened (but for unequal reports): voters that
  lost their exchange are told to fetch the update from the leader and to hold it. A member lost after its contribution
  arrived therefore costs no second exchange.
- A voter leaves by a plan without it. If those who stay are no quorum, an update without bits is held and committed by
  all, whose view is those who stay. If these are too few, but newcomers are there, the leavers train with them once more:
  then the newcomers have a vote.
- A rollback is an update without bits too. It takes its turn once the round going on is committed, before the next plan.
- A member lost to an exchange, too late, or whose contribution was refused by rule, is left out for a few rounds, doubling
  until it contributes; but never if the plan then lacked a quorum or `min_peers`.
- A reign ends when a quorum was not heard for a lease, when an update could not be recovered, or after `max_attempts`.
- It ends as well once a round is committed that somebody else may have committed before, if that round changes the view: those
  who elected this leader are then not the voters, who may have gone on without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from geomesh_p2p.core.bounds import contribution_fault
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.election import Won
from geomesh_p2p.core.events import CloseTraining, NeedPlan
from geomesh_p2p.core.log import is_quorum
from geomesh_p2p.core.messages import Close, Finished, HeldReport, HoldAgain, PlanOffer, PlanRefused
from geomesh_p2p.core.round import BEHIND, NOT_READY, RESTARTED, Member
from geomesh_p2p.core.state import State
from geomesh_p2p.core.types import GENESIS_ROUND, Assignment, Held, PeerId, Plan, Rollback, Update

AT_WORK = ("training", "straggler_idle", "exchange", "commit")
BENCH_ROUNDS, LONGEST_BENCH_ROUNDS = 2, 8
"""For how long a member that held a round up is left out, that round included: twice as long each time until it contributes."""
BEHIND_ROUNDS = 1
"""The same for one that had not caught up yet."""
MOST_EXCHANGE_SECONDS = 900.0    # for which it is waited for an exchange that goes on, however short it was thought
SILENCE_SHARE = 0.25             # of a round's training for which a silent member is waited for
Stage = Literal["recover", "collect", "planning", "open", "done"]


def more_peers(lacking: int, min_peers: int) -> str:
    return f"{lacking} more peer{'s' if lacking > 1 else ''}, min_peers is {min_peers}"


class Leading:
    """The leader's side of its rounds. `failed` tells why the reign must end, `chosen` what is to be committed."""

    def __init__(self, state: State, member: Member, won: Won) -> None:
        self.s, self.member, self.won = state, member, won
        self.term = state.term
        self.since = state.now
        self.stage: Stage = "collect"
        self.attempt = 0
        self.failures = 0
        self.gather = False
        self.unequal = 0
        self.plan: Plan | None = None
        self.previous: Plan | None = None
        self.finished: set[PeerId] = set()
        self.closed: set[PeerId] = set()
        self.reports: dict[PeerId, tuple[int, Update]] = {}
        self.members_counted: tuple[PeerId, ...] = ()
        self.opened_at = self.finished_at = self.held_at = state.now
        self.moved_at = float("-inf")            # when the exchange here was last seen to go on
        self.took_seconds = 0.0                  # of the exchange that brought what is held here
        self.act_at = state.now
        self.push_at = float("inf")
        self.overtaken_at = float("inf")         # since when a quorum holds what this leader still exchanges
        self.benched: dict[PeerId, int] = {}     # left out until this round
        self.strikes: dict[PeerId, int] = {}
        self.abstained: dict[PeerId, float] = {}  # newcomers, which get no vote so: not counted as voters to be until then
        self.doubted: dict[PeerId, float] = {}   # not counted ready before a heartbeat later than this says so
        self.waiting = ""
        self.lacking = 0                         # peers that min_peers asks for beyond those that are ready
        self.failed = ""
        self.rollback: Rollback | None = None    # what an operator wants next
        self.rolled_back_at = float("-inf")      # since when the peers make the earlier state, if that was the last round
        self.chosen: Update | None = None
        self.recovering = won.held is not None   # what is committed next is a predecessor's, who may have committed it
        if won.held is not None:
            self._recover(won)
        else:
            last = member.plan or member.given_up
            if last is not None and last.round == state.round + 1 and last.base == state.log.digest:
                self.previous = last
            self.collect()

    # -------------------------------------------------------------- a predecessor's update

    def _recover(self, won: Won) -> None:
        assert won.held is not None
        mine = self.s.held_next()
        if won.held.update.body_bytes == 0 or (mine is not None and mine.update.seal == won.held.update.seal):
            self._hold_again(won.held)
            return
        self.stage, self.waiting = "recover", f"the held update of {self.s.sites(won.sources)}"
        self.attempt += 1
        self.opened_at = self.s.now
        self._fetch_recovered()

    def _fetch_recovered(self) -> None:
        held = self.won.held
        assert held is not None
        self.act_at = self.s.now + self.s.timing.retry_seconds
        self.member.want(self._own(held), (self.term, self.attempt), tuple(p for p in self.won.sources if p != self.s.me))

    def _own(self, held: Held) -> Held:
        """A predecessor's record under this term and attempt."""
        return replace(held, term=self.term, attempt=self.attempt) if self.s.rules.on("held_again") else held

    def on_held(self) -> None:
        """What `member.want` asked for is held here now."""
        held = self.s.held_next()
        if held is None:
            return
        if self.stage == "recover":
            self._open_held(held)
        else:
            self.member.report_as(self.member.wanted_as)

    def _hold_again(self, held: Held) -> None:
        """Hold `held` under a new rank of this term, here and then at the voters."""
        s = self.s
        self.attempt += 1
        own = self._own(held)
        s.save_held(own)
        self._open_held(own)

    def _open_held(self, own: Held) -> None:
        self.plan, self.reports, self.members_counted = None, {}, self.s.view
        self.opened_at = self.held_at = self.s.now
        self.stage = "open"
        self._push(own)
        self.on_report(self.s.me, HeldReport(own.update.round, self.term, self.attempt, own.plan, own.update))

    def _push(self, held: Held, to: tuple[PeerId, ...] = ()) -> None:
        """Tell voters that have not reported to hold what this leader holds."""
        s = self.s
        message = HoldAgain(held.update.round, self.term, self.attempt, held)
        for peer in to or tuple(peer for peer in s.view if self.reports.get(peer, (0,))[0] != self.attempt):
            if peer != s.me:
                s.send(peer, message)
        self.push_at = s.now + 2 * s.timing.retry_seconds

    # -------------------------------------------------------------- whom to plan with

    def _usable(self, peer: PeerId) -> bool:
        """Whether `peer` may be planned for: heard, training, ready at this round, or following the log closely enough to
        be there when the plan arrives (else it would never enter a run whose rounds are shorter than its heartbeats)."""
        s = self.s
        if peer == s.me:
            return s.ready
        seen = s.peers.get(peer)
        if seen is None or not s.alive(peer) or not seen.beat.trains or seen.beat.profile is None:
            return False
        if seen.at <= self.doubted.get(peer, float("-inf")):
            return False
        if seen.beat.round == s.round:
            return seen.beat.ready and seen.beat.digest == s.log.digest
        return seen.lag <= 1 and self.rolled_back_at == float("-inf")

    def _is_leaving(self, peer: PeerId) -> bool:
        if peer == self.s.me:
            return bool(self.s.leaving)
        seen = self.s.peers.get(peer)
        return seen is not None and seen.leaving

    def _voters_of(self, members: list[PeerId]) -> int:
        """How many voters a round with these members will name, if every newcomer contributes but those that have just not."""
        staying = [peer for peer in members if peer in self.s.view]
        mute = [peer for peer in members if peer not in staying and self.abstained.get(peer, 0.0) > self.s.now]
        newcomers = len(members) - len(staying) - len(mute)
        return len(staying) + (newcomers if self.s.round == GENESIS_ROUND else min(newcomers, len(self.s.view)))

    def collect(self) -> None:
        """Ask for a plan if enough peers are there; say for whom this waits if not."""
        s = self.s
        self.stage, self.plan, self.push_at, self.lacking = "collect", None, float("inf"), 0
        self.act_at = s.now + s.timing.retry_seconds
        if s.final:
            self.stage, self.waiting = "done", ""
            return
        if self.rollback is not None and self._roll_back(self.rollback):
            return
        there = [peer for peer in sorted({s.me, *s.peers}) if self._usable(peer)]
        usable = [peer for peer in there if not self._is_leaving(peer)]
        members = [peer for peer in usable if self.benched.get(peer, 0) <= s.round]
        if not self._plannable(members):
            members = usable
        if not self._plannable(members):
            if self._let_leave():
                return
            if any(peer not in s.view for peer in usable):
                members = [peer for peer in there if peer in usable or peer in s.view]
        if not self._plannable(members):
            self._explain(usable)
            return
        if self._settling(members):
            return
        members.sort(key=s.site_of)
        self.stage, self.waiting = "planning", "the planner"
        self.act_at = s.now + 30 * s.timing.retry_seconds
        previous = self.previous if self.previous is not None and self.previous.round == s.round + 1 else None
        s.out.append(
            NeedPlan(s.round + 1, self.attempt + 1, self.term, s.log.digest, tuple(members), previous, self.gather)
        )

    def _plannable(self, members: list[PeerId]) -> bool:
        if not members or (self.s.rules.on("plan_has_quorum") and not self.s.quorum(members)):
            return False
        return len(members) >= self.s.settings.min_peers and self._voters_of(members) >= self.s.settings.min_peers

    def _explain(self, members: list[PeerId]) -> None:
        missing = [peer for peer in self.s.view if peer not in members]
        if self.s.quorum(members) and len(members) >= self.s.settings.min_peers:
            self.waiting = f"newcomers that contribute: the next round needs {self.s.settings.min_peers} voters (min_peers)"
        elif self.s.quorum(members):
            self.lacking = self.s.settings.min_peers - len(members)
            self.waiting = more_peers(self.lacking, self.s.settings.min_peers)
        else:
            self.waiting = f"a quorum of the voters: {self.s.sites(missing)}"

    def _settling(self, members: list[PeerId]) -> bool:
        """The first plan of a run, of a reign among peers not yet heard, and after a rollback waits a little for the others."""
        s = self.s
        if s.round == GENESIS_ROUND:
            newest = max((seen.ready_since or 0.0 for peer, seen in s.peers.items() if peer in members), default=0.0)
            until = max(newest, self.since) + s.timing.settle_seconds
        elif self.attempt == 0 and (begun := max(self.since, self.rolled_back_at)) + s.timing.settle_seconds > s.now:
            coming = [v for v in s.view if v not in members and not self._is_leaving(v) and (s.alive(v) or v not in s.peers)]
            until = begun + s.timing.settle_seconds if coming else s.now
        else:
            return False
        if s.now >= until:
            return False
        self.act_at, self.waiting = until, "others that may still become ready"
        return True

    def _here(self) -> list[PeerId]:
        """The voters that can hold an update without bits."""
        s = self.s
        return [peer for peer in s.view if peer == s.me or (s.alive(peer) and s.peers[peer].lag <= 1)]

    def _roll_back(self, rollback: Rollback) -> bool:
        s = self.s
        if not s.quorum(self._here()):
            return False
        self._hold_without_bits(s.view, rollback)
        return True

    def _hold_without_bits(self, voters: tuple[PeerId, ...], rollback: Rollback | None = None) -> None:
        s = self.s
        update = Update(s.round + 1, s.log.digest, "gather", (), (), voters, digest_bytes(), 0, rollback)
        self._hold_again(Held(self.term, self.attempt, b"", update))

    def _let_leave(self) -> bool:
        """If voters want to leave and the others are no quorum: an update without bits, held by all, that lets them go."""
        s, here = self.s, self._here()
        staying = tuple(sorted((peer for peer in here if not self._is_leaving(peer)), key=s.site_of))
        if len(staying) == len(here) or not staying or len(staying) < s.settings.min_peers or not s.quorum(here):
            return False
        self._hold_without_bits(staying)
        return True

    # -------------------------------------------------------------- an attempt

    def on_planned(self, plan: Plan | None, reason: str) -> Plan | None:
        """Open the attempt; returns the plan if this peer is a member of it."""
        s = self.s
        if self.stage != "planning":
            return None
        if plan is None:
            self.stage, self.waiting, self.act_at = "collect", reason, s.now + s.timing.retry_seconds
            return None
        if (plan.round, plan.term, plan.attempt, plan.base) != (s.round + 1, self.term, self.attempt + 1, s.log.digest):
            return None
        if s.rules.on("plan_has_quorum") and not s.quorum(plan.peers):
            self.stage, self.waiting = "collect", "a plan whose members are a quorum"
            self.act_at = s.now + s.timing.retry_seconds
            return None
        self.attempt = plan.attempt
        self.plan, self.stage = plan, "open"
        self.finished, self.closed = set(), set()
        if s.rules.on("newest_attempt"):
            self.reports, self.overtaken_at = {}, float("inf")
        self.members_counted = s.view if s.rules.on("count_view") else plan.peers
        self.opened_at, self.waiting = s.now, ""
        self.finished_at = self.held_at = float("inf")
        self.moved_at, self.took_seconds = float("-inf"), 0.0
        self.act_at = s.now + s.timing.retry_seconds
        for peer in plan.peers:
            if peer != s.me:
                s.send(peer, PlanOffer(plan))
        return plan if plan.of(s.me) is not None else None

    def on_finished(self, sender: PeerId, message: Finished) -> None:
        if self.plan is None or message.plan != self.plan.digest or self.plan.of(sender) is None:
            return
        if self.s.rules.on("ranges_within") and contribution_fault(self.plan, sender, message.contribution):
            self.lose([sender], "member_lost", BENCH_ROUNDS)
            return
        self.finished.add(sender)
        if message.contribution.abstains and sender not in self.s.view:
            self.abstained[sender] = self.s.now + 10 * self.s.timing.retry_seconds
            if self._voters_of(list(self.plan.peers)) < self.s.settings.min_peers:
                self.lose([], "too_few_voters")
                return
        if len(self.finished) == len(self.plan.members) and self.finished_at == float("inf"):
            self.finished_at = self.s.now

    def on_moved(self, plan: Digest) -> None:
        """The exchange of `plan` goes on here."""
        if self.plan is not None and plan == self.plan.digest:
            self.moved_at = self.s.now

    def _exchange_seconds(self, upto: float) -> float:
        """What the plan's exchange takes: as was planned, or as it has by `upto`, whose links may be slower than was known."""
        return 0.0 if self.plan is None else max(self.plan.exchange_seconds, upto - self.finished_at)

    def on_refused(self, sender: PeerId, refusal: PlanRefused) -> None:
        """A member will not take part in this attempt."""
        if self.plan is None or refusal.plan != self.plan.digest or sender in self.finished:
            return
        if refusal.reason == NOT_READY:
            self.doubted[sender] = self.s.now
        bench = {NOT_READY: 0, RESTARTED: 0, BEHIND: BEHIND_ROUNDS}.get(refusal.reason, BENCH_ROUNDS)
        self.lose([sender], "plan_refused", bench)

    def on_lost(self, reporter: PeerId, plan: Digest, peers: tuple[PeerId, ...]) -> None:
        """`reporter` missed chunk deadlines of `peers`. Whoever can still be given the update is; else they are left out."""
        s = self.s
        if self.plan is None or plan != self.plan.digest or self.stage != "open":
            return
        held = s.held_next()
        if self._holds_newest(held):
            assert held is not None
            if reporter in s.view:
                self._push(held, (reporter,))
        elif self.reports:
            if reporter == s.me:
                self._fetch_reported()
        else:
            victims = [peer for peer in peers if peer != s.me]
            if not victims and reporter != s.me:
                victims = [reporter]
            self.lose(victims, "member_lost", BENCH_ROUNDS)

    def lose(self, peers: list[PeerId], reason: str, bench_rounds: int = 0) -> None:
        """Give this attempt up and go on with the next one, without `peers` if they are to be left out for a while."""
        s, plan = self.s, self.plan
        if plan is None or self._holds_newest(s.held_next()):
            return
        for peer in peers if bench_rounds else []:
            strikes = self.strikes.get(peer, 0)
            self.benched[peer] = s.round + min(bench_rounds * 2**strikes, LONGEST_BENCH_ROUNDS)
            self.strikes[peer] = strikes + 1
        self._next_attempt(plan, reason)

    def _next_attempt(self, plan: Plan, reason: str) -> None:
        s = self.s
        s.discard(plan, reason)
        self.failures += 1
        if self.failures >= s.timing.max_attempts:
            self.failed = "exchange_failed" if reason == "member_lost" else reason
            return
        self.previous = plan
        self.collect()

    # -------------------------------------------------------------- held reports

    def _holds_newest(self, held: Held | None) -> bool:
        return held is not None and self.stage == "open" and held.rank == (self.term, self.attempt)

    def on_report(self, sender: PeerId, report: HeldReport) -> None:
        """A peer holds an update. Commit when a quorum of the view before it holds the same one, of the newest attempt."""
        s = self.s
        if report.term != self.term or report.round != s.round + 1:
            return
        if report.attempt != self.attempt and s.rules.on("newest_attempt"):
            return
        self.reports[sender] = (report.attempt, report.update)
        if sender == s.me:
            self.held_at = s.now
            self.took_seconds = self._exchange_seconds(s.now)
            self.push_at = min(self.push_at, s.now + max(s.timing.retry_seconds, self.took_seconds))
        self._count()

    def _count(self) -> None:
        s = self.s
        by_seal: dict[bytes, list[PeerId]] = {}
        updates: dict[bytes, Update] = {}
        for peer, (_, update) in self.reports.items():
            by_seal.setdefault(update.seal, []).append(peer)
            updates[update.seal] = update
        for seal, peers in by_seal.items():
            if is_quorum(peers, self.members_counted):
                if self._has_body(seal):
                    self.chosen = updates[seal]
                elif not self._may_still_assemble(updates[seal]):
                    self._fetch_reported()
                return
        exchange_over = self.plan is None or s.me not in self.plan.peers or not self.member.exchanging
        if len(by_seal) == 1 and exchange_over and s.me not in self.reports and self.member.wanted is None:
            self._fetch_reported()
        elif len(by_seal) > 1 and self.plan is not None:
            self._unequal(by_seal)

    def _may_still_assemble(self, update: Update) -> bool:
        """Whether this leader's own exchange is about to bring `update`, which a quorum holds already: as a rule the others are
        only a moment ahead. To fetch it takes the links twice, so the exchange has as long again as it took them."""
        if self.plan is None or not self.member.assembling(update):
            return False
        self.overtaken_at = min(self.overtaken_at, self.s.now)
        return self.s.now < self.overtaken_at + self._exchange_seconds(self.overtaken_at) + 2 * self.s.timing.retry_seconds

    def _has_body(self, seal: Digest) -> bool:
        held = self.s.held_next()
        assembled = self.member.assembled
        return (held is not None and held.update.seal == seal) or (assembled is not None and assembled.seal == seal)

    def _fetch_reported(self) -> None:
        """Another member holds what this leader's own exchange did not bring."""
        if self.member.wanted is not None or not self.reports:
            return
        sources: dict[bytes, list[PeerId]] = {}
        updates = {update.seal: update for _, update in self.reports.values()}
        for peer, (_, update) in sorted(self.reports.items()):
            if peer != self.s.me:
                sources.setdefault(update.seal, []).append(peer)
        if not sources:
            return
        seal = max(sources, key=lambda seal: (len(sources[seal]), seal))
        plan = b"" if self.plan is None else self.plan.digest
        held = Held(self.term, self.attempt, plan, updates[seal])
        self.member.want(held, held.rank, tuple(sources[seal]))

    def _unequal(self, by_seal: dict[bytes, list[PeerId]]) -> None:
        """Two updates of one attempt: if none can reach a quorum any more, once more in gather; then without the odd ones."""
        s, plan = self.s, self.plan
        assert plan is not None
        silent = [peer for peer in s.view if peer not in self.reports and s.alive(peer) and peer in plan.peers]
        if any(s.quorum([*peers, *silent]) for peers in by_seal.values()):
            return
        self.gather = True
        self.unequal += 1
        if self.unequal > 1:
            agreed = max(by_seal.values(), key=lambda peers: (len(peers), sorted(peers)))
            for peer in self.reports:
                if peer not in agreed and peer != s.me:
                    self.benched[peer] = s.round + LONGEST_BENCH_ROUNDS
        self._next_attempt(plan, "unequal_held")

    # -------------------------------------------------------------- the next round

    def committed(self, odd: tuple[PeerId, ...] = ()) -> None:
        """The log has grown: begin the next round. `odd` peers make sure of their anchors first. Whoever
        contributed has made good for what it was benched for."""
        update = self.s.last_update
        for c in update.contributors if update is not None else ():
            self.strikes.pop(c.peer, None)
        self.rolled_back_at = float("-inf")
        if update is not None and update.rollback is not None:
            self.rolled_back_at = self.s.now
            if self.rollback == update.rollback:
                self.rollback = None
        self.doubted |= dict.fromkeys(odd, self.s.now)
        self.attempt = self.failures = self.unequal = 0
        self.gather, self.previous, self.chosen, self.recovering = False, None, None, False
        self.reports, self.overtaken_at = {}, float("inf")
        self.collect()

    # -------------------------------------------------------------- time

    def heard(self) -> None:
        """A heartbeat has arrived: whoever was missing may be there now."""
        if self.stage == "collect" and self.act_at > self.s.now:
            self.collect()

    def next_deadline(self) -> float:
        if self.stage == "done":
            return float("inf")
        return min(self.act_at, self.push_at) if self.stage == "open" else self.act_at

    def tick(self) -> None:
        s = self.s
        if self.stage in ("collect", "planning"):
            if s.now >= self.act_at:
                self.collect()
        elif self.stage == "recover":
            if self.member.wanted is None:
                self._fetch_recovered()
            self.act_at = s.now + s.timing.retry_seconds
            if s.now - self.opened_at > 4 * s.timing.heartbeat_limit_seconds:
                self.failed = "exchange_failed"
        elif self.stage == "open":
            self._watch()

    def _watch(self) -> None:
        """Deadlines of an open attempt."""
        s, held, retry = self.s, self.s.held_next(), self.s.timing.retry_seconds
        if self._holds_newest(held) or (held is not None and self.plan is None):
            assert held is not None
            if s.now >= self.push_at:
                self._push(held)
            self.waiting = f"held reports of {s.sites(peer for peer in s.view if peer not in self.reports)}"
            self.act_at = s.now + retry
            if s.now - self.held_at > 8 * (s.timing.heartbeat_limit_seconds + self.took_seconds):
                self.failed = "exchange_failed"
            return
        self.push_at = float("inf")
        if s.now < self.act_at:
            return
        self.act_at = s.now + retry
        if self.reports:
            self._count()
        if self.plan is not None and self.chosen is None:
            self._watch_plan(self.plan)

    def _watch_plan(self, plan: Plan) -> None:
        s = self.s
        late, gone = [], []
        for member in plan.members:
            if member.peer in self.finished:
                continue
            if not s.alive(member.peer):
                if self._given_up(plan, member.peer):
                    gone.append(member.peer)
            elif self._is_late(plan, member):
                late.append(member.peer)
            elif member.peer != s.me:
                self._remind(plan, member.peer)
        self.waiting = f"the contributions of {s.sites(peer for peer in plan.peers if peer not in self.finished)}"
        if gone or late:
            self.lose(gone + late, "member_lost", BENCH_ROUNDS if late else 0)
            return
        if self.finished_at < float("inf"):
            self.waiting = "the exchange"
            patience = 4 * plan.exchange_seconds * (1 + self.failures) + 2 * s.timing.heartbeat_limit_seconds
            still = s.now - max(self.finished_at, self.moved_at)
            # While it goes on, links are slower than was known: begun anew, it would only send the same bytes again.
            if still > patience or s.now - self.finished_at > max(patience, MOST_EXCHANGE_SECONDS):
                if self.reports:
                    self.finished_at = s.now
                    self._fetch_reported()
                else:
                    self.gather = True
                    self.lose([], "exchange_failed")

    def _given_up(self, plan: Plan, peer: PeerId) -> bool:
        """Whether a member that is not heard is planned without. In a long round, while others still train anyway, it may be
        silent for a while: nobody waits for it yet, and what it trains is not lost for a short outage."""
        s = self.s
        if all(other in self.finished or not s.alive(other) for other in plan.peers):
            return True
        heard = s.peers[peer].at if peer in s.peers else self.opened_at
        return s.now - max(heard, self.since) > SILENCE_SHARE * plan.train_seconds

    def _is_late(self, plan: Plan, member: Assignment) -> bool:
        """Ask a late member to close; true if it did not even then."""
        s = self.s
        predicted = member.finish_seconds * 1.2 + plan.grace_seconds
        step = member.finish_seconds / max(1, member.inner_steps)
        since = s.now - self.opened_at
        if plan.may_close and since > predicted:
            self.closed.add(member.peer)
            if member.peer == s.me:
                s.out.append(CloseTraining(plan.digest))
            else:
                s.send(member.peer, Close(plan.digest))
        if plan.may_close:
            patience = 2 * step + 0.5 * member.finish_seconds + plan.grace_seconds
        else:
            patience = 4 * member.finish_seconds + 10 * plan.grace_seconds
        return since > predicted + patience + 2 * s.timing.heartbeat_limit_seconds

    def _remind(self, plan: Plan, peer: PeerId) -> None:
        """Offer the plan again to a member whose heartbeat, sent since, does not show it at work."""
        seen = self.s.peers.get(peer)
        if seen is not None and seen.at > self.opened_at and (seen.beat.phase not in AT_WORK or seen.beat.round < self.s.round):
            self.s.send(peer, PlanOffer(plan))
