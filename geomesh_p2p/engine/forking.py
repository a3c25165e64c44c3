"""A new run from an old state: for a run whose quorum is lost for good, or to try something else from there.

The folder of the old run is moved aside whole. The new one holds a founding record that names the old run and the round, and
the state after that round as a snapshot whose only voter is the founder.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.ports import Engine
from geomesh_p2p.core.types import NO_TERM, Fork, Founding, PeerId
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.files import move_aside
from geomesh_p2p.engine.resume import Rebuilder, Settings
from geomesh_p2p.errors import DataError, RefusedError

TAKEN_ALONG = ("identity.key", "port", "profile.json")


def fork(folder: Path, round: int, me: tuple[Digest, PeerId], engine: Engine, settings: Settings) -> Path | None:
    """Make `folder` that of a new run, founded by `me` (fingerprint, peer), which goes on from the state after `round` of the
    run in it. Returns where the old one was moved to; None if this was done before. Raises RefusedError, DataError, OSError:
    the folder is then as it was."""
    fingerprint, founder = me
    with DiskStore(folder) as store:
        old, snapshots = store.load_founding(), Snapshots(folder)
        assert old is not None, "a run is there"
        if old.fingerprint != fingerprint:
            raise RefusedError(f"--fork-from {round}: {folder} is of other settings: fork with those that it was trained with")
        if old.fork is not None and old.fork.round == round and old.founder == founder:
            return None
        rebuild = Rebuilder(store, snapshots, engine.initial_weights, old, settings)
        try:
            log, state = rebuild.log_after(round), rebuild(round)
        except LookupError as error:
            why = f"{error} (last round: {store.newest_ever()})"
            raise DataError(f"--fork-from {round}: {why}{_instead(rebuild, round)}") from None
        if state is None:
            step = _instead(rebuild, round) or ": try another round"
            raise DataError(f"--fork-from {round}: nothing in {folder} that the log agrees with leads there{step}")
        new = Founding(fingerprint, os.urandom(16), old.seed, old.weights, founder, Fork(old.run, round, log.digest))
        fresh = made_beside(folder)
        shutil.rmtree(fresh, ignore_errors=True)
        with DiskStore(fresh) as made:
            Snapshots(fresh).write(replace(log, run=new.run, voters=(founder,)), *state)
            made.save_durable(Durable(NO_TERM, False))
            made.save_founding(new)
        for name in TAKEN_ALONG:
            if (folder / name).exists():
                shutil.copy2(folder / name, fresh / name)
    aside = move_aside(folder)
    assert aside is not None, "it was there"
    finish(folder)
    return aside


def _instead(rebuild: Rebuilder, round: int) -> str:
    """From where else a run can be forked, if that can be told."""
    kept = rebuild.next_kept(round)
    return "" if kept is None else f": the oldest later one that works is round {kept}"


def made_beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.fork")


def finish(folder: Path) -> None:
    """Put the new run in its place; also if a process that forked ended after the old one was moved aside."""
    if not folder.exists() and (made_beside(folder) / "founding.record").exists():
        made_beside(folder).rename(folder)
