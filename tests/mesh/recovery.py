"""How long the others need to their next commit after a kill, in virtual time: by phase of the round, role and topology; and
how many rounds after a partition of 60 s until all show one digest.

    python -m tests.mesh.recovery [--seeds 3]

Seconds are virtual, so the figures are those of the protocol alone: heartbeat 1 s, heartbeat limit 5 s, rounds of about 2 s.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from geomesh_p2p.swarm.memory import Network
from tests.injection.proof import fired, inject
from tests.injection.script import MIDDLE, At, Fault, Phase, Script
from tests.injection.virtual import TIMING, VirtualMesh, long_run, run_mesh

KILLED_IN = 6                # round
DEATHS: dict[str, tuple[Phase, int | None]] = {
    "before plan": ("before_plan", None),
    "after plan": ("after_plan", None),
    "training": ("training", 2),
    "first chunk": ("exchange", 0),
    "mid exchange": ("exchange", MIDDLE),
    "before held": ("before_held", None),
    "before commit": ("before_commit", None),
    "in commit": ("in_commit", 1),
}
LEADER_ONLY = ("before plan", "in commit")


@dataclass(frozen=True)
class Recovery:
    """From the kill until all survivors have committed the round that was going on. `rounds` in rounds of this mesh."""

    seconds: float
    heartbeats: float
    rounds: float
    discarded: int


async def kill_and_go_on(folder: Path, death: str, role: str, topology: str, seed: int = 0, count: int = 4) -> Recovery:
    """Kills the leader or a member of `count` peers once, and takes the time. The victim comes back and takes part again.
    Raises AssertionError if anything is wrong at the end."""
    phase, step = DEATHS[death]
    script = Script([(At(role, phase, KILLED_IN, step), Fault("kill", seconds=25.0))])
    network = Network(seed, latency_seconds=0.02 + 0.03 * seed)
    run = long_run(topology=topology)
    async with VirtualMesh(folder, "abcdef"[:count], script, network, run, seed) as mesh:
        mesh.start()
        await mesh.until(lambda: script.struck or mesh.least > KILLED_IN, what="the kill")
        fired(script.struck, f"kill of the {role} {death}")
        mesh.prove()
        at, victim = mesh.now, mesh[script.struck[0].moment.site]
        survivors = [peer for peer in mesh if peer is not victim]
        times = [note["at"] for note in survivors[0].commits() if note["round"] < KILLED_IN]
        usual = statistics.median(later - earlier for earlier, later in pairwise(times))
        await mesh.until(lambda: min(peer.round for peer in survivors) >= KILLED_IN, what="the survivors' next commit")
        seconds = mesh.now - at
        await mesh.until(lambda: victim.lives > 1, what="its return")
        await mesh.until(lambda: victim.up and victim.round >= max(p.round for p in survivors) - 1, what="its catching up")
        back = mesh.round
        await mesh.until(lambda: victim.peer in survivors[0].commits()[-1]["view"], 60.0, "its vote")
        assert mesh.round <= back + 3, "it comes into the next plans"
        await mesh.rounds(2)
        discards = {note["plan"] for peer in survivors for kind, note in peer.notes if kind == "discard"}
        mesh.check()
    return Recovery(seconds, seconds / TIMING.heartbeat_seconds, seconds / usual, len(discards))


@dataclass(frozen=True)
class Healed:
    """From the heal of a partition until all peers show one newer digest."""

    rounds: int
    seconds: float


async def split_and_heal(folder: Path, names: str, side: str, topology: str, seed: int = 0) -> Healed:
    """Cuts `side` off from the others for 60 s. Raises AssertionError unless the side with a quorum goes on alone, the other
    says for whom it waits, and all vote again after the heal."""
    network = Network(seed, latency_seconds=0.02 + 0.03 * seed)
    async with VirtualMesh(folder, names, network=network, run=long_run(topology=topology), seed=seed) as mesh:
        mesh.start()
        await mesh.rounds(4)
        await mesh.sleep(0.7 + 0.9 * seed)                # somewhere in a round
        inject(lambda: split(mesh, side))
        other = "".join(name for name in names if name not in side)
        side_wins = 2 * len(side) > len(names) or (2 * len(side) == len(names) and "a" in side)
        wins, loses = (side, other) if side_wins else (other, side)
        at_split = mesh.round
        await mesh.sleep(15.0)
        fired(sum(mesh.network.effect("cut", peer.peer) for peer in mesh), "the split")
        stuck = {mesh[name].round for name in loses}
        await mesh.sleep(45.0)
        assert {mesh[name].round for name in loses} == stuck, "the smaller side commits nothing"
        assert min(mesh[name].round for name in wins) >= at_split + 10, "the larger side goes on"
        assert all("voters not heard" in mesh[name].replica.waiting_for for name in loses), "and says for whom it waits"
        inject(mesh.network.heal)
        healed, at = mesh.round, mesh.now
        await mesh.until(lambda: one_digest(mesh) and mesh.least > healed, 60.0, "one digest again")
        found = Healed(mesh.round - healed, mesh.now - at)
        await mesh.until(lambda: set(mesh["a"].commits()[-1]["view"]) == set(mesh.ids), 60.0, "all of them voting again")
        mesh.check()
    return found


def split(mesh: VirtualMesh, side: str) -> None:
    for a in mesh:
        for b in mesh:
            if a.name in side and b.name not in side:
                mesh.network.cut(a.peer, b.peer)


def one_digest(mesh: VirtualMesh) -> bool:
    newest = {(peer.replica.round, peer.replica.digest) for peer in mesh}
    return len(newest) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    everything: dict[str, list[Recovery]] = {}
    print("role    death          topology  heartbeats  rounds  attempts given up  (medians and worst of seeds)")
    for role in ("leader", "member"):
        for death in DEATHS:
            if role == "member" and death in LEADER_ONLY:
                continue
            for topology in ("gather", "reduce"):
                found = []
                for seed in range(seeds):
                    with tempfile.TemporaryDirectory() as folder:
                        found.append(run_mesh(kill_and_go_on(Path(folder), death, role, topology, seed)))
                everything.setdefault(role, []).extend(found)
                beats, rounds = [r.heartbeats for r in found], [r.rounds for r in found]
                print(
                    f"{role:7} {death:14} {topology:8}  {statistics.median(beats):4.1f} {max(beats):5.1f}  "
                    f"{statistics.median(rounds):4.1f} {max(rounds):4.1f}  {max(r.discarded for r in found)}",
                    flush=True,
                )
    for role, found in everything.items():
        beats, rounds = [r.heartbeats for r in found], [r.rounds for r in found]
        print(
            f"{role}: {len(found)} kills; to the next commit median {statistics.median(beats):.1f} heartbeats "
            f"({statistics.median(rounds):.1f} rounds), worst {max(beats):.1f} heartbeats ({max(rounds):.1f} rounds)"
        )
    print("partition of 60 s: rounds (seconds) from the heal until all show one digest")
    for names, side in (("abcd", "ab"), ("abcd", "bcd"), ("abcde", "ab"), ("abcde", "abc")):
        for topology in ("gather", "reduce"):
            healed = []
            for seed in range(seeds):
                with tempfile.TemporaryDirectory() as folder:
                    healed.append(run_mesh(split_and_heal(Path(folder), names, side, topology, seed)))
            figures = ", ".join(f"{h.rounds} ({h.seconds:.1f})" for h in healed)
            print(f"{side:3} of {names:5} {topology:8}  {figures}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
