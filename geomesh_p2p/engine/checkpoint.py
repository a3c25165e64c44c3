"""One peer's folder on disk: what it must not forget, the record it holds, the round log, and snapshots.

    founding.record  state.record  held.record  log/ROUND.update  snapshot-ROUND/  .lock

A held record becomes the log's entry by a rename when its update is committed: the body is written once, and the held
record is gone in the same instant. Bodies are checked against the hash in their update whenever they are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geomesh_p2p.core.canonical import digest_bytes, pack, unpack
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.types import Founding, Held, Update
from geomesh_p2p.engine.files import PARTIAL, FolderLock, damaged, read_record, sync_folder, write_record
from geomesh_p2p.engine.snapshots import Manifest, Receiver, Snapshot, Snapshots
from geomesh_p2p.errors import DataError

__all__ = ["DiskStore", "Manifest", "Receiver", "Snapshot", "Snapshots"]

_FOUNDING, _DURABLE, _HELD, _UPDATE = b"GMFOUND1", b"GMSTATE1", b"GMHELD_1", b"GMUPDAT1"
_TYPES: dict[bytes, type] = {_FOUNDING: Founding, _DURABLE: Durable, _HELD: Held, _UPDATE: Update}
_NAME = re.compile(r"(\d{8,})\.update")
_HAD = re.compile(r"(\d{8,})\.(update|damaged)")


class DiskLog:
    """The founding record and the round log in `folder`, for who only reads them: takes no lock and changes nothing. Beside a
    peer that is at work there, what is read may be gone the next moment.

    Raises DataError, naming the file, if one is damaged."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._log = self.folder / "log"

    def load_founding(self) -> Founding | None:
        found = self._load("founding.record", _FOUNDING)
        return found[0] if found else None

    def _load(self, name: str, *kinds: bytes) -> tuple[Any, bytes] | None:
        path = self.folder / name
        if not path.exists():
            return None
        kind, header, body = read_record(path)
        if kind not in kinds:
            raise damaged(path, f"is a {kind!r} record")
        try:
            return unpack(_TYPES[kind], header), body
        except ValueError as error:
            raise damaged(path, f"was written by another release ({error})") from None

    def _path(self, round: int) -> Path:
        return self._log / f"{round:08d}.update"

    def read_update(self, round: int) -> tuple[Update, bytes] | None:
        """None if it is not here; DataError if it is damaged (see `set_aside`)."""
        path = self._path(round)
        found = self._load(f"log/{path.name}", _UPDATE, _HELD)
        if found is None:
            return None
        update: Update = found[0].update if isinstance(found[0], Held) else found[0]
        if update.round != round or digest_bytes(found[1]) != update.body:
            raise damaged(path)
        return update, found[1]

    def read_header(self, round: int) -> Update | None:
        """The update without its body, which is not checked; None if it is not here, or not to be read."""
        try:
            kind, header, _ = read_record(self._path(round), with_body=False)
            found: Any = unpack(_TYPES[kind], header)
        except (FileNotFoundError, DataError, ValueError, KeyError):
            return None
        update = found.update if isinstance(found, Held) else found
        return update if isinstance(update, Update) and update.round == round else None

    def rounds(self) -> range:
        """Rounds on disk without a gap up to the newest; empty before the first commit."""
        present = self._present()
        if not present:
            return range(0)
        first = last = max(present)
        while first - 1 in present:
            first -= 1
        return range(first, last + 1)

    def _present(self) -> set[int]:
        names = (_NAME.fullmatch(path.name) for path in self._log.iterdir())
        return {int(name[1]) for name in names if name}

    def sizes(self) -> dict[int, int]:
        """Bytes on disk of each update, by round, ascending."""
        return {round: self._path(round).stat().st_size for round in sorted(self._present())}

    def newest_ever(self) -> int:
        """The newest round whose update was once here, sound or not; 0 if there was none."""
        names = (_HAD.fullmatch(path.name) for path in self._log.iterdir())
        return max((int(name[1]) for name in names if name), default=0)


class DiskStore(DiskLog):
    """Implements ports.Store in `folder` (created if need be), held exclusively by this process until `close`.

    Raises TemporaryError if another process has the folder, OSError if a write fails (DiskFullError before it begins, if
    space is short), DataError, naming the file, if one is damaged."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(folder)
        self._log.mkdir(parents=True, exist_ok=True)
        self._lock = FolderLock(self.folder)
        for stale in (*self.folder.glob("*.record" + PARTIAL), *self._log.glob("*" + PARTIAL)):
            stale.unlink()
        Snapshots(self.folder).clean()
        self._held: Held | None = None

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ founding and state

    def save_founding(self, founding: Founding) -> None:
        write_record(self.folder / "founding.record", _FOUNDING, pack(founding))

    def load_durable(self) -> Durable | None:
        """DataError here means that this peer no longer knows what it promised: it must take a new identity."""
        found = self._load("state.record", _DURABLE)
        return found[0] if found else None

    def save_durable(self, durable: Durable) -> None:
        write_record(self.folder / "state.record", _DURABLE, pack(durable))

    # ------------------------------------------------------------ the held record

    def load_held(self) -> tuple[Held, bytes] | None:
        found = self._load("held.record", _HELD)
        if found is None:
            return None
        held, body = found
        if held.update.round < self.rounds().stop:
            return None  # its round was committed, and this peer stopped before the record was gone
        if digest_bytes(body) != held.update.body:
            raise damaged(self.folder / "held.record")
        self._held = held
        return held, body

    def save_held(self, held: Held, body: Sequence[memoryview | bytes]) -> None:
        self._held = None  # from here on the file may hold either, until it is read again
        write_record(self.folder / "held.record", _HELD, pack(held), body)
        self._held = held

    def set_held_aside(self) -> None:
        """Moves a held record that cannot be read out of the way."""
        os.rename(self.folder / "held.record", self.folder / "held.damaged")
        sync_folder(self.folder)

    # ------------------------------------------------------------ the log

    def append(self, update: Update, body: Sequence[memoryview | bytes]) -> None:
        """Adds an update that is committed; a held record of its round or an older one is gone afterwards."""
        path = self.folder / "held.record"
        held, self._held = self._held or _held_in(path), None
        if held is not None and held.update == update:
            os.rename(path, self._path(update.round))
            sync_folder(self._log)
        else:
            write_record(self._path(update.round), _UPDATE, pack(update), body)
            if held is not None and held.update.round > update.round:
                self._held = held
            else:
                path.unlink(missing_ok=True)
        sync_folder(self.folder)

    def set_aside(self, round: int) -> Path:
        """Moves a damaged update out of the log, so that a sound copy from another peer can be appended; says where to."""
        path = self._path(round)
        aside = path.with_suffix(".damaged")
        os.rename(path, aside)
        sync_folder(self._log)
        return aside

    def prune(self, first_kept: int) -> None:
        """Deletes updates of rounds before `first_kept`, the oldest first."""
        for round in sorted(self._present()):
            if round < first_kept:
                self._path(round).unlink()


def _held_in(path: Path) -> Held | None:
    """What `path` holds; None if nothing in it can be read: a commit has a body of its own and does without."""
    try:
        return unpack(Held, read_record(path, with_body=False)[1])
    except (FileNotFoundError, DataError, ValueError):
        return None
