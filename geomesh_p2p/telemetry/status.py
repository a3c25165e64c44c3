"""One line that answers what a peer does, how far it is, and what comes next and when: from observations alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from geomesh_p2p.core import observations as seen

IN_A_ROUND = ("planning", "training", "straggler_idle", "exchange", "commit")
NEXT = {
    "starting": "joins the run",
    "joining": "takes part in the plan after the next one",
    "idle": "the next plan",
    "planning": "training",
    "training": "exchange",
    "straggler_idle": "exchange",
    "exchange": "commit",
    "commit": "the next round",
    "catch_up": "takes part in the next plan",
    "saving": "the next round",
    "validating": "the end",
    "leaving": "ends after a round without this peer",
}
ENOUGH_ROUNDS = 2
"""Whole rounds seen here in a row before anything is foretold from them."""
ROUNDS_KEPT = 5


class StatusLine:
    """Takes observations, is the line as text."""

    def __init__(self, site: str, clock: Callable[[], float] = time.monotonic, rounds: int | None = None) -> None:
        self._site, self._clock, self._rounds = site, clock, rounds
        self.phase = seen.PhaseChanged("starting", 0)
        self._since = self._phase_began = clock()
        self._took: dict[str, float] = {}                       # seconds of each phase, the last time
        self._training: seen.TrainingProgress | None = None
        self._exchange: seen.ExchangeProgress | None = None
        self._planned: dict[str, float] = {}                    # seconds of the phases that the plan predicts
        self._members = seen.MembersChanged((), "", 0)
        self._committed: int | None = None                      # None before the log is read
        self._kept_up = 0                                       # a round that came alone to a peer that is no member
        self._whole = False                                     # whether the next round's time is that of a round alone
        self._rounds_seen: deque[tuple[int, float]] = deque(maxlen=ROUNDS_KEPT)  # (tokens of all, seconds) of whole rounds
        self.no_leader_since: float | None = None

    def take(self, event: Any) -> None:
        match event:
            case seen.PhaseChanged():
                now = self._clock()
                if event.phase != self.phase.phase:
                    self._took[self.phase.phase] = now - self._phase_began
                    self._phase_began = now
                    self._training = self._exchange = None
                if not (event.lacking and self.phase.lacking):
                    self._since = now
                self.phase = event
            case seen.TrainingProgress():
                self._training = event
            case seen.ExchangeProgress():
                self._exchange = event
            case seen.PlanAdopted():
                mine = next((m for m in event.plan.members if m.site == self._site), None)
                finish = mine.finish_seconds if mine is not None else event.plan.train_seconds
                self._planned = {"training": finish, "exchange": event.plan.exchange_seconds}
            case seen.MembersChanged():
                self._members = event
            case seen.RoundCommitted():
                self._take_round(event)
            case seen.LogStands():
                self._committed = event.round
            case seen.CaughtUpTo():
                self._committed = max(event.round, self._committed or 0)
                if event.rounds == 1:
                    self._kept_up = event.round
                else:
                    self._begin_anew()
            case seen.LeaderChanged():
                if event.leader:
                    self.no_leader_since = None
                elif self.no_leader_since is None:
                    self.no_leader_since = self._clock()

    def _begin_anew(self) -> None:
        """What came by catching up tells nothing of how long a round takes, nor does the first one after it."""
        self._rounds_seen.clear()
        self._whole = False

    def _take_round(self, event: seen.RoundCommitted) -> None:
        self._committed = max(event.round, self._committed or 0)
        if self._site not in event.members and event.round != self._kept_up:
            self._begin_anew()
        elif not self._whole:
            self._whole = True  # this one began with a start or with catching up
        elif event.times.wall > 0:
            self._rounds_seen.append((event.round_tokens, event.times.wall))

    def __str__(self) -> str:
        return "; ".join(part for part in (self._what(), self._waits(), self._speed(), self._who(), self._next()) if part)

    def _what(self) -> str:
        phase = self.phase
        if self._committed is None and phase.phase == "starting":
            return "starting"
        round = phase.round + 1 if phase.phase in IN_A_ROUND else max(phase.round, self._committed or 0)
        of = f" of {self._rounds:,}" if self._rounds else ""
        text = f"round {round}{of}: {phase.phase.replace('_', ' ')}"
        if self._training is not None:
            text += f", step {self._training.step} of {self._training.steps}"
        if self._exchange is not None and phase.phase in ("straggler_idle", "exchange"):
            text += f", {describe_exchange(self._exchange)}"
        return text

    def _waits(self) -> str:
        if not self.phase.waiting_for:
            return ""
        return f"waiting for {self.phase.waiting_for} since {self._clock() - self._since:.0f} s"

    def _speed(self) -> str:
        own = self._training
        parts = [f"{own.tokens_per_second:,.0f} tokens/s here, loss {own.loss:.3f} here"] if own is not None else []
        if len(self._rounds_seen) >= ENOUGH_ROUNDS:
            rate = sum(tokens for tokens, _ in self._rounds_seen) / sum(seconds for _, seconds in self._rounds_seen)
            parts.append(f"the run {rate:,.0f} tokens/s")
        return ", ".join(parts)

    def _who(self) -> str:
        members = self._members
        if not members.sites:
            return ""
        leader = f", leader {members.leader}" if members.leader else ", no leader"
        return f"{len(members.sites)} members ({', '.join(members.sites)}){leader}"

    def _next(self) -> str:
        text = f"next: {NEXT.get(self.phase.phase, 'the next round')}{self._when()}"
        if self.phase.deadline_seconds is not None:
            text += f", gives up waiting in {max(0.0, self.phase.deadline_seconds - (self._clock() - self._since)):.0f} s"
        left = self._rounds - self._committed if self._rounds and self._committed is not None else 0
        if left > 0 and len(self._rounds_seen) >= ENOUGH_ROUNDS and not self.phase.lacking:
            text += f"; the run's end in about {duration(left * median(seconds for _, seconds in self._rounds_seen))}"
        return text

    def _when(self) -> str:
        """In how many seconds the phase ends, from the best that is known."""
        spent = self._clock() - self._phase_began
        phase, training, exchange = self.phase.phase, self._training, self._exchange
        if self.phase.lacking:
            return " once that is there"
        if phase == "training" and training is not None and training.step:
            return f" in about {spent / training.step * (training.steps - training.step):.0f} s"
        if phase == "exchange" and exchange is not None and exchange.remaining_seconds is not None:
            return f" in about {exchange.remaining_seconds:.0f} s"
        for known, how in ((self._planned, "as planned"), (self._took, "as last time")):
            if phase in known and spent <= known[phase]:
                return f" in about {known[phase] - spent:.0f} s, {how}"
        if phase in self._planned:
            return f" any moment, {spent - self._planned[phase]:.0f} s late"
        return " once that is there" if self.phase.waiting_for else " (when is not known yet)"


def describe_exchange(event: seen.ExchangeProgress) -> str:
    left = "" if event.remaining_seconds is None else f", {event.remaining_seconds:.0f} s left"
    return f"{100 * event.share:.0f}%, {megabytes(event.received_bytes)} in, {megabytes(event.sent_bytes)} out{left}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
