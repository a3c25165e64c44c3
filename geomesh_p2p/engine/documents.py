"""Where text comes from: the documents of a data source, in an order that every peer agrees on."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator

from geomesh_p2p.config import DatasetSection
from geomesh_p2p.errors import DataError

DOCUMENT_CHARACTERS = 65_536
"""Longer text files are cut into documents at the first line end after so many characters, so that some can be held out."""

# Written by the build of an interpreter, or not part of the library proper.
_LEFT_OUT_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


def documents(section: DatasetSection) -> Iterator[str]:
    """The documents of `section`, none empty. Raises DataError naming the file and what to do about it."""
    if section.source == "python-stdlib":
        yield from _python_stdlib()
        return
    for path in files(section):
        yield from _jsonl(path, section.field) if section.source == "jsonl" else _text(path)


def files(section: DatasetSection) -> list[str]:
    """All files that the patterns name, each once, ordered by pattern and then by name. Raises DataError as documents does."""
    if not section.paths:
        raise DataError(f"dataset.paths is empty: give the files to read with dataset.source = {section.source!r}")
    found: dict[str, None] = {}
    for pattern in section.paths:
        expanded = os.path.expanduser(pattern)
        if os.path.isdir(expanded):
            raise DataError(
                f"dataset.paths: {pattern!r} is a folder; name its files, for instance {os.path.join(pattern, '*')!r}"
            )
        matches = (
            [expanded] if os.path.isfile(expanded) else sorted(filter(os.path.isfile, glob.glob(expanded, recursive=True)))
        )
        if not matches:
            raise DataError(f"dataset.paths: no file matches {pattern!r}; correct the path, or mend the pattern")
        found.update(dict.fromkeys(matches))
    return list(found)


def stamps(section: DatasetSection) -> list[tuple[str, int, int]]:
    """(path, size, time of the last change in nanoseconds) of each file, in the order read, without opening any."""
    paths = _standard_library() if section.source == "python-stdlib" else files(section)
    return [(os.path.abspath(path), (status := os.stat(path)).st_size, status.st_mtime_ns) for path in paths]


def _open(path: str) -> io.BufferedReader:
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.open(path, "rb"))
    if path.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.open(path, "rb"))
    return open(path, "rb")


def _lines(path: str) -> Iterator[str]:
    """The lines of a UTF-8 file, packed or not; line ends are kept."""
    number = 0
    try:
        with _open(path) as stream:
            for line in stream:
                number += 1
                yield line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 (line {number}, byte 0x{error.object[error.start]:02x}); "
            "convert it, for instance with: iconv -f latin1 -t utf-8"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); check the file and its permissions"
        ) from None
    except Exception as error:  # zstandard's own error type, known only where zstandard is imported
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path}: not a whole zstd file ({error}); pack it again or leave it out") from None
    if number == 0:
        raise DataError(f"{path}: the file is empty; fill it, or leave it out of dataset.paths")


def _text(path: str) -> Iterator[str]:
    parts: list[str] = []
    length = 0
    some = False
    for line in _lines(path):
        parts.append(line)
        length += len(line)
        if length >= DOCUMENT_CHARACTERS:
            yield "".join(parts)
            some, parts, length = True, [], 0
    if "".join(parts).strip():
        yield "".join(parts)
    elif not some:
        raise DataError(f"{path}: the file holds white space only; fill it, or leave it out of dataset.paths")


def _jsonl(path: str, field: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON ({error.msg}); one object a line is expected") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            known = ", ".join(sorted(record)[:8]) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{path}:{number}: no text in field {field!r} (found: {known}); set dataset.field")
        if text:
            yield text


def _python_stdlib() -> Iterator[str]:
    for path in _standard_library():
        try:
            with open(path, encoding="utf-8", newline="") as stream:
                text = stream.read()
        except UnicodeDecodeError:
            continue  # a few codec tables are in their own encoding
        if text:
            yield text


def _standard_library() -> list[str]:
    """The running interpreter's standard library, by sorted relative path; its own tests and build leftovers left out."""
    root = sysconfig.get_paths()["stdlib"]
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS and not name.startswith("config-")]
        found += [
            os.path.relpath(os.path.join(folder, name), root)
            for name in names
            if name.endswith(".py") and not name.startswith(_LEFT_OUT_PREFIXES)
        ]
    if not found:
        raise DataError(
            f'dataset.source python-stdlib: no source files under {root}; use dataset.source = "text" with files of your own'
        )
    return [os.path.join(root, relative) for relative in sorted(found, key=lambda path: path.split(os.sep))]
