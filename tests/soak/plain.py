"""Thousands of rounds with peers that come and go, and nothing else: does anything grow?

Three peers stay for good and are measured. Newcomers, each a site of its own that was never there before, join one after the
other, take part in some rounds, and leave in good order or are killed.
"""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from geomesh_p2p.lab.verify import main as verify
from tests.injection.process import TELL_SIZES, kill
from tests.process.sites import LIGHT, Site, Sites, complaints, until
from tests.soak.measure import Slope, growing, keep_logs, sample, slope

STAY = ("a", "b", "c")
SAMPLE_EVERY_ROUNDS = 20
WARM_UP_SECONDS = 400.0   # more than anything is kept of who is gone, so that from there on as many come as are forgotten
LEAST_SAMPLES = 20
CHANGE_SECONDS = (1.0, 4.0)   # from one coming or going to the next
LIMIT_SECONDS = 120.0     # net.reach_seconds and an election: nothing here may take longer


@dataclass
class Outcome:
    rounds: int = 0
    joins: int = 0
    leaves: int = 0
    kills: int = 0
    slopes: list[Slope] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run(folder: Path, rounds: int, seed: int) -> Outcome:
    rng, outcome = random.Random(seed), Outcome()
    mesh = Sites(folder, list(STAY), rounds=10**8, command=LIGHT)
    mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.05", "LIGHT_PARAMETERS": "20000", TELL_SIZES: "1"}
    stayers = list(mesh.sites)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    try:
        mesh.start()
        mesh.together()
        guests, number, next_sample, next_change = list[Site](), 0, 0, 0.0
        warm_at = time.monotonic() + WARM_UP_SECONDS
        while (round := min(site.round for site in stayers)) < rounds:
            if round >= next_sample:
                next_sample = round + SAMPLE_EVERY_ROUNDS
                if round % (10 * SAMPLE_EVERY_ROUNDS) < SAMPLE_EVERY_ROUNDS:
                    counts = f"{outcome.joins} joins, {outcome.leaves} leaves, {outcome.kills} kills"
                    print(f"   round {round}: {counts}", flush=True)
                for site in stayers if time.monotonic() >= warm_at else ():
                    for key, value in sample(site).items():
                        points[f"{site.name} {key}"].append((round, value))
            # By the clock: what is remembered for minutes would grow with the pace of the rounds, if guests came with them.
            if time.monotonic() >= next_change:
                next_change = time.monotonic() + rng.uniform(*CHANGE_SECONDS)
                if len(guests) < 2 and (not guests or rng.random() < 0.6):
                    number += 1
                    guests.append(join(mesh, f"guest-{number:04}"))
                    outcome.joins += 1
                elif guests:
                    guest = guests.pop(rng.randrange(len(guests)))
                    outcome.wrong += leave(mesh, guest, stayers, in_good_order=rng.random() < 0.5)
                    outcome.leaves += guest.process is not None
                    outcome.kills += guest.process is None
            goal = min(next_sample, round + 1)
            until(lambda: min(site.round for site in stayers) >= goal, f"round {goal}", LIMIT_SECONDS)  # noqa: B023
        for site in stayers:
            if not site.alive or len(site.history("start")) != 1:
                outcome.wrong.append(f"{site.name} did not stay")
        mesh.terminate()
        for site in mesh:
            if site.process is not None and (code := site.process.wait(LIMIT_SECONDS)) != 0:
                outcome.wrong.append(f"{site.name} ended with {code}")
    except AssertionError as error:
        outcome.wrong.append(str(error))
    finally:
        mesh.stop()
    outcome.rounds = min(site.round for site in stayers)
    outcome.wrong += complaints(mesh)
    if verify([str(mesh.folder / "runs" / "tiny")]) != 0:
        outcome.wrong.append("the checker found violations")
    outcome.slopes = [slope(name, series) for name, series in sorted(points.items()) if "round" not in name]
    if max(map(len, points.values()), default=0) < LEAST_SAMPLES:
        outcome.wrong.append(f"over before enough was measured, which begins after {WARM_UP_SECONDS:g} s: ask for more rounds")
    outcome.wrong += [f"grows: {one}" for one in growing(outcome.slopes)]
    if outcome.wrong:
        keep_logs(mesh)
    return outcome


def join(mesh: Sites, name: str) -> Site:
    """A newcomer, once it has contributed to a committed round."""
    guest = mesh.add(name)
    guest.start()
    stayer = mesh.sites[0]

    def contributed() -> bool:
        return any(name == c["site"] for note in stayer.history("commit")[-5:] for c in note["contributors"])

    until(contributed, f"{name} to contribute", LIMIT_SECONDS)
    return guest


def leave(mesh: Sites, guest: Site, stayers: list[Site], in_good_order: bool) -> list[str]:
    """What was wrong with its going."""
    assert guest.process is not None
    if in_good_order:
        guest.process.terminate()
        code, wanted = guest.process.wait(LIMIT_SECONDS), 0
    else:
        code, wanted = kill(guest), -signal.SIGKILL

    def out() -> bool:
        return all(guest.peer not in site.history("commit")[-1]["view"] for site in stayers)

    until(out, f"{guest.name} to be out", LIMIT_SECONDS)
    guest.address_file.unlink(missing_ok=True)
    return [] if code == wanted else [f"{guest.name} ended with {code}, not {wanted}"]
