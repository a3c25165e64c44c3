"""One line that answers what a peer does, how far it is, and what comes next and when: from observations alone."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        self._rate: float | None = None
        self._tokens_total: int | None = None
        self._round_seconds: float | None = None
        self._committed = 0

    def take(self, event: Any) -> None:
        match event:
            case seen.PhaseChanged():
                now = self._clock()
                if event.phase != self.phase.phase:
                    self._took[self.phase.phase] = now - self._phase_began
                    self._phase_began = now
                    self._training = self._exchange = None
                self.phase, self._since = event, now
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
                self._committed, self._tokens_total = event.round, event.tokens_total
            case seen.CaughtUpTo():
                self._committed, self._tokens_total = event.round, None

    def _take_round(self, event: seen.RoundCommitted) -> None:
        self._committed, self._round_seconds = event.round, event.times.wall
        if self._tokens_total is not None and event.times.wall > 0:
            self._rate = (event.tokens_total - self._tokens_total) / event.times.wall
        self._tokens_total = event.tokens_total

    def __str__(self) -> str:
        return "; ".join(part for part in (self._what(), self._waits(), self._speed(), self._who(), self._next()) if part)

    def _what(self) -> str:
        phase = self.phase
        round = phase.round + 1 if phase.phase in IN_A_ROUND else phase.round
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
        own, run = self._training, self._rate
        parts = [f"{own.tokens_per_second:,.0f} tokens/s here, loss {own.loss:.3f}"] if own is not None else []
        parts += [f"the run {run:,.0f} tokens/s"] if run is not None else []
        return ", ".join(parts) or "no speed yet"

    def _who(self) -> str:
        members = self._members
        if not members.sites:
            return "no members yet"
        leader = f", leader {members.leader}" if members.leader else ", no leader"
        return f"{len(members.sites)} members ({', '.join(members.sites)}){leader}"

    def _next(self) -> str:
        text = f"next: {NEXT.get(self.phase.phase, 'the next round')}{self._when()}"
        if self.phase.deadline_seconds is not None:
            text += f", gives up waiting in {max(0.0, self.phase.deadline_seconds - (self._clock() - self._since)):.0f} s"
        if self._rounds and self._round_seconds:
            text += f"; the run's end in about {duration((self._rounds - self._committed) * self._round_seconds)}"
        return text

    def _when(self) -> str:
        """In how many seconds the phase ends, from the best that is known."""
        spent = self._clock() - self._phase_began
        phase, training, exchange = self.phase.phase, self._training, self._exchange
        if phase == "training" and training is not None and training.step:
            return f" in about {spent / training.step * (training.steps - training.step):.0f} s"
        if phase == "exchange" and exchange is not None and exchange.remaining_seconds is not None:
            return f" in about {exchange.remaining_seconds:.0f} s"
        for known, how in ((self._planned, "as planned"), (self._took, "as last time")):
            if phase in known and spent <= known[phase]:
                return f" in about {known[phase] - spent:.0f} s, {how}"
        if phase in self._planned or phase in self._took:
            return f" any moment, {spent - self._planned.get(phase, self._took.get(phase, 0.0)):.0f} s late"
        return f" once {self.phase.waiting_for} is there" if self.phase.waiting_for else " (when is not known yet)"


def describe_exchange(event: seen.ExchangeProgress) -> str:
    left = "" if event.remaining_seconds is None else f", {event.remaining_seconds:.0f} s left"
    return f"{100 * event.share:.0f}%, {megabytes(event.received_bytes)} in, {megabytes(event.sent_bytes)} out{left}"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
