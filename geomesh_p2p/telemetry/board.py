"""What this peer can say of itself at any time, as JSON: for `geomesh status`. From observations alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from geomesh_p2p import __version__
from geomesh_p2p.core import observations as seen
from geomesh_p2p.core.types import Plan
from geomesh_p2p.telemetry.sinks import jsonable

WARNINGS_KEPT = 10
ROUNDS_KEPT = 5
LONGEST_TEXT = 500
PERPLEXITIES_KEPT = 64


class StatusBoard:
    """An observer. `goal` is the run's last round, `run_id` its name."""

    def __init__(self, site: str, goal: int, clock: Callable[[], float] = time.monotonic, run_id: str = "") -> None:
        self._site, self._goal, self._clock, self._run_id = site, goal, clock, run_id
        self._began = clock()
        self._phase = seen.PhaseChanged("starting", 0)
        self._phase_since = self._began
        self._committed_at: float | None = None
        self._round = 0
        self._tokens = 0
        self._digest = b""
        self._leader, self._term = "", 0
        self._perplexity: tuple[int, float] | None = None
        self._perplexities: deque[seen.Validated] = deque(maxlen=PERPLEXITIES_KEPT)
        self._plan: Plan | None = None
        self._rolled_back: seen.RolledBack | None = None
        self._training: seen.TrainingProgress | None = None
        self._exchange: seen.ExchangeProgress | None = None
        self._rounds: deque[seen.RoundCommitted] = deque(maxlen=ROUNDS_KEPT)
        self._seconds = {"straggler_idle": 0.0, "wan_idle": 0.0, "wall": 0.0}
        self._warnings: deque[tuple[float, str, str]] = deque(maxlen=WARNINGS_KEPT)

    def __call__(self, event: Any) -> None:
        match event:
            case seen.PhaseChanged():
                if event.phase != self._phase.phase:
                    self._phase_since = self._clock()
                    self._training = self._exchange = None
                self._phase = event
            case seen.LogStands():
                self._round, self._tokens = event.round, event.tokens_total
            case seen.TrainingProgress():
                self._training = event
            case seen.ExchangeProgress():
                self._exchange = event
            case seen.PlanAdopted():
                self._plan = event.plan
            case seen.RoundCommitted():
                self._committed(event)
            case seen.CaughtUpTo():
                self._round = max(self._round, event.round)
                self._rounds.clear()
            case seen.Validated():
                self._perplexity = event.round, event.perplexity
                self._perplexities.append(event)
            case seen.RolledBack():
                self._rolled_back = event
            case seen.LeaderChanged():
                self._leader, self._term = event.leader, event.term
            case seen.Warned():
                self._warn(event.reason, event.text)
            case seen.PeerLost(left=False):
                self._warn("peer_lost", f"{event.site} is lost: not heard for {event.silent_seconds:.1f} s")

    def _warn(self, reason: str, text: str) -> None:
        self._warnings.append((self._clock(), reason, text[:LONGEST_TEXT]))

    def _committed(self, event: seen.RoundCommitted) -> None:
        self._round, self._tokens, self._digest = event.round, event.tokens_total, event.digest
        self._committed_at = self._clock()
        self._rounds.append(event)
        for name in self._seconds:
            self._seconds[name] += getattr(event.times, name)

    @property
    def _goes_on(self) -> bool:
        """Whether there is somebody to plan and somebody to train with: else there is no telling when the run will end."""
        waits = any(words in self._phase.waiting_for for words in ("a leader", "a quorum", "min_peers"))
        return bool(self._leader) and not self._phase.lacking and not waits

    def snapshot(self) -> dict[str, Any]:
        """JSON-able; the same keys always, null where nothing is known."""
        now, last = self._clock(), self._rounds[-1] if self._rounds else None
        wall = self._seconds["wall"]
        lasts = [event.times.wall for event in self._rounds if event.times.wall > 0]
        seconds = median(lasts) if lasts else None
        return jsonable({
            "site": self._site,
            "run_id": self._run_id,
            "version": __version__,
            "uptime_seconds": now - self._began,
            "phase": self._phase.phase,
            "phase_seconds": now - self._phase_since,
            "waiting_for": self._phase.waiting_for,
            "round": self._round,
            "goal": self._goal,
            "digest": self._digest,
            "term": self._term,
            "leader": self._leader,
            "rolled_back": None if self._rolled_back is None else asdict(self._rolled_back),
            "committed_seconds_ago": None if self._committed_at is None else now - self._committed_at,
            "round_seconds": seconds,
            "eta_seconds": max(0, self._goal - self._round) * seconds if seconds is not None and self._goes_on else None,
            "tokens": self._tokens,
            "round_tokens": None if last is None else last.round_tokens,
            "perplexity": None if self._perplexity is None else self._perplexity[1],
            "perplexity_round": None if self._perplexity is None else self._perplexity[0],
            "perplexities": [{"round": one.round, "perplexity": one.perplexity} for one in self._perplexities],
            "loss": None if self._training is None else self._training.loss,
            "tokens_per_second": None if self._training is None else self._training.tokens_per_second,
            "step": None if self._training is None else [self._training.step, self._training.steps],
            "exchange_share": None if self._exchange is None else self._exchange.share,
            "straggler_idle_share": self._seconds["straggler_idle"] / wall if wall else None,
            "wan_idle_share": self._seconds["wan_idle"] / wall if wall else None,
            "plan": None if self._plan is None else plan_in_short(self._plan),
            "warnings": [
                {"seconds_ago": now - at, "reason": reason, "text": text} for at, reason, text in self._warnings
            ],
        })  # fmt: skip


def plan_in_short(plan: Plan) -> dict[str, Any]:
    return {
        "round": plan.round,
        "attempt": plan.attempt,
        "topology": plan.topology,
        "train_seconds": plan.train_seconds,
        "exchange_seconds": plan.exchange_seconds,
        "members": [
            {"site": one.site, "batch": one.batch, "inner_steps": one.inner_steps, "finish_seconds": one.finish_seconds}
            for one in plan.members
        ],
        "bystanders": [{"site": one.site, "reason": one.reason} for one in plan.bystanders],
    }
