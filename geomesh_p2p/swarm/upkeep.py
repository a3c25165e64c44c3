"""Keeps a libp2p daemon running: started again when it has died or does not answer, given up if that happens too often."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from geomesh_p2p.errors import GeoMeshError

MOST_DEATHS = 5              # within DEATHS_SECONDS, the last of which is final
DEATHS_SECONDS = 300.0
FIRST_PAUSE_SECONDS = 0.5    # before the second start again; doubled for each further one
PROBE_SECONDS = 5.0
SILENT_SECONDS = 20.0        # a daemon that twice in a row does not answer for so long hangs

OnExit = Callable[[int, str], None]         # (exit code, the daemon's last words)


class Kept(Protocol):
    """A running daemon."""

    ended: bool

    async def answers(self) -> None:
        """Returns when it has answered; may raise OSError or wait for ever."""
        ...

    def kill(self, why: str) -> None:
        """End it at once, with `why` as its last words."""
        ...

    async def stop(self) -> None: ...


D = TypeVar("D", bound=Kept)


@dataclass
class Deaths:
    """When the daemon died, and whether it is worth starting again."""

    most: int = MOST_DEATHS
    window_seconds: float = DEATHS_SECONDS
    _at: deque[float] = field(default_factory=deque)

    def died(self, now: float) -> float | None:
        """How long to wait before the next start; None: it has died too often."""
        self._at.append(now)
        while self._at[0] <= now - self.window_seconds:
            self._at.popleft()
        if len(self._at) >= self.most:
            return None
        return FIRST_PAUSE_SECONDS * 2.0 ** (len(self._at) - 2) if len(self._at) > 1 else 0.0


class Upkeep(Generic[D]):
    """`start` gives a running daemon that calls the OnExit given to it when it ends by itself; `opened` makes it ready for
    use. What either raises (GeoMeshError, OSError) counts as a death, but for the first start, which raises it."""

    def __init__(
        self, start: Callable[[OnExit], Awaitable[D]], opened: Callable[[D], Awaitable[None]],
        on_warning: Callable[[str, str], None], on_given_up: OnExit, deaths: Deaths | None = None,
    ) -> None:  # fmt: skip
        self.daemon: D | None = None
        self.starts = 0
        self._start, self._opened = start, opened
        self._on_warning, self._on_given_up = on_warning, on_given_up
        self._deaths = deaths or Deaths()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        daemon = await self._start(self._exited)
        try:
            await self._opened(daemon)
        except BaseException:
            await daemon.stop()
            raise
        self._use(daemon)

    def _use(self, daemon: D) -> None:
        self.daemon = daemon
        self.starts += 1
        self._spawn(self._watch(daemon))

    async def stop(self) -> None:
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            await daemon.stop()

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _exited(self, code: int, words: str) -> None:
        """Of the daemon in use; while one is being started, whoever starts it notices."""
        daemon, self.daemon = self.daemon, None
        if daemon is not None and not self._stopped:
            self._spawn(self._again(daemon, code, words))

    async def _again(self, dead: D, code: int, words: str) -> None:
        await dead.stop()
        clock = asyncio.get_running_loop().time
        while (pause := self._deaths.died(clock())) is not None:
            what = f"the libp2p daemon ended with {code}" if code else "the libp2p daemon could not be started again"
            self._on_warning("daemon_died", f"{what} ({words or 'no last words'}): starting it again")
            await asyncio.sleep(pause)
            code, words = 0, ""
            daemon: D | None = None
            try:
                daemon = await self._start(self._exited)
                await self._opened(daemon)
                if not daemon.ended:
                    self._use(daemon)
                    return
                words = "it ended at once"
            except (GeoMeshError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                words = str(error) or type(error).__name__
            finally:
                if daemon is not None and self.daemon is not daemon:
                    await daemon.stop()
        self._on_given_up(code, words)

    async def _watch(self, daemon: D) -> None:
        """A silence of a whole host, suspended and woken, is not the daemon's: so it takes two in a row."""
        silent = 0
        while self.daemon is daemon:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await daemon.answers()
                silent = 0
            except TimeoutError:
                silent += 1
                if silent == 2:
                    daemon.kill(f"it did not answer for {2 * SILENT_SECONDS:g} s and was ended")
                    return
                continue
            except (OSError, asyncio.IncompleteReadError):
                pass  # it has died, as its end tells
            await asyncio.sleep(PROBE_SECONDS)
