"""Where a peer stood when it stopped: its newest snapshot, and the updates on disk since, folded again."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.log import RoundLog
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.ports import Engine, Vector
from geomesh_p2p.core.types import NO_TERM, Founding, Update
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.errors import DataError


@dataclass(frozen=True)
class Resumed:
    """`warnings` says in words what on disk could not be used. `newest_ever`: the round this peer once had committed, perhaps
    newer than `log`, if that is damaged."""

    log: RoundLog
    state: OuterState
    residual: Vector | None
    warnings: tuple[str, ...]
    newest_ever: int


Settings = tuple[Layout, CodecSection, OuterSection]


def resume(store: DiskStore, snapshots: Snapshots, engine: Engine, founding: Founding, settings: Settings) -> Resumed:
    """The engine's weights are then the anchor, and its inner state that of the snapshot. Raises DataError if what is on
    disk cannot be read at all."""
    layout, codec, outer = settings
    snapshot = snapshots.newest()
    if snapshot is None:
        log, state = RoundLog.founded(founding), OuterState.founded(engine.weights().copy())
    elif snapshot.manifest.state.run != founding.run:
        raise DataError(f"{snapshots.path(snapshot.manifest.round)} is of another run than founding.record: move it away")
    else:
        log, state = RoundLog(snapshot.manifest.state), OuterState(snapshot.anchor, snapshot.momentum)
        if snapshot.inner is not None:
            engine.load_inner(str(snapshot.inner))
    warnings = list(snapshot.problems) if snapshot is not None else []
    while (found := _next_update(store, log.round + 1, warnings)) is not None:
        update, body = found
        log.append(update)
        apply_update(state, layout, codec, outer, update, body)
    engine.set_weights(state.anchor)
    residual = snapshot.residual if snapshot is not None and snapshot.manifest.round == log.round else None
    newest_ever = max([log.round, store.newest_ever(), *snapshots.rounds()])
    return Resumed(log, state, residual, tuple(warnings), newest_ever)


def _next_update(store: DiskStore, round: int, warnings: list[str]) -> tuple[Update, bytes] | None:
    """A damaged update is set aside: the others have a sound copy."""
    try:
        return store.read_update(round)
    except DataError as error:
        warnings.append(f"{error}: kept as {store.set_aside(round).name}, fetched again from the others")
        return None


def retire_identity_without_state(store: DiskStore, folder: Path) -> str:
    """An identity whose promises (term, vote, plan) are lost must not speak again: it could break them. Says so, or ""."""
    key = folder / "identity.key"
    if store.load_founding() is None:
        return ""
    lost = "state.record"
    with suppress(DataError):
        if store.load_durable() is not None:
            lost = ""
    try:
        store.load_held()
    except DataError:
        store.set_held_aside()
        lost = "held.record, kept as held.damaged"
    if not lost:
        return ""
    if key.exists():
        key.rename(folder / f"identity.key.retired-{time.strftime('%Y%m%d-%H%M%S')}")
    store.save_durable(Durable(NO_TERM, False))
    return f"{folder}: what this peer had promised is lost ({lost}): it takes a new identity"
