"""After each snapshot: what is past the limits of the run file's [save] goes, and observers hear what stays."""

from __future__ import annotations

from geomesh_p2p.config import SaveSection
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.ports import Observer, SnapshotStore, Store
from geomesh_p2p.core.retention import LEAST_SNAPSHOTS, RAISE_LIMIT, above_limit, fullest


class Retaining:
    """Works in the thread that saves. That not even the least fits is told once, and again only after it did."""

    def __init__(self, store: Store, snapshots: SnapshotStore, save: SaveSection, observe: Observer) -> None:
        self._store, self._snapshots, self._save, self._observe = store, snapshots, save, observe
        self._told = False

    def saved(self, round: int) -> None:
        """A snapshot of `round` was written. What cannot be deleted stays until the next one."""
        try:
            # Whoever catches up, and this peer if its newest snapshot is damaged, needs the updates since.
            self._store.prune(min(*self._snapshots.rounds(), round - self._save.keep_updates) + 1)
            left = self._snapshots.prune(self._store.sizes())
            self._store.prune(left.first_update)
            snapshots, updates = self._snapshots.sizes(), self._store.sizes()
        except OSError as error:
            self._observe(obs.Warned("not_deleted", f"old snapshots and updates could not be deleted: {error}"))
            return
        most = fullest(self._save, snapshots[max(snapshots)], max(updates.values(), default=0))
        self._observe(obs.Kept(sum(snapshots.values()), sum(updates.values()), most.size_bytes))
        limit = self._save.keep_bytes
        over = limit is not None and left.size_bytes > limit and len(snapshots) <= LEAST_SNAPSHOTS
        if limit is not None and over and not self._told:
            self._observe(obs.Warned("over_limit", f"{above_limit(limit, left.size_bytes)}: {RAISE_LIMIT}"))
        self._told = over
