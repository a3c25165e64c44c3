"""The folder of this process's sockets: private, its path short enough, and swept by the next start if its owner was killed.

The owner holds a lock on the folder that the kernel drops with the process, so a folder that can be locked has no owner,
whatever became of it and in whichever container it ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

PREFIX = "geomesh-sockets-"
SUFFIX = ".sock"
LONGEST_BASE = 50            # bytes; the path of a socket has at most 107


class SocketFolder:
    """Made by making one; remove() when its sockets are closed."""

    def __init__(self, base: str = "") -> None:
        base = base or _short_base()
        sweep(base)
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # swept before it was locked
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.isdir(self.path):
                return
            os.close(self._lock)

    def remove(self) -> None:
        _remove(Path(self.path))
        os.close(self._lock)


def sweep(base: str) -> int:
    """Remove the folders that dead processes of this user have left in `base`. How many there were."""
    swept = 0
    for folder in Path(base).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    swept += _remove(folder)
            finally:
                os.close(lock)
    return swept


def _remove(folder: Path) -> bool:
    """Its sockets and the folder itself, and nothing that somebody else may have put there."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.endswith(SUFFIX):
                path.unlink()
        folder.rmdir()
    return not folder.exists()


def _short_base() -> str:
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) <= LONGEST_BASE else "/tmp"
