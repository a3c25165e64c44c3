"""Where a peer stood when it stopped: its newest snapshot, and the updates on disk since, folded again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geomesh_p2p.config import CodecSection, OuterSection
from geomesh_p2p.core.anchors import state_in_log
from geomesh_p2p.core.canonical import Digest, digest_bytes
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.log import LogState, RoundLog, lineage
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.ports import Engine, Vector
from geomesh_p2p.core.types import GENESIS_ROUND, NO_TERM, Founding, Range, Rollback, Update
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshot, Snapshots
from geomesh_p2p.engine.snapshots import described
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
    part_residual: tuple[Range, Vector] | None = None


Settings = tuple[Layout, CodecSection, OuterSection]


def resume(store: DiskStore, snapshots: Snapshots, engine: Engine, founding: Founding, settings: Settings) -> Resumed:
    """The engine's weights are then the anchor, and its inner state that of the snapshot. Raises DataError if what is on
    disk cannot be read at all."""
    layout, codec, outer = settings
    warnings = _drop_contradicted(store, snapshots)
    snapshot = snapshots.newest()
    if snapshot is None:
        log, state = RoundLog.founded(founding), OuterState.founded(engine.weights().copy())
    elif snapshot.manifest.state.run != founding.run:
        raise DataError(f"{snapshots.path(snapshot.manifest.round)} is of another run than founding.record: move it away")
    else:
        log, state = RoundLog(snapshot.manifest.state), OuterState(snapshot.anchor, snapshot.momentum)
        if snapshot.inner is not None:
            engine.load_inner(str(snapshot.inner))
    warnings += snapshot.problems if snapshot is not None else ()
    while (found := _next_update(store, log.round + 1, warnings)) is not None:
        update, body = found
        if update.rollback is not None:
            made = Rebuilder(store, snapshots, engine.initial_weights, founding, settings)(update.round, trusting=True)
            if made is None:
                to = update.rollback.to_round
                warnings.append(f"the run went back to round {to}, to which nothing here leads: asked of the others")
                break
            state = OuterState(*made)
            engine.forget_inner()
        log.append(update)
        apply_update(state, layout, codec, outer, update, body)
    engine.set_weights(state.anchor)
    residual, part_residual = (None, None) if snapshot is None else _residuals(snapshot, log.round, settings, warnings)
    newest_ever = max([log.round, store.newest_ever(), *snapshots.rounds()])
    return Resumed(log, state, residual, tuple(warnings), newest_ever, part_residual)


def _residuals(
    snapshot: Snapshot, round: int, settings: Settings, warnings: list[str]
) -> tuple[Vector | None, tuple[Range, Vector] | None]:
    """What this peer's contributions and answers up to `round` left unsaid. They hold for one round and one layout only."""
    layout, codec, _ = settings
    if not codec.residual:
        return None, None
    residual, part, why = snapshot.residual, snapshot.part_residual, ""
    if snapshot.manifest.round != round:
        why = f"the snapshot is of round {snapshot.manifest.round}, the log goes on to round {round}"
    elif residual is None:
        why = f"the snapshot of round {round} has none"
    elif residual.size != layout.parameters or (part is not None and part[0].stop > layout.parameters):
        why = "that of the snapshot is for other tensors"
    if why:
        warnings.append(
            f"what this peer's contributions left unsaid is lost ({why}): it begins anew, which costs a little precision"
        )
        return None, None
    return residual, part


def _next_update(store: DiskStore, round: int, warnings: list[str]) -> tuple[Update, bytes] | None:
    """A damaged update is set aside: the others have a sound copy."""
    try:
        return store.read_update(round)
    except DataError as error:
        warnings.append(f"{error}: kept as {store.set_aside(round).name}, fetched again from the others")
        return None


def _in_log(store: DiskStore, snapshots: Snapshots, round: int) -> tuple[Digest, Digest]:
    """(hash of the snapshot of `round`, what the log on disk says of that state: empty if nothing). Raises DataError and
    LookupError."""
    manifest, following = snapshots.manifest(round), store.read_update(round + 1)
    if following is None or following[0].base != manifest.state.digest:
        return manifest.content, b""
    return manifest.content, state_in_log(following[0])


def _drop_contradicted(store: DiskStore, snapshots: Snapshots) -> list[str]:
    """Nobody resumes from, exports or gives away a state of which the log says that the others had another one."""
    said = []
    for round in snapshots.rounds():
        with suppress(DataError, LookupError):
            own, others = _in_log(store, snapshots, round)
            if others and own != others:
                snapshots.drop(round)
                said.append(
                    f"{snapshots.path(round)} holds another state than the most had after round {round}, so the log says: "
                    "it is deleted, and this peer goes on from an older one, or asks the others"
                )
    return said


class Rebuilder:
    """Implements ports.Past: from a snapshot of which an update on disk says that most contributors had the same, or the
    initial weights, and the updates since. What is found wrong on the way is replaced."""

    def __init__(
        self, store: DiskStore, snapshots: Snapshots, initial: Callable[[], Vector], founding: Founding, settings: Settings
    ) -> None:
        self._store, self._snapshots, self._initial, self._founding = store, snapshots, initial, founding
        self._settings = settings

    def __call__(self, round: int, trusting: bool = False) -> tuple[Vector, Vector] | None:
        for accepted in (self.vouched, self._not_contradicted) if trusting else (self.vouched,):
            for start, since in self._ways(round):
                with suppress(DataError, LookupError):
                    state = self._begin(start, accepted)
                    if state is not None:
                        self._replay(state, since)
                        return state.anchor, state.momentum
        _drop_contradicted(self._store, self._snapshots)
        return None

    def log_after(self, round: int) -> LogState:
        """Raises LookupError if the updates on disk do not tell, DataError."""
        start = max((kept for kept in self._snapshots.rounds() if kept <= round), default=GENESIS_ROUND)
        log = RoundLog.founded(self._founding) if start == GENESIS_ROUND else RoundLog(self._snapshots.manifest(start).state)
        for later in range(start + 1, round + 1):
            update = self._store.read_header(later)
            if update is None:
                raise LookupError(f"the update of round {later} is not on disk")
            log.append(update)
        return log.state

    def rollback(self, to_round: int) -> Rollback:
        for start, since in self._ways(to_round):
            if start == GENESIS_ROUND or self._not_contradicted(start):
                tokens = 0 if start == GENESIS_ROUND else self._snapshots.manifest(start).state.tokens
                for update in filter(None, map(self._store.read_header, since)):
                    tokens = tokens + update.tokens if update.rollback is None else update.rollback.tokens
                return Rollback(to_round, tokens)
        oldest = min(self._snapshots.rounds(), default=GENESIS_ROUND)
        raise LookupError(f"nothing that is kept leads to round {to_round}; the oldest snapshot kept is of round {oldest}")

    def next_kept(self, round: int) -> int | None:
        """The oldest later round than `round` of which there is a snapshot that the log agrees with."""
        for kept in self._snapshots.rounds():
            with suppress(DataError, LookupError):
                if kept > round and self.vouched(kept):
                    return kept
        return None

    def _ways(self, round: int) -> Iterator[tuple[int, Sequence[int]]]:
        """(round of a state on disk, the rounds to be folded into it to get to `round`), the shortest way first."""
        kept, since = {GENESIS_ROUND, *self._snapshots.rounds()}, deque[int]()
        for at in lineage(round, self._store.read_header):
            if at in kept:
                yield at, tuple(since)
            since.appendleft(at)

    def _begin(self, start: int, accepted: Callable[[int], bool]) -> OuterState | None:
        if start == GENESIS_ROUND:
            anchor = self._initial()
            return OuterState.founded(anchor) if digest_bytes(anchor.astype("<f4")) == self._founding.weights else None
        return OuterState(*self._snapshots.read_state(start)) if accepted(start) else None

    def vouched(self, round: int) -> bool:
        """Whether the log on disk says that the others had the snapshot of `round` too."""
        own, others = _in_log(self._store, self._snapshots, round)
        return own == others

    def _not_contradicted(self, round: int) -> bool:
        own, others = _in_log(self._store, self._snapshots, round)
        return others in (b"", own)

    def _replay(self, state: OuterState, rounds: Iterable[int]) -> None:
        layout, codec, outer = self._settings
        kept = set(self._snapshots.rounds())
        for round in rounds:
            found = self._store.read_update(round)
            if found is None:
                raise DataError(f"the update of round {round} is not on disk")
            apply_update(state, layout, codec, outer, *found)
            if round in kept:
                self._correct(round, state)

    def _correct(self, round: int, state: OuterState) -> None:
        """Replace a snapshot that holds something else; without room for a new one it goes, and nobody resumes from it."""
        with suppress(DataError, LookupError):
            log_state = self._snapshots.manifest(round).state
            if self._snapshots.manifest(round).content == described(log_state, state.anchor, state.momentum).content:
                return
            try:
                self._snapshots.write(log_state, state.anchor, state.momentum)
            except OSError:
                self._snapshots.drop(round)


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
