"""This interpreter and what is installed in it, against what GeoMesh says it needs. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections import deque
from importlib import metadata

PACKAGE = "geomesh-p2p"
OLDEST_PYTHON = (3, 11)
NEWEST_TRIED_PYTHON = (3, 13)


def python_refusal(version: tuple[int, int] | None = None) -> str:
    """Why this Python will not do, "" if it will."""
    found = version or sys.version_info[:2]
    if found >= OLDEST_PYTHON:
        return ""
    return (
        f"Python {found[0]}.{found[1]} is not supported, GeoMesh needs {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer: "
        "make a virtual environment with one (PYTHON=python3.11 make setup)"
    )


def conflicts(package: str = PACKAGE, installed: dict[str, str] | None = None) -> list[str]:
    """What `package`, and whatever it needs, asks for and is not there in the version asked for: a line each. `installed` gives
    other versions than those found. Raises PackageNotFoundError if `package` itself is not installed."""
    from packaging.requirements import InvalidRequirement, Requirement

    found: list[str] = []
    seen = {package}
    waiting: deque[tuple[str, frozenset[str]]] = deque([(package, frozenset())])
    metadata.version(package)
    while waiting:
        name, extras = waiting.popleft()
        for text in metadata.requires(name) or ():
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                continue
            try:
                version = (installed or {}).get(wanted.name) or metadata.version(wanted.name)
            except metadata.PackageNotFoundError:
                found.append(f"{name} needs {wanted.name}{wanted.specifier}, which is not installed")
                continue
            if wanted.specifier and not wanted.specifier.contains(version, prereleases=True):
                found.append(f"{name} needs {wanted.name}{wanted.specifier}, installed is {version}")
            key = f"{wanted.name}{sorted(wanted.extras)}"
            if key not in seen:
                seen.add(key)
                waiting.append((wanted.name, frozenset(wanted.extras)))
    return found


def has_uvloop() -> bool:
    """Whether there is a uvloop to run on (not what swarm puts in its place); else a peer runs on asyncio's own event loop."""
    try:
        import uvloop
    except ImportError:
        return False
    return hasattr(uvloop, "new_event_loop")
