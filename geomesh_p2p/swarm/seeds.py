"""Into the run through its seeds: addresses at which some peer of it may answer, tried until one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import UnreachableError
from geomesh_p2p.seed_files import SeedFiles
from geomesh_p2p.swarm.addresses import Address, parse
from geomesh_p2p.swarm.offload import in_own_thread

DIAL_SECONDS = 10.0
OTHER_SEEDS_SECONDS = 2.0        # how long further seeds are waited for once one has answered


@dataclass
class _Dial:
    """A seed as given, the address that is dialled for it by now, and why it has not answered, empty once it has."""

    seed: str
    target: Address
    why: str = "no answer yet"


class Seeds:
    """`dial` connects to an address or raises Unreachable, `me` is this peer: its own address is no seed. `files` says which
    seeds were read from files."""

    def __init__(
        self, net: NetSection, me: PeerId, dial: Callable[[Address], Awaitable[None]], warn: Callable[[str, str], None]
    ) -> None:
        self.files = SeedFiles()
        self._reach_seconds = net.reach_seconds
        self._me, self._dial, self._warn = me, dial, warn

    async def connect(self, seeds: Sequence[str], required: bool = True, warn: bool = True) -> tuple[PeerId, ...]:
        """Connect to `seeds`; one that answers is enough. Returns the peers reached; warns of each seed that was not if asked.

        If none answers it is tried again, with growing pauses, up to net.reach_seconds; then UnreachableError with a reason
        per address if `required`, else nobody was reached. A seed from a file is read again before each try.
        """
        now = [parse(seed, "net.seeds") for seed in await self.newest(seeds)]
        dials = [_Dial(seed, target) for seed, target in zip(seeds, now, strict=True) if target.peer not in ("", self._me)]
        if not dials:
            return ()
        tries = {asyncio.create_task(self._reach(dial)) for dial in dials}
        patience = self._reach_seconds if required else min(self._reach_seconds, DIAL_SECONDS)
        try:
            done, _ = await asyncio.wait(tries, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if done:
                await asyncio.wait(tries, timeout=OTHER_SEEDS_SECONDS)
        finally:
            for task in tries:
                task.cancel()
        reached = tuple(dial.target.peer for dial in dials if not dial.why)
        missed = {dial.target.text: dial.why for dial in dials if dial.why}
        if not reached and required:
            reasons = "; ".join(f"{address}: {why}" for address, why in missed.items())
            raise UnreachableError(
                f"no seed answered within {self._reach_seconds:g} s (net.reach_seconds): {reasons}: check that a peer of "
                "the run is up there and that its port is open"
            )
        for address, why in missed.items() if warn else ():
            self._warn("seed_unreachable", f"seed {address}: {why}")
        return reached

    async def newest(self, seeds: Sequence[str]) -> tuple[str, ...]:
        """`seeds` as their files have them by now; those that are not from files as they are."""
        if not self.files:
            return tuple(seeds)
        files = self.files
        return await in_own_thread(lambda: tuple(files.newest(seed) for seed in seeds))

    async def _reach(self, dial: _Dial) -> None:
        """Dial until it answers."""
        pause = 0.5
        while True:
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    await self._dial(dial.target)
                dial.why = ""
                return
            except TimeoutError:
                dial.why = f"no answer within {DIAL_SECONDS:g} s"
            except Unreachable as error:
                reason = dial_reason(str(error), dial.target.text)
                if reason != BACKING_OFF:  # libp2p has not tried this time: what it found before holds
                    dial.why = reason
            await asyncio.sleep(pause)
            newest = parse((await self.newest((dial.seed,)))[0], "net.seeds")
            if newest != dial.target and newest.peer != self._me:
                dial.target, pause = newest, 0.5
            else:
                pause = min(pause * 2, 8.0)


BACKING_OFF = "libp2p waits before it dials again"
ANOTHER_PEER = "another peer answers there (its peer id differs)"


def dial_reason(text: str, address: str) -> str:
    """What libp2p's long account of a failed dial says of `address`, in a few words."""
    bare = address.split("/p2p/")[0]
    own = next((line for line in text.splitlines() if f"[{bare}]" in line), text)
    low = own.lower()
    if "peer id mismatch" in low or "key mismatch" in low:
        return ANOTHER_PEER
    if "connection refused" in low:
        return "connection refused: nothing listens there"
    if "no route to host" in low or "network is unreachable" in low:
        return "no route there"
    if "timeout" in low or "deadline exceeded" in low:
        return "no answer"
    if "backoff" in low:
        return BACKING_OFF
    return " ".join(own.split())[:200]
