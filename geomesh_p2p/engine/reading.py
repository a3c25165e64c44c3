"""Reading text at a start, watched: it says how far it is, and a source that falls silent ends it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from geomesh_p2p.errors import TemporaryError

log = logging.getLogger("geomesh")
T = TypeVar("T")
TELL_SECONDS = 5.0


@dataclass
class Reading:
    """How far it is; counted by the thread that reads."""

    documents: int = 0
    tokens: int = 0


def read_watched(read: Callable[[Reading], T], silent_seconds: float, look_seconds: float = 0.1) -> T:
    """`read(reading)`, in a thread that is left to itself if no document came for `silent_seconds`: then TemporaryError."""
    reading, outcome, done = Reading(), list[Any](), threading.Event()

    def work() -> None:
        try:
            outcome.extend((read(reading), None))
        except BaseException as error:  # raised below, in the thread that waits
            outcome.extend((None, error))
        done.set()

    threading.Thread(target=work, name="reading", daemon=True).start()
    moved = told = time.monotonic()
    before = 0
    while not done.wait(look_seconds):
        now = time.monotonic()
        if reading.documents != before:
            moved, before = now, reading.documents
        if now - told >= TELL_SECONDS:
            told = now
            silent = f", none for {now - moved:.0f} s" if now - moved >= TELL_SECONDS else ""
            log.info("reading text: %s documents, %s tokens so far%s", f"{before:,}", f"{reading.tokens:,}", silent)
        if now - moved >= silent_seconds:
            raise TemporaryError(
                f"dataset: no text came for {silent_seconds:g} s (dataset.read_seconds) after {before:,} documents: "
                "check the file system that dataset.paths is on, then start again"
            )
    result, error = outcome
    if error is not None:
        raise error
    given: T = result
    return given
