"""Networks that split, stall, break and lag, whole peers in virtual time: one history, and rounds go on where they can."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from tests.injection.proof import fired, inject
from tests.injection.script import At, Fault, Script
from tests.injection.virtual import TIMING, VirtualMesh, long_run, run_mesh
from tests.mesh.recovery import one_digest, split_and_heal

TOPOLOGIES = ("gather", "reduce")
MOST_ROUNDS_AFTER_HEAL = 3
pytestmark = pytest.mark.fault


# ---------------------------------------------------------------- partitions


@pytest.mark.case("C042")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("names", "side"), [("abcd", "ab"), ("abcd", "bcd"), ("abcde", "ab"), ("abcde", "abc")])
def test_a_split_of_60_seconds_and_its_heal(tmp_path: Path, names: str, side: str, topology: str) -> None:
    """At most one side commits: the majority, or of two halves the one with the lowest id. The other says for whom it
    waits. At most three rounds after the heal all show one digest again."""

    healed = run_mesh(split_and_heal(tmp_path, names, side, topology))
    assert healed.rounds <= MOST_ROUNDS_AFTER_HEAL


@pytest.mark.case("C042")
def test_an_even_split_while_a_round_is_being_committed(tmp_path: Path) -> None:
    """The leader's commit reaches its own half alone; the other half holds the update and takes it over after the heal."""

    async def main() -> None:
        lasting = Fault("cut", seconds=10_000.0, toward=("c", "d"))
        # a is cut off right after its first commit, which is b's, and b as soon as it has that.
        script = Script([(At("a", "in_commit", 6, 1), lasting), (At("b", "before_commit", 6), lasting)])
        async with VirtualMesh(tmp_path, "abcd", script) as mesh:
            mesh.start()
            await mesh.until(lambda: len(script.struck) == 2 or mesh.least > 6, what="the commit")
            fired(len(script.struck) == 2, "the split")
            await mesh.sleep(60.0)
            mesh.prove()
            going_on, stuck = [mesh["a"], mesh["b"]], [mesh["c"], mesh["d"]]
            assert all(peer.round >= 16 for peer in going_on), "the half with the commit, and the lowest id, goes on"
            assert [peer.round for peer in stuck] == [5, 5], "the other commits nothing"
            held = [peer.replica.s.held_next() for peer in stuck]
            assert all(one is not None and one.update.digest == mesh["a"].commits()[5]["digest"] for one in held)
            assert all("voters not heard: a, b" in peer.replica.waiting_for for peer in stuck), "it says for whom it waits"
            inject(mesh.network.heal)
            healed = mesh.round
            await mesh.until(lambda: one_digest(mesh) and mesh.least > healed, 60.0, "one digest again")
            assert mesh.round - healed <= MOST_ROUNDS_AFTER_HEAL
            await mesh.rounds(3)
            assert mesh["c"].commits()[5]["digest"] == mesh["a"].commits()[5]["digest"]
            mesh.check()

    run_mesh(main())


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "kind",
    ["cut", "one_way", "half_open", "reset", "helper_killed", pytest.param("loss", marks=pytest.mark.case("C056"))],
)
def test_short_outages_again_and_again(tmp_path: Path, kind: str, topology: str) -> None:
    async def main() -> None:
        async with VirtualMesh(tmp_path, "abcd", run=long_run(topology=topology)) as mesh:
            mesh.start()
            await mesh.rounds(3)
            before, struck = mesh.round, 0
            for number in range(20):
                peer = mesh["abcd"[number * 7 % 4]]
                amount = {"loss": 0.5, "reset": 300.0}.get(kind, 0.0)
                struck += mesh.strike(peer, Fault(kind, seconds=1.5, amount=amount))  # type: ignore[arg-type]
                await asyncio.sleep(4.0)
            fired(struck, "the outages")
            mesh.prove()
            assert mesh.round >= before + 8, "it goes on between them"
            await mesh.rounds(3, 60.0)
            await mesh.until(lambda: set(mesh["a"].commits()[-1]["view"]) == set(mesh.ids), 60.0, "all of them taking part")
            mesh.check()

    run_mesh(main())


@pytest.mark.case("C056")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("from_round", [0, 10])
@pytest.mark.parametrize("latency_seconds", [1.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_seconds_of_latency_with_jitter(tmp_path: Path, latency_seconds: float, from_round: int, topology: str) -> None:
    """Rounds take a few trips longer, and a new leader can be elected. Nobody is taken for lost, or, if trips suddenly take
    longer than a peer may be silent, nobody once they are known."""

    async def main() -> None:
        network = Network(1, latency_seconds=0.02)
        lag = {"latency_seconds": latency_seconds, "jitter_seconds": 0.5}
        async with VirtualMesh(tmp_path, "abcd", network=network, run=long_run(topology=topology)) as mesh:
            if from_round == 0:
                inject(lambda: all_links(mesh, **lag))
            mesh.start()
            await mesh.until(lambda: mesh.least >= from_round, what="the round from which on the trips are long")
            if from_round:
                inject(lambda: all_links(mesh, **lag))
            begun = mesh.now
            await asyncio.sleep(30 * latency_seconds)
            trips = [peer.session.around.links.rtt_seconds(mesh.ids[0]) for peer in mesh if peer.name != "a"]
            fired(max(trips) > latency_seconds, "the latency, as the peers measured it")
            # Trips that suddenly take longer than a peer may be silent are a silence until they are known.
            sudden = from_round and latency_seconds + 0.5 > TIMING.heartbeat_limit_seconds
            before, quiet_from = mesh.round, mesh.now if sudden else begun
            await asyncio.sleep(60 * latency_seconds)
            later = [(kind, note) for peer in mesh for kind, note in peer.notes if note["at"] > quiet_from]
            assert not [note for kind, note in later if kind in ("lost", "discard")], "nobody is lost, nothing given up"
            assert mesh.round - before >= 60 * latency_seconds / (6 * latency_seconds + 4.0), "training goes on"
            mesh.strike(mesh.leader, Fault("kill", seconds=10.0))
            await mesh.rounds(3, 60 * latency_seconds)
            await mesh.until(lambda: all(peer.up for peer in mesh), 60.0)
            await mesh.rounds(2, 60 * latency_seconds)
            mesh.check()

    run_mesh(main())


def all_links(mesh: VirtualMesh, **changes: float) -> None:
    for a in mesh.ids:
        for b in mesh.ids:
            if a != b:
                mesh.network.set_link(a, b, one_way=True, **changes)


@pytest.mark.long
@pytest.mark.case("C055")
def test_one_slow_link(tmp_path: Path) -> None:
    """One of four peers at 1 Mbit/s: the others' rounds are not held up for long, the slow one is named and contributes all the
    while, fewer bytes are sent over its link, and rounds are as short as before when it is well again."""

    async def main() -> None:
        layout = Layout((Tensor("w", 4_000_000, 1),))          # half a megabyte of signs: 4 s to each of three at 1 Mbit/s
        network = Network(1, latency_seconds=0.02, bytes_per_second=100e6 / 8)
        run = long_run(topology="auto", mode="planned", round_tokens=16 * 96, min_steps=4, max_steps=64)
        limits = ExchangeLimits(chunk_bytes=32_768)
        async with VirtualMesh(tmp_path, "abcd", network=network, run=run, limits=limits, layout=layout) as mesh:
            mesh.start()
            await mesh.rounds(8)
            usual = round_seconds(mesh, 4)
            struck = mesh.strike(mesh["d"], Fault("slow", seconds=120.0, amount=1e6 / 8))
            fired(struck, "the slow link")
            begun, planned = mesh.now, mesh["a"].replica.plan.exchange_seconds
            await asyncio.sleep(80.0)
            mesh.prove()
            since = [note for note in mesh["a"].commits() if note["at"] > begun]
            assert all("d" in [one["site"] for one in note["contributors"]] for note in since), "the slow peer takes part"
            assert since[-1]["topology"] == "reduce", "the topology that sends less over the slow link"
            times = [note["at"] for note in since]
            assert max(later - earlier for earlier, later in pairwise(times)) <= 2.0 * usual, "bounded from the first round on"
            assert round_seconds(mesh, 4) <= 1.75 * usual, "and planned for: two bits of every parameter come back"
            plan = await mesh.until(lambda: mesh["a"].replica.plan)
            assert plan.exchange_seconds > 5 * planned, "deadlines and predictions follow what was measured"
            assert [reason for reason in plan.reasons if "slowest way" in reason and ("d to" in reason or "to d" in reason)]
            assert not [note for peer in mesh for kind, note in peer.notes if kind == "discard"], "slow is not lost"
            await asyncio.sleep(60.0)
            await mesh.rounds(6, 100.0)
            assert mesh["d"].peer in mesh["a"].commits()[-1]["view"], "and takes part when its link is well again"
            assert round_seconds(mesh, 4) <= 1.1 * usual
            mesh.check()

    run_mesh(main())


def round_seconds(mesh: VirtualMesh, last: int) -> float:
    times = [note["at"] for note in mesh["a"].commits()[-last - 1 :]]
    return median(later - earlier for earlier, later in pairwise(times))


@pytest.mark.long
@pytest.mark.case("C056")
def test_long_silence_between_exchanges(tmp_path: Path) -> None:
    """Rounds of ten minutes, in which nothing but heartbeats is said, and these are lost now and then."""

    async def main() -> None:
        network = Network(1, latency_seconds=0.05)
        async with VirtualMesh(tmp_path, "abcd", network=network, sequence_seconds=75.0) as mesh:
            mesh.start()
            await mesh.until(lambda: mesh.least >= 1, 2000.0)
            struck = mesh.strike(mesh["b"], Fault("loss", seconds=1200.0, amount=0.05))
            fired(struck, "the loss")
            await mesh.until(lambda: mesh.least >= 5, 6000.0)
            mesh.prove()
            assert all(len(note["contributors"]) == 4 for note in mesh["a"].commits())
            assert not [note for peer in mesh for kind, note in peer.notes if kind == "discard"]
            assert TIMING.heartbeat_limit_seconds < 75.0
            mesh.check()

    run_mesh(main())
