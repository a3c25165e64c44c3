"""Keeps book of this peer's rounds and turns each committed one into one observation.

Facts come from three sides: the replica's notes (plans, discards, leaders), the algorithm (training, folding) and the
transport (traffic, when others finished).
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.messages import Finished
from geomesh_p2p.core.ports import InnerResult, LocalRound, Observer, PeerTraffic, Transport
from geomesh_p2p.core.types import PeerId, Plan, StepReport, Term, Update
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.stopwatch import Ahead, Stopwatch, times_of

NO_WORK = InnerResult(
    tokens=0, ranges=(), steps=0, loss=math.nan, seconds=0.0, data_wait_seconds=0.0, step_seconds=(), skipped_steps=0,
    overrun_seconds=0.0, learning_rate=0.0,
)  # fmt: skip


class RoundBook:
    """One peer's rounds. `opened`: when its first round began."""

    def __init__(self, me: PeerId, membership: Membership, transport: Transport, observe: Observer, opened: float) -> None:
        self.me = me
        self.last_step_report: StepReport | None = None
        self._membership = membership
        self._transport = transport
        self._observe = observe
        self._watches: dict[int, Stopwatch] = {}  # by round: the next plan may come before the last update is folded
        self._opened = opened
        self._ahead: list[Ahead] = []            # what was trained of the next round since then
        self._committed: dict[int, tuple[Term, str, int, tuple[str, ...]]] = {}
        self._voters: tuple[PeerId, ...] = ()
        self._traffic: dict[PeerId, PeerTraffic] = {}

    # ---------------------------------------------------------------- as the round goes on

    def plan_adopted(self, plan: Plan, now: float) -> None:
        """An attempt's plan counts from the first one on: later attempts of a round reuse what was trained."""
        watch = self._watches.get(plan.round)
        if watch is None:
            self._watches[plan.round] = Stopwatch(plan, now)
        else:
            watch.plan, watch.reused = plan, True

    def trained(self, local: LocalRound, now: float) -> None:
        watch = self._watches.get(local.contribution.round)
        if watch is None:
            return
        watch.inner_steps_ended(local, now)
        mine = watch.plan.of(self.me)
        if mine is not None and local.result.step_seconds:
            # A short last step says nothing of the planned batch.
            whole = local.result.step_seconds[:-1] if mine.last_batch != mine.batch else local.result.step_seconds
            if whole:
                self.last_step_report = StepReport(self.me, mine.batch, median(whole))

    def trained_ahead(self, result: InnerResult, now: float) -> None:
        """Steps of the round after have just ended."""
        self._ahead.append(Ahead(now - result.seconds, now, result.data_wait_seconds))

    def member_finished(self, message: Finished, arrived: float, rtt_seconds: float) -> None:
        watch = self._watches.get(message.contribution.round)
        if watch is not None:
            watch.member_finished(message.contribution.peer, arrived, rtt_seconds)

    def committed(self, update: Update, term: Term, leader: str, tokens_total: int) -> None:
        """`tokens_total` are the run's, with this update."""
        gone = tuple(self._membership.site_of(peer) for peer in self._voters if peer not in update.voters)
        self._committed[update.round] = (term, leader, tokens_total, gone)
        self._voters = update.voters

    # ---------------------------------------------------------------- the round is over

    def folded(self, update: Update, fold_seconds: float, now: float) -> None:
        """`update` is in the anchor; it took `fold_seconds`."""
        watch = self._watches.pop(update.round, None)
        self._watches = {round: later for round, later in self._watches.items() if round > update.round}
        times = times_of(watch, self._opened, now, fold_seconds, self._ahead)
        self._opened, self._ahead = now, []
        who = self._committed.pop(update.round, (Term(0, ""), "", 0, ()))
        self._observe(self._observation(update, watch, times, who))
        ppl = validation_of(update)
        if ppl is not None:
            self._observe(obs.Validated(update.round - 1, ppl, final=False))

    def validated(self, round: int, nats: float, tokens: int) -> None:
        ppl = perplexity(nats, tokens)
        if ppl is not None:
            self._observe(obs.Validated(round, ppl, final=True))

    def _observation(
        self, update: Update, watch: Stopwatch | None, times: obs.PeerTimes, who: tuple[Term, str, int, tuple[str, ...]]
    ) -> obs.RoundCommitted:
        plan, local = (watch.plan, watch.local) if watch else (None, None)
        result, own = (local.result, local.contribution) if local else (NO_WORK, None)
        mine = plan.of(self.me) if plan else None
        traffic = self._traffic_since()
        return obs.RoundCommitted(
            round=update.round,
            digest=update.digest,
            term=who[0].number,
            leader=who[1],
            attempt=plan.attempt if plan else 0,
            topology=update.topology,
            members=tuple(m.site for m in plan.members) if plan else (),
            contributors=tuple(c.site for c in update.contributors),
            voters=len(update.voters),
            batch=mine.batch if mine else 0,
            inner_steps=mine.inner_steps if mine else 0,
            planned_tokens=plan.planned_tokens if plan else 0,
            tokens=own.tokens if own and own.payload in [c.payload for c in update.contributors] else 0,
            tokens_total=who[2],
            loss=result.loss if result.steps else None,
            validation_ppl=validation_of(update),
            learning_rate=result.learning_rate,
            planned_finish_seconds=mine.finish_seconds if mine else 0.0,
            finish_seconds=result.seconds,
            planned_seconds=plan.round_seconds if plan else 0.0,
            times=times,
            validation_seconds=local.validation_seconds if local else 0.0,
            step_seconds_median=median(result.step_seconds) if result.step_seconds else 0.0,
            steps_done=result.steps,
            skipped_steps=result.skipped_steps,
            overrun_seconds=result.overrun_seconds,
            emulated_seconds=result.seconds,
            payload_sent=traffic["payload_sent"],
            payload_received=traffic["payload_received"],
            overhead_sent=traffic["overhead_sent"],
            overhead_received=traffic["overhead_received"],
            relayed_sent=traffic["relayed_sent"],
            relayed_received=traffic["relayed_received"],
            abstained=own.reason if own and own.abstains else "",
            reused=watch.reused if watch else False,
            residual_norm=local.residual_norm if local else None,
            credited={c.site: c.tokens for c in update.contributors},
            gone=who[3],
        )

    def _traffic_since(self) -> dict[str, dict[str, int]]:
        """Bytes by remote site since the last round."""
        ways = ("sent", "received")
        names = [f"{kind}_{way}" for kind in ("payload", "overhead", "relayed") for way in ways]
        result: dict[str, dict[str, int]] = {name: {} for name in names}
        traffic = {peer: totals for peer, totals in self._transport.traffic().items() if self._membership.admitted(peer)}
        self._traffic = {peer: before for peer, before in self._traffic.items() if peer in traffic}
        for peer, totals in traffic.items():
            before = self._traffic.get(peer, PeerTraffic())
            if any(getattr(totals, name) < getattr(before, name) for name in names):
                before = PeerTraffic()  # the peer was forgotten and met again since: its counts began anew
            site = self._membership.site_of(peer)
            for name in names:
                result[name][site] = result[name].get(site, 0) + getattr(totals, name) - getattr(before, name)
            self._traffic[peer] = PeerTraffic(**vars(totals))
        return result


def validation_of(update: Update) -> float | None:
    """The perplexity of the anchor before `update`, from all contributors' shares of the validation set."""
    nats = sum(c.validation_nats for c in update.contributors)
    return perplexity(nats, sum(c.validation_tokens for c in update.contributors))


def perplexity(nats: float, tokens: int) -> float | None:
    """exp of the mean token loss; None without tokens. A diverged loss gives infinity."""
    if tokens <= 0:
        return None
    mean: Any = nats / tokens
    return math.exp(mean) if mean < 700 else math.inf
