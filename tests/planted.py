"""Plants one violation of each invariant into copies of a run's recorded histories, and has them checked.

    python -m tests.planted RUN_FOLDER      # exit 0 if the folder is sound and every planted violation is named
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geomesh_p2p.lab.verify import main as verify

Lines = dict[str, list[dict[str, Any]]]  # by site


def of_kind(lines: Lines, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [(site, line) for site, own in sorted(lines.items()) for line in own if line["kind"] == kind]


def unequal_anchors(lines: Lines) -> None:
    """Two peers hash one part of their anchors after the last round, and find different bytes."""
    number = max(line["round"] for _, line in of_kind(lines, "commit"))
    last = [one for one in of_kind(lines, "commit") if one[1]["round"] == number]
    for hashed, (site, line) in zip(("aa", "bb"), last[:2], strict=True):
        head = {key: line[key] for key in ("time", "peer", "site", "run", "round", "digest")}
        lines[site].insert(lines[site].index(line) + 1, {**head, "kind": "anchor", "part": "planted", "hash": hashed * 32})


def foreign_base(lines: Lines) -> None:
    of_kind(lines, "contribute")[-1][1]["base"] = "ab" * 32


def second_plan(lines: Lines) -> None:
    site, line = of_kind(lines, "accept")[-1]
    lines[site].insert(lines[site].index(line) + 1, {**line, "plan": "ee" * 32})


def other_payload(lines: Lines) -> None:
    credited = {item["payload"] for _, line in of_kind(lines, "commit") for item in line["contributors"]}
    for _, line in of_kind(lines, "contribute"):
        if line["payload"] in credited:
            line["payload"] = "77" * 32
            return


def second_update(lines: Lines) -> None:
    number = max(line["round"] for _, line in of_kind(lines, "commit"))
    last = [line for _, line in of_kind(lines, "commit") if line["round"] == number]
    last[-1].update(digest="11" * 32, seal="22" * 32)


def range_credited_twice(lines: Lines) -> None:
    commits = [line for _, line in of_kind(lines, "commit")]
    first, last = min(line["round"] for line in commits), max(line["round"] for line in commits)
    again = next(line["contributors"][0]["ranges"] for line in commits if line["round"] == first)
    for line in commits:
        if line["round"] == last:
            line["contributors"][0]["ranges"] = again


def endless_wait(lines: Lines) -> None:
    """A peer goes on for ten hours with a plan that comes to nothing."""
    site, line = of_kind(lines, "accept")[-1]
    at = lines[site].index(line)
    waiting = {key: line[key] for key in ("peer", "site", "run")}
    lost = {**waiting, "kind": "lost", "peer_id": "nobody", "peer_site": "nobody", "seconds": 1.0}
    lines[site][at + 1 :] = [{**lost, "time": line["time"] + 600.0 * number} for number in range(1, 60)]


PLANTED: dict[int, Callable[[Lines], None]] = {
    1: unequal_anchors,
    2: foreign_base,
    3: second_plan,
    4: other_payload,
    5: second_update,
    6: range_credited_twice,
    7: endless_wait,
}


def plant(source: Path, target: Path, fault: Callable[[Lines], None]) -> None:
    """Copy the histories below `source` to `target`, with the fault in them."""
    paths = {path.parent.name: path for path in source.glob("*/history.jsonl")}
    lines = {site: [json.loads(text) for text in path.read_text().splitlines()] for site, path in paths.items()}
    fault(lines)
    for site, own in lines.items():
        (target / site).mkdir(parents=True)
        (target / site / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
        config = paths[site].with_name("config.json")
        if config.exists():
            shutil.copy(config, target / site)


def check(source: Path, invariant: int, folder: Path) -> tuple[int, list[str]]:
    """Plant a violation of `invariant`: (exit code of the checker, what it said)."""
    target = folder / f"invariant-{invariant}"
    plant(source, target, PLANTED[invariant])
    said: list[str] = []
    return verify([target], said.append), said


def main(source: Path) -> int:
    sound = verify([source])
    named = 0
    with tempfile.TemporaryDirectory() as folder:
        for invariant in PLANTED:
            code, said = check(source, invariant, Path(folder))
            shown = next((text for text in said if text.startswith(f"violation: invariant {invariant}:")), "NOT FOUND")
            named += code == 1 and shown != "NOT FOUND"
            print(f"planted {invariant}: exit {code}, {shown}")
    print(f"{named} of {len(PLANTED)} planted violations named")
    return 0 if sound == 0 and named == len(PLANTED) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
