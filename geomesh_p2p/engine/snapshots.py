"""Snapshots: the anchor and the outer state after a committed round, in files that are checked chunk by chunk.

    snapshot-ROUND/ shared.safetensors    anchor and momentum: the same bytes on every peer
                    residual.safetensors  what this peer's contributions left unsaid, if that is kept
                    part.safetensors      what its answers as a reducer left unsaid, for the share that it had
                    inner.pt              this peer's own inner optimizer
                    meta.json             where the log stood, and the hashes of all of it

Any peer can hand out `shared.safetensors` chunk by chunk; a joiner checks each chunk against the manifest, whose hash the
members agree on. Losing the private files costs a peer a little progress and nobody else anything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.canonical import DIGEST_BYTES, Digest, digest, digest_bytes, pack, unpack
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.retention import Retained, retained
from geomesh_p2p.core.types import Range
from geomesh_p2p.engine.files import PARTIAL, damaged, require_space, sync_folder, write_synced
from geomesh_p2p.errors import DataError

Vector = npt.NDArray[np.float32]

CHUNK_BYTES = 2**20
IN_USE_SECONDS = 60.0
SHARED, META = "shared.safetensors", "meta.json"
RESIDUAL, PART, INNER = "residual.safetensors", "part.safetensors", "inner.pt"
RECEIVED, REPLACED, STALE = ".received", ".replaced", ".stale"
_NAME = re.compile(r"snapshot-(\d+)")


@dataclass(frozen=True)
class Manifest:
    """What a snapshot holds: where the log stood, and the hash of each mebibyte of `shared.safetensors`."""

    state: LogState
    parameters: int
    chunks: tuple[Digest, ...]

    @property
    def round(self) -> int:
        return self.state.round

    @cached_property
    def digest(self) -> Digest:
        return digest("manifest", self)

    @cached_property
    def content(self) -> Digest:
        """Hash of what every peer has in common after the round (no peer ids, no run id)."""
        state = self.state
        return digest("state", state.round, state.digest, state.credited, state.tokens, self.parameters, self.chunks)

    @property
    def size_bytes(self) -> int:
        return len(_header(_shared_shapes(self.parameters))) + 8 * self.parameters

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Manifest:
        """Raises ValueError unless `data` is a manifest whose chunks fit its size."""
        manifest = unpack(cls, data)
        if manifest.parameters <= 0 or len(manifest.chunks) != -(-manifest.size_bytes // CHUNK_BYTES):
            raise ValueError(f"a manifest of {len(manifest.chunks)} chunks for {manifest.parameters} parameters")
        return manifest


@dataclass(frozen=True)
class Snapshot:
    """A snapshot read back and checked. `problems` says in words which newer snapshots or private files were not usable."""

    manifest: Manifest
    anchor: Vector
    momentum: Vector
    residual: Vector | None
    inner: Path | None
    problems: tuple[str, ...]
    part_residual: tuple[Range, Vector] | None = None


class Snapshots:
    """The snapshots in one peer's folder; the newest `keep` are kept, and one more while a joiner reads it; fewer where they
    and the log would take more than `keep_bytes`. A new one gets its name, and an old one goes, only once the new one has been
    read back and checked. Reading changes nothing; who writes must have the folder to itself."""

    def __init__(self, folder: Path | str, keep: int = 2, keep_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.keep, self.keep_bytes = keep, keep_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._described: dict[int, tuple[int, Manifest]] = {}
        self._read_at: dict[int, float] = {}  # when a joiner last asked for a piece of it

    def clean(self) -> None:
        """Clears away what a crash left; a snapshot that was about to be replaced gets its name back."""
        for path in self.folder.glob("snapshot-*" + REPLACED):
            target = path.with_name(path.name.removesuffix(REPLACED))
            os.rename(path, path.with_name(target.name + STALE) if target.exists() else target)
        self._delete("snapshot-*" + PARTIAL)
        self._delete("snapshot-*" + STALE)

    def rounds(self) -> list[int]:
        """Rounds with a snapshot, ascending."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def sizes(self) -> dict[int, int]:
        """Bytes on disk by round, ascending."""
        return {round: sum(file.stat().st_size for file in self.path(round).iterdir()) for round in self.rounds()}

    def path(self, round: int) -> Path:
        return self.folder / f"snapshot-{round}"

    # ------------------------------------------------------------ writing

    def write(
        self,
        state: LogState,
        anchor: Vector,
        momentum: Vector,
        residual: Vector | None = None,
        save_inner: Callable[[str], None] | None = None,
        part_residual: tuple[Range, Vector] | None = None,
    ) -> Manifest:
        """Writes the snapshot of `state.round` and checks it. Raises OSError: DiskFullError before anything is written if space
        is short, EIO if what was written does not read back."""
        require_space(self.folder, anchor.nbytes + momentum.nbytes + (0 if residual is None else residual.nbytes))
        self.clean()
        aside = self.folder / f"snapshot-{state.round}{PARTIAL}"
        try:
            aside.mkdir()
            hashes: list[Digest] = []
            write_synced(aside / SHARED, _hashed(_safetensors({"anchor": anchor, "momentum": momentum}), hashes))
            if residual is not None:
                write_synced(aside / RESIDUAL, _safetensors({"residual": residual}))
            if part_residual is not None:
                write_synced(aside / PART, _safetensors({f"from {part_residual[0].start}": part_residual[1]}))
            if save_inner is not None:
                save_inner(str(aside / INNER))
                _sync_file(aside / INNER)
            manifest = Manifest(state, anchor.size, tuple(hashes))
            self._publish(aside, manifest)
        except OSError:
            with suppress(OSError):
                self.clean()
            raise
        return manifest

    def _publish(self, aside: Path, manifest: Manifest) -> None:
        write_synced(aside / META, [_meta(aside, manifest)])
        sync_folder(aside)
        try:
            _verify(aside)
        except DataError as error:
            raise OSError(errno.EIO, str(error)) from None
        target = self.path(manifest.round)
        replaced = self.folder / (target.name + REPLACED)  # `clean` brings it back if the other rename fails
        if target.exists():
            os.rename(target, replaced)
        os.rename(aside, target)
        sync_folder(self.folder)
        self._discard(replaced)

    def delete_older(self, newest: int) -> None:
        """Deletes those beyond `keep`, of which `newest` is one. Raises OSError."""
        older = [round for round in self.rounds() if round < newest]
        surplus = older[: max(0, len(older) - (self.keep - 1))]
        wanted = max(surplus, key=lambda round: self._read_at.get(round, 0.0), default=0)
        try:
            for round in surplus:
                if round != wanted or not self._in_use(round):
                    self.drop(round)
        except OSError:
            with suppress(OSError):
                self.clean()
            raise

    def _in_use(self, round: int) -> bool:
        return time.monotonic() <= self._read_at.get(round, float("-inf")) + IN_USE_SECONDS

    def prune(self, updates: Mapping[int, int]) -> Retained:
        """Deletes those for which, beside `updates` (bytes by round), there is no room within `keep_bytes`; says what stays, of
        the updates too. Raises OSError."""
        sizes = self.sizes()
        left = retained(sizes, updates, self.keep_bytes, [round for round in sizes if self._in_use(round)])
        for round in left.going:
            self.drop(round)
        return left

    def drop(self, round: int) -> None:
        """Deletes the snapshot of `round`, if there is one. Raises OSError."""
        self._read_at.pop(round, None)
        self._described.pop(round, None)
        self._discard(self.path(round))

    def _discard(self, path: Path) -> None:
        """Deletes a snapshot; one that is half deleted no longer bears its name."""
        if path.exists():
            os.rename(path, path.with_name(path.name + STALE))
            self._delete("snapshot-*" + STALE)

    def _delete(self, pattern: str) -> None:
        for path in self.folder.glob(pattern):
            shutil.rmtree(path)

    # ------------------------------------------------------------ reading

    def manifest(self, round: int) -> Manifest:
        """Raises LookupError if there is no snapshot of `round`, DataError if its description is damaged."""
        path = self.path(round) / META
        if not path.exists():
            raise LookupError(f"no snapshot of round {round}")
        written, known = path.stat().st_mtime_ns, self._described.get(round)
        if known is None or known[0] != written:  # a joiner asks for every chunk of a snapshot, and the manifest each time
            known = self._described[round] = (written, _read_meta(path)[0])
        return known[1]

    def content(self, state: LogState, anchor: Vector, momentum: Vector) -> Digest:
        """The `content` of this state: from its snapshot if there is one, else hashed now."""
        with suppress(LookupError, DataError):
            if (manifest := self.manifest(state.round)).state.digest == state.digest:
                return manifest.content
        return described(state, anchor, momentum).content

    def described(self, packed: bytes) -> Manifest:
        """A manifest that another peer sent. Raises ValueError."""
        return Manifest.unpack(packed)

    def read_state(self, round: int) -> tuple[Vector, Vector]:
        """(anchor, momentum) of the snapshot of `round`, checked. Raises LookupError, DataError."""
        self.manifest(round)
        snapshot = self._load(round, [])
        return snapshot.anchor, snapshot.momentum

    def verify(self, round: int) -> None:
        """Reads everything shared and checks it. Raises DataError, naming the damaged file."""
        _verify(self.path(round))

    def newest(self) -> Snapshot | None:
        """The newest sound snapshot; None if there is none at all. Raises DataError, naming the files, if all are damaged."""
        problems: list[str] = []
        for round in reversed(self.rounds()):
            try:
                return self._load(round, problems)
            except (DataError, OSError) as error:
                problems.append(str(error))
        if problems:
            raise DataError("no snapshot can be read: " + "; ".join(problems))
        return None

    def _load(self, round: int, problems: list[str]) -> Snapshot:
        folder = self.path(round)
        manifest, private = _read_meta(folder / META)
        skip = manifest.size_bytes - 8 * manifest.parameters
        values = np.empty(2 * manifest.parameters, np.float32)
        raw, at = values.data.cast("B"), -skip
        for chunk in _checked_chunks(folder / SHARED, manifest):
            piece = chunk[max(0, -at) :]
            raw[max(0, at) : at + len(chunk)] = piece
            at += len(chunk)
        usable = {}
        for name, (size, expected) in private.items():
            path = folder / name
            if path.exists() and path.stat().st_size == size and _hash_file(path) == expected:
                usable[name] = path
            else:
                problems.append(f"{path} is damaged: this peer goes on without it")
        residual = _read_vector(usable[RESIDUAL])[1] if RESIDUAL in usable else None
        anchor, momentum = values[: manifest.parameters], values[manifest.parameters :]
        part = None
        if PART in usable:
            name, values = _read_vector(usable[PART])
            start = int(name.removeprefix("from "))
            part = Range(start, start + values.size), values
        return Snapshot(manifest, anchor, momentum, residual, usable.get(INNER), tuple(problems), part)

    def read_chunk(self, round: int, offset: int, length: int) -> bytes:
        """Bytes of `shared.safetensors` for a joiner. Raises LookupError if the snapshot is gone."""
        try:
            with (self.path(round) / SHARED).open("rb") as file:
                self._read_at[round] = time.monotonic()
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            raise LookupError(f"no snapshot of round {round}") from None

    # ------------------------------------------------------------ receiving

    def receive(self, manifest: Manifest) -> Receiver:
        """Goes on with (or begins) receiving the snapshot that `manifest` describes. Of those begun before, one is kept."""
        aside = self.folder / f"snapshot-{manifest.round}{RECEIVED}"
        if not aside.exists():
            for round in self.receiving()[:-1]:
                shutil.rmtree(self.folder / f"snapshot-{round}{RECEIVED}")
            require_space(self.folder, manifest.size_bytes)
            aside.mkdir()
        return Receiver(aside, manifest, self._publish)


    def receiving(self) -> list[int]:
        """Rounds of which a snapshot was received in part, ascending."""
        names = (_NAME.fullmatch(path.name.removesuffix(RECEIVED)) for path in self.folder.glob(f"snapshot-*{RECEIVED}"))
        return sorted(int(name[1]) for name in names if name)

    def forget_received(self) -> None:
        """Drops what was received in part."""
        self._delete(f"snapshot-*{RECEIVED}")


class Receiver:
    """A snapshot that arrives chunk by chunk, from several donors, in any order; what is there survives a restart."""

    def __init__(self, folder: Path, manifest: Manifest, publish: Callable[[Path, Manifest], None]) -> None:
        self.manifest = manifest
        self._folder = folder
        self._publish = publish
        self._path = folder / SHARED
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, manifest.size_bytes)
        self._missing = {i for i, _ in enumerate(manifest.chunks) if self._read_hash(i) != manifest.chunks[i]}

    def _span(self, index: int) -> tuple[int, int]:
        return index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.manifest.size_bytes)

    def _read_hash(self, index: int) -> Digest:
        start, stop = self._span(index)
        return digest_bytes(os.pread(self._descriptor, stop - start, start))

    def missing(self) -> list[Range]:
        """Byte ranges still wanted, one for each chunk, ascending."""
        return [Range(*self._span(index)) for index in sorted(self._missing)]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Takes one whole chunk of `missing()`. Raises DataError if it is not what the manifest says: ask another donor."""
        index, within = divmod(offset, CHUNK_BYTES)
        expected = self.manifest.chunks[index] if not within and 0 <= index < len(self.manifest.chunks) else None
        if expected is None or digest_bytes(data) != expected:
            raise DataError(f"bytes from {offset} on of the snapshot of round {self.manifest.round} do not fit its manifest")
        start, stop = self._span(index)
        if os.pwrite(self._descriptor, data, start) != stop - start:
            raise OSError(f"{self._path}: short write")
        self._missing.discard(index)

    def finish(self) -> None:
        """Makes the snapshot the peer's own, once nothing is missing."""
        if self._missing:
            raise ValueError(f"{len(self._missing)} chunks of the snapshot of round {self.manifest.round} are missing")
        os.fsync(self._descriptor)
        self.close()
        self._publish(self._folder, self.manifest)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


# ---------------------------------------------------------------- bytes


def described(state: LogState, anchor: Vector, momentum: Vector) -> Manifest:
    """The manifest of a snapshot that is not written."""
    hashes: list[Digest] = []
    for _ in _hashed(_safetensors({"anchor": anchor, "momentum": momentum}), hashes):
        pass
    return Manifest(state, anchor.size, tuple(hashes))


def _shared_shapes(parameters: int) -> dict[str, int]:
    return {"anchor": parameters, "momentum": parameters}


def _header(sizes: dict[str, int]) -> bytes:
    """A safetensors header for fp32 vectors; the same bytes for the same sizes, padded so that the data is aligned."""
    entries, at = {}, 0
    for name, size in sizes.items():
        entries[name] = {"dtype": "F32", "shape": [size], "data_offsets": [at, at + 4 * size]}
        at += 4 * size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _safetensors(tensors: dict[str, Vector]) -> Iterator[bytes | memoryview]:
    """The file's bytes in chunks of CHUNK_BYTES (the last one shorter)."""
    parts = [memoryview(_header({name: tensor.size for name, tensor in tensors.items()}))]
    parts += [np.ascontiguousarray(tensor, np.dtype("<f4")).data.cast("B") for tensor in tensors.values()]
    pending = b""
    for part in parts:
        at = 0
        if pending:
            at = CHUNK_BYTES - len(pending)
            pending += bytes(part[:at])
            if len(pending) < CHUNK_BYTES:
                continue
            yield pending
            pending = b""
        while len(part) - at >= CHUNK_BYTES:
            yield part[at : at + CHUNK_BYTES]
            at += CHUNK_BYTES
        pending = bytes(part[at:])
    if pending:
        yield pending


def _read_vector(path: Path) -> tuple[str, Vector]:
    """(name, values) of the one vector in a file whose hash was checked."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        (name,) = json.loads(file.read(length))
        return name, np.fromfile(file, np.float32)


def _hashed(chunks: Iterator[bytes | memoryview], hashes: list[Digest]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        hashes.append(digest_bytes(chunk))
        yield chunk


def _verify(folder: Path) -> None:
    for _ in _checked_chunks(folder / SHARED, _read_meta(folder / META)[0]):
        pass


def _checked_chunks(path: Path, manifest: Manifest) -> Iterator[bytes]:
    if not path.exists() or path.stat().st_size != manifest.size_bytes:
        raise damaged(path, "is missing or cut short")
    with path.open("rb") as file:
        for index, expected in enumerate(manifest.chunks):
            chunk = file.read(CHUNK_BYTES)
            if digest_bytes(chunk) != expected:
                raise damaged(path, f"is damaged in its mebibyte {index}")
            yield chunk


def _hash_file(path: Path) -> Digest:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).digest()


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _meta(folder: Path, manifest: Manifest) -> bytes:
    state = manifest.state
    fields: dict[str, Any] = {
        "format": 1,
        "round": state.round,
        "digest": state.digest.hex(),
        "run": state.run.hex(),
        "voters": list(state.voters),
        "credited": [[r.start, r.stop] for r in state.credited],
        "tokens": state.tokens,
        "parameters": manifest.parameters,
        "manifest": manifest.digest.hex(),
        "private": {
            name: [(folder / name).stat().st_size, _hash_file(folder / name).hex()]
            for name in (RESIDUAL, PART, INNER)
            if (folder / name).exists()
        },
        "chunks": [chunk.hex() for chunk in manifest.chunks],
    }
    fields["checksum"] = _checksum(fields)
    return json.dumps(fields, indent=1).encode()


def _checksum(fields: dict[str, Any]) -> str:
    return digest_bytes(json.dumps({k: v for k, v in fields.items() if k != "checksum"}, sort_keys=True).encode()).hex()


def _read_meta(path: Path) -> tuple[Manifest, dict[str, tuple[int, Digest]]]:
    try:
        fields = json.loads(path.read_bytes())
        if fields["checksum"] != _checksum(fields):
            raise ValueError("checksum")
        credited = tuple(Range(start, stop) for start, stop in fields["credited"])
        unhex = bytes.fromhex
        state = LogState(
            unhex(fields["run"]), fields["round"], unhex(fields["digest"]), tuple(fields["voters"]), credited, fields["tokens"]
        )
        manifest = Manifest(state, fields["parameters"], tuple(unhex(chunk) for chunk in fields["chunks"]))
        private = {name: (size, unhex(hashed)) for name, (size, hashed) in fields["private"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        raise damaged(path) from None
    return manifest, private
