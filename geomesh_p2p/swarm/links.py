"""Measured links: round-trip times from heartbeats, rates from transfers that really took place, both smoothed.

A rate counts busy time only: the clock runs while bytes of an exchange are sent and not yet acknowledged, and one round
trip is taken off (the wait for the last acknowledgement). Waiting for a peer that is late with its own part is therefore
never mistaken for a slow link.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.messages import Chunk, ChunkAck
from geomesh_p2p.core.types import Link, PeerId

RTT_WEIGHT = 0.2             # of a new sample, in the moving average
RATE_WEIGHT = 0.3
LEAST_WEIGHT = 0.01          # at which the least round trip follows longer ones, as routes change
MIN_BUSY_SHARE = 0.05        # of the time that a transfer took, for its bytes alone
MIN_SAMPLE_BYTES = 32 * 1024     # less says more about the delay than about the rate
MIN_SAMPLE_SECONDS = 1e-4
MOST_TRANSFERS = 2           # to one peer at a time: the end of a round's, and the next one's

Key = tuple[str, PeerId, int]


@dataclass
class _Transfer:
    """What one plan sends to one peer, and what of it is being measured."""

    sent: dict[Key, int] = field(default_factory=dict)         # end of what was sent, by stream
    acknowledged: dict[Key, int] = field(default_factory=dict)
    busy_since: float | None = None
    last_news: float = 0.0
    busy_bytes: int = 0


@dataclass
class _Path:
    """What is known of the way to one peer, and the transfers that are going on, by plan."""

    rtt_seconds: float | None = None
    least_rtt_seconds: float = 0.0     # without what waits in queues
    bytes_per_second: float | None = None
    transfers: dict[Digest, _Transfer] = field(default_factory=dict)


class LinkTable:
    """All ways out of one peer. Times are seconds of its own monotonic clock."""

    def __init__(
        self,
        on_rate: Callable[[PeerId, float], None] = lambda peer, bytes_per_second: None,
        upload_bytes_per_second: float | None = None,
    ) -> None:
        """`on_rate` is told of each transfer that was long enough to be measured. `upload_bytes_per_second` is what this peer
        may send to all together; no rate is above it."""
        self.upload_bytes_per_second = upload_bytes_per_second
        self._paths: dict[PeerId, _Path] = {}
        self._on_rate = on_rate
        self.on_news: Callable[[], None] = lambda: None
        """Called when a way has been measured that was not known before."""

    def _path(self, peer: PeerId) -> _Path:
        return self._paths.setdefault(peer, _Path())

    def round_trip(self, peer: PeerId, seconds: float) -> None:
        if seconds >= 0:
            path = self._path(peer)
            least = path.least_rtt_seconds if path.rtt_seconds is not None else seconds
            path.least_rtt_seconds = min(seconds, _smoothed(least, seconds, LEAST_WEIGHT))
            path.rtt_seconds = _smoothed(path.rtt_seconds, seconds, RTT_WEIGHT)

    def sent(self, peer: PeerId, chunk: Chunk, now: float) -> None:
        """`chunk` is about to be handed to the stream."""
        path = self._path(peer)
        transfer = path.transfers.get(chunk.plan) or self._begin(peer, path, chunk.plan)
        key = (chunk.kind, chunk.owner, chunk.share)
        transfer.sent[key] = max(transfer.sent.get(key, 0), chunk.offset + len(chunk.data))
        if transfer.busy_since is None:
            transfer.busy_since = transfer.last_news = now

    def _begin(self, peer: PeerId, path: _Path, plan: Digest) -> _Transfer:
        """What is under way for another plan is given up, as a rule: if not, it is measured anew from its next chunk on,
        without what was under way before that."""
        for transfer in path.transfers.values():
            self._close(peer, path, transfer)
            transfer.acknowledged.update(transfer.sent)
        while len(path.transfers) >= MOST_TRANSFERS:
            del path.transfers[next(iter(path.transfers))]
        return path.transfers.setdefault(plan, _Transfer())

    def acknowledged(self, peer: PeerId, ack: ChunkAck, now: float) -> None:
        path = self._path(peer)
        transfer, key = path.transfers.get(ack.plan), (ack.kind, ack.owner, ack.share)
        if transfer is None or key not in transfer.sent:
            return
        before, upto = transfer.acknowledged.get(key, 0), min(ack.offset, transfer.sent[key])
        if upto <= before:
            return
        transfer.acknowledged[key] = upto
        if transfer.busy_since is None:
            return
        transfer.busy_bytes += upto - before
        transfer.last_news = now
        if all(transfer.acknowledged.get(stream, 0) >= end for stream, end in transfer.sent.items()):
            self._close(peer, path, transfer)

    def _close(self, peer: PeerId, path: _Path, transfer: _Transfer) -> None:
        """The transfer is over, or was given up: then it counts up to its last acknowledgement."""
        if transfer.busy_since is not None and transfer.busy_bytes >= MIN_SAMPLE_BYTES:
            busy = transfer.last_news - transfer.busy_since
            # The round trip may be longer than all of the transfer, if heartbeats waited behind bulk: the least one counts.
            seconds = max(busy - path.least_rtt_seconds, busy * MIN_BUSY_SHARE, MIN_SAMPLE_SECONDS)
            rate = min(transfer.busy_bytes / seconds, self.upload_bytes_per_second or math.inf)
            is_news, path.bytes_per_second = path.bytes_per_second is None, _smoothed(path.bytes_per_second, rate, RATE_WEIGHT)
            self._on_rate(peer, rate)
            if is_news:
                self.on_news()
        transfer.busy_since, transfer.busy_bytes = None, 0

    def rtt_seconds(self, peer: PeerId) -> float:
        """Smoothed; 0 if nothing was heard yet."""
        path = self._paths.get(peer)
        return path.rtt_seconds or 0.0 if path is not None else 0.0

    def least_rtt_seconds(self, peer: PeerId) -> float:
        """Without what a busy host or a full queue adds; 0 if nothing was heard yet."""
        path = self._paths.get(peer)
        return path.least_rtt_seconds if path is not None and path.rtt_seconds is not None else 0.0

    def bytes_per_second(self, peer: PeerId) -> float | None:
        path = self._paths.get(peer)
        return path.bytes_per_second if path is not None else None

    def outstanding(self, peer: PeerId) -> bool:
        """Whether something sent to `peer` has not been acknowledged yet."""
        path = self._paths.get(peer)
        return path is not None and any(transfer.busy_since is not None for transfer in path.transfers.values())

    def links_from(self, me: PeerId) -> tuple[Link, ...]:
        """The ways whose rate has been measured, ordered by peer id."""
        return tuple(
            Link(me, peer, path.rtt_seconds or 0.0, path.bytes_per_second)
            for peer, path in sorted(self._paths.items())
            if path.bytes_per_second is not None
        )

    def round_trips_from(self, me: PeerId) -> tuple[Link, ...]:
        """The ways whose round trip is known, the rate 0 where nothing has measured it yet, ordered by peer id; then the
        uplink, if that is limited."""
        uplink = self.upload_bytes_per_second
        return (
            *(
                Link(me, peer, path.rtt_seconds, path.bytes_per_second or 0.0)
                for peer, path in sorted(self._paths.items())
                if path.rtt_seconds is not None
            ),
            *([Link.uplink(me, uplink)] if uplink is not None else []),
        )

    def forget(self, peer: PeerId) -> None:
        self._paths.pop(peer, None)


def _smoothed(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
