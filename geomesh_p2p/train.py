"""THE ALGORITHM of one peer, from top to bottom.

A run is a log of 1-bit updates and the model is the fold of that log. The mesh hands this loop its work in the order of
the log: train for a plan, or fold a committed update. A round that is discarded needs no work: every round begins from
the anchor. Who leads, who is lost, what is committed and what is sent again is decided elsewhere; here is only what
happens to the weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core import codec, outer
from geomesh_p2p.core.anchors import part_of
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.ports import (
    AdoptState,
    Closes,
    Engine,
    FoldUpdate,
    LocalRound,
    Made,
    MakeAnew,
    Mesh,
    RollBack,
    SaveState,
    TrainRound,
    ValidateAll,
    Vector,
)
from geomesh_p2p.core.types import Contribution, PeerId


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


async def train(mesh: Mesh, model: LocalModel) -> None:
    """Work until the mesh has no more for this peer. Everything that blocks runs in one worker thread, in order."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as worker:
        while (work := await mesh.next_work()) is not None:
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
    # What this peer begins from, in few bytes: the others compare it with theirs (core/anchors.py).
    _, anchor_part = hash_part(model)
    state = b"" if work.content is None else work.content(model.state.anchor, model.state.momentum)
    share, of = plan.peers.index(model.peer), len(plan.members)
    nats, tokens = validate_anchor(model, share, of, not work.validate, lambda: mesh.should_close(plan))
    validation_seconds = time.perf_counter() - started

    result = model.engine.train(mine, plan, lambda: mesh.should_close(plan), time.monotonic())

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
        else:
            payload, hashed = encoded, digest_bytes(encoded)
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
    return LocalRound(contribution, payload, result, seconds, validation_seconds, unsaid)


def validate_anchor(
    model: LocalModel, share: int, of: int, skip: bool = False, should_close: Callable[[], bool] | None = None
) -> tuple[float, int]:
    """Put the weights on the anchor; (nats, tokens) of the share-th of `of` parts of the validation set, (0, 0) if skipped."""
    model.engine.set_weights(model.state.anchor)
    return (0.0, 0) if skip else model.engine.validate(share, of, should_close)


def fold(model: LocalModel, work: FoldUpdate) -> float:
    """Apply a committed update to the anchor, advance the residual if it was ours too, and go on from the anchor."""
    begun = time.perf_counter()
    if model.lost:
        model.round = work.update.round
        return 0.0
    if model.codec.residual and work.own_payload is not None:
        model.residual = codec.new_residual(
            model.layout, model.state.anchor, model.engine.weights(), model.codec, work.own_payload, model.residual
        )
    outer.apply_update(model.state, model.layout, model.codec, model.outer, work.update, work.body)
    model.round = work.update.round
    model.engine.set_weights(model.state.anchor)
    return time.perf_counter() - begun


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
    model.hashed, model.lost = None, False
    model.engine.set_weights(model.state.anchor)


def roll_back(model: LocalModel, work: RollBack) -> Made:
    made = work.rebuild(work.update.round)
    model.round = work.update.round
    model.engine.forget_inner()
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
