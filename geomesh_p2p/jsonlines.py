"""Files of JSON lines that grow for as long as a run: FILE.jsonl is written to, and once it is large it becomes a part.

    history.jsonl  history-000001.jsonl.gz  history-000002.jsonl.gz

Nothing is thrown away: whoever reads takes the parts and the file as one. Parts are compressed in a thread of their own.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from geomesh_p2p.errors import TemporaryError

PART_BYTES = 2**24


class JsonLines:
    """Appends JSON lines, each with one write, so that a line is there as a whole or not at all. A torn last line (the machine
    lost power) is cut off when the file is opened. Raises TemporaryError when the disk refuses."""

    def __init__(self, path: Path, part_bytes: int = PART_BYTES):
        self.path = path
        self._part_bytes = part_bytes
        self._compressing = threading.Lock()
        with self._told():
            self._open()
            self._cut_torn_line()
            if plain_parts(path):
                self._compress()

    def append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._told():
            while data:
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]
            if self._size >= self._part_bytes:
                self._end_part()

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size

    def _end_part(self) -> None:
        number = max((_number(part) for part in parts(self.path)), default=0) + 1
        os.rename(self.path, self.path.with_name(f"{self.path.stem}-{number:06d}.jsonl"))
        self.close()
        self._open()
        self._compress()

    def _compress(self) -> None:
        threading.Thread(target=self._compress_parts, name=f"{self.path.stem} parts", daemon=True).start()

    def _compress_parts(self) -> None:
        """What fails is tried again after the next part; a part that is not compressed is read as well."""
        with self._compressing, suppress(OSError):
            for part in plain_parts(self.path):
                compress(part)

    def _cut_torn_line(self) -> None:
        end = size = self._size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
            self._size = end

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"{self.path}: cannot be written: {error.strerror}: mend that (free space, rights) and start again"
            raise TemporaryError(text) from error


def compress(part: Path) -> None:
    """`part` becomes `part`.gz; a crash at any point leaves one of them whole. Raises OSError."""
    whole = part.with_name(part.name + ".gz")
    aside = part.with_name(whole.name + ".partial")
    with part.open("rb") as source, aside.open("wb") as target:
        with gzip.GzipFile("", "wb", 6, target) as packed:
            shutil.copyfileobj(source, packed)
        target.flush()
        os.fsync(target.fileno())
    aside.replace(whole)
    part.unlink()


def parts(path: Path) -> list[Path]:
    """The parts of `path`, oldest first; of one that is there twice, the compressed file."""
    found = {_number(part): part for part in (*plain_parts(path), *_parts(path, ".jsonl.gz"))}
    return [found[number] for number in sorted(found)]


def plain_parts(path: Path) -> list[Path]:
    """Those that are there uncompressed."""
    return _parts(path, ".jsonl")


def _parts(path: Path, suffix: str) -> list[Path]:
    name = re.compile(re.escape(path.stem) + r"-\d{6,}" + re.escape(suffix))
    return [part for part in path.parent.iterdir() if name.fullmatch(part.name)]


def _number(part: Path) -> int:
    return int(part.name.partition(".")[0].rpartition("-")[2])


def read_lines(path: Path) -> Iterator[str]:
    """Every line of `path`, its parts first; it may be written to meanwhile. What is missing of a damaged part shows as a line
    that is no JSON. Raises OSError."""
    if not path.exists() and parts(path):  # ended between two parts, before the next file was begun
        newest: BinaryIO = io.BytesIO()
        now = -1
    else:
        newest = path.open("rb")
        now = os.fstat(newest.fileno()).st_ino
    with newest:
        for part in parts(path):
            with _opened(part) as file:
                if os.fstat(file.fileno()).st_ino == now:  # it has become a part since it was opened
                    continue
                try:
                    yield from _lines(file)
                except (EOFError, zlib.error, gzip.BadGzipFile):
                    yield f"{part.name} is damaged"
        yield from _lines(newest)


def _opened(part: Path) -> gzip.GzipFile | BinaryIO:
    if part.suffix != ".gz":
        with suppress(FileNotFoundError):  # it was compressed meanwhile
            return part.open("rb")
        part = part.with_name(part.name + ".gz")
    return gzip.open(part)


def _lines(file: Iterable[bytes]) -> Iterator[str]:
    for line in file:
        yield line.decode("utf-8", "replace").rstrip("\r\n")
