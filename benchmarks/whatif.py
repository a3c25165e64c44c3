"""How long `geomesh plan --what-if` takes: `python benchmarks/whatif.py [--sites 4 16 64 256]` prints JSON.

Each case is the whole command in a process of its own, under a generated setting: unequal sites spread over the 14 regions of
settings/azure_rtt_ms.csv. `seconds` is the wall time of the best of a few tries, `processor_seconds` what that one computed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from geomesh_p2p.lab.bench.settings import SHIPPED

ROOT = Path(__file__).parent.parent
MATRIX = "azure_rtt_ms.csv"


def generated(folder: Path, sites: int) -> Path:
    shutil.copy(SHIPPED / MATRIX, folder)
    regions = (folder / MATRIX).read_text().splitlines()[0].split(",")[1:]
    draw = random.Random(sites)
    lines = [
        'about = "generated: unequal sites in 14 regions"',
        f"reference_round_sequences = {sites * 128}",
        "stands_for_parameters = 300e6",
        "egress_usd_per_gb = 0.05",
    ]
    for k in range(sites):
        each = 0.005 * draw.uniform(1, 6)
        lines += [
            "[[sites]]",
            f'name = "site-{k:03}"',
            f'region = "{regions[k % len(regions)]}"',
            'device = "generated"',
            f"fixed_seconds = {each / 2:.6f}",
            f"sequence_seconds = {each:.6f}",
            f"max_batch = {draw.randrange(8, 64)}",
        ]
    links = ["[links]", f'rtt_ms_file = "{MATRIX}"', "most_mbps = 1020", "mbit_per_round_trip = 75", "jitter_share = 0.1"]
    path = folder / f"sites{sites}.toml"
    path.write_text("\n".join([*lines, *links]) + "\n")
    return path


def measure(sites: int, tries: int) -> dict[str, float | int]:
    with tempfile.TemporaryDirectory() as folder:
        setting = generated(Path(folder), sites)
        run = ["plan", str(ROOT / "configs/llama-300m.toml"), "--what-if", str(setting), "--parameters", "300000000", "--json"]
        run += ["--planner.round_tokens", str(sites * 128 * 1024)]
        found = []
        for _ in range(tries):
            begun, spent = time.perf_counter(), os.times()
            ended = subprocess.run([sys.executable, "-m", "geomesh_p2p.cli", *run], check=True, capture_output=True, cwd=ROOT)
            wall, now = time.perf_counter() - begun, os.times()
            computed = now.children_user + now.children_system - spent.children_user - spent.children_system
            found.append((wall, computed))
        seconds, computed = min(found)
        plan = json.loads(ended.stdout)["plan"]
        return {
            "sites": sites,
            "members": len(plan["members"]),
            "seconds": round(seconds, 3),
            "processor_seconds": round(computed, 3),
            "straggler_idle_share": plan["straggler_idle_share"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--tries", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps({"what_if": [measure(sites, arguments.tries) for sites in arguments.sites]}, indent=2))


if __name__ == "__main__":
    main()
