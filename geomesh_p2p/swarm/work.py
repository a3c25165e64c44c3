"""What the session hands to the algorithm, in the order of the log, and what becomes of it.

Implements ports.Mesh. Called from the event loop, except `should_close` and `has_work`: the worker thread asks
them between steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.ports import InnerResult, LocalRound, Made, TrainRound, Vector, Work
from geomesh_p2p.core.types import Assignment, Plan, Update


@dataclass
class Job:
    """Training for one round. `plan` is the plan it was begun for, `wanted` the newest attempt that it serves."""

    plan: Plan
    wanted: Plan
    close: threading.Event = field(default_factory=threading.Event)
    void: threading.Event = field(default_factory=threading.Event)
    local: LocalRound | None = None


@dataclass(frozen=True)
class Listeners:
    """Whom the bench tells: all are called in the event loop."""

    contributed: Callable[[Job, LocalRound], None]
    trained_ahead: Callable[[InnerResult], None]
    folded: Callable[[Update, int, Digest, float], None]
    validated: Callable[[int, float, int], None]
    made_anew: Callable[[int, Made], None]


class Bench:
    """The queue of work of one peer and the one training job that counts."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._queue: asyncio.Queue[Work | None] = asyncio.Queue()
        self.job: Job | None = None

    # ---------------------------------------------------------------- the session's side

    def put(self, work: Work | None) -> None:
        self._queue.put_nowait(work)

    def train(
        self, plan: Plan, mine: Assignment, validate: bool, content: Callable[[Vector, Vector], Digest] | None = None
    ) -> None:
        """Begin anew for `plan`; a job before it is void."""
        self.drop()
        self.job = Job(plan, plan)
        self.put(TrainRound(plan, mine, validate, content))

    def drop(self) -> None:
        """What is or was trained counts no longer."""
        if self.job is not None:
            self.job.void.set()
        self.job = None

    def close(self, plan: Digest) -> None:
        """Training for `plan` is to end at the next step boundary; without effect after the last step."""
        if self.job is not None and plan in (self.job.plan.digest, self.job.wanted.digest):
            self.job.close.set()

    # ---------------------------------------------------------------- the algorithm's side

    async def next_work(self) -> Work | None:
        return await self._queue.get()

    def should_close(self, plan: Plan) -> bool:
        job = self.job
        return job is None or job.plan is not plan or job.close.is_set() or job.void.is_set()

    def has_work(self) -> bool:
        return not self._queue.empty()

    def trained_ahead(self, result: InnerResult) -> None:
        self._listeners.trained_ahead(result)

    def contribute(self, plan: Plan, local: LocalRound) -> None:
        job = self.job
        if job is None or job.plan is not plan:
            return  # void in the meantime
        job.local = local
        self._listeners.contributed(job, local)

    def folded(self, update: Update, part: int, part_hash: Digest, codec_seconds: float) -> None:
        self._listeners.folded(update, part, part_hash, codec_seconds)

    def validated(self, round: int, nats: float, tokens: int) -> None:
        self._listeners.validated(round, nats, tokens)

    def made_anew(self, round: int, outcome: Made) -> None:
        self._listeners.made_anew(round, outcome)
