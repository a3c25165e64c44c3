"""Durable files: written aside, fsynced, renamed, and the folder fsynced. A crash at any point leaves the old or the new.

Only `os` calls that a test can let fail one by one are used for writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import safetensors

from geomesh_p2p.core.canonical import DIGEST_BYTES, digest_bytes
from geomesh_p2p.errors import DataError, TemporaryError

PARTIAL = ".partial"
RESERVE_BYTES = 16 * 2**20
"""Space left free beside what is written: for histories, metrics and the file system itself."""


class DiskFullError(TemporaryError, OSError):
    """There is not enough space for what is to be written; nothing was written."""

    def __str__(self) -> str:
        return str(self.strerror)


def require_space(folder: Path, size_bytes: int) -> None:
    """Raises DiskFullError if `size_bytes` would not fit in `folder`, which need not be there yet."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if free < size_bytes + RESERVE_BYTES:
        need = (size_bytes + RESERVE_BYTES) / 1e6
        raise DiskFullError(
            errno.ENOSPC, f"{need:.0f} MB are needed in {folder} and {free / 1e6:.0f} MB are free: free some space, start again"
        )


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, parts: Iterable[Any]) -> None:
    """Creates (or overwrites) `path` with the buffers, one after the other, and fsyncs it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for part in parts:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, parts: Sequence[Any]) -> None:
    """Replaces `path` by the buffers, one after the other. Raises OSError, and then `path` is what it was before."""
    require_space(path.parent, sum(memoryview(part).nbytes for part in parts))
    aside = path.with_name(path.name + PARTIAL)
    try:
        write_synced(aside, parts)
        os.rename(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Whole or not at all, for those who read it meanwhile."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def tensor_errors(path: Path) -> Iterator[None]:
    """While safetensors writes `path`: its errors that come from the system are raised as the OSErrors that they are."""
    try:
        yield
    except safetensors.SafetensorError as error:
        if (found := _OS_ERROR.search(str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


# ---------------------------------------------------------------- records: a checked header and a body

_PREFIX = struct.Struct("<8sIQ")


def write_record(path: Path, kind: bytes, header: bytes, body: Sequence[Any] = ()) -> None:
    """kind (8 bytes), the two lengths, header, checksum of all that, body. Who reads the body checks it by its own hash."""
    start = _PREFIX.pack(kind, len(header), sum(memoryview(part).nbytes for part in body)) + header
    write_durably(path, [start, digest_bytes(start), *body])


def read_record(path: Path, with_body: bool = True) -> tuple[bytes, bytes, bytes]:
    """(kind, header, body). Raises DataError, naming the file, if it is cut short or its header is damaged."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) == _PREFIX.size:
            kind, header_bytes, body_bytes = _PREFIX.unpack(prefix)
            if os.fstat(file.fileno()).st_size == _PREFIX.size + header_bytes + DIGEST_BYTES + body_bytes:
                header = file.read(header_bytes)
                if digest_bytes(prefix, header) == file.read(DIGEST_BYTES):
                    return kind, header, file.read() if with_body else b""
    raise damaged(path)


def damaged(path: Path, what: str = "is damaged or cut short") -> DataError:
    return DataError(f"{path} {what}: move it away and start again, the peer then gets what it lacks from the others")


# ---------------------------------------------------------------- one process a folder


class FolderLock:
    """Holds `folder` for this process until `release` or the process's end, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise TemporaryError(
                f"{folder} is in use by process {owner}: stop it, or give this peer another site.name"
            ) from None
        if not _is_at(self._descriptor, folder / ".lock"):  # its holder has just cleared the folder
            os.close(self._descriptor)
            raise TemporaryError(f"{folder} was in use until now: start again")
        with suppress(OSError):  # who holds it is said for people alone
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- what a start has made


class Made:
    """What is made in `folder` from here on; `undo` takes it away again, and with it the folders that there were not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders = [path for path in (folder, *folder.parents) if not path.exists()]
        self._before = set(os.listdir(folder)) if folder.is_dir() else set()

    def undo(self, keep: str = "") -> None:
        """Only while this process holds the folder's lock. `keep` names a file to leave where it is."""
        for path in self._folder.iterdir():
            if path.name in self._before or path.name == keep:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for folder in self._folders:
            try:
                folder.rmdir()
            except OSError:  # not empty: somebody else's, or kept
                break


def move_aside(folder: Path) -> Path | None:
    """Rename `folder` to a name with the time in it, and say which; None if it is not there. Raises TemporaryError if another
    process is at work in it."""
    if not folder.is_dir():
        return None
    lock = FolderLock(folder)
    name = f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    aside = next(path for path in map(folder.with_name, names) if not path.exists())
    try:
        folder.rename(aside)
    finally:
        lock.release()
    return aside
