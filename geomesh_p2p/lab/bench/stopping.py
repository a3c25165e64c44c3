"""The wish that a training ends before it is done, and what is told meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

GRACE_SECONDS = 10.0
"""A round that ends within so much after the wish is kept; of a longer one the steps so far are lost."""


class Stopped(Exception):
    """A training has ended because it was asked to; what it kept is in its folder."""


class Stop:
    """May be asked for from a signal's handler or another thread; trainings look at it between steps and rounds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at: float | None = None

    def ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = self._clock()

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def check(self, grace_seconds: float = 0.0) -> None:
        """Raises Stopped once it was asked for, and `grace_seconds` ago."""
        if self._asked_at is not None and self._clock() >= self._asked_at + grace_seconds:
            raise Stopped


def to_stderr(text: str) -> None:
    print(f"geomesh: {text}", file=sys.stderr, flush=True)
