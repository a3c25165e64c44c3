"""Batches read ahead in a thread of their own: a source that stalls or fails holds up its own peer's round, nothing else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.types import Range

Ids = npt.NDArray[np.int64]
LOOK_SECONDS = 0.1
"""How often whoever waits for a batch looks whether it is still wanted."""


class Source(Protocol):
    def batch(self, positions: Iterable[int]) -> Ids:
        """The sequences at `positions`. May block; raises OSError for what may be over soon."""
        ...


@dataclass(frozen=True)
class Patience:
    """`read_seconds`: without a batch for so long, the round goes on without this peer. After an error it is read again
    every `retry_seconds`. `ahead` batches are kept ready."""

    read_seconds: float = 60.0
    warn_seconds: float = 5.0
    retry_seconds: float = 1.0
    ahead: int = 4


@dataclass(frozen=True)
class Starved:
    """No batch came. `closed`: nobody waits for it any more."""

    reason: str
    closed: bool


class Feed:
    """At most one reader for one source. A read that does not return keeps the reader; the next round's reads come after it.
    A round that ends early may leave the reader waiting, for the next one. `warn` is called, from the thread that waits, once
    a wait is long."""

    def __init__(
        self,
        source: Source,
        patience: Patience | None = None,
        warn: Callable[[str], None] = lambda _text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience = patience or Patience()
        self._source, self._warn, self._clock = source, warn, clock
        self._changed = threading.Condition()
        self._supply: Supply | None = None
        self._reader: threading.Thread | None = None

    def supply(self, ranges: Iterable[Range], sizes: Sequence[int]) -> Supply:
        """Batches of `sizes` from `ranges`, in order. A supply before this one gives nothing more."""
        positions = chain.from_iterable(range(part.start, part.stop) for part in ranges)
        supply = Supply(self, [list(islice(positions, size)) for size in sizes])
        with self._changed:
            self._supply = supply
            self._changed.notify_all()
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="data", daemon=True)
                self._reader.start()
        return supply

    def _read(self) -> None:
        """Until everything that is wanted now has been read."""
        while True:
            with self._changed:
                while (supply := self._supply) is not None and supply.wanted and len(supply.ready) >= self.patience.ahead:
                    self._changed.wait()
                if supply is None or not supply.wanted:
                    self._supply = self._reader = None
                    return
                wanted = supply.wanted[0]
            found: Ids | BaseException
            try:
                found = self._source.batch(wanted)
            except OSError as error:
                with self._changed:
                    supply.trouble = str(error)
                    self._changed.wait(self.patience.retry_seconds)
                continue
            except BaseException as error:  # a bug: it is raised where the batch is asked for
                found = error
            with self._changed:
                supply.trouble = ""
                supply.wanted.popleft()
                supply.ready.append(found)
                self._changed.notify_all()


class Supply:
    """One round's batches."""

    def __init__(self, feed: Feed, wanted: Iterable[list[int]]) -> None:
        self._feed = feed
        self.wanted = deque(wanted)
        self.ready: deque[Any] = deque()
        self.trouble = ""

    def next(self, should_close: Callable[[], bool]) -> Ids | Starved:
        """The next batch, as soon as it is there."""
        feed, patience = self._feed, self._feed.patience
        begun, warned = feed._clock(), False
        with feed._changed:
            while not self.ready:
                waited = feed._clock() - begun
                why = f"the data source fails ({self.trouble})" if self.trouble else "the data source is silent"
                if waited >= patience.read_seconds:
                    return Starved(f"starved: {why} for {waited:.0f} s", closed=False)
                if waited >= patience.warn_seconds and not warned:
                    warned = True
                    limit = f"without data after {patience.read_seconds:g} s (dataset.read_seconds) it sits the round out"
                    feed._warn(f"starved: {why} since {waited:.0f} s; {limit}")
                feed._changed.wait(LOOK_SECONDS)
                if not self.ready and should_close():
                    return Starved(f"starved: closed after {feed._clock() - begun:.1f} s without data", closed=True)
            found = self.ready.popleft()
            feed._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        batch: Ids = found
        return batch
