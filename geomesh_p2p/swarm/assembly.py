"""What an exchange tells its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from geomesh_p2p.core.agreement import Agreement
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.ports import Vector
from geomesh_p2p.core.types import Contribution, PeerId, Plan
from geomesh_p2p.swarm.chunks import Bytes
from geomesh_p2p.swarm.deadlines import Missed


@dataclass(frozen=True)
class Assembly:
    """What an exchange came to: the body of the update, buffer by buffer, and whose contributions are in it (site order).

    With residuals, in a reduce: `mean` is this peer's share of the mean before it was encoded to `part`.
    `agreement`: of the contributors, as far as this peer saw their bytes (in a reduce: over its share)."""

    plan: Plan
    contributors: tuple[Contribution, ...]
    body: tuple[Bytes, ...]
    body_digest: Digest
    body_bytes: int
    mean: Vector | None = None
    part: Bytes | None = None
    agreement: tuple[tuple[PeerId, Agreement], ...] = ()


@dataclass(frozen=True)
class Progress:
    """Payload bytes received of those expected, and sent; `remaining_seconds` at the rate so far, None before the first.
    `moved` grows as long as the exchange goes on: with bytes, and with reducers that say that they are at work."""

    done_bytes: int
    total_bytes: int
    sent_bytes: int
    remaining_seconds: float | None
    moved: int = 0


class ExchangeListener(Protocol):
    """Is told from within the event loop. Must not block, and must not await the exchange's stop()."""

    def assembled(self, assembly: Assembly) -> None:
        """The body is whole: exactly once, unless the exchange is stopped before."""
        ...

    def lost(self, missed: tuple[Missed, ...]) -> None:
        """These peers' bytes are overdue, whoever was asked. Repeated at every further deadline."""
        ...

    def unequal(self, peers: tuple[PeerId, ...]) -> None:
        """These reducers averaged other contributions than this peer knows of: nothing will be assembled."""
        ...

    def refused(self, peer: PeerId, reason: str) -> None:
        """`peer` sent something that is refused by rule."""
        ...

    def rejected(self, peer: PeerId, reason: str) -> None:
        """What `peer` meant to send is refused by rule: nothing will be assembled with it. `refused` was told as well."""
        ...

    def failed(self, error: BaseException) -> None:
        """A bug: the exchange has ended."""
        ...
