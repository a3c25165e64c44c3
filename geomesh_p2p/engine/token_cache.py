"""Tokens on disk, made once for all peers of a host, and read without reading text: a start seeks, it does not replay.

A folder of the cache is named after what its tokens depend on (files by path, size and time of change, tokenizer, seed and
so on) and gets its name only once it is whole. Who makes one holds a lock that dies with its process. Whoever opens one reads
it through once and compares hashes: a value that has changed on disk is not trained on.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geomesh_p2p.engine.files import PARTIAL, require_space, sync_folder

log = logging.getLogger("geomesh")
Tokens = npt.NDArray[np.unsignedinteger]
PARTS = ("train", "held_out")


@dataclass(frozen=True)
class Prepared:
    """Tokens to train on and held out, and of which documents: how many, and the hash of their hashes."""

    train: Tokens
    held_out: Tokens
    documents: int
    documents_hash: str


@dataclass(frozen=True)
class _Description:
    documents: int
    documents_hash: str
    train: int
    held_out: int
    files: dict[str, str] = field(default_factory=dict)
    """Hash of each file of tokens."""
    checksum: str = ""
    """Of all that is said above."""

    def sealed(self) -> _Description:
        said = json.dumps(asdict(replace(self, checksum="")), sort_keys=True)
        return replace(self, checksum=hashlib.blake2b(said.encode(), digest_size=32).hexdigest())


class _UnusableError(Exception):
    """What is wrong with a folder of tokens, in words."""


def users_folder() -> Path | None:
    """Where this user's programs keep what they can make again (XDG base directories); None if nobody says."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "geomesh" / "tokens" if os.path.isabs(base) else None


def kept(cache: Path, key: str, prepare: Callable[[], Prepared], patience_seconds: float) -> Prepared:
    """What `prepare` gives, from disk if it is there whole; else made and, if there is room, kept. While another process
    makes it, it is waited for, `patience_seconds` at most."""
    folder = cache / key
    found = _load(folder)
    if found is not None:
        return found
    made: Prepared | None = None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock", patience_seconds) as alone:
            if (found := _load(folder)) is not None:
                return found
            for rest in cache.glob(f"{key}*{PARTIAL}") if alone else ():  # its maker was killed
                shutil.rmtree(rest, ignore_errors=True)
            if folder.exists():
                log.warning("%s %s: its tokens are made again", folder, _why_not(folder))
                shutil.rmtree(folder)
            made = prepare()
            _keep(folder, made)
    except OSError as error:
        log.warning("%s: tokens are not kept there (%s): this peer has them in memory", folder, error.strerror or error)
    return _load(folder) or made or prepare()


def _load(folder: Path) -> Prepared | None:
    """None if there is nothing, or nothing that is whole and unchanged."""
    try:
        return _read(folder)
    except _UnusableError:
        return None


def _why_not(folder: Path) -> str:
    try:
        _read(folder)
    except _UnusableError as error:
        return str(error)
    return "was damaged a moment ago"


def _read(folder: Path) -> Prepared:
    """Every byte is read, once and in order, before any is used."""
    try:
        told = json.loads((folder / "documents.json").read_bytes())
        if set(told) == {f.name for f in fields(_Description)} - {"files", "checksum"}:
            raise _UnusableError("was made by an older release, without hashes")
        said = _Description(**told)
        if said.sealed() != said:
            raise _UnusableError("is damaged (documents.json)")
        for part in PARTS:
            if _hash(folder / f"{part}.npy") != said.files[part]:
                raise _UnusableError(f"is damaged ({part}.npy does not fit its hash)")
        train, held_out = (np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in PARTS)
    except (OSError, ValueError, TypeError, EOFError, KeyError) as error:
        raise _UnusableError(f"is damaged ({error})") from None
    if (train.ndim, held_out.ndim, len(train), len(held_out)) != (1, 1, said.train, said.held_out):
        raise _UnusableError("is damaged (it has other lengths than it says)")
    return Prepared(train, held_out, said.documents, said.documents_hash)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _keep(folder: Path, made: Prepared) -> None:
    require_space(folder.parent, made.train.nbytes + made.held_out.nbytes)
    aside = folder.with_name(f"{folder.name}.{os.getpid()}{PARTIAL}")
    try:
        aside.mkdir(exist_ok=True)
        for part in PARTS:
            with (aside / f"{part}.npy").open("wb") as file:
                np.save(file, getattr(made, part))
                file.flush()
                os.fsync(file.fileno())
        files = {part: _hash(aside / f"{part}.npy") for part in PARTS}
        said = _Description(made.documents, made.documents_hash, len(made.train), len(made.held_out), files)
        (aside / "documents.json").write_text(json.dumps(asdict(said.sealed())))
        sync_folder(aside)
        try:
            aside.rename(folder)
        except OSError as error:  # another process, which did not wait, has made the same
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(path: Path, patience_seconds: float) -> Iterator[bool]:
    """Whether this process is alone at work on what `path` locks; false if the other one takes longer than is waited for."""
    begun, told = time.monotonic(), False
    while (descriptor := _try_to_lock(path)) is None and time.monotonic() - begun < patience_seconds:
        if not told:
            told = True
            log.info("waiting for another process, which prepares the same tokens (%.0f s at most)", patience_seconds)
        time.sleep(0.05)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _try_to_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)  # another one's, or one that was just taken away
    return None
