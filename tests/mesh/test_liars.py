"""Members that lie: what is out of bounds is refused and its sender named and left out; what agrees with nobody is flagged;
what was sent before is dropped and counted. Whole peers over the in-memory network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.types import BatchTime, Profile, Range
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.budgets import Usage
from geomesh_p2p.swarm.membership import Admission
from geomesh_p2p.swarm.memory import MemoryTransport, Network
from tests.injection.proof import fired, inject
from tests.mesh.calm import CalmPeer, calm_mesh, until, virtual
from tests.mesh.toy import SIZE, ToyEngine, toy_run

Lie = Callable[[Any], Any]


def endless(topology: str = "gather", kind: str = "sign") -> Any:
    run = toy_run(topology=topology)
    codec = run.codec.model_copy(update={"payload": kind})
    return run.model_copy(update={"run": run.run.model_copy(update={"rounds": 1_000_000}), "codec": codec})


def started(folder: Path, names: list[str], run: Any, network: Network | None = None) -> list[CalmPeer]:
    peers = calm_mesh(folder, names, run, network or Network())
    for peer in peers:
        peer.start([p.peer for p in peers])
    return peers


async def ended(peers: list[CalmPeer]) -> None:
    for peer in peers:
        await peer.kill()


def warned(peer: CalmPeer, reason: str) -> list[str]:
    return [event.text for event in peer.events if getattr(event, "reason", "") == reason and hasattr(event, "text")]


def blamed(peer: CalmPeer) -> list[dict[str, Any]]:
    return [fields for kind, fields in peer.notes if kind == "blame"]


def equal_digests(peers: list[CalmPeer]) -> bool:
    committed = {entry for peer in peers for entry in peer.digests().items()}
    return len({round for round, _ in committed}) == len(committed)


# ---------------------------------------------------------------- bounds


def too_many_tokens(local: Any) -> Any:
    return replace(local, contribution=replace(local.contribution, tokens=local.contribution.tokens * 1000))


def twice_the_same(local: Any) -> Any:
    return replace(local, contribution=replace(local.contribution, ranges=local.contribution.ranges * 2))


def others_positions(local: Any) -> Any:
    return replace(local, contribution=replace(local.contribution, ranges=(Range(0, 2**40),)))


def wrong_size(local: Any) -> Any:
    return replace(local, contribution=replace(local.contribution, payload_bytes=local.contribution.payload_bytes * 7))


def absurd_magnitude(local: Any, times: float = 1e5) -> Any:
    payload = local.payload.copy()
    payload[:4] = (payload[:4].view("<f4") * np.float32(times)).view(np.uint8)
    return replace(local, payload=payload, contribution=replace(local.contribution, payload=digest_bytes(payload)))


def numbers_too_large(local: Any) -> Any:
    payload = local.payload.copy()
    numbers = payload.view("<f4" if payload.size == 4 * SIZE else "<f2")
    numbers *= numbers.dtype.type(1000)
    return replace(local, payload=payload, contribution=replace(local.contribution, payload=digest_bytes(payload)))


def negative_magnitude(local: Any) -> Any:
    return absurd_magnitude(local, -1.0)


def not_a_number(local: Any) -> Any:
    return absurd_magnitude(local, float("nan"))


LIES = [
    (too_many_tokens, "tokens in"), (twice_the_same, "counts twice"), (others_positions, "does not give it"),
    (wrong_size, "wrong size"), (absurd_magnitude, "times the others' magnitude"), (negative_magnitude, "not negative"),
    (not_a_number, "finite"),
]  # fmt: skip


@pytest.mark.fault
@pytest.mark.case("C119")
@pytest.mark.parametrize(
    ("lie", "says", "topology", "kind"),
    [(*lie, "gather", "sign") for lie in LIES]
    + [(*lie, "reduce", "sign") for lie in LIES[-3:]]
    + [(absurd_magnitude, "times the others' magnitude", "gather", "int8")]
    + [(numbers_too_large, "times the others' magnitude", *how) for how in (("gather", "fp32"), ("reduce", "fp16"))],
    ids=lambda value: getattr(value, "__name__", str(value)[:12]),
)
@virtual
async def test_what_is_out_of_bounds_is_refused_and_its_sender_named_and_left_out(
    tmp_path: Path, lie: Lie, says: str, topology: str, kind: str
) -> None:
    peers = started(tmp_path, ["a", "b", "c", "liar"], endless(topology, kind))
    liar, told = peers[3], list[int]()
    assert liar.session is not None
    hand_in = liar.session._hand_in

    def lying(job: Any) -> None:
        if job.plan.round >= 3:
            job.local = lie(job.local)
            told.append(job.plan.round)
        hand_in(job)

    inject(lambda: setattr(liar.session, "_hand_in", lying))
    honest = peers[:3]
    await until(lambda: (liar.digests() and max(liar.digests()) >= 3) or told)
    fired(told, f"the liar's contributions: {lie.__name__}")
    await until(lambda: all(max(peer.digests(), default=0) >= 6 for peer in honest))
    assert any(liar.name in text and says in text for peer in honest for text in warned(peer, "refused_by_rule")) or any(
        liar.name in text and says in text for peer in honest for text in warned(peer, "refused_bytes")
    )
    assert any(b["peer_site"] == liar.name and says in b["reason"] for peer in honest for b in blamed(peer))
    contributed = [{c["site"] for c in note["contributors"]} for note in peers[0].commits() if note["round"] >= 3]
    assert all(liar.name not in sites for sites in contributed), "a lie was committed"
    assert not any(b["peer_site"] != liar.name for peer in honest for b in blamed(peer)), "somebody honest was blamed"
    assert equal_digests(honest)
    await ended(peers)


@pytest.mark.fault
@virtual
async def test_absurd_figures_in_heartbeats_stop_nobody(tmp_path: Path) -> None:
    """The liar's profile and step times are in its heartbeats; it is named, keeps its vote, and is planned for when it is
    sane again."""
    peers = started(tmp_path, ["a", "b", "c", "liar"], endless())
    liar, honest = peers[3], peers[:3]
    session = liar.session
    assert session is not None
    await until(lambda: all(max(peer.digests(), default=0) >= 2 for peer in peers))
    heartbeat = session._heartbeat
    absurd = Profile(liar.peer, liar.name, "toy", (BatchTime(1, 1e-30), BatchTime(2, 1e30)))
    lie = {"profile": absurd, "step_seconds": 1e-30, "step_batch": 1}
    inject(lambda: setattr(session, "_heartbeat", lambda: replace(heartbeat(), **lie)))
    await until(lambda: any(warned(peer, "refused_figures") for peer in honest) or max(honest[0].digests()) > 40)
    assert all(peer.session is not None and peer.session.crash is None for peer in peers)
    named = [text for peer in honest for text in warned(peer, "refused_figures")]
    fired([text for text in named if "liar says" in text], "absurd figures in heartbeats")
    reached = max(honest[0].digests())
    await until(lambda: all(max(peer.digests()) >= reached + 4 for peer in honest))
    session._heartbeat = heartbeat  # type: ignore[method-assign]
    await until(lambda: any(liar.name in {c["site"] for c in n["contributors"]} for n in honest[0].commits()[-2:]))
    assert equal_digests(peers)
    await ended(peers)


# ---------------------------------------------------------------- agreement


class LikeMinded(ToyEngine):
    """Goes the way that all data point to, with noise of its own; or another way."""

    way = 1.0
    chance: np.random.Generator | None = None

    def train(self, assignment: Any, plan: Any, should_close: Any, started: float) -> Any:
        anchor = self.values.copy()
        result = super().train(assignment, plan, should_close, started)
        target = np.random.default_rng(1).normal(0, 0.01, SIZE).astype(np.float32)
        moved = (self.values - anchor) * np.float32(0.5) + target
        if self.chance is not None:
            moved = self.chance.normal(0, 0.01, SIZE).astype(np.float32)
        self.values[:] = anchor + np.float32(self.way) * moved
        return result


class LikeMindedPeer(CalmPeer):
    engine: LikeMinded

    def make_engine(self) -> ToyEngine:
        self.engine = LikeMinded(self.seconds_per_sequence, lambda seconds: None, self.layout.parameters)
        return self.engine


@pytest.mark.fault
@pytest.mark.case("C119")
@pytest.mark.parametrize(("topology", "lie"), [("gather", "flipped"), ("reduce", "flipped"), ("gather", "random")])
@virtual
async def test_a_member_that_agrees_with_nobody_is_flagged_by_all(tmp_path: Path, topology: str, lie: str) -> None:
    run, network = endless(topology), Network()
    founding = calm_mesh(tmp_path, ["a"], run, network)[0].founding
    peers: list[Any] = [LikeMindedPeer(network, tmp_path, name, run, founding) for name in ("a", "b", "c", "d", "liar")]
    for peer in peers:
        peer.start([p.peer for p in peers])
    honest, liar = peers[:4], peers[4]
    if lie == "flipped":
        inject(lambda: setattr(liar.engine, "way", -1.0))
    else:
        inject(lambda: setattr(liar.engine, "chance", np.random.default_rng(5)))
    await until(lambda: all(len(peer.digests()) >= 12 for peer in peers))
    scores = [event for peer in honest for event in peer.events if type(event).__name__ == "Agreed"]
    assert len(scores) >= 20
    fired(scores[-1].with_others["liar"] < 0.55, f"the liar's signs: {lie}")
    for peer in peers:
        flags = warned(peer, "disagrees")
        assert [text.split()[0] for text in flags] == ["liar"], "once, and nobody else"
        assert set(scores[-1].with_update) <= {p.name for p in peers}
    assert min(scores[-1].with_others[peer.name] for peer in honest) > 0.7
    assert equal_digests(peers)
    await ended(peers)


# ---------------------------------------------------------------- strangers


class Taps:
    """What has passed from peer to peer over the network, for a stranger or a broken relay to send again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[tuple[str, str, bytes]] = []
        self.times = 1               # that each frame arrives
        deliver = MemoryTransport.deliver

        def tapped(transport: MemoryTransport, to: str, body: bytes, *more: Any) -> None:
            self.frames.append((transport.peer, to, bytes(body)))
            for _ in range(self.times):
                deliver(transport, to, body, *more)

        monkeypatch.setattr(MemoryTransport, "deliver", tapped)


@pytest.mark.fault
@pytest.mark.case("C073")
@pytest.mark.parametrize("topology", ["gather", "reduce"])
@virtual
async def test_what_was_sent_before_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """Every frame of the exchange and of the protocol is sent twice in its round, and once more a round and several later."""
    taps, network = Taps(monkeypatch), Network()
    peers = started(tmp_path, ["a", "b", "c"], endless(topology), network)
    await until(lambda: all(len(peer.digests()) >= 2 for peer in peers))
    replayed, heard = 0, (m.Chunk, m.ChunkAck, m.PartHeader, m.Finished, m.HeldReport, m.Commit, m.PlanOffer, m.Vote)

    def replay() -> None:
        nonlocal replayed
        for source, to, body in [*taps.frames[-200:], *taps.frames[-1000:-800]]:
            message = wire.decode(memoryview(body)[wire.LENGTH_BYTES :]).message
            if isinstance(message, heard) and to in network.live:
                network.live[to]._receive(source, body)
                replayed += 1

    inject(lambda: setattr(taps, "times", 2))
    for _ in range(8):
        reached = max(peers[0].digests())
        inject(replay)
        await until(lambda reached=reached: all(max(peer.digests()) > reached for peer in peers))  # type: ignore[misc]
    dropped = [peer.session.desk.dropped for peer in peers if peer.session is not None]
    fired(replayed and sum(count.total() for count in dropped) > 0, "frames sent again")
    assert sum(count["of an exchange that is over"] for count in dropped) > 0
    assert sum(count["duplicate"] for count in dropped) > 0
    assert equal_digests(peers)
    assert not any(blamed(peer) for peer in peers), "nobody is blamed for what a network repeats"
    tokens = [c["tokens"] for note in peers[0].commits() for c in note["contributors"]]
    assert set(tokens) == {peers[0].commits()[0]["contributors"][0]["tokens"]}
    await ended(peers)


@pytest.mark.fault
@pytest.mark.case("C117")
@pytest.mark.parametrize("how", ["secret", "allow"])
@virtual
async def test_a_stranger_gets_neither_state_nor_a_vote(tmp_path: Path, how: str) -> None:
    """It knows the seeds, the run file and the protocol, but not the secret, or it is not on the list."""
    network, names = Network(), ["a", "b", "c"]
    peers = calm_mesh(tmp_path, names, endless(), network)
    allow = frozenset(peer.peer for peer in peers)
    for peer in peers:
        peer.admission = Admission(secret=b"the secret") if how == "secret" else Admission(allow=allow)
        peer.start([p.peer for p in peers])
    await until(lambda: all(len(peer.digests()) >= 2 for peer in peers))

    stranger = CalmPeer(network, tmp_path, "stranger", peers[0].run, peers[0].founding)
    stranger.admission = Admission(secret=b"a guess") if how == "secret" else Admission()
    inject(lambda: stranger.start([p.peer for p in peers]))
    heard: list[Any] = []
    if stranger.session is not None:
        membership = stranger.session.around.membership
        await until(lambda: len(membership.refused_by) == 3)
        heard = list(membership.refused_by.values())
    fired(heard, "a stranger's greetings")
    assert all(("join secret" if how == "secret" else "allow list") in refusal.reason for refusal in heard)

    transport = network.live[stranger.peer]
    for what in ("update", "held", "snapshot", "manifest", "founding", "status"):
        for peer in peers:
            answer = await transport.request(peer.peer, m.Fetch(what, 1, b"", 0, 1 << 20), 5.0)
            assert answer == m.Fetched(False, b"", 0, 0, b"", 0), f"a stranger was given a {what}"
    term = peers[0].session.replica.term  # type: ignore[union-attr]
    for peer in peers:
        transport.send(peer.peer, m.VoteRequest(False, replace(term, number=term.number + 5), 1000, b"x" * 32, None))
        transport.send(peer.peer, m.Leave("I was never here"))
    reached = max(peers[0].digests())
    await until(lambda: all(max(peer.digests()) >= reached + 3 for peer in peers))
    for peer in peers:
        session = peer.session
        assert session is not None
        assert session.replica.term == term, "a stranger's candidacy was heard"
        assert set(session.around.membership.known) == allow - {peer.peer}
        assert stranger.peer not in session.replica.s.peers
        assert all(stranger.peer not in note["view"] for note in peer.commits())
        said = [text for text in warned(peer, "refused_peer") if stranger.peer in text]
        assert len(said) == 1, "one line for each stranger"
        assert all(stranger.peer not in session.around.membership.site_of(p) for p in session.book._traffic)
        assert set(session.book._traffic) <= allow
    assert max(stranger.digests(), default=0) == 0
    assert equal_digests(peers)
    await ended([*peers, stranger])


# ---------------------------------------------------------------- what is in use is given back


@pytest.mark.parametrize("topology", ["gather", "reduce"])
@virtual
async def test_budgets_are_back_at_zero_after_every_round(tmp_path: Path, topology: str) -> None:
    peers = started(tmp_path, ["a", "b", "c"], toy_run(topology=topology))
    for round in range(1, 6):
        await until(lambda round=round: all(max(p.digests(), default=0) >= round for p in peers))  # type: ignore[misc]
        for peer in peers:
            for other in peers:
                assert peer.transport.budgets.usage(other.peer) == Usage(), "frames half read or requests unanswered"
    await asyncio.gather(*(peer.task for peer in peers if peer.task))
    for peer in peers:
        assert peer.session is not None
        assert peer.session.desk._inbox.bytes == 0
        assert peer.transport.budgets.refused.total() == peer.transport.budgets.refused["stranger"]


# ---------------------------------------------------------------- rounds that nobody has committed


def claiming(peer: CalmPeer, told: list[int]) -> Callable[[], None]:
    """`peer` says from now on, to all, that it has committed a million million rounds more; `told` lists its true rounds."""

    def fault() -> None:
        assert peer.session is not None
        honest = peer.session._heartbeat

        def lie() -> m.Heartbeat:
            beat = honest()
            told.append(beat.round)
            return replace(beat, round=beat.round + 10**12, digest=b"?" * 32)

        peer.session._heartbeat = lie  # type: ignore[method-assign]

    return fault


async def pace(peers: list[CalmPeer], seconds: float) -> list[float]:
    """Rounds a second."""
    begun = [peer.model.round for peer in peers]
    await asyncio.sleep(seconds)
    return [(peer.model.round - first) / seconds for peer, first in zip(peers, begun, strict=True)]


@pytest.mark.fault
@pytest.mark.parametrize("trains", [True, False])
@virtual
async def test_who_claims_rounds_that_it_cannot_show_holds_up_nobody(tmp_path: Path, trains: bool) -> None:
    """A member, or an observer: three honest peers commit on at their pace, lose no attempt, and name it once each."""
    peers = calm_mesh(tmp_path, ["a", "b", "c", "liar"], endless(), Network())
    liar, honest, told = peers[3], peers[:3], list[int]()
    liar.trains = trains
    for peer in peers:
        peer.start([p.peer for p in peers])
    await until(lambda: all(peer.model.round >= 5 for peer in peers))
    before = await pace(honest, 60.0)
    lost = [sum(kind == "discard" for kind, _ in peer.notes) for peer in honest]
    inject(claiming(liar, told))
    await asyncio.sleep(2.0)
    fired(told, "the liar's heartbeats claimed rounds that there are not")
    after = await pace(honest, 120.0)
    assert all(later > 0.9 * earlier for earlier, later in zip(before, after, strict=True)), (before, after)
    assert [sum(kind == "discard" for kind, _ in peer.notes) for peer in honest] == lost
    assert not any(noted["committed_by"] == "catch_up" for peer in honest for noted in peer.commits()[-20:])
    for peer in honest:
        (line,) = warned(peer, "unproved_claim")
        assert line.startswith("liar claims round 1000000")
        assert "is not believed until it does" in line
    assert equal_digests(honest)
    await ended(peers)
