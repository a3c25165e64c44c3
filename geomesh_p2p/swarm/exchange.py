"""The exchange of one attempt of a round: contributions out, contributions (and parts) in, and the update's body in the end.

    idle -> sending own bytes as soon as they are final, receiving others' -> body assembled (once) -> serving -> stopped

Chunks come and go in any order. The receiver is in charge of what is missing: a stream that is due and silent past its
deadline is asked for, first of its owner, then of other members, which pass on what they hold; if that does not help its
owner is reported lost, again and again, until the exchange is stopped. Nothing here decides about the round.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from geomesh_p2p.core.agreement import Agreement
from geomesh_p2p.core.canonical import DIGEST_BYTES, Digest
from geomesh_p2p.core.messages import Chunk, ChunkAck, ChunkMissing, ChunkWanted, PartHeader
from geomesh_p2p.core.ports import Transport, Vector
from geomesh_p2p.core.types import Contribution, PeerId, Plan, Range
from geomesh_p2p.swarm.assembly import Assembly, ExchangeListener, Progress
from geomesh_p2p.swarm.chunks import PART, Bytes, Ranges, StreamKey
from geomesh_p2p.swarm.deadlines import DueStreams, ExchangeLimits, Missed, Waiting
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec
from geomesh_p2p.swarm.gather import Gather
from geomesh_p2p.swarm.inbox import ExchangeInbox, ExchangeMessage
from geomesh_p2p.swarm.lanes import Lane
from geomesh_p2p.swarm.offload import Offload, in_thread, inline
from geomesh_p2p.swarm.reception import Reception, Stored
from geomesh_p2p.swarm.reduce import Reduce, ShareMean

__all__ = [
    "Assembly", "Exchange", "ExchangeCodec", "ExchangeInbox", "ExchangeLimits", "ExchangeListener", "ExchangeMessage", "Missed",
    "Progress", "Waiting", "in_thread", "inline",
]  # fmt: skip

MAX_GAPS = 64
"""Gaps asked for in one message."""
UNMEASURED_CHUNK_BYTES = 16_384
"""Of a chunk at most, where the rate is not known and the exchange thought to be short.
A few large ones at once on a slow way would look like silence."""


class Exchange:
    """One attempt's exchange at one member. All methods are called from the event loop.

    Raises ValueError if `me` is not a member of the plan.
    """

    def __init__(
        self,
        me: PeerId,
        plan: Plan,
        transport: Transport,
        codec: ExchangeCodec,
        limits: ExchangeLimits,
        listener: ExchangeListener,
        offload: Offload = in_thread,
    ) -> None:
        if plan.of(me) is None:
            raise ValueError(f"{me} is no member of the plan for round {plan.round}")
        self.plan = plan
        self.refusals: Counter[str] = Counter()
        self._me = me
        self._digest = plan.digest
        self._transport = transport
        self._codec = codec
        self._limits = limits
        self._listener = listener
        self._offload = offload
        self._streams: Gather | Reduce = (Reduce if plan.topology == "reduce" else Gather)(me, plan, codec)
        others = sorted((peer for peer in plan.peers if peer != me), key=lambda peer: limits.rates.get(peer, float("inf")))
        is_short = limits.deadline_factor * plan.exchange_seconds <= limits.deadline_seconds
        small = min(limits.chunk_bytes, UNMEASURED_CHUNK_BYTES) if is_short else limits.chunk_bytes
        self._lanes = {
            peer: Lane(peer, self._digest, transport, limits.chunk_bytes if peer in limits.rates else small) for peer in others
        }
        self._finished: dict[PeerId, Contribution] = {}
        self._headers: dict[int, PartHeader] = {}
        self._reception = Reception(plan, codec, self._streams, limits.acknowledge_chunks * limits.chunk_bytes)
        self._stored = self._reception.stored
        self._relays: dict[StreamKey, PeerId] = {}
        self._asked: dict[StreamKey, set[PeerId]] = {}
        self._due = DueStreams(me, tuple(self._lanes), limits, plan)
        self._known: dict[Digest, Bytes] = {}
        self._own_payload: Bytes | None = None
        self._part_residual: Vector | None = None
        self._unequal: set[PeerId] = set()
        self._rejected: set[PeerId] = set()
        self._agreement: tuple[tuple[PeerId, Agreement], ...] = ()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.concluded = False
        """Whether the update's body is assembled: all that is left is to serve others."""
        self.took_seconds = 0.0
        """From the own contribution until then."""
        self._contributed_at = 0.0
        self._first_byte_at: float | None = None
        self._sent_before = self._sent()
        self._received = self._moved = 0

    # ------------------------------------------------------------ life

    def start(self, known: Mapping[Digest, Bytes] | None = None) -> None:
        """Begin. `known` are payloads that an earlier attempt of the round brought (gather): they need not come again."""
        self._known = dict(known or {})
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"exchange of round {self.plan.round}")
        self._task.add_done_callback(self._ended)

    async def all_sent(self) -> None:
        """Returns when nothing that was offered or asked for is left to be sent, or the exchange is stopped."""
        while not self._stopped and (busy := [lane for lane in self._lanes.values() if not lane.idle.is_set()]):
            await busy[0].idle.wait()

    async def stop(self, reason: str) -> None:
        """End, whatever the state: no task and no buffer is left when this returns."""
        self.halt(reason)
        if self._task is not None:
            await asyncio.wait([self._task])  # first: its parts may take one more step each, with all that they count on
        self._reception.clear()
        self._due.clear()
        for held in (self._headers, self._known, self._relays, self._asked):
            held.clear()
        for lane in self._lanes.values():
            lane.clear()
        self._own_payload = self._part_residual = None

    def halt(self, reason: str) -> None:
        """Take and send nothing more; `stop` waits until that is so."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel(reason)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes.values():
                for _ in range(self._limits.parallel_chunks):
                    group.create_task(lane.work())
            group.create_task(self._watch())
            group.create_task(self._conclude())

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.failed(error)

    # ------------------------------------------------------------ contributions

    def contribute(self, contribution: Contribution, payload: Bytes | None, part_residual: Vector | None = None) -> None:
        """The own contribution is final. `payload` is None if it abstains; it must not change until the exchange is stopped
        and the update folded, which is made of it.
        `part_residual` is what the reducer's earlier answers for its share left unsaid."""
        if self._me in self._finished:
            raise ValueError(f"this peer has already contributed to round {self.plan.round}")
        if contribution.abstains != (payload is None):
            raise ValueError("a payload comes with a contribution that has tokens, and with no other")
        self._own_payload, self._part_residual, self._contributed_at = payload, part_residual, self._now
        if payload is not None:
            if payload.size != self._codec.payload_bytes:
                raise ValueError(f"the payload has {payload.size} bytes, the codec's have {self._codec.payload_bytes}")
            for peer, key, ranges in self._streams.sends():
                self._stored[key] = Stored(contribution.payload, payload, ranges)
                self._lanes[peer].offer(key, contribution.payload, payload, ranges)
            if self.plan.topology == "gather":
                own = Stored(contribution.payload, payload, Ranges([(0, payload.size)]))
                self._stored[self._streams.contribution_of(self._me)] = own
        self._member_has_finished(contribution)

    def member_finished(self, contribution: Contribution) -> None:
        """Another member's contribution is final; its bytes are due from now on. Repetitions are ignored."""
        peer = contribution.peer
        if self._stopped or peer == self._me or peer not in self._lanes:
            return
        if (contribution.round, contribution.base) != (self.plan.round, self.plan.base):
            self._refuse(peer, "contribution to another round")
            return
        if not contribution.abstains and contribution.payload_bytes != self._codec.payload_bytes:
            self._reject(peer, "contribution of the wrong size")
            return
        if peer in self._finished:
            if self._finished[peer] != contribution:
                self._refuse(peer, "a second contribution")
            return
        self._member_has_finished(contribution)

    def _member_has_finished(self, contribution: Contribution) -> None:
        self._finished[contribution.peer] = contribution
        key = self._streams.contribution_of(contribution.peer)
        known = self._known.get(contribution.payload) if self.plan.topology == "gather" else None
        if known is not None and contribution.peer != self._me and not contribution.abstains:
            self._reception.keep(key, Stored(contribution.payload, known, Ranges([(0, known.size)])))
            self._now_whole(key)
        else:
            self._settle(contribution.peer)
        self._look_for_due()

    @property
    def contributors(self) -> tuple[Contribution, ...] | None:
        """Those whose contributions make up the mean, in site order; None as long as a member has not finished."""
        if len(self._finished) < len(self.plan.members):
            return None
        return tuple(c for peer in self.plan.peers if not (c := self._finished[peer]).abstains)

    def payloads(self) -> dict[Digest, Bytes]:
        """Whole, verified contributions that are here (gather), for the next attempt's `start`."""
        if self.plan.topology != "gather":
            return {}
        return self._known | {stored.payload: stored.buffer for stored in self._stored.values()}

    # ------------------------------------------------------------ receiving

    def receive(self, sender: PeerId, message: ExchangeMessage) -> None:
        """A message of this exchange; those of other plans and of strangers are ignored."""
        if self._stopped or message.plan != self._digest or sender not in self._lanes:
            self.refusals["not of this exchange"] += 1
            return
        if isinstance(message, PartHeader):
            self._receive_part_header(sender, message)
            return
        key = StreamKey(message.kind, message.owner, message.share)
        if isinstance(message, Chunk):
            self._receive_chunk(sender, key, message)
        elif isinstance(message, ChunkAck):
            self._lanes[sender].acknowledge(key, message.offset)
        elif isinstance(message, ChunkWanted):
            self._give(sender, key, message.gaps)
        else:
            self._not_to_be_had(sender, key, message.peers)

    def _receive_chunk(self, sender: PeerId, key: StreamKey, chunk: Chunk) -> None:
        expected = self._expected_payload(key)
        taken = self._reception.take(sender, key, chunk, expected, self._may_send(sender, key))
        if taken.refused:
            self._refuse(sender, taken.refused)
        if taken.ignored:
            self.refusals[taken.ignored] += 1
        if taken.acknowledge is not None:
            self._acknowledge(sender, key, taken.acknowledge)
        if taken.new:
            self._count(taken.new)
            self._due.progressed(key, self._now)
            self._due.sends(sender, self._now)
            self._settle(key.owner)
            self._changed.set()

    def _may_send(self, sender: PeerId, key: StreamKey) -> bool:
        """Nobody writes into a stream of another, unless it was asked to pass it on: the slices of a reduce have no hash."""
        return sender == key.owner or sender in self._asked.get(key, ())

    def _expected_payload(self, key: StreamKey) -> Digest | None:
        """The hash that the stream's owner has announced, if it has."""
        if key.kind == PART:
            header = self._headers.get(key.share)
            return header.payload if header else None
        contribution = self._finished.get(key.owner)
        return contribution.payload if contribution else None

    def _settle(self, owner: PeerId) -> None:
        """Something of `owner`'s has changed: take what is whole now."""
        for key in self._reception.open_keys(owner):
            senders = self._reception.senders(key)
            fault = self._reception.settle(key, self._expected_payload(key))
            if fault and self._reception.is_rejected(key):
                self._reject(owner, fault)
            elif fault:  # the stream stays due: it is asked for again, or its owner reported in the end
                for sender in senders if len(senders) == 1 else ():  # of several, nobody knows which
                    self._refuse(sender, fault)
            elif fault == "":
                self._now_whole(key)

    def _now_whole(self, key: StreamKey) -> None:
        self._due.whole(key)
        if key in self._relays:
            self._lanes[self._relays[key]].offer(key, *self._stored[key])
        self._changed.set()

    def _receive_part_header(self, sender: PeerId, header: PartHeader) -> None:
        streams = self._streams
        ranges = streams.part_ranges(header.share) if isinstance(streams, Reduce) else None
        owner = self.plan.peers[header.share] if ranges is not None else ""
        if ranges is None or owner == self._me or header.payload_bytes != ranges.total:
            self._refuse(sender, "a part that does not fit")
            return
        key = StreamKey(PART, owner, header.share)
        if header.share in self._headers or not self._may_send(sender, key):
            return
        self._headers[header.share] = header
        self._due.progressed(key, self._now)
        self._settle(owner)
        self._compare_parts()

    def _compare_parts(self) -> None:
        if (contributors := self.contributors) is None:
            return
        ours = tuple(contribution.payload for contribution in contributors)
        others = {self.plan.peers[share] for share, header in self._headers.items() if header.contributions != ours}
        if others - self._unequal:
            self._unequal |= others
            self._listener.unequal(tuple(sorted(self._unequal)))

    # ------------------------------------------------------------ asking and giving

    def _give(self, sender: PeerId, key: StreamKey, gaps: tuple[Range, ...]) -> None:
        stored = self._stored.get(key)
        if stored is not None:
            if len(gaps) > MAX_GAPS or any(not 0 <= gap.start < gap.stop <= stored.ranges.total for gap in gaps):
                self._refuse(sender, "a request that does not fit")
                return
            if key.kind == PART:
                self._transport.send(sender, self._headers[key.share])
            if gaps:
                self._lanes[sender].offer(key, *stored).want(gaps)
        elif key.owner == self._me:
            if key.kind == PART:
                self._say_missing(sender, key, self._not_here())
        elif (ranges := self._streams.relays(key, sender)) is not None:
            self._relays[key] = sender
            self._reception.relay(key, ranges)
            self._ask([key.owner], key)
        else:
            self._say_missing(sender, key, (key.owner,))

    def _say_missing(self, to: PeerId, key: StreamKey, peers: tuple[PeerId, ...]) -> None:
        self._transport.send(to, ChunkMissing(self._digest, key.kind, key.owner, key.share, peers))

    def _not_here(self) -> tuple[PeerId, ...]:
        """The members whose contributions this reducer lacks, but for those whose bytes are coming."""
        return tuple(
            peer for peer in self._lanes
            if peer not in self._finished or self._due.is_silent(self._streams.contribution_of(peer), self._now)
        )  # fmt: skip

    def _not_to_be_had(self, sender: PeerId, key: StreamKey, peers: tuple[PeerId, ...]) -> None:
        if sender != key.owner:
            self._ask(self._due.ask_next(key, self._now), key)
        elif key.kind == PART and peers:
            self._due.blocked(key, tuple(peer for peer in peers if peer in self.plan.peers and peer != sender))
        elif key.kind == PART:
            self._due.at_work(key, self._now)
            self._moved += 1

    def _ask(self, peers: list[PeerId], key: StreamKey) -> None:
        gaps = tuple(Range(*gap) for gap in self._reception.gaps(key)[:MAX_GAPS])
        self._asked.setdefault(key, set()).update(peers)
        for peer in peers:
            self._transport.send(peer, ChunkWanted(self._digest, key.kind, key.owner, key.share, gaps))

    def _acknowledge(self, to: PeerId, key: StreamKey, offset: int) -> None:
        self._transport.send(to, ChunkAck(self._digest, key.kind, key.owner, key.share, offset))

    def _refuse(self, peer: PeerId, reason: str) -> None:
        self.refusals[reason] += 1
        self._listener.refused(peer, reason)

    def _reject(self, peer: PeerId, reason: str) -> None:
        self._refuse(peer, reason)
        self._rejected.add(peer)
        self._listener.rejected(peer, reason)

    # ------------------------------------------------------------ deadlines

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _expected(self) -> list[StreamKey]:
        """The streams that this peer needs and that their owners are known to have made (or to be about to: parts)."""
        keys = []
        if self._streams.needs_contributions():
            keys += [self._streams.contribution_of(c.peer) for c in self._finished.values() if not c.abstains]
        if isinstance(self._streams, Reduce) and self.contributors:
            keys += self._streams.body(self.contributors)
        return [key for key in keys if key.owner != self._me]

    def _look_for_due(self) -> None:
        for key in self._expected():
            if not self._reception.is_done(key):
                self._due.add(key, self._now)
        self._compare_parts()
        self._changed.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._due.seconds_to_next(self._now))
            asks, missed = self._due.check(self._now)
            for key, peers in asks:
                self._ask(peers, key)
            if missed:
                self._listener.lost(missed)

    def waiting(self) -> tuple[Waiting, ...]:
        """For whom and what this peer waits, since when, and how long still."""
        return self._due.waiting(self._now)

    # ------------------------------------------------------------ conclusion

    async def _conclude(self) -> None:
        await self._until(lambda: self.contributors is not None)
        contributors = self.contributors
        assert contributors is not None
        mean = await self._reduce_share(contributors) if isinstance(self._streams, Reduce) and contributors else None
        state, body = hashlib.blake2b(digest_size=DIGEST_BYTES), list[Bytes]()
        for key in self._streams.body(contributors):  # hashed in order as they come, while later ones are on their way
            await self._until(partial(self._stored.__contains__, key))
            body.append(self._stored[key].buffer)
            await self._check_part(key, body[-1])
            await self._offload(partial(state.update, body[-1].data))
        if isinstance(self._streams, Gather) and contributors:
            await self._compare(contributors, body, None)
        await self._until(lambda: not self._unequal and not self._rejected)
        size = sum(buffer.size for buffer in body)
        part = self._stored[self._streams.own_part].buffer if mean is not None and isinstance(self._streams, Reduce) else None
        found = Assembly(self.plan, contributors, tuple(body), state.digest(), size, mean, part, self._agreement)
        self.concluded, self.took_seconds = True, self._now - self._contributed_at
        self._listener.assembled(found)

    async def _compare(self, contributors: tuple[Contribution, ...], payloads: list[Bytes], share: Range | None) -> None:
        """Reject contributions that are absurd beside the others, and score how far each agrees with them."""
        odd = await self._offload(partial(self._codec.odd_ones, payloads, share))
        for index, fault in odd.items():
            self._reject(contributors[index].peer, fault)
        tokens = [c.tokens for c in contributors]
        scores = await self._offload(partial(self._codec.agreement, payloads, tokens, share, self._digest))
        self._agreement = tuple((c.peer, score) for c, score in zip(contributors, scores, strict=True))

    async def _check_part(self, key: StreamKey, part: Bytes) -> None:
        if key.kind != PART or key.owner == self._me or self._own_payload is None:
            return
        fault = await self._offload(partial(self._codec.odd_part, part, self.plan.shares[key.share], self._own_payload))
        if fault:
            self._reject(key.owner, fault)

    async def _reduce_share(self, contributors: tuple[Contribution, ...]) -> Vector | None:
        """Average the own share, answer with the part. Returns the mean if a residual has to be made of it."""
        streams = self._streams
        assert isinstance(streams, Reduce)
        if not streams.share:
            return None
        arriving, payloads = [], []
        for contribution in contributors:
            key = streams.contribution_of(contribution.peer)
            if contribution.peer == self._me:
                assert self._own_payload is not None
                payloads.append(self._own_payload)
            elif key in self._stored:
                payloads.append(self._stored[key].buffer)
            else:
                arriving.append(self._reception.open(key, contribution.payload))
                payloads.append(arriving[-1].buffer)
        share = ShareMean(self._codec, streams.share, payloads, [c.tokens for c in contributors], self.plan.round)
        await share.run(arriving, self._changed, self._offload)
        others = [streams.contribution_of(c.peer) for c in contributors if c.peer != self._me]
        await self._until(lambda: all(self._reception.is_done(key) for key in others))  # none was refused by rule
        await self._compare(contributors, payloads, streams.share)
        await self._until(lambda: not self._rejected)
        part, digest = await share.encode(self._part_residual, self._offload)
        self._answer(streams, contributors, part, digest)
        for key in others:
            del self._stored[key]
        return share.mean if self._codec.settings.residual else None

    def _answer(self, streams: Reduce, contributors: tuple[Contribution, ...], part: Bytes, digest: Digest) -> None:
        hashes = tuple(contribution.payload for contribution in contributors)
        header = self._headers[streams.index] = PartHeader(self._digest, streams.index, hashes, digest, part.size)
        stored = self._stored[streams.own_part] = Stored(digest, part, Ranges([(0, part.size)]))
        for peer, lane in self._lanes.items():
            self._transport.send(peer, header)
            lane.offer(streams.own_part, *stored)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # ------------------------------------------------------------ figures

    @property
    def buffered_bytes(self) -> int:
        """Held for this exchange: what was received, and the own part."""
        whole = (stored for stored in self._stored.values() if stored.buffer is not self._own_payload)
        return self._reception.buffered_bytes + sum(stored.ranges.total for stored in whole)

    def _count(self, size: int) -> None:
        if self._first_byte_at is None:
            self._first_byte_at = self._now
        self._received += size
        self._moved += 1

    def progress(self) -> Progress:
        peers = [peer for peer in self._lanes if not (peer in self._finished and self._finished[peer].abstains)]
        keys = [self._streams.contribution_of(peer) for peer in peers]
        if isinstance(self._streams, Reduce):
            keys += [StreamKey(PART, peer, index) for index, peer in enumerate(self.plan.peers)]
        total = sum(ranges.total for key in keys if (ranges := self._streams.inbound(key)) is not None)
        elapsed = self._now - self._first_byte_at if self._first_byte_at is not None else 0.0
        done = min(self._received, total)
        remaining = (total - done) * elapsed / done if done and elapsed else None
        return Progress(done, total, self._sent() - self._sent_before, remaining, self._moved)

    def _sent(self) -> int:
        """Payload bytes ever sent to the other members."""
        return sum(traffic.payload_sent for peer, traffic in self._transport.traffic().items() if peer in self._lanes)
