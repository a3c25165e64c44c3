"""Where peers of the run were last met, kept in this peer's folder: after a restart any one of them leads back into the run.

It is a hint and nothing more. Whoever answers at an address proves its id, and a newer address takes the place of the old.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.addresses import MOST_ADDRESSES

MOST_PEERS = 64
MOST_CHARACTERS = 300        # of one address


class Acquaintances:
    """Newest first, at most MOST_PEERS. `warnings` has one line if the file could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._known: dict[PeerId, tuple[str, ...]] = {}
        self._saved = self._packed()
        self._load()

    def __len__(self) -> int:
        return len(self._known)

    def addresses(self, but: Iterable[PeerId] = (), most: int = 8) -> tuple[str, ...]:
        """One address each of the peers met last, the newest first, each ending in its peer id."""
        left_out = set(but)
        found = [addresses[0] for peer, addresses in self._known.items() if peer not in left_out]
        return tuple(found[:most])

    def met(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """`peer` is at these addresses now."""
        kept = tuple(a for a in addresses if a.endswith(f"/p2p/{peer}") and len(a) <= MOST_CHARACTERS)[:MOST_ADDRESSES]
        if kept:
            self._known = {peer: kept, **{p: a for p, a in self._known.items() if p != peer}}
            while len(self._known) > MOST_PEERS:
                self._known.popitem()

    def save(self) -> bool:
        """Write the file, whole or not at all, if the peers or their addresses are others than those saved. Raises OSError."""
        packed = self._packed()
        if packed == self._saved:
            return False
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        aside.write_text(json.dumps([{"peer": peer, "addresses": list(a)} for peer, a in self._known.items()], indent=1))
        aside.replace(self.path)
        self._saved = packed
        return True

    def _packed(self) -> frozenset[tuple[PeerId, tuple[str, ...]]]:
        return frozenset(self._known.items())

    def _load(self) -> None:
        try:
            entries = json.loads(self.path.read_text())
            for entry in reversed(entries[:MOST_PEERS]):
                self.met(str(entry["peer"]), [str(address) for address in entry["addresses"]])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.warnings.append(f"{self.path} cannot be read ({error}): peers met before are forgotten")
        self._saved = self._packed()
