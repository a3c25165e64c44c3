"""After each snapshot: what is past the limits of the run file's [save] goes, and observers hear what stays."""

from __future__ import annotations

from geomesh_p2p.config import SaveSection
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.ports import Observer, SnapshotStore, Store
from geomesh_p2p.core.retention import LEAST_SNAPSHOTS, above_limit, fullest


class Retaining:
    """Works in the thread that saves. That not even the least fits is told once, and again only after all was within the
    limit."""

    def __init__(self, store: Store, snapshots: SnapshotStore, save: SaveSection, observe: Observer) -> None:
        self._store, self._snapshots, self._save, self._observe = store, snapshots, save, observe
        self._told = False

    def saved(self, round: int) -> None:
        """A snapshot of `round` was written. What cannot be deleted stays until the next one."""
        try:
            self._snapshots.delete_older(round)
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
        if limit is None:
            return
        if left.size_bytes <= limit:
            self._told = self._told and len(snapshots) < LEAST_SNAPSHOTS
        elif len(snapshots) <= LEAST_SNAPSHOTS and not self._told:  # more stay only while somebody reads one
            self._told = True
            self._observe(obs.Warned("over_limit", ": ".join(above_limit(limit, most))))
