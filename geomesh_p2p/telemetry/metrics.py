"""Every Prometheus metric in one table, and the observer that feeds it. What serves it is metrics_server.py.

Base units; counters end in _total. Labels are bounded: phases and reasons are from fixed lists, remotes are sites of the run
and their series go when they go.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics

from geomesh_p2p.core import observations as seen
from geomesh_p2p.core.events import DISCARD_REASONS
from geomesh_p2p.core.messages import FETCHED
from geomesh_p2p.core.retention import DiskForecast, DiskSample
from geomesh_p2p.core.types import Plan
from geomesh_p2p.telemetry.gpus import GpuCollector

# name (without the prefix geomesh_ and a counter's _total): kind, labels besides `site`, help
TABLE: dict[str, tuple[type[Counter] | type[Gauge], tuple[str, ...], str]] = {
    "round": (Gauge, (), "Last round committed by this peer"),
    "term": (Gauge, (), "Term of the leader that this peer follows"),
    "is_leader": (Gauge, (), "1 if this peer leads"),
    "members": (Gauge, (), "Sites known and heard, this one included"),
    "phase": (Gauge, ("phase",), "1 for the phase this peer is in"),
    "rounds_committed": (Counter, (), "Rounds committed by this process: begins at zero with it, for rate()"),
    "rounds_discarded": (Counter, ("reason",), "Attempts given up"),
    "rollbacks": (Counter, (), "Rollbacks to the state after an earlier round"),
    "digest_mismatches": (Counter, (), "Digests that differed from another peer's"),
    "seconds": (Counter, ("phase",), "Where the time of committed rounds went"),
    "round_goal": (Gauge, (), "The run's last round (run.rounds)"),
    "round_age_seconds": (Gauge, (), "Time since this peer's last committed round (NaN before the first)"),
    "round_seconds": (Gauge, (), "Wall seconds of the last round"),
    "round_planned_seconds": (Gauge, (), "The last round as predicted"),
    "finish_seconds": (Gauge, (), "From plan to last inner step, last round"),
    "finish_planned_seconds": (Gauge, (), "From plan to last inner step as predicted, last round"),
    "replans": (Counter, ("reason",), "Plans that differ from the one before, by what changed first"),
    "batch": (Gauge, (), "Sequences a step in the last round"),
    "inner_steps": (Gauge, (), "Inner steps in the last round"),
    "step_seconds": (Gauge, (), "Median inner step of the last round"),
    "tokens": (Counter, (), "Tokens this process trained in committed rounds: begins at zero with it, for rate()"),
    "run_tokens": (Gauge, (), "Tokens of all peers in the log: goes on over restarts, absent until the log is known"),
    "tokens_per_second": (Gauge, (), "Speed of the inner loop now"),
    "loss": (Gauge, (), "Training loss (nats a token)"),
    "validation_perplexity": (Gauge, (), "Of the anchor, as last validated"),
    "validation_round": (Gauge, (), "Round of the anchor that was last validated"),
    "exchange_share": (Gauge, (), "Share of the expected bytes that are here, of the exchange going on or the last one"),
    "exchange_received_bytes": (Gauge, (), "Payload bytes received in the exchange going on or the last one"),
    "exchange_sent_bytes": (Gauge, (), "Payload bytes sent in the exchange going on or the last one"),
    "exchange_seconds": (Gauge, (), "Of the last round: from the last member's last step until the update was applied"),
    "exchange_planned_seconds": (Gauge, (), "The same as predicted by the newest plan"),
    "exchange_remaining_seconds": (Gauge, (), "Until the exchange going on has all bytes, at the rate so far (NaN: unknown)"),
    "learning_rate": (Gauge, ("optimizer",), "Learning rate of the inner and the outer optimizer"),
    "payload_bytes": (Counter, ("direction", "remote"), "Bytes of contributions and updates"),
    "overhead_bytes": (Counter, ("direction", "remote"), "All other bytes"),
    "relayed_bytes": (Counter, ("direction", "remote"), "Of both, the bytes that went through a relay"),
    "given_bytes": (Counter, ("what",), "Bytes of state given to peers that join or catch up"),
    "link_bytes_per_second": (Gauge, ("remote",), "Measured rate to a remote"),
    "link_rtt_seconds": (Gauge, ("remote",), "Measured round trip to a remote"),
    "agreement_share": (Gauge, ("remote",), "Share of a member's signs that agree with the updates, smoothed"),
    "joins": (Counter, (), "Peers that joined"),
    "losses": (Counter, (), "Peers that were lost or left"),
    "elections": (Counter, (), "Changes of leader"),
    "catch_up_rounds": (Counter, (), "Rounds caught up from others"),
    "skipped_steps": (Counter, (), "Inner steps skipped (not finite)"),
    "abstentions": (Counter, (), "Rounds without a contribution of this peer, though a member"),
    "overrun_seconds": (Counter, (), "Time that emulated steps took beyond their emulated time"),
    "checkpoint_seconds": (Gauge, (), "Duration of the last save"),
    "checkpoint_bytes": (Gauge, (), "Size of the last save"),
    "checkpoint_round": (Gauge, (), "Round of the last save"),
    "disk_free_bytes": (Gauge, (), "Bytes free where this peer's run folder is"),
    "disk_full_seconds": (Gauge, (), "Until that disk is full as it grows now (+Inf: it does not fill; absent until known)"),
    "kept_bytes": (Gauge, ("what",), "On disk after the last save: snapshots, updates (the round log)"),
    "checkpoint_age_seconds": (Gauge, (), "Time since the last save (NaN before the first)"),
    "warnings": (Counter, ("reason",), "Warnings"),
}
disable_created_metrics()  # when each counter was made: a third of the page, and nobody asks for it
TIMED_PHASES = ("compute", "data_wait", "straggler_idle", "wan_idle", "codec", "control")
REPLAN_REASONS = ("attempt", "members", "topology", "batch", "steps")
DIGEST_MISMATCH = "digest_mismatch"
MAX_REASONS = 32
MAX_GONE = 128
FROM_THE_LOG = ("round", "run_tokens")
OF_A_ROUND = (
    "round_seconds", "round_planned_seconds", "finish_seconds", "finish_planned_seconds", "step_seconds",
    "batch", "inner_steps", "loss", "validation_perplexity", "validation_round",
)  # fmt: skip
ABSENT_AT_FIRST = (*FROM_THE_LOG, *OF_A_ROUND, "disk_full_seconds")
"""No series until the figure is known: a restart never makes what a run has come to fall, and no zero spoils a mean or a
minimum over the peers."""


class Metrics:
    """An observer that keeps the metrics of one peer in a registry of its own. `folder` is the peer's, for the disk's state."""

    def __init__(
        self,
        site: str,
        outer_learning_rate: float,
        clock: Callable[[], float] = time.monotonic,
        round_goal: int = 0,
        folder: Path = Path(),
    ):
        self.registry = CollectorRegistry()
        self._site, self._clock = site, clock
        self._all: dict[str, Counter | Gauge] = {
            name: kind(f"geomesh_{name}", text, ("site", *labels), registry=self.registry)
            for name, (kind, labels, text) in TABLE.items()
        }
        ProcessCollector(namespace="geomesh", registry=self.registry)
        GpuCollector(site).register(self.registry)
        self._remotes: set[str] = set()
        # Remotes that were lost, the newest of them: what still comes in about them counts for nothing.
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._warned: set[str] = set()
        self._plan: Plan | None = None
        self._saved_at: float | None = None
        self._committed_at: float | None = None
        self._folder, self._disk = folder, DiskForecast()
        self.phase = seen.PhaseChanged("starting", 0)
        self._begin(outer_learning_rate, round_goal)

    def _begin(self, outer_learning_rate: float, round_goal: int) -> None:
        """Series whose labels are known from the start exist from the start, at zero."""
        for name, (_, labels, _) in TABLE.items():
            if not labels and name not in ABSENT_AT_FIRST:
                self._of(name)
        for name, label, values in (
            ("seconds", "phase", TIMED_PHASES),
            ("phase", "phase", seen.PHASES),
            ("rounds_discarded", "reason", DISCARD_REASONS),
            ("replans", "reason", REPLAN_REASONS),
            ("given_bytes", "what", FETCHED),
        ):
            for value in values:
                self._of(name, **{label: value})
        self._of("learning_rate", optimizer="outer").set(outer_learning_rate)
        self._of("round_goal").set(round_goal)
        self._of("checkpoint_age_seconds").set_function(lambda: self._since(self._saved_at))
        self._of("round_age_seconds").set_function(lambda: self._since(self._committed_at))
        self._of("disk_free_bytes").set_function(lambda: free_bytes(self._folder))

    def _since(self, moment: float | None) -> float:
        return math.nan if moment is None else self._clock() - moment

    def _of(self, name: str, **labels: str) -> Any:
        return self._all[name].labels(site=self._site, **labels)

    def __call__(self, event: Any) -> None:
        match event:
            case seen.PhaseChanged():
                self._of("phase", phase=self.phase.phase).set(0)
                self._of("phase", phase=event.phase).set(1)
                self.phase = event
            case seen.TrainingProgress():
                self._of("tokens_per_second").set(event.tokens_per_second)
                self._of("loss").set(event.loss)
            case seen.PlanAdopted():
                reason = what_changed(self._plan, event.plan)
                if reason:
                    self._of("replans", reason=reason).inc()
                self._plan = event.plan
                self._of("exchange_planned_seconds").set(event.plan.exchange_seconds)
            case seen.RoundCommitted():
                self._committed(event)
            case seen.RoundDiscarded():
                self._of("rounds_discarded", reason=event.reason if event.reason in DISCARD_REASONS else "other").inc()
            case seen.Validated():
                self._of("validation_perplexity").set(event.perplexity)
                self._of("validation_round").set(event.round)
            case seen.ExchangeProgress():
                for name, number in (
                    ("exchange_share", event.share),
                    ("exchange_received_bytes", event.received_bytes),
                    ("exchange_sent_bytes", event.sent_bytes),
                    ("exchange_remaining_seconds", math.nan if event.remaining_seconds is None else event.remaining_seconds),
                ):
                    self._of(name).set(number)
            case seen.LogStands():
                self._of("round").set(event.round)
                self._of("run_tokens").set(event.tokens_total)
            case seen.MembersChanged():
                self._of("members").set(len(event.sites))
                self._of("term").set(event.term)
                for site in event.sites:
                    self._gone.pop(site, None)
                for remote in self._remotes - set(event.sites):
                    self._forget(remote)
            case seen.PeerJoined():
                self._of("joins").inc()
            case seen.PeerLost():
                self._of("losses").inc()
                self._forget(event.site)
            case seen.LeaderChanged():
                if event.leader:
                    self._of("elections").inc()
                self._of("term").set(event.term)
                self._of("is_leader").set(event.self_is_leader)
            case seen.LinkMeasured() if event.remote not in self._gone:
                self._remotes.add(event.remote)
                self._of("link_rtt_seconds", remote=event.remote).set(event.rtt_seconds)
                self._of("link_bytes_per_second", remote=event.remote).set(event.bytes_per_second)
            case seen.Given() if event.what in FETCHED:
                self._of("given_bytes", what=event.what).inc(event.bytes)
            case seen.Agreed():
                for remote, share in event.with_update.items():
                    if remote not in self._gone:
                        self._remotes.add(remote)
                        self._of("agreement_share", remote=remote).set(share)
            case seen.RolledBack():
                self._of("rollbacks").inc()
            case seen.CaughtUpTo():
                self._of("catch_up_rounds").inc(event.rounds)
                self._of("round").set(event.round)
            case seen.Saved():
                self._of("checkpoint_seconds").set(event.seconds)
                self._of("checkpoint_bytes").set(event.bytes)
                self._of("checkpoint_round").set(event.round)
                self._saved_at = self._clock()
            case seen.Kept():
                self._kept(event)
            case seen.Warned():
                self._warn(event.reason)

    def _committed(self, event: seen.RoundCommitted) -> None:
        self._committed_at = self._clock()
        for name, value in (
            ("round", event.round),
            ("round_seconds", event.times.wall),
            ("exchange_seconds", event.times.wan_idle + event.times.codec),
            ("round_planned_seconds", event.planned_seconds),
            ("run_tokens", event.tokens_total),
            ("loss", event.loss),
        ):
            if value is not None:
                self._of(name).set(value)
        if self._site in event.members:
            for name, value in (
                ("finish_seconds", event.finish_seconds),
                ("finish_planned_seconds", event.planned_finish_seconds),
                ("batch", event.batch),
                ("inner_steps", event.inner_steps),
                ("step_seconds", event.step_seconds_median),
            ):
                self._of(name).set(value)
            self._of("learning_rate", optimizer="inner").set(event.learning_rate)
        for name, amount in (
            ("rounds_committed", 1),
            ("tokens", event.tokens),
            ("skipped_steps", event.skipped_steps),
            ("abstentions", int(bool(event.abstained))),
            ("overrun_seconds", event.overrun_seconds),
        ):
            self._of(name).inc(amount)
        for phase in TIMED_PHASES:
            self._of("seconds", phase=phase).inc(max(0.0, getattr(event.times, phase)))
        for name, direction, traffic in (
            ("payload_bytes", "sent", event.payload_sent),
            ("payload_bytes", "received", event.payload_received),
            ("overhead_bytes", "sent", event.overhead_sent),
            ("overhead_bytes", "received", event.overhead_received),
            ("relayed_bytes", "sent", event.relayed_sent),
            ("relayed_bytes", "received", event.relayed_received),
        ):
            for remote, count in traffic.items():
                if remote not in self._gone:
                    self._remotes.add(remote)
                    self._of(name, direction=direction, remote=remote).inc(count)

    def _kept(self, event: seen.Kept) -> None:
        for what, size in (("snapshots", event.snapshot_bytes), ("updates", event.update_bytes)):
            self._of("kept_bytes", what=what).set(size)
        kept, free = event.snapshot_bytes + event.update_bytes, free_bytes(self._folder)
        if not math.isnan(free):
            self._disk.add(DiskSample(self._clock(), free, kept, event.fullest_bytes))
            if not math.isnan(seconds := self._disk.full_in_seconds()):
                self._of("disk_full_seconds").set(seconds)

    def _warn(self, reason: str) -> None:
        if reason == DIGEST_MISMATCH:
            self._of("digest_mismatches").inc()
        if reason not in self._warned and len(self._warned) >= MAX_REASONS:
            reason = "other"
        self._warned.add(reason)
        self._of("warnings", reason=reason).inc()

    def _forget(self, remote: str) -> None:
        """A lost remote's series go; should it come back, they begin again at zero."""
        self._remotes.discard(remote)
        self._gone[remote] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        for name, (_, labels, _) in TABLE.items():
            if "remote" in labels:
                self._all[name].remove_by_labels({"remote": remote})


def free_bytes(folder: Path) -> float:
    """NaN if that cannot be told."""
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return math.nan


def what_changed(before: Plan | None, now: Plan) -> str:
    """The first of REPLAN_REASONS in which `now` differs from the plan before it, "" if none (or if it is the first)."""
    if before is None:
        return ""
    if now.round == before.round:
        return "attempt"
    if now.peers != before.peers:
        return "members"
    if now.topology != before.topology:
        return "topology"
    for reason, field in (("batch", "batch"), ("steps", "inner_steps")):
        if [getattr(member, field) for member in now.members] != [getattr(member, field) for member in before.members]:
            return reason
    return ""
