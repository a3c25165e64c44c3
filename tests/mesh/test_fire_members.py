"""Members that die in an exchange, fall silent, run out of disk or numbers; joiners under fire. Whole peers, virtual time."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from geomesh_p2p.core.messages import Finished, Heartbeat
from geomesh_p2p.core.types import Held, Plan, Update
from geomesh_p2p.swarm.chunks import Incoming, Outgoing
from geomesh_p2p.swarm.exchange import Exchange
from geomesh_p2p.swarm.memory import MemoryTransport
from geomesh_p2p.swarm.stopwatch import Stopwatch
from geomesh_p2p.swarm.work import Job
from tests.injection.proof import fired
from tests.injection.script import LAST, MIDDLE, At, Fault, Phase, Script
from tests.injection.virtual import TIMING, VirtualMesh, VirtualPeer, long_run, run_mesh

TOPOLOGIES = ("gather", "reduce")
pytestmark = pytest.mark.fault


async def struck(mesh: VirtualMesh, limit_seconds: float = 200.0) -> VirtualPeer:
    """The peer of the script's first strike, once it is done."""
    await mesh.until(lambda: mesh.script.struck or mesh.now > limit_seconds, limit_seconds + 1.0)
    fired(mesh.script.struck, "the script's first fault")
    return mesh[mesh.script.struck[0].moment.site]


# ---------------------------------------------------------------- in the exchange


@pytest.mark.case("C058")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", ["kill", "pause"])
@pytest.mark.parametrize("chunk", [0, 1, MIDDLE, LAST])
def test_a_peer_fails_at_a_chunk_boundary(tmp_path: Path, chunk: int, kind: str, topology: str) -> None:
    """All survivors have the same bits afterwards, with its contribution or without it."""

    async def main() -> None:
        script = Script([(At("member", "exchange", 6, chunk), Fault(kind, seconds=20.0))])  # type: ignore[arg-type]
        async with VirtualMesh(tmp_path, "abcd", script, run=long_run(topology=topology)) as mesh:
            mesh.start()
            victim = await struck(mesh)
            others = [peer for peer in mesh if peer is not victim]
            await mesh.until(lambda: min(peer.round for peer in others) >= 7, 40.0, "the survivors' next two commits")
            same_anchors(mesh, others)
            await mesh.until(lambda: victim.up and victim.round >= mesh.round - 1 and mesh.round > 8, 60.0, "its return")
            await mesh.rounds(2)
            mesh.prove()
            mesh.check()

    run_mesh(main())


def same_anchors(mesh: VirtualMesh, peers: list[VirtualPeer]) -> None:
    """What each recorded of its anchor, by round and part: one hash wherever two have recorded the same part."""
    seen: dict[tuple[int, int], set[bytes]] = {}
    for peer in peers:
        for kind, note in peer.notes:
            if kind == "anchor":
                seen.setdefault((note["round"], note["part"]), set()).add(note["hash"])
    assert seen
    assert all(len(hashes) == 1 for hashes in seen.values())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_flipped_bytes_are_found_by_their_hash_and_asked_for_again(tmp_path: Path, topology: str) -> None:
    async def main() -> None:
        # of a contribution in a gather, of a part in a reduce
        step = 0 if topology == "gather" else LAST
        script = Script([(At("member", "exchange", -5, step), Fault("bad_bytes", amount=1))], times=3)
        async with VirtualMesh(tmp_path, "abcd", script, run=long_run(topology=topology)) as mesh:
            mesh.start()
            await struck(mesh)
            await mesh.until(lambda: mesh.least >= 10, 120.0)
            mesh.prove()
            warned = [event for peer in mesh for event in peer.events if getattr(event, "reason", "") == "refused_bytes"]
            assert warned, "and whose bytes they were is said"
            assert all(len(note["contributors"]) == 4 for note in mesh["a"].commits()[4:]), "nobody is left out for it"
            mesh.check()

    run_mesh(main())


# ---------------------------------------------------------------- silent, but alive


@pytest.mark.case("C046")
@pytest.mark.parametrize(("sequence_seconds", "limit_rounds"), [(0.25, 1), (15.0, 0)])
def test_a_peer_that_says_nothing_for_20_seconds_in_mid_training(
    tmp_path: Path, sequence_seconds: float, limit_rounds: int
) -> None:
    """In a short round it is left out, and is back in the first plan after it is heard; in a long one it is not left out."""

    async def main() -> None:
        script = Script([(At("member", "training", 4, 1), Fault("pause", seconds=20.0))])
        async with VirtualMesh(tmp_path, "abcd", script, sequence_seconds=sequence_seconds) as mesh:
            mesh.start()
            victim = await struck(mesh, 1000.0)
            await mesh.until(victim.life.gate.is_set, 30.0)
            awake = mesh.round
            await mesh.until(lambda: mesh.least >= awake + limit_rounds + 2, 2000.0)
            mesh.prove()
            assert victim.lives == 1
            without = [n["round"] for n in mesh["a"].commits() if victim.name not in [c["site"] for c in n["contributors"]]]
            if limit_rounds == 0:
                assert without == [], "its work is not lost"
            else:
                assert without, "the others did not wait for it"
                notes = mesh["a"].notes
                heard = max(i for i, (kind, note) in enumerate(notes) if kind == "join" and note["peer_site"] == victim.name)
                assert max(without) <= max(note["round"] for kind, note in notes[:heard] if kind == "accept")
            mesh.check()

    run_mesh(main())


@pytest.mark.case("C062")
def test_a_dead_peer_is_listed_by_nobody_after_the_limit(tmp_path: Path) -> None:
    async def main() -> None:
        async with VirtualMesh(tmp_path, "abcd") as mesh:
            mesh.start()
            await mesh.rounds(3)
            fired(mesh.strike(mesh["b"], Fault("kill")), "the kill")
            killed = mesh.now
            others = [peer for peer in mesh if peer.name != "b"]

            def listed_by() -> list[str]:
                newest = [[e for e in peer.events if type(e).__name__ == "MembersChanged"][-1] for peer in others]
                return [peer.name for peer, event in zip(others, newest, strict=True) if "b" in event.sites]

            assert listed_by() == ["a", "c", "d"]
            await mesh.until(lambda: not listed_by(), 30.0)
            assert mesh.now - killed <= TIMING.heartbeat_limit_seconds + 2 * TIMING.heartbeat_seconds
            await mesh.rounds(2)
            lost = next(note["at"] for kind, note in mesh["a"].notes if kind == "lost")
            planned = next(note["round"] for kind, note in mesh["a"].notes if kind == "accept" and note["at"] > lost)
            for note in mesh["a"].commits():
                if note["round"] >= planned:
                    assert mesh["b"].peer not in note["view"], "from the first round planned after the loss on"
            mesh.prove()
            mesh.check()

    run_mesh(main())


# ---------------------------------------------------------------- numbers and disks


@pytest.mark.case("C063")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_weights_that_are_not_finite_at_one_peer(tmp_path: Path, topology: str) -> None:
    """It abstains and says so; the exchange takes place on every peer, nobody waits, and all have the same bits."""

    async def main() -> None:
        script = Script([(At("member", "training", 5, 3), Fault("nan"))])
        async with VirtualMesh(tmp_path, "abcd", script, run=long_run(topology=topology)) as mesh:
            mesh.start()
            victim = await struck(mesh)
            await mesh.until(lambda: mesh.least >= 8)
            mesh.prove()
            round5 = next(note for note in mesh["a"].commits() if note["round"] == 5)
            assert [c["site"] for c in round5["contributors"]] == [peer.name for peer in mesh if peer is not victim]
            assert victim.peer in round5["view"], "it keeps its vote"
            assert [e.text for e in victim.events if getattr(e, "reason", "") == "abstained"]
            times = {note["round"]: note["at"] for note in mesh["a"].commits()}
            assert times[5] - times[4] <= 1.2 * (times[4] - times[3]), "the others do not wait for it"
            same_anchors(mesh, list(mesh))
            mesh.check()

    run_mesh(main())


@pytest.mark.parametrize("phase", ["after_plan", "before_held", "before_commit", "saving"])
@pytest.mark.parametrize("who", ["leader", "member"])
def test_a_peer_whose_disk_is_full(tmp_path: Path, who: str, phase: Phase) -> None:
    """It ends with the code for 'try again' before it promises anything that its disk does not know; the others go on."""

    async def main() -> None:
        script = Script([(At(who, phase, 0 if phase == "saving" else 5), Fault("full_disk", seconds=12.0))])
        async with VirtualMesh(tmp_path, "abcd", script) as mesh:
            mesh.start()
            victim = await struck(mesh)
            await mesh.until(lambda: mesh.now > victim.disk_full_until + 10.0)
            await mesh.until(lambda: victim.up and victim.round >= mesh.round - 1, 60.0, "its return")
            await mesh.rounds(2, 60.0)
            mesh.prove()
            assert all(code == 75 and "free the disk" in reason for code, reason in victim.outcomes)
            assert victim.outcomes or phase == "saving"
            assert all(not peer.outcomes for peer in mesh if peer is not victim)
            mesh.check()

    run_mesh(main())


def test_clocks_that_jump_change_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with VirtualMesh(tmp_path, "abcd") as mesh:
            mesh.start()
            await mesh.rounds(3)
            for name, seconds in (("a", 3600.0), ("b", -3600.0), ("c", 86400.0)):
                fired(mesh.strike(mesh[name], Fault("clock_jump", amount=seconds)), "the jump")
                await asyncio.sleep(1.3)
            await mesh.rounds(5)
            mesh.prove()
            assert not [note for peer in mesh for kind, note in peer.notes if kind in ("discard", "lost")]
            mesh.check()

    run_mesh(main())


# ---------------------------------------------------------------- joiners


@pytest.mark.case("C038")
@pytest.mark.parametrize(
    ("at", "fault"),
    [
        (At("e", "joining", step=0), Fault("slow_donor", seconds=60.0, amount=20.0)),
        (At("e", "joining", step=2), Fault("kill", seconds=3.0)),
        (At("e", "joining", step=1), Fault("cut", seconds=20.0)),
        (At("e", "joining", step=1), Fault("half_open", seconds=20.0)),
        (At("e", "joining", step=0), Fault("reset")),
        (At("e", "joining", step=1), Fault("helper_killed", seconds=5.0)),
        (At("e", "joining", step=1), Fault("full_disk", seconds=5.0)),
        (At("leader", "saving"), Fault("kill", seconds=5.0)),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else value.who,
)
@pytest.mark.parametrize("by_snapshot", [False, True])
def test_a_joiner_under_fire(tmp_path: Path, at: At, fault: Fault, by_snapshot: bool) -> None:
    async def main() -> None:
        run = long_run()
        if by_snapshot:
            run = run.model_copy(update={"save": run.save.model_copy(update={"snapshot_every_rounds": 5, "keep_updates": 3})})
        async with VirtualMesh(tmp_path, "abcde", Script([]), run=run) as mesh:
            mesh.start("a", "b", "c", "d")
            await mesh.until(lambda: mesh.least >= 13)
            mesh.script.rows = [(at, fault)]
            mesh.start("e")
            await struck(mesh)
            joiner = mesh["e"]
            await mesh.until(lambda: joiner.up and joiner.peer in mesh["b"].commits()[-1]["view"], 120.0, "the joiner's vote")
            await mesh.rounds(3)
            mesh.prove()
            if fault.kind == "slow_donor":
                assert bool([note for kind, note in joiner.notes if kind == "adopt"]) == by_snapshot
            same_anchors(mesh, list(mesh))
            mesh.check()

    run_mesh(main())


# ---------------------------------------------------------------- what is left behind

COUNTED = (
    asyncio.Task, Exchange, Incoming, Outgoing, Plan, Update, Held, Stopwatch, Job, Finished, Heartbeat, MemoryTransport,
    np.ndarray,
)  # fmt: skip


def left_over(mesh: VirtualMesh) -> Counter[str]:
    """Objects of these kinds that are reachable now, and lengths of what could grow."""
    for peer in mesh:
        peer.events.clear()
        peer.notes.clear()
        peer.lines.clear()
    gc.collect()
    counts = Counter(type(item).__name__ for item in gc.get_objects() if isinstance(item, COUNTED))
    for peer in mesh:
        session = peer.session
        assert session is not None
        member = peer.replica.member
        for name, size in {
            "events": session._events.qsize(),
            "bodies": len(session.desk._bodies),
            "inbox": session.desk._inbox.bytes,
            "early": len(member.early),
            "tasks": len(session._tasks),
            "watches": len(session.book._watches),
            "pending": len(peer.transport._pending),
        }.items():
            counts[name] += size
    return counts


@pytest.mark.case("C097")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_half_of_all_exchanges_fail_and_nothing_is_left_of_them(tmp_path: Path, topology: str) -> None:
    async def main() -> None:
        async with VirtualMesh(tmp_path, "abcd", Script([]), run=long_run(topology=topology)) as mesh:
            mesh.start()
            await mesh.rounds(2)
            failed, levels = 0, []
            for half in range(3):
                for number in range(8):
                    victim = "bcd"[number % 3]
                    row = (At(victim, "exchange", -mesh.round, 0), Fault("cut", seconds=4.5))
                    mesh.script.rows = [*mesh.script.rows, row]
                    before = mesh.round
                    await mesh.until(lambda before=before: mesh.round >= before + 2, 60.0)  # type: ignore[misc]
                    if half == 0 and number == 0:
                        fired(mesh.script.struck, "the first cut")
                await mesh.until(lambda: mesh.least == mesh.round, 60.0)
                discards = {note["plan"] for peer in mesh for kind, note in peer.notes if kind == "discard"}
                failed += len(discards)
                await mesh.until(lambda: all(peer.up and peer.replica.phase == "training" for peer in mesh), 60.0)
                levels.append(left_over(mesh))
            mesh.prove()
            assert failed >= 20, failed
            first, last = levels[0], levels[-1]
            grown = {name: (first[name], last[name]) for name in last if last[name] > first[name] + max(4, first[name] // 10)}
            assert not grown, grown

    run_mesh(main())
