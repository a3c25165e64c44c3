"""The newest state in a peer's folder, for who only looks: takes no lock, changes nothing, and may work beside the peer.

What a peer at work renames or deletes meanwhile is met by reading anew from what is the newest then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.log import lineage
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.core.types import GENESIS_ROUND, Update
from geomesh_p2p.engine.checkpoint import DiskLog, Snapshots
from geomesh_p2p.engine.resume import Settings
from geomesh_p2p.errors import DataError, TemporaryError

TRIES = 8


@dataclass(frozen=True)
class Seen:
    """The state after `round`, which is the newest that the folder leads to."""

    round: int
    digest: Digest
    state: OuterState


def newest_state(folder: Path, initial: Callable[[], Vector], settings: Settings) -> Seen:
    """`initial` makes the weights that the run began with: a rollback may lead to them. Raises DataError if nothing there can
    be used, TemporaryError if the peer was too quick in changing it each time."""
    for _ in range(TRIES):
        before = _changes(folder)
        try:
            seen = _look(folder, initial, settings)
        except (DataError, LookupError, OSError) as error:
            if _changes(folder) == before:
                raise error if not isinstance(error, LookupError) else DataError(f"{folder}: {error}") from None
            continue
        with suppress(OSError):
            if DiskLog(folder).newest_ever() <= seen.round or _changes(folder) == before:
                return seen
    raise TemporaryError(f"{folder} changed {TRIES} times while it was read: try again, or take another peer's folder")


def _changes(folder: Path) -> tuple[int, ...]:
    """Differs once anything was renamed or deleted in `folder` or its log."""
    return tuple(path.stat().st_mtime_ns for path in (folder, folder / "log") if path.exists())


def _look(folder: Path, initial: Callable[[], Vector], settings: Settings) -> Seen:
    layout, codec, outer = settings
    log, snapshots, headers = DiskLog(folder), Snapshots(folder), dict[int, Update]()
    snapshot = snapshots.newest()
    if snapshot is None:
        raise DataError(f"{folder}: no snapshot: this peer has saved nothing yet")
    if snapshot.anchor.size != layout.parameters:
        sizes = f"{snapshot.anchor.size:,} parameters, the model {layout.parameters:,}"
        raise DataError(f"{folder}: the snapshot has {sizes}: it is of another configuration")
    first, digest = snapshot.manifest.round, snapshot.manifest.state.digest
    round = first
    while (update := log.read_header(round + 1)) is not None and update.base == digest:
        round, digest = update.round, update.digest
        headers[round] = update
    since, start, states = deque[int](), -1, {first, *snapshots.rounds(), GENESIS_ROUND}
    for start in lineage(round, lambda at: headers.get(at) or log.read_header(at)):
        if start in states:
            break
        since.appendleft(start)
    if start not in states:
        raise LookupError(f"the run went back to round {start}, to which nothing here leads: try again after the next snapshot")
    if start == first:
        state = OuterState(snapshot.anchor, snapshot.momentum)
    elif start == GENESIS_ROUND and start not in snapshots.rounds():
        state = OuterState.founded(_initial(log, initial))
    else:
        state = OuterState(*snapshots.read_state(start))
    for at in since:
        found = log.read_update(at)
        if found is None:
            raise LookupError(f"the update of round {at} is missing")
        apply_update(state, layout, codec, outer, *found)
    return Seen(round, digest, state)


def _initial(log: DiskLog, initial: Callable[[], Vector]) -> Vector:
    weights, founding = initial(), log.load_founding()
    if founding is None or digest_bytes(weights.astype("<f4")) != founding.weights:
        raise LookupError("the weights that the run began with cannot be made again here")
    return weights
