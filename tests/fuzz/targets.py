"""What fuzzed frames are thrown at: the reader and decoder, a replica, an exchange, and a mesh that trains meanwhile."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import digest
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.log import RoundLog
from geomesh_p2p.core.replica import Replica, Settings
from geomesh_p2p.core.types import NO_TERM, BatchTime, Contribution, Founding, Profile
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.membership import Admission
from geomesh_p2p.swarm.memory import Network as MemoryNetwork
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.fuzz.frames import LENGTH, Values, bodies, framed
from tests.mesh.exchanges import Mesh, plan_for
from tests.mesh.toy import ToyPeer, toy_mesh, toy_run

PATIENCE_SECONDS = 120.0


@dataclass
class Figures:
    """What became of the frames."""

    seed: int
    made: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    heard: Counter[str] = field(default_factory=Counter)
    halts: int = 0
    rounds: int = 0
    live_frames: int = 0
    live_refused: int = 0
    memory_mib: float = 0.0

    @property
    def frames(self) -> int:
        return sum(self.made.values())


def memory_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------- reader and decoder


class ReaderTarget:
    """Frames in a stream that comes in pieces. Whatever is no frame ends the stream; the next one begins anew."""

    def __init__(self, random: Random, figures: Figures) -> None:
        self.random, self.figures = random, figures
        self.reader = wire.FrameReader()
        self.reader.begin, self.reader.end = self._begin, self._end
        self.held = 0

    def _begin(self, kind: type, length: int) -> bool:
        if self.random.random() < 0.1:
            return False
        self.held += length
        return True

    def _end(self, length: int) -> None:
        self.held -= length

    def throw(self, frame: bytes) -> list[Any]:
        """The messages that were understood."""
        heard: list[Any] = []
        at = 0
        try:
            while at < len(frame):
                size = self.random.choice((1, 3, 40, 500, 5000))
                for body in self.reader.feed(frame[at : at + size]):
                    heard.append(wire.decode(body).message)
                at += size
        except wire.FrameError as error:
            self.figures.outcomes[type(error).__name__] += 1
            self._restart()
        buffered = len(self.reader._body) if self.reader._body is not None else 0
        assert buffered <= wire.MAX_BODY
        waits = buffered or self.reader._stop or self.reader._skip
        if waits and self.random.random() < 0.5:  # half of those that wait for more never get it
            self._restart()
        self.figures.outcomes["understood"] += len(heard)
        return heard

    def _restart(self) -> None:
        self.reader.abandon()
        assert self.held == 0, "what was begun is given back"
        self.reader = wire.FrameReader()
        self.reader.begin, self.reader.end = self._begin, self._end


# ---------------------------------------------------------------- a replica that believes its members


class ReplicaTarget:
    """One replica, three other members who send whatever was understood. It may halt (a member that lies can make it: see
    SECURITY.md), in words; it may not raise."""

    def __init__(self, random: Random, figures: Figures) -> None:
        self.random, self.figures = random, figures
        self.founding = Founding(digest("toy"), b"nonce", 0, digest("weights"), "id-a")
        self.now = 0.0
        self._anew()

    def _anew(self) -> None:
        log = RoundLog.founded(self.founding)
        settings = Settings(min_peers=1, seed=self.random.randrange(2**32))
        self.replica = Replica("id-a", "a", log, Durable(NO_TERM, False), None, settings)
        self._handle(ev.Ready(Profile("id-a", "a", "toy", (BatchTime(1, 0.1),))))

    def throw(self, message: Any) -> None:
        self.now += self.random.random() * 0.05
        self._handle(ev.Received(self.random.choice(("id-b", "id-c", "id-d")), message))
        if self.random.random() < 0.2:
            self._handle(ev.Tick())
        if self.replica.halted or self.random.random() < 0.002:
            self.figures.halts += self.replica.halted
            self._anew()

    def _handle(self, event: Any) -> None:
        for action in self.replica.handle(event, self.now):
            if isinstance(action, ev.Send):
                wire.encode_bytes(action.message, self.founding.run)  # what it answers can be sent
            elif isinstance(action, ev.ProveClaim):
                proof: Any = self.random.choice(("proved", "refuted", "silent"))
                self._handle(ev.ClaimAnswered(action.peer, action.base.round, proof))
            elif isinstance(action, ev.CatchUp):
                self._handle(ev.FetchFailed("catch_up", ""))
            elif isinstance(action, ev.FetchHeld):
                self._handle(ev.FetchFailed("held", ""))
            elif isinstance(action, ev.NeedPlan):
                self._handle(ev.Planned(None, "no planner here"))


# ---------------------------------------------------------------- an exchange whose members send anything


class ExchangeTarget:
    """Exchanges of three members, in a gather and in a reduce, who send each other whatever was understood, under the plan of
    the day. Nothing may be raised, and no more kept than the exchange is about."""

    MESSAGES = (m.Chunk, m.ChunkAck, m.PartHeader, m.ChunkWanted, m.ChunkMissing, m.Finished)

    def __init__(self, random: Random) -> None:
        self.random = random
        self.peers = ("peer-0", "peer-1", "peer-2")

    async def throw(self, messages: list[Any]) -> None:
        plan = plan_for(3, self.random.choice(("gather", "reduce")))
        async with Mesh(plan, MemoryNetwork()) as mesh:
            mesh.start()
            most = 8 * sum(exchange._codec.payload_bytes for exchange in mesh.exchanges)
            for number, message in enumerate(messages):
                at = self.random.randrange(3)
                self._give(mesh, at, self.random.choice([peer for peer in self.peers if peer != self.peers[at]]), message)
                if number % 10 == 0:
                    await asyncio.sleep(0.05)
                if self.random.random() < 0.02 and mesh.contributions[at].peer not in mesh.exchanges[at]._finished:
                    mesh.finish(at)
                assert mesh.exchanges[at].buffered_bytes <= most

    def _give(self, mesh: Mesh, at: int, sender: str, message: Any) -> None:
        if isinstance(message, m.Finished):
            mesh.exchanges[at].member_finished(self._meant(mesh, replace(message.contribution, peer=sender)))
            return
        message = replace(message, plan=mesh.plan.digest)
        if hasattr(message, "owner"):
            message = replace(
                message, kind=self.random.choice(("contribution", "part", message.kind)), owner=self.random.choice(self.peers)
            )
        if isinstance(message, m.Chunk) and self.random.random() < 0.5:
            message = replace(message, share=0, total=753, offset=self.random.randrange(-1, 700))
        mesh.exchanges[at].receive(sender, message)

    def _meant(self, mesh: Mesh, contribution: Contribution) -> Contribution:
        """Near enough to be taken, half the time."""
        if self.random.random() < 0.5:
            return contribution
        size = mesh.exchanges[0]._codec.payload_bytes
        return replace(
            contribution, round=mesh.plan.round, base=mesh.plan.base, payload_bytes=size, tokens=max(1, contribution.tokens)
        )


# ---------------------------------------------------------------- a mesh that trains


class LiveTarget:
    """Three peers over the in-memory network that train while frames arrive at all of them from strangers."""

    def __init__(self, folder: Path, random: Random, figures: Figures) -> None:
        self.random, self.figures = random, figures
        self.network = MemoryNetwork()
        run = toy_run()
        run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": 1_000_000})})
        self.peers = toy_mesh(folder, ["a", "b", "c"], run, self.network)
        for peer in self.peers:
            peer.admission = Admission(secret=b"what strangers do not know")
        self.strangers = [f"stranger-{number}" for number in range(1000)]

    async def __aenter__(self) -> LiveTarget:
        for peer in self.peers:
            peer.start([p.peer for p in self.peers])
        await self.rounds(2)
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self.peers:
            await peer.kill()

    async def rounds(self, more: int) -> None:
        """Until everybody has committed so many rounds more."""
        wanted = [max(peer.digests(), default=0) + more for peer in self.peers]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not all(max(p.digests(), default=0) >= w for p, w in zip(self.peers, wanted, strict=True)):
                self.check()
                await asyncio.sleep(0.02)
        self.figures.rounds += more

    def check(self) -> None:
        for peer in self.peers:
            assert peer.task is not None
            assert peer.session is not None
            assert not peer.task.done(), f"{peer.name} has ended: {peer.session.outcome}, {peer.session.crash!r}"

    async def throw(self, made: Iterator[tuple[str, bytes]], count: int) -> None:
        for number in range(count):
            _, body = next(made)
            sender, peer = self.random.choice(self.strangers), self.random.choice(self.peers)
            transport = self.network.live[peer.peer]
            before = sum(transport.budgets.refused.values())
            transport._receive(sender, len(body).to_bytes(LENGTH, "big") + body)
            self.figures.live_refused += sum(transport.budgets.refused.values()) > before
            if number % 200 == 0:
                await asyncio.sleep(0)
                self.check()
        self.figures.live_frames += count
        for peer in self.peers:
            assert peer.session is not None
            known = set(peer.session.around.membership.known)
            assert known <= {p.peer for p in self.peers}, "a stranger was let in"
            assert self.network.live[peer.peer].budgets.remembered <= 600


async def fuzz_live(folder: Path, seed: int, frames: int, figures: Figures) -> None:
    random = Random(f"{seed}/live")
    async with LiveTarget(folder, random, figures) as live:
        founding = live.peers[0].founding
        values = Values(random, words(live.peers), (founding.run, founding.base, founding.fingerprint))
        made = bodies(random, values, founding.run)
        while frames > 0:
            await live.throw(made, min(frames, 5000))
            await live.rounds(1)
            frames -= 5000
        committed = {(r, d) for peer in live.peers for r, d in peer.digests().items()}
        assert len({r for r, _ in committed}) == len(committed), "two digests of one round"


def words(peers: list[ToyPeer]) -> tuple[str, ...]:
    known = [word for peer in peers for word in (peer.peer, peer.name)]
    return (*known, "id-d", "d", "update", "held", "snapshot", "status", "gather")


def fuzz_frames(
    seed: int, frames: int, figures: Figures, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Reader, decoder, replica and exchange."""
    random = Random(seed)
    reader, replica = ReaderTarget(random, figures), ReplicaTarget(random, figures)
    hashes = (replica.founding.run, replica.founding.base, replica.founding.fingerprint)
    values = Values(random, ("id-a", "id-b", "id-c", "id-d", "a", "b", "c", "d", "contribution", "part"), hashes)
    made = bodies(random, values, replica.founding.run)
    exchange, waiting = ExchangeTarget(random), list[Any]()
    for done in range(frames):
        if done % 50_000 == 0:
            progress(done)
        how, body = next(made)
        figures.made[how] += 1
        for message in reader.throw(framed(random, body)):
            figures.heard[type(message).__name__] += 1
            replica.throw(message)
            if isinstance(message, ExchangeTarget.MESSAGES):
                waiting.append(message)
        if len(waiting) >= 200:
            run_virtual(exchange.throw(waiting))
            waiting = []
