"""How long an exchange takes over the emulated links of a setting, and how that compares with bytes / rate + hops x round trip.

    python benchmarks/exchange_wan.py [--setting azure4] [--parameters 8000000] [--topologies gather,reduce,auto] [--rounds 12]

Real peers (processes, libp2p) of `benchmarks/light_peer.py`; links are emulated in the transport with the setting's round
trips and rates. All finish their training at the same time, so nothing of an exchange is hidden behind a straggler. A round's
exchange is the product's own figure, from the last member's finish until the update is folded, encoding included, at the peer
where it took longest: votes and commit are in it. The limit has one hop for a gather and two for a reduce, of whole round trips
(bytes need half of one); each hop takes as long as its worst pair. Rounds count from --from-round on. Prints JSON.

held_ratio   from the last member's contribution (encoding is over by then) until every member has all bytes, checked and on
             disk, by the same limit; of the held_rounds in which no commit came before that
leader       the site that commits, and that of the lowest peer id: of four voters two are enough for a commit if one of them
tie_breaker  is that of the lowest id, else it takes three. So a third vote is waited for unless the tie breaker is the leader
             or the site nearest to it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from geomesh_p2p.jsonlines import read_lines
from geomesh_p2p.lab.bench.settings import Setting, load_setting
from geomesh_p2p.lab.mesh import run_mesh
from geomesh_p2p.loading import load_run, load_sites

LIGHT = (sys.executable, str(Path(__file__).with_name("light_peer.py")))
SEQUENCE, SEQUENCES = 128, 8  # tokens of one, and how many a round for each member

RUN = """
[run]
id = "wan"
folder = "{folder}/runs"
rounds = {rounds}
min_peers = {members}
[model]
sequence_length = {sequence}
[planner]
round_tokens = {round_tokens}
topology = "{topology}"
[save]
snapshot_every_rounds = 1000
"""


def limit_seconds(plan: Mapping[str, Any], parameters: int, rates: Mapping[tuple[str, str], float],
                  rtts: Mapping[tuple[str, str], float]) -> float:  # fmt: skip
    """bytes / rate + round trip of each hop's worst pair; one bit a parameter, two of an answer.

    Rates in bytes/s by (from, to), site by site."""
    sites = [member["site"] for member in plan["members"]]
    pairs = [(a, b) for a in sites for b in sites if a != b]
    if plan["topology"] == "gather":
        return max(parameters / 8 / rates[pair] + rtts[pair] for pair in pairs)
    share = {site: (stop - start) / 8 for site, (start, stop) in zip(sites, plan["shares"], strict=True)}
    inward = max(share[b] / rates[a, b] + rtts[a, b] for a, b in pairs if share[b])
    return inward + max(2 * share[a] / rates[a, b] + rtts[a, b] for a, b in pairs if share[a])


def rounds_of(folder: Path, sites: Sequence[str]) -> list[dict[str, Any]]:
    """Committed rounds with their plan, each peer's seconds from the last finish to the fold, and the seconds from the last
    contribution until all hold the update (None where a commit was quicker than that, or an attempt was given up)."""
    plans: dict[int, dict[str, Any]] = {}
    told: dict[int, dict[str, dict[str, Any]]] = {}
    contributed: dict[int, dict[str, float]] = {}
    held: dict[int, dict[str, float]] = {}
    for site in sites:
        for line in read_lines(folder / site / "metrics.jsonl"):
            event = json.loads(line)
            if event["kind"] == "plan":
                plans[event["plan"]["round"]] = event["plan"]
            elif event["kind"] == "phase" and event["phase"] in ("straggler_idle", "exchange", "commit"):
                number = event["round"] + 1  # a phase is told with the last committed round
                contributed.setdefault(number, {}).setdefault(site, event["time"])
                if event["phase"] == "commit":
                    held.setdefault(number, {}).setdefault(site, event["time"])
            elif event["kind"] == "round" and event["contributors"]:
                told.setdefault(event["round"], {})[site] = event
    found = []
    for number, events in sorted(told.items()):
        if len(events) == len(sites) and all(len(event["members"]) == len(sites) for event in events.values()):
            seconds = {site: event["times"]["wan_idle"] + event["times"]["codec"] for site, event in events.items()}
            event = events[sites[0]]
            all_hold = event["attempt"] == 1 and held.get(number, {}).keys() == set(sites)
            held_seconds = max(held[number].values()) - max(contributed[number].values()) if all_hold else None
            found.append({
                "round": number, "plan": plans[number], "attempt": event["attempt"], "leader": event["leader"],
                "seconds": seconds, "held": held_seconds,
            })  # fmt: skip
    return found


def run_once(setting: Setting, topology: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    names = setting.names
    rates = {(a, b): float(setting.rates[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)}
    rtts = {(a, b): float(setting.rtts[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)}
    folder.mkdir(parents=True)
    run_file = folder / "run.toml"
    round_tokens = SEQUENCE * SEQUENCES * len(names)
    run_file.write_text(RUN.format(folder=folder, rounds=options.rounds, members=len(names), sequence=SEQUENCE,
                                   round_tokens=round_tokens, topology=topology))  # fmt: skip
    (folder / "sites").mkdir()
    for a in names:
        links = "".join(
            f"[links.{b}]\nrtt_ms = {1000 * rtts[a, b]}\nmbps = {rates[a, b] * 8 / 1e6}\n" for b in names if b != a
        )
        (folder / "sites" / f"{a}.toml").write_text(f'[site]\nname = "{a}"\n{links}')
    os.environ |= {
        "LIGHT_PARAMETERS": str(options.parameters), "LIGHT_SEQUENCE_SECONDS": str(options.train_seconds / SEQUENCES),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with redirect_stdout(sys.stderr):
        code = run_mesh(run_file, load_run(run_file), load_sites(folder / "sites"), {}, geomesh=LIGHT)
    if code != 0:
        raise SystemExit(f"the mesh ended with {code}: see the peers' logs in {folder}")
    rounds = [one for one in rounds_of(folder / "runs" / "wan", names) if one["round"] >= options.from_round]
    if not rounds:
        raise SystemExit(f"no round from {options.from_round} on was committed by all: see the peers' logs in {folder}")
    return figures(rounds, options.parameters, rates, rtts)


def figures(rounds: Sequence[Mapping[str, Any]], parameters: int, rates: Mapping[tuple[str, str], float],
            rtts: Mapping[tuple[str, str], float]) -> dict[str, Any]:  # fmt: skip
    seconds = [max(one["seconds"].values()) for one in rounds]
    limits = [limit_seconds(one["plan"], parameters, rates, rtts) for one in rounds]
    ratios = [taken / limit for taken, limit in zip(seconds, limits, strict=True)]
    held = [one["held"] / limit for one, limit in zip(rounds, limits, strict=True) if one["held"] is not None]
    return {
        "topologies": sorted({one["plan"]["topology"] for one in rounds}),
        "rounds": len(rounds),
        "leader": rounds[0]["leader"],
        "tie_breaker": min(rounds[0]["plan"]["members"], key=lambda member: str(member["peer"]))["site"],
        "exchange_seconds_median": round(statistics.median(seconds), 4),
        "exchange_seconds_worst": round(max(seconds), 4),
        "limit_seconds": round(statistics.median(limits), 4),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_worst": round(max(ratios), 3),
        "held_ratio_median": round(statistics.median(held), 3) if held else None,
        "held_rounds": len(held),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "attempts_given_up": sum(one["attempt"] > 1 for one in rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", default="azure4")
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--topologies", default="gather,reduce,auto")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--from-round", type=int, default=3)
    parser.add_argument("--train-seconds", type=float, default=2.0)
    parser.add_argument("--folder", default="", help="keep the peers' files here")
    options = parser.parse_args()
    setting = load_setting(options.setting)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        found = {
            topology: run_once(setting, topology, options, folder / topology) for topology in options.topologies.split(",")
        }
    print(json.dumps({"setting": setting.name, "parameters": options.parameters, **found}, indent=2))


if __name__ == "__main__":
    main()
