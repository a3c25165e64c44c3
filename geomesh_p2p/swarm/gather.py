"""Gather: everyone sends its whole payload to everyone; each averages for itself. (N-1) payloads up, exact."""

from __future__ import annotations

from collections.abc import Sequence

from geomesh_p2p.core.types import Contribution, PeerId, Plan
from geomesh_p2p.swarm.chunks import CONTRIBUTION, Ranges, StreamKey
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec


class Gather:
    """Which streams there are for `me`. Everything is a contribution, verified by its own hash, and passed on by any holder."""

    def __init__(self, me: PeerId, plan: Plan, codec: ExchangeCodec) -> None:
        self._me = me
        self._peers = plan.peers
        self._ranges = Ranges([(0, codec.payload_bytes)])

    def sends(self) -> list[tuple[PeerId, StreamKey, Ranges]]:
        """The streams of the own contribution."""
        return [(peer, self.contribution_of(self._me), self._ranges) for peer in self._peers if peer != self._me]

    def contribution_of(self, owner: PeerId) -> StreamKey:
        return StreamKey(CONTRIBUTION, owner, 0)

    def inbound(self, key: StreamKey) -> Ranges | None:
        """The layout of a stream that this peer is to receive, None of any other."""
        expected = key.kind == CONTRIBUTION and key.share == 0 and key.owner != self._me and key.owner in self._peers
        return self._ranges if expected else None

    def verifies(self, key: StreamKey) -> bool:
        return True

    def body(self, contributors: Sequence[Contribution]) -> list[StreamKey]:
        """The streams that make up the update's body, in order."""
        return [self.contribution_of(contribution.peer) for contribution in contributors]

    def needs_contributions(self) -> bool:
        return True

    def relays(self, key: StreamKey, sender: PeerId) -> Ranges | None:
        """The layout of a stream that this peer does not need, but would fetch for `sender`."""
        return None
