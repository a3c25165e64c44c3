"""What stays of a run in a peer's folder, and what a person reads while it runs: metrics.jsonl, history.jsonl, the console."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from geomesh_p2p.core import observations as seen
from geomesh_p2p.core.types import Range, Term
from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.jsonlines import JsonLines
from geomesh_p2p.telemetry.status import StatusLine

log = logging.getLogger("geomesh")

METRICS_KINDS: dict[type, str] = {
    seen.PhaseChanged: "phase",
    seen.PlanAdopted: "plan",
    seen.RoundCommitted: "round",
    seen.RoundDiscarded: "discarded",
    seen.RolledBack: "rolled_back",
    seen.Validated: "validated",
    seen.PeerJoined: "joined",
    seen.PeerLost: "lost",
    seen.LeaderChanged: "leader",
    seen.CaughtUpTo: "caught_up",
    seen.Agreed: "agreement",
    seen.Saved: "saved",
    seen.Warned: "warned",
}


def jsonable(value: Any) -> Any:
    """`value` for a JSON line: digests in hex, Term as [number, candidate], Range as [start, stop], other dataclasses as
    objects, NaN and Inf as null."""
    match value:
        case bytes():
            return value.hex()
        case Term():
            return [value.number, value.candidate]
        case Range():
            return [value.start, value.stop]
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [jsonable(item) for item in value]
        case set() | frozenset():
            return [jsonable(item) for item in sorted(value)]
        case Mapping():
            return {str(jsonable(key)): jsonable(item) for key, item in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


class HistoryWriter:
    """history.jsonl: what the independent checker reads. Kinds and fields: HISTORY_KINDS in core/events.py."""

    def __init__(self, path: Path, peer: str, site: str, clock: Callable[[], float] = time.time):
        self._lines = JsonLines(path)
        self._peer, self._site, self._clock = peer, site, clock
        self._began = time.monotonic()

    def write(self, kind: str, fields: Mapping[str, Any], run: bytes) -> None:
        """`uptime_seconds` tells how long a wait was, whatever happens to the time of day."""
        head = {"time": self._clock(), "peer": self._peer, "site": self._site, "run": run.hex(), "kind": kind}
        self._lines.append({**head, "uptime_seconds": time.monotonic() - self._began, **jsonable(fields)})

    def close(self) -> None:
        self._lines.close()


class MetricsFile:
    """metrics.jsonl: a line for each observation whose type is in METRICS_KINDS. Says once if the disk refuses, and goes on."""

    def __init__(self, path: Path, site: str, clock: Callable[[], float] = time.time):
        self._lines: JsonLines | None = JsonLines(path)
        self._site, self._clock = site, clock

    def __call__(self, event: Any) -> None:
        kind = METRICS_KINDS.get(type(event))
        if kind is None or self._lines is None:
            return
        line = {"time": self._clock(), "site": self._site, "kind": kind, **jsonable(event)}
        if isinstance(event, seen.PlanAdopted):
            line["digest"] = event.plan.digest.hex()
        try:
            self._lines.append(line)
        except TemporaryError as error:
            log.error("%s (no more lines are written there)", error)
            self._lines = None

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class ConsoleReporter:
    """Plain lines for a person: what happened, and at least every `quiet_seconds` what it does, how far it is, and what comes
    next and when. `rounds` is the run's last round, if known. That nobody leads is worth a line only after `lease_seconds`:
    before, it is a part of every change of leader.

    `start()` runs the timer in a thread of its own, so that silence is broken even when everything else hangs.
    """

    def __init__(
        self,
        site: str,
        quiet_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        rounds: int | None = None,
        lease_seconds: float = 10.0,
    ):
        self._quiet_seconds, self._clock, self._lease_seconds = quiet_seconds, clock, lease_seconds
        self._told_no_leader_since: float | None = None
        self._rolled_back = 0
        self._last_line = clock()
        self.status = StatusLine(site, clock, rounds)
        self._stopping = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="console", daemon=True).start()

    def close(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(1.0):
            self.tick()

    def tick(self) -> None:
        """Prints the status line if nothing was printed for `quiet_seconds`, and that there is no leader if that lasts."""
        since, waits = self.status.no_leader_since, self.status.phase.waiting_for
        if since not in (None, self._told_no_leader_since) and self._clock() - since > self._lease_seconds:
            self._told_no_leader_since = since
            self._say(f"no leader for {self._clock() - since:.0f} s{f': waiting for {waits}' if waits else ''}")
        if self._clock() - self._last_line >= self._quiet_seconds:
            self._say(str(self.status))

    def __call__(self, event: Any) -> None:
        self.status.take(event)
        if isinstance(event, seen.RolledBack):
            self._rolled_back = event.round
        told = isinstance(event, seen.RoundCommitted) and event.round == self._rolled_back and not event.contributors
        text = "" if told else describe(event)
        if text:
            lost = isinstance(event, seen.PeerLost) and not event.left
            self._say(text, logging.WARNING if lost or isinstance(event, seen.Warned) else logging.INFO)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        self._last_line = self._clock()
        phase = self.status.phase
        log.log(level, "%s", text, extra={"fields": {"phase": phase.phase, "round": phase.round}})


def describe(event: Any) -> str:
    """An observation in words, "" if a person need not see it."""
    match event:
        case seen.RoundCommitted(contributors=()):
            what = f": {', '.join(event.gone)} leaves" if event.gone else " committed without contributions"
            return f"round {event.round}{what}; digest {event.digest.hex()[:12]}"
        case seen.RoundCommitted():
            of = event.round - 1  # contributions bring the perplexity of the anchor that they began from
            perplexity = f"; perplexity of round {of}: {event.validation_ppl:.2f}" if event.validation_ppl is not None else ""
            members, here = "", ""
            if event.members:  # unknown where this peer was no member, and so is how long the round took
                loss = f", loss {event.loss:.3f}" if event.loss is not None else ""
                idle = f"idle {event.times.straggler_idle:.1f} s for others, {event.times.wan_idle:.1f} s for bytes"
                members = f" of {len(event.members)}"
                here = f" in {event.times.wall:.1f} s; here {event.tokens:,} tokens{loss}, {idle}"
            return (
                f"round {event.round} committed by {len(event.contributors)}{members}, {event.round_tokens:,} tokens"
                f"{here}{perplexity}; digest {event.digest.hex()[:12]}"
            )
        case seen.RoundDiscarded():
            return f"round {event.round}: attempt {event.attempt} discarded: {event.reason.replace('_', ' ')}"
        case seen.RolledBack():
            return f"round {event.round}: the state after round {event.to_round} once more, by order"
        case seen.Validated():
            return f"perplexity of round {event.round}: {event.perplexity:.3f}" if event.final else ""
        case seen.PeerJoined():
            return f"{event.site} joined"
        case seen.PeerLost(left=True):
            return f"{event.site} has left"
        case seen.PeerLost():
            return f"{event.site} is lost: not heard for {event.silent_seconds:.1f} s"
        case seen.LeaderChanged():
            own = " (this peer)" if event.self_is_leader else ""
            return f"leader of term {event.term}: {event.leader}{own}" if event.leader else ""
        case seen.CaughtUpTo():
            return f"caught up to round {event.round}: {event.rounds} rounds in {event.seconds:.1f} s"
        case seen.Warned():
            return event.text
    return ""
