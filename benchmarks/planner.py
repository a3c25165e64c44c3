"""How long the planner takes: `python benchmarks/planner.py [--sites 4 16 64 256]` prints JSON.

Sites of random speed, memory and links plan a first round, then the next one from live figures. `seconds` are of
processor time, the best of a few tries; `ratio_to_first` compares with the smallest mesh of the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace

from geomesh_p2p.config import InnerSection, PlannerSection
from geomesh_p2p.core.forecast import Volume
from geomesh_p2p.core.plan import PlanInputs, Sites, Slot, WorkLeft, plan_round
from geomesh_p2p.core.types import BatchTime, Link, Profile, Range, StepReport, Term

PARAMETERS = 150_000_000
SEQUENCE_LENGTH = 1024
SEQUENCES_A_SITE = 512


def random_mesh(sites: int, seed: int) -> PlanInputs:
    draw = random.Random(seed)
    profiles = []
    for k in range(sites):
        each, fixed, largest = 0.02 * draw.uniform(1, 5), 0.05, draw.randrange(8, 256)
        curve = tuple(BatchTime(b, fixed + b * each) for b in (1, 2, 4, largest))
        profiles.append(Profile(f"peer-{k:03}", f"site-{k:03}", "emulated", curve))
    links = tuple(
        Link(a.peer, b.peer, draw.uniform(0.005, 0.2), draw.uniform(20e6, 120e6))
        for a in profiles
        for b in profiles
        if a is not b
    )
    return PlanInputs(
        Slot(b"run", 1, Term(1, "peer-000"), 1, b"base"),
        Sites(tuple(profiles), links, view=tuple(profile.peer for profile in profiles)),
        WorkLeft(Volume(PARAMETERS, PARAMETERS // 8, PARAMETERS // 8), SEQUENCE_LENGTH, (Range(0, 2**62),)),
    )


def measure(sites: int, tries: int) -> dict[str, float | int]:
    settings = PlannerSection(round_tokens=SEQUENCES_A_SITE * SEQUENCE_LENGTH * sites)
    inner = InnerSection()
    inputs = random_mesh(sites, seed=sites)
    first, following = [], []
    for _ in range(tries):
        begun = time.process_time()
        plan = plan_round(inputs, settings, inner)
        first.append(time.process_time() - begun)
        draw = random.Random(1)
        reports = tuple(
            StepReport(a.peer, a.batch, draw.uniform(0.9, 1.2) * a.finish_seconds / a.inner_steps) for a in plan.members
        )
        live = replace(inputs, sites=replace(inputs.sites, reports=reports), previous=plan)
        begun = time.process_time()
        plan_round(live, settings, inner)
        following.append(time.process_time() - begun)
    idle = sum(plan.train_seconds - a.finish_seconds for a in plan.members) / (plan.train_seconds * len(plan.members))
    return {
        "sites": sites,
        "members": len(plan.members),
        "seconds": min(first),
        "seconds_following": min(following),
        "predicted_idle_share": idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--tries", type=int, default=3)
    arguments = parser.parse_args()
    measure(2, 1)  # imports the solver
    rows = [measure(sites, arguments.tries) for sites in arguments.sites]
    for row in rows:
        row["ratio_to_first"] = row["seconds"] / rows[0]["seconds"]
    print(json.dumps({"planner": rows}, indent=2))


if __name__ == "__main__":
    main()
