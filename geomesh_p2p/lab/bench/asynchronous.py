"""The asynchronous baseline: each site sends its pseudo-gradient when it is done and trains on; a server applies what comes.

The server is one of the sites. It averages with delayed Nesterov momentum (Liu et al. 2024, Asynchronous Local-SGD Training for
Language Modeling): every delta moves the anchor by its own part at once, the momentum only with every N-th, by the mean of the
last N. A site merges the server's answer at the next end of a step (weights = anchor + what it trained since it sent) and waits
only if it is done again before its last delta was answered. In virtual time first, step by step; then trained, event by event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.canonical import digest, digest_bytes
from geomesh_p2p.core.plan import lr_scale
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.core.types import NO_TERM, Assignment, Plan, Range
from geomesh_p2p.lab.bench.clock import Moment, World
from geomesh_p2p.lab.bench.stopping import Stop
from geomesh_p2p.lab.bench.timeline import Part, Stage
from geomesh_p2p.lab.bench.trajectory import Point, Trajectory, Workers, claimed, keep
from geomesh_p2p.lab.report import FP32_BYTES

Kind = Literal["train", "send", "apply", "merge"]


@dataclass(frozen=True)
class Event:
    """In the order of time. `train`: `steps` inner steps of a site, of a run that has `tokens` by then; `send`: its delta is
    made from its weights; `apply`: the server applies it and answers (without a site: the anchor is validated); `merge`: the
    site goes on from the answer."""

    kind: Kind
    site: str
    seconds: float
    steps: int = 0
    start: int = 0
    tokens: int = 0


@dataclass
class _Site:
    index: int
    steps: int = 0            # since it sent last
    untold: int = 0           # of these, not yet in an event
    flying: bool = False      # its last delta is not answered yet
    answer: bool = False      # the answer is here, to be merged at the next end of a step
    waits_since: float | None = None
    compute: float = 0.0
    wan_idle: float = 0.0
    sent: float = 0.0
    deltas: int = 0
    tokens: int = 0


@dataclass
class _Race:
    run: RunConfig
    world: World
    parameters: int
    budget_tokens: int
    stage_tokens: int
    events: list[Event] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sites = [_Site(index) for index in range(len(self.world.setting.sites))]
        self.server = _best_connected(self.world)
        self.batch, self.length = self.run.planner.batch, self.run.model.sequence_length
        self.step_tokens = self.batch * self.length
        self.trained = self.applied = self.position = self.staged = 0
        self.now = self.stage_begins = 0.0
        self.queue: list[tuple[float, int, str, int]] = []
        self.number = 0

    def at(self, seconds: float, kind: str, site: _Site) -> None:
        self.number += 1
        heapq.heappush(self.queue, (seconds, self.number, kind, site.index))

    def play(self) -> None:
        for site in self.sites:
            self.at(self.moment.step_seconds(site.index, self.batch), "step", site)
        while self.applied < self.budget_tokens and self.queue:
            self.now, _, kind, index = heapq.heappop(self.queue)
            getattr(self, f"_{kind}")(self.sites[index])
        if self.applied > self.staged:
            self._stage()

    @property
    def moment(self) -> Moment:
        return self.world.at(self.number, min(1.0, self.applied / self.budget_tokens))

    def _step(self, site: _Site) -> None:
        """A step has ended."""
        site.compute += self.moment.step_seconds(site.index, self.batch)
        site.steps += 1
        site.untold += 1
        site.tokens += self.step_tokens
        self.trained += self.step_tokens
        if site.answer:
            self._merge(site)
        if site.steps >= self.run.planner.inner_steps:
            if site.flying:
                site.waits_since = self.now
                return
            self._send(site)
        self.at(self.now + self.moment.step_seconds(site.index, self.batch), "step", site)

    def _happened(self, kind: Kind, site: _Site, steps: int = 0, start: int = 0, tokens: int = 0) -> None:
        self.events.append(Event(kind, self.world.setting.names[site.index], self.now, steps, start, tokens))

    def _tell(self, site: _Site) -> None:
        if site.untold:
            before = self.trained - site.untold * self.step_tokens
            self._happened("train", site, site.untold, self.position, before)
            self.position += site.untold * self.batch
            site.untold = 0

    def _send(self, site: _Site) -> None:
        self._tell(site)
        self._happened("send", site, site.steps)
        site.flying = True
        site.steps = 0
        site.deltas += 1
        self.at(self.now + self._transfer(site.index, self.server), "apply", site)

    def _transfer(self, source: int, target: int) -> float:
        """Seconds that all parameters take. What the server's own site gives to it or gets from it, nobody sends."""
        size = FP32_BYTES * self.parameters
        self.sites[source].sent += size if source != target else 0
        return self.moment.transfer_seconds(source, target, size)

    def _apply(self, site: _Site) -> None:
        self._happened("apply", site)
        self.applied += self.run.planner.inner_steps * self.step_tokens
        self.at(self.now + self._transfer(self.server, site.index), "answered", site)
        if self.applied - self.staged >= self.stage_tokens:
            self._stage()

    def _answered(self, site: _Site) -> None:
        site.flying, site.answer = False, True
        if site.waits_since is not None:
            site.wan_idle += self.now - site.waits_since
            site.waits_since = None
            self._merge(site)
            self._send(site)
            self.at(self.now + self.moment.step_seconds(site.index, self.batch), "step", site)

    def _merge(self, site: _Site) -> None:
        self._tell(site)
        self._happened("merge", site)
        site.answer = False

    def _stage(self) -> None:
        parts = []
        for site in self.sites:
            waiting = 0.0 if site.waits_since is None else self.now - site.waits_since
            if site.waits_since is not None:
                site.waits_since = self.now
            name, waited = self.world.setting.names[site.index], site.wan_idle + waiting
            parts.append(Part(name, 0, site.tokens, site.compute, 0.0, waited, 0.0, site.sent, 0.0, deltas=site.deltas))
            site.compute = site.wan_idle = site.sent = 0.0
            site.tokens = site.deltas = 0
        # What is credited is what was applied, whatever is still on its way.
        self.stages.append(Stage(len(self.stages) + 1, self.stage_begins, self.now, tuple(parts), self.applied - self.staged))
        self.events.append(Event("apply", "", self.now, tokens=self.applied))
        self.staged, self.stage_begins = self.applied, self.now


def _best_connected(world: World) -> int:
    """The site whose slowest way is the fastest."""
    if len(world.setting.sites) == 1:
        return 0
    rates = world.setting.rates
    return int(np.argmax(np.where(np.isfinite(rates), rates, np.inf).min(axis=1)))


def race(
    run: RunConfig, world: World, parameters: int, budget_tokens: int, stage_tokens: int
) -> tuple[list[Stage], list[Event]]:
    """The asynchronous baseline in virtual time until `budget_tokens` are applied; a stage is at least `stage_tokens`."""
    played = _Race(run, world, parameters, budget_tokens, stage_tokens)
    played.play()
    return played.stages, played.events


# ---------------------------------------------------------------- with real gradients


def train_race(
    run: RunConfig,
    sites: Sequence[str],
    events: Sequence[Event],
    store: Path,
    tell: Callable[[Point], None] = lambda _point: None,
    stop: Stop | None = None,
) -> Trajectory:
    """As trajectory.trained, for the asynchronous baseline; validated at the end of each stage, saved only when it is done."""
    stop = stop or Stop()
    workers = Workers(run, sites, stop=stop)
    key = digest("race", workers.fingerprint, run.planner.batch, run.planner.inner_steps, len(sites))
    for event in events:
        key = digest("event", key, event.kind, event.site, event.steps, event.start, event.tokens)
    folder = store / key.hex()[:32]
    with claimed(folder, stop) as done:
        return done or _train_race(workers, run, events, folder, tell)


def _train_race(
    workers: Workers, run: RunConfig, events: Sequence[Event], folder: Path, tell: Callable[[Point], None]
) -> Trajectory:
    sites = list(workers.engines)
    server = _Server(run, np.array(workers.first.state.anchor), len(sites))
    points = [Point(0, 0, workers.validate(), None)]
    base = {name: np.array(server.anchor) for name in sites}
    weights = {name: np.array(server.anchor) for name in sites}
    sent: dict[str, Vector] = {}
    deltas: dict[str, Vector] = {}
    answers: dict[str, Vector] = {}
    losses: list[float] = []
    for event in events:
        workers.stop.check()
        match event.kind:
            case "train":
                losses.append(_train(workers, event, weights, run))
            case "send":
                deltas[event.site] = base[event.site] - weights[event.site]
                sent[event.site] = np.array(weights[event.site])
            case "apply" if event.site:
                server.apply(deltas.pop(event.site))
                answers[event.site] = np.array(server.anchor)
            case "apply":
                workers.first.state.anchor[:] = server.anchor
                points.append(Point(points[-1].rounds + 1, event.tokens, workers.validate(), sum(losses) / max(1, len(losses))))
                losses = []
                tell(points[-1])
            case "merge":
                base[event.site] = answers.pop(event.site)
                weights[event.site] = base[event.site] + (weights[event.site] - sent[event.site])
    return keep(folder, server.anchor, digest_bytes(server.anchor).hex(), points)


def _train(workers: Workers, event: Event, weights: dict[str, Vector], run: RunConfig) -> float:
    engine, batch, length = workers.engines[event.site], run.planner.batch, run.model.sequence_length
    tokens = event.steps * batch * length
    member = Assignment(
        event.site, event.site, batch, event.steps, batch, (Range(event.start, event.start + event.steps * batch),),
        lr_scale(batch, run.inner)[0], 0.0,
    )  # fmt: skip
    plan = Plan(b"", 1, NO_TERM, 1, b"", (member,), "gather", (), event.tokens, tokens, 0.0, 0.0, 0.0, False)
    engine.set_weights(weights[event.site])
    result = engine.train(member, plan, lambda: False, 0.0)
    weights[event.site] = np.array(engine.weights())
    return result.loss


class _Server:
    """Delayed Nesterov over the last N deltas."""

    def __init__(self, run: RunConfig, anchor: Vector, sites: int) -> None:
        self.anchor, self.momentum, self.sum = anchor, np.zeros_like(anchor), np.zeros_like(anchor)
        self.rate, self.mu, self.sites, self.count = run.outer.learning_rate, run.outer.momentum, sites, 0

    def apply(self, delta: Vector) -> None:
        self.sum += delta
        self.count += 1
        step = delta / np.float32(self.sites)
        if self.count % self.sites == 0:
            self.momentum = np.float32(self.mu) * self.momentum + self.sum / np.float32(self.sites)
            self.sum[:] = 0
            step = step + np.float32(self.mu) * self.momentum
        self.anchor -= np.float32(self.rate) * step
