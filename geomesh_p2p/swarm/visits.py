"""`geomesh status`: questions of those who take no part. Whoever may join the run may ask, and learns what its peers do.

A visitor proves what a newcomer proves: the join secret, or a peer id that is allowed. The answer is JSON: what the peer says
of itself, and how it sees the others: their newest heartbeats, the links to them, and where they can be asked themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.transport import Libp2pTransport

STATUS = "status"
MOST_BYTES = 1 << 20


class Visits:
    """The answering side. `own` is what this peer says of itself."""

    def __init__(self, membership: Membership, transport: Libp2pTransport, own: Callable[[], dict[str, Any]]) -> None:
        self._membership, self._transport, self._own = membership, transport, own

    def answer(self, sender: PeerId, fetch: Fetch) -> Fetched | None:
        """None if `fetch` is no question of a visitor."""
        if fetch.what != STATUS:
            return None
        me, admission = self._membership.me, self._membership.admission
        if not self._membership.admitted(sender) and (why := admission.refusal(me.peer, sender, fetch.seal)):
            return Fetched(False, why.encode(), 0, 0, b"", 0)
        text = json.dumps(self.overview()).encode()
        if len(text) > MOST_BYTES:
            return Fetched(False, f"its answer has {len(text)} bytes: too many".encode(), 0, 0, b"", 0)
        return Fetched(True, b"", 0, len(text), text, 0)

    def overview(self) -> dict[str, Any]:
        me = self._membership.me
        founding = me.founding
        return {**self._own(), "peer": me.peer, "run": founding.run.hex() if founding else None, "others": self._others()}

    def _others(self) -> list[dict[str, Any]]:
        now, links = time.monotonic(), self._transport.links
        found = []
        for known in sorted(self._membership.known.values(), key=lambda known: known.site):
            beat = known.heartbeat
            found.append({
                "site": known.site,
                "peer": known.peer,
                "heard_seconds_ago": max(0.0, now - known.heard_at),
                "phase": beat.phase if beat else None,
                "round": beat.round if beat else None,
                "trains": known.trains,
                "ready": beat.ready if beat else False,
                "leaving": beat.leaving if beat else False,
                "step_batch": beat.step_batch if beat else None,
                "step_seconds": beat.step_seconds if beat else None,
                "device": beat.profile.device if beat and beat.profile else None,
                "rtt_seconds": links.rtt_seconds(known.peer),
                "bytes_per_second": links.bytes_per_second(known.peer),
                "relayed": bool(self._transport.circuits.relay(known.peer)),
                "addresses": list(self._transport.addresses_of(known.peer)),
            })  # fmt: skip
        return found
