"""Random fault schedules over whole peers in virtual time, exchange included; their histories go to the independent checker.

    python -m tests.mesh.fire --schedules 200 --seed 0 [--faults 3] [--processes 2] [--overlap]

One schedule is one seed: a mesh of three to five peers, a topology, links, and a table of faults by (peer or role, phase,
round), with others at any moment. A joiner may come and a peer may leave meanwhile. Then everything is mended, and the run
must go on with everybody who is there. A schedule in which fewer than --faults had an effect is drawn again, from its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from geomesh_p2p.swarm.memory import Network
from tests.injection.proof import injecting
from tests.injection.script import KINDS, LAST, MIDDLE, PHASES, At, Fault, Kind, Script
from tests.injection.virtual import VirtualMesh, long_run, run_mesh

MOST_DRAWS = 20
HEALED_SECONDS = 240.0       # within which the run must have gone on
ANY_KIND = tuple(kind for kind in KINDS if kind not in ("nan", "bad_bytes"))    # at any moment
ROLES = ("leader", "member", "anyone")


def draw_fault(r: random.Random, kind: Kind) -> Fault:
    seconds = r.choice((0.5, 2.0, 6.0, 15.0))
    amount = {
        "slow": r.choice((500.0, 2000.0, 20_000.0)),
        "loss": r.choice((0.1, 0.3, 0.6)),
        "reset": r.choice((0.0, 200.0, 2000.0)),
        "clock_jump": r.choice((-3600.0, 60.0, 86400.0)),
        "bad_bytes": float(r.choice((1, 2, 5))),
        "slow_donor": r.choice((2.0, 10.0, 20.0)),
    }.get(kind, 0.0)
    if kind == "kill" and r.random() < 0.2:
        seconds = 0.0
    return Fault(kind, seconds, amount)


def draw_row(r: random.Random, names: str) -> tuple[At, Fault]:
    kind: Any = r.choice(KINDS)
    phase: Any = r.choice(PHASES[:8] if r.random() < 0.85 else PHASES)
    if kind == "bad_bytes":
        phase = "exchange"
    elif kind == "nan":
        phase = "training"
    elif kind == "slow_donor":
        phase = r.choice(("joining", "catching_up"))
    step = None
    if phase == "exchange":
        step = r.choice((0, 1, MIDDLE, LAST))
    elif phase == "in_commit":
        step = r.choice((1, 1, 2, 3))
    who = r.choice((*ROLES, *names))
    return At(who, phase, -r.randint(1, 12), step), draw_fault(r, kind)


async def schedule(folder: Path, seed: int, draw: int, overlap: bool = False) -> tuple[list[str], Counter[str]]:
    """What was violated, and which faults had an effect."""
    r = random.Random(f"fire/{seed}/{draw}")
    names = "abcde"[: r.choice((3, 3, 4, 4, 5))]
    later = names[-1] if len(names) > 3 and r.random() < 0.5 else ""
    network = Network(seed, latency_seconds=r.choice((0.005, 0.05, 0.3)))
    network.defaults = replace(network.defaults, jitter_seconds=r.choice((0.0, 0.004)))
    planner = {"mode": "planned", "round_tokens": 16 * 8 * len(names)} if r.random() < 0.3 else {}
    if overlap:
        planner = {"mode": "planned", "round_tokens": 16 * 8 * len(names), "overlap": "delayed"}
    run = long_run(topology=r.choice(("gather", "reduce")), min_peers=r.choice((1, 2)), **planner)
    saves = {"snapshot_every_rounds": r.choice((2, 10)), "keep_updates": r.choice((2, 50))}
    codec = run.codec.model_copy(update={"residual": r.random() < 0.5})
    run = run.model_copy(update={"save": run.save.model_copy(update=saves), "codec": codec})
    script = Script([draw_row(r, names) for _ in range(r.randint(4, 9))])
    async with VirtualMesh(folder, names, script, network, run, seed) as mesh:
        mesh.start(*(name for name in names if name != later))
        end = r.choice((30.0, 45.0, 60.0))
        for _ in range(r.randint(1, 4)):
            kind: Any = r.choice(ANY_KIND)
            mesh.later(r.uniform(3.0, end), strike, mesh, r.choice((*ROLES, *names)), draw_fault(r, kind))
        if later:
            mesh.later(r.uniform(5.0, end), mesh.start, later)
        if len(names) == 5 and r.random() < 0.4:
            mesh.later(r.uniform(5.0, end), leave, mesh, r.choice(names[1:4]))
        found: list[str] = []
        try:
            await mesh.until(lambda: mesh.now >= end, end + 1.0)
            mesh.count()
            script.rows = []
            mesh.mend_all()
            await mesh.until(lambda: gone_on(mesh), HEALED_SECONDS, "the run to go on with all who are there")
        except AssertionError as error:
            found.append(str(error))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        found += mesh.violations()
        counts = Counter(script.counts)
        counts["rounds"] = mesh.round
        counts["steps ahead"] = sum(peer.lives and peer.model.engine.ahead for peer in mesh)
        return found, counts


def strike(mesh: VirtualMesh, who: str, fault: Fault) -> None:
    up = [peer for peer in mesh if peer.up]
    fits = [peer for peer in up if who in (peer.name, "leader" if peer.leads else "member", "anyone")]
    if fits:
        mesh.strike(mesh.random.choice(fits), fault)


def leave(mesh: VirtualMesh, name: str) -> None:
    if mesh[name].up:
        mesh[name].session.leave("asked to")  # type: ignore[union-attr]


def gone_on(mesh: VirtualMesh) -> bool:
    """Three rounds in a row with the votes of everybody who has not left."""
    there = [peer for peer in mesh if peer.lives and not peer.left]
    if not all(peer.up for peer in there):
        return False
    newest = max(there, key=lambda peer: peer.round).commits()[-3:]
    everybody = {peer.peer for peer in there}
    return len(newest) == 3 and all(everybody <= set(note["view"]) for note in newest) and newest[0]["at"] > mesh.mended_at


def play(seed: int, faults: int = 3, overlap: bool = False) -> tuple[list[str], Counter[str]]:
    """One schedule: violations (none if sound), and counts by kind."""
    for draw in range(MOST_DRAWS):
        with tempfile.TemporaryDirectory() as folder:
            found, counts = run_mesh(schedule(Path(folder), seed, draw, overlap))
        fired = counts.total() - counts["rounds"] - counts["steps ahead"]
        if found or fired >= faults or not injecting():
            break
    counts["faults"], counts["draws"] = fired, draw + 1
    label = f"seed {seed}" + (f" draw {draw}" if draw else "")
    return [f"{label}: {text}" for text in found], counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=3, help="as many at least must have an effect in each schedule")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--overlap", action="store_true", help="peers begin the next round while an update is on its way")
    arguments = parser.parse_args()
    totals: Counter[str] = Counter()
    bad, started = 0, time.perf_counter()
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    with ProcessPoolExecutor(arguments.processes) as pool:
        each = ([value] * len(seeds) for value in (arguments.faults, arguments.overlap))
        for found, counts in pool.map(play, seeds, *each, chunksize=1):
            totals += counts
            bad += bool(found)
            for text in found:
                print(text, flush=True)
    seconds = time.perf_counter() - started
    named = f"seeds {seeds.start} to {seeds.stop - 1}"
    print(f"{len(seeds)} schedules of whole peers ({named}), {bad} with violations, {seconds:.0f} s")
    for kind, count in sorted(totals.items()):
        print(f"  {kind:<16} {count}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
