"""THE ALGORITHM of one peer, from top to bottom.

A run is a log of updates made of signs; the model is the fold of that log. The mesh hands this loop its work in the order of
the log: train for a plan, or fold a committed update. A round that is discarded needs no work: every round begins from
the anchor. Who leads, who is lost, what is committed and what is sent again is decided elsewhere; here is only what
happens to the weights.

If a plan lets it (planner.overlap), a peer goes on training while its round's update is on its way: core/ahead.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from geomesh_p2p.config import CodecSection, InnerSection, OuterSection
from geomesh_p2p.core import ahead, codec, outer
from geomesh_p2p.core.anchors import part_of
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.ports import (
    AdoptState,
    Closes,
    Engine,
    FoldUpdate,
    InnerResult,
    LocalRound,
    Made,
    MakeAnew,
    Mesh,
    RollBack,
    SaveState,
    TrainRound,
    ValidateAll,
    Vector,
    WorkWaits,
)
from geomesh_p2p.core.types import Assignment, Contribution, PeerId, Plan
from geomesh_p2p.errors import TrainingDivergedError

ROUNDS_IN_VAIN = 3  # in a row, at least, before a run is taken for diverged by its weights


@dataclass
class Ahead:
    """What is trained of the round after `plan`, on the positions that `mine` reserves. Until `plan`'s update is folded,
    `began` are the weights from which, and `sent` those that its contribution was made from, if a residual needs them."""

    plan: Plan
    mine: Assignment
    began: Vector | None
    sent: Vector | None = None
    done: InnerResult | None = None
    stopped: bool = False                        # for want of data

    @property
    def steps(self) -> int:
        return 0 if self.done is None else self.done.steps

    @property
    def goes_on(self) -> bool:
        return not self.stopped and self.steps < self.mine.ahead_steps


@dataclass
class LocalModel:
    """This peer's replica: the anchor with the outer optimizer's state, and the engine whose weights move away from it."""

    peer: PeerId
    site: str
    engine: Engine
    layout: Layout
    state: outer.OuterState
    codec: CodecSection
    outer: OuterSection
    residual: Vector | None = None
    round: int = 0                               # that of the anchor
    hashed: tuple[int, int, Digest] | None = None  # (round, part, hash) of a part of it
    lost: bool = False                           # it is not that of its round, and has to be made anew first
    ahead: Ahead | None = None                   # what the weights have that belongs to the next round
    max_skipped_steps: int = InnerSection().max_skipped_steps
    in_vain: list[int] = field(default_factory=list)  # steps of each of the last rounds whose weights could not be sent


async def train(mesh: Mesh, model: LocalModel) -> None:
    """Work until the mesh has no more for this peer. Everything that blocks runs in one worker thread, in order."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as worker:
        while True:
            if model.ahead is not None and model.ahead.goes_on and not mesh.has_work():
                # The update is on its way: in the meantime the next round's first steps.
                mesh.trained_ahead(await loop.run_in_executor(worker, go_ahead, mesh, model))
            if (work := await mesh.next_work()) is None:
                break
            match work:
                case TrainRound():
                    # Plan -> inner steps -> contribution. Its bytes leave at once, also while others still compute.
                    mesh.contribute(work.plan, await loop.run_in_executor(worker, inner_round, mesh, model, work))
                case FoldUpdate():
                    # Commit: the same update moves the same anchor on every peer, bit for bit.
                    seconds = await loop.run_in_executor(worker, fold, model, work)
                    if not model.lost:
                        part, part_hash = await loop.run_in_executor(worker, hash_part, model)
                        mesh.folded(work.update, part, part_hash, seconds)
                case RollBack():
                    # The same on purpose, backwards: the state of an earlier round, made from the log on disk.
                    outcome = await loop.run_in_executor(worker, roll_back, model, work)
                    if not model.lost:
                        mesh.folded(work.update, *await loop.run_in_executor(worker, hash_part, model), 0.0)
                    mesh.made_anew(model.round, outcome)
                case AdoptState():
                    await loop.run_in_executor(worker, adopt, model, work)
                case SaveState() if model.lost:
                    pass
                case SaveState():
                    await loop.run_in_executor(
                        worker, work.write, model.state.anchor, model.state.momentum, model.residual, model.engine.save_inner
                    )
                case ValidateAll():
                    nats, tokens = await loop.run_in_executor(worker, validate_anchor, model, 0, 1)
                    mesh.validated(work.round, nats, tokens)
                case MakeAnew():
                    outcome = await loop.run_in_executor(worker, make_anew, model, work)
                    mesh.made_anew(model.round, outcome)


def inner_round(mesh: Closes, model: LocalModel, work: TrainRound) -> LocalRound:
    """Validate this member's share of the anchor, run its inner steps, encode the pseudo-gradient."""
    plan, mine = work.plan, work.mine
    started = time.perf_counter()
    # The first steps may be done already.
    early = model.ahead if model.ahead is not None and begins(model.ahead, plan, mine) else None
    model.ahead = early
    # What this peer begins from, in few bytes: the others compare it with theirs (core/anchors.py).
    _, anchor_part = hash_part(model)
    state = b"" if work.content is None else work.content(model.state.anchor, model.state.momentum)
    share, of = plan.peers.index(model.peer), len(plan.members)
    nats, tokens = validate_anchor(model, share, of, not work.validate, lambda: mesh.should_close(plan))
    validation_seconds = time.perf_counter() - started

    before = None if early is None else early.done
    rest_plan, rest = ahead.steps_left(plan, mine, 0 if early is None else early.steps)
    result = model.engine.train(rest, rest_plan, lambda: mesh.should_close(plan), time.monotonic())
    result = ahead.together(before, result)
    model.ahead = None

    # delta = anchor - weights (+ residual), as signs and magnitudes. Anything not finite: abstain, and say so.
    begun = time.perf_counter()
    reason, payload, hashed = "", None, b""
    if result.tokens == 0:
        reason = result.stopped or "closed before the first inner step was done"
    else:
        anchor, weights = model.state.anchor, model.engine.weights()
        encoded = codec.encode(model.layout, anchor, weights, model.codec, model.residual, round=plan.round)
        if isinstance(encoded, codec.NotFinite):
            reason = f"{encoded.tensor} is not finite after the inner steps"
            model.in_vain.append(result.steps)
            # Each round begins at the anchor; one may fail by accident.
            if len(model.in_vain) >= ROUNDS_IN_VAIN and sum(model.in_vain) >= model.max_skipped_steps:
                raise TrainingDivergedError(sum(model.in_vain), result.loss, result.learning_rate)
        else:
            payload, hashed = encoded, digest_bytes(encoded)
            model.in_vain.clear()
            if mine.ahead:
                sent = np.array(weights) if model.codec.residual else None
                began = outer.expected_anchor(model.state, weights, result.tokens / plan.planned_tokens, model.outer)
                model.engine.set_weights(began)
                model.ahead = Ahead(plan, mine, began, sent)
    seconds = time.perf_counter() - begun
    contribution = Contribution(
        peer=model.peer,
        site=model.site,
        round=plan.round,
        base=plan.base,
        tokens=0 if payload is None else result.tokens,
        ranges=() if payload is None else result.ranges,
        payload=hashed,
        payload_bytes=0 if payload is None else payload.nbytes,
        validation_nats=nats,
        validation_tokens=tokens,
        reason=reason,
        anchor_part=anchor_part,
        state=state,
    )
    unsaid = None if model.residual is None else float(np.linalg.norm(model.residual))
    earlier = (0.0, 0.0) if before is None else (before.seconds, before.data_wait_seconds)
    return LocalRound(contribution, payload, result, seconds, validation_seconds, unsaid, *earlier)


def begins(begun: Ahead, plan: Plan, mine: Assignment) -> bool:
    """Whether what was trained ahead is the beginning of this assignment, from this base."""
    return begun.began is None and begun.plan.round + 1 == plan.round and ahead.goes_on(begun.mine, begun.steps, mine)


def go_ahead(mesh: WorkWaits, model: LocalModel) -> InnerResult:
    """Steps of the next round, until there is other work or no more of them."""
    begun = model.ahead
    assert begun is not None
    plan, mine = ahead.steps_ahead(begun.plan, begun.mine, begun.steps)
    result = model.engine.train(mine, plan, mesh.has_work, time.monotonic())
    begun.stopped = bool(result.stopped) and not mesh.has_work()
    begun.done = ahead.together(begun.done, result)
    return result


def validate_anchor(
    model: LocalModel, share: int, of: int, skip: bool = False, should_close: Callable[[], bool] | None = None
) -> tuple[float, int]:
    """Put the weights on the anchor; (nats, tokens) of the share-th of `of` parts of the validation set, (0, 0) if skipped.
    What was trained ahead is in the weights again afterwards."""
    if model.ahead is None:
        model.engine.set_weights(model.state.anchor)
        return (0.0, 0) if skip else model.engine.validate(share, of, should_close)
    if skip:
        return 0.0, 0
    kept = np.array(model.engine.weights())
    model.engine.set_weights(model.state.anchor)
    found = model.engine.validate(share, of, should_close)
    model.engine.set_weights(kept)
    return found


def fold(model: LocalModel, work: FoldUpdate) -> float:
    """Apply a committed update to the anchor, advance the residual if it was ours too, and go on from the anchor, with what was
    trained since the contribution if that is in the update."""
    begun = time.perf_counter()
    if model.lost:
        model.round, model.ahead = work.update.round, None
        return 0.0
    if model.codec.residual and work.own_payload is not None:
        sent = model.engine.weights() if model.ahead is None or model.ahead.sent is None else model.ahead.sent
        model.residual = codec.new_residual(
            model.layout, model.state.anchor, sent, model.codec, work.own_payload, model.residual
        )
    outer.apply_update(model.state, model.layout, model.codec, model.outer, work.update, work.body)
    model.round = work.update.round
    _rebase(model, work)
    return time.perf_counter() - begun


def _rebase(model: LocalModel, work: FoldUpdate) -> None:
    """weights = anchor + (weights - those it went ahead from), or the anchor if nothing was trained ahead that counts."""
    begun, anchor = model.ahead, model.state.anchor
    counts = begun is not None and begun.plan.round == work.update.round and work.own_payload is not None
    if begun is None or begun.began is None or not counts:
        model.ahead = None
        model.engine.set_weights(anchor)
        return
    weights = begun.began
    np.subtract(model.engine.weights(), weights, out=weights)
    np.add(anchor, weights, out=weights)
    begun.began, begun.sent = None, None
    model.engine.set_weights(weights)


def hash_part(model: LocalModel) -> tuple[int, Digest]:
    """(part, hash) of one part of the anchor, another one each round: a flipped bit shows within ANCHOR_PARTS rounds."""
    if model.hashed is None or model.hashed[0] != model.round:
        part, start, stop = part_of(model.round, model.state.anchor.size)
        model.hashed = (model.round, part, digest_bytes(model.state.anchor[start:stop]))
    return model.hashed[1:]


def adopt(model: LocalModel, work: AdoptState) -> None:
    anchor, momentum = work.load()
    replace_state(model, anchor, momentum)
    model.round = work.round


def replace_state(model: LocalModel, anchor: Vector, momentum: Vector) -> None:
    model.state.anchor[:] = anchor
    model.state.momentum[:] = momentum
    model.residual = None  # residuals are each peer's own; losing one is harmless
    model.hashed, model.lost, model.ahead = None, False, None
    model.engine.set_weights(model.state.anchor)


def roll_back(model: LocalModel, work: RollBack) -> Made:
    made = work.rebuild(work.update.round)
    model.round = work.update.round
    model.engine.forget_inner()
    model.ahead = None
    if made is None:
        model.lost = True
        return "lost"
    replace_state(model, *made)
    return "rolled_back"


def make_anew(model: LocalModel, work: MakeAnew) -> Made:
    """The same anchor once more, from a state that the others agreed on: was this one right?"""
    made = work.rebuild(model.round)
    if made is None:
        return "lost"
    have = (model.state.anchor, model.state.momentum)
    equal = (np.array_equal(mine.view(np.uint32), again.view(np.uint32)) for mine, again in zip(have, made, strict=True))
    if not model.lost and all(equal):
        return "sound"
    replace_state(model, *made)
    return "repaired"
