"""report.json and report.md of a mesh, from what its peers left behind: metrics.jsonl, history.jsonl, config.json.

Where a peer's time goes is measured by the peer (core/observations.PeerTimes); here it is only added up. Shares are sums
over peers and rounds, divided by the sums of wall time; rounds in which a peer was no member do not count for it.
Files of killed peers may be short or missing: what is not there is left out.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.lab.report_text import render

STEADY_FROM_ROUND = 3
# Above this share of overrun seconds the emulated speeds were not kept, and idle figures say nothing.
MAX_OVERRUN_SHARE = 0.01
FP32_BYTES = 4


@dataclass
class PeerRecord:
    """What one site's folder says."""

    site: str
    peer_id: str = ""
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)  # metrics lines of kind "round"
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)  # history lines of kind "commit"
    final_ppl: dict[int, float] = field(default_factory=dict)
    discards: dict[tuple[int, str], set[str]] = field(default_factory=lambda: defaultdict(set))  # (round, plan): reasons
    starts: int = 0
    parameters: int | None = None

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Rounds in which this peer was a member, in order."""
        return [self.rounds[number] for number in sorted(self.rounds) if self.rounds[number].get("inner_steps")]


def write_report(folder: Path, run: RunConfig, sites: Sequence[str], time_scale: float | None = None) -> dict[str, Any]:
    """Write FOLDER/report.json and FOLDER/report.md and return the report."""
    report = summarise(folder, run, sites, time_scale)
    for name, text in (("report.json", json.dumps(report, indent=2) + "\n"), ("report.md", render(report))):
        aside = folder / f"{name}.new"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, folder / name)
    return report


def headline(report: Mapping[str, Any]) -> str:
    """What a run came to, in one line."""
    first, last = report["val_ppl_first"], report["val_ppl_last"]
    validated = first is not None and last is not None
    perplexity = f"validation perplexity {first:.2f} -> {last:.2f}" if validated else "not validated"
    shares = {"straggler idle": report["straggler_idle_share"], "WAN idle": report["wan_idle_share"]}
    idle = [f"{what} {share:.1%}" for what, share in shares.items() if share is not None]
    return ", ".join([f"{report['rounds_committed']} rounds, {report['tokens']:,} tokens: {perplexity}", *idle])


def summarise(folder: Path, run: RunConfig, sites: Sequence[str], time_scale: float | None = None) -> dict[str, Any]:
    """The report of the run in `folder`, with the peers of `sites`. Figures without any data are null."""
    peers = [read_peer(folder / site, site) for site in sites]
    parameters = next((peer.parameters for peer in peers if peer.parameters), None)
    commits = {number: line for peer in peers for number, line in peer.commits.items()}
    rounds = [summarise_round(number, peers, commits.get(number)) for number in sorted(_numbers(peers))]
    _add_perplexities(rounds, peers)
    if parameters is None and rounds:
        parameters = count_parameters(run)
    lines = [line for peer in peers for line in peer.trained]
    steady = [line for line in lines if line["round"] >= STEADY_FROM_ROUND]
    fastest = find_fastest(peers)
    sent, fp32, ring = traffic(peers, parameters)
    overrun = _share(_sum(lines, "overrun_seconds"), _sum(lines, "emulated_seconds"))
    finish_errors = [one["finish_error_share"] or 0.0 for one in rounds if one["round"] >= STEADY_FROM_ROUND]
    perplexities = [one["val_ppl"] for one in rounds if one["val_ppl"] is not None]
    reached = time_to_target(rounds, run.run.target_ppl)
    return {
        "run_id": run.run.id,
        "parameters": parameters,
        "rounds_committed": max((one["round"] for one in rounds), default=0),
        "rounds_discarded": _discarded(peers),
        "tokens": sum(one["tokens"] for one in rounds),
        "tokens_per_round": _mean([one["tokens"] for one in rounds]),
        "wall_seconds": sum(one["seconds"] for one in rounds),
        "val_ppl_first": _first_perplexity(peers),
        "val_ppl_last": perplexities[-1] if perplexities else None,
        "target_ppl": run.run.target_ppl,
        "time_to_target_seconds": reached[0],
        "time_to_target_with_validation_seconds": reached[1],
        "rounds_to_target": reached[2],
        "digest": rounds[-1]["digest"] if rounds else None,
        "digests_equal": all(one["digests_equal"] for one in rounds),
        "straggler_idle_share": _time_share(lines, "straggler_idle"),
        "straggler_idle_share_steady": _time_share(steady, "straggler_idle"),
        "straggler_idle_share_fastest": _time_share(fastest.trained, "straggler_idle") if fastest else None,
        "fastest_site": fastest.site if fastest else None,
        "wan_idle_share": _time_share(lines, "wan_idle"),
        "wan_idle_share_steady": _time_share(steady, "wan_idle"),
        "compute_share": _time_share(lines, "compute"),
        **{f"{part}_share": _time_share(lines, part) for part in ("data_wait", "codec", "control")},
        "emulation_overrun_share": overrun or 0.0,
        "emulation_time_scale": time_scale,
        "idle_valid": (overrun or 0.0) <= MAX_OVERRUN_SHARE,
        "finish_error_share_steady": max(finish_errors, default=None),
        "bytes_payload": sent["payload_sent"],
        "bytes_total": sent["payload_sent"] + sent["overhead_sent"],
        "bytes_ratio_to_fp32": _share(sent["payload_sent"], fp32),
        "bytes_ratio_to_fp32_ring": _share(sent["payload_sent"], ring),
        "rounds": rounds,
        "peers": [summarise_peer(peer) for peer in peers],
    }


# ---------------------------------------------------------------- reading


def read_peer(folder: Path, site: str) -> PeerRecord:
    """A site's record; an empty one if the folder has nothing. A round that was reported twice counts as reported last."""
    record = PeerRecord(site)
    for line in _json_lines(folder / "metrics.jsonl"):
        if line.get("kind") == "round" and isinstance(line.get("round"), int):
            record.rounds[line["round"]] = line
        elif line.get("kind") == "validated" and line.get("final") and line.get("perplexity") is not None:
            record.final_ppl[int(line["round"])] = float(line["perplexity"])
    for line in _json_lines(folder / "history.jsonl"):
        record.peer_id = str(line.get("peer") or record.peer_id)
        match line.get("kind"):
            case "start":
                record.starts += 1
            case "commit":
                record.commits[int(line["round"])] = line
            case "discard":
                record.discards[(int(line["round"]), str(line.get("plan")))].add(str(line.get("reason")))
    for path in [folder / "config.json", *sorted(folder.glob("snapshot-*/*.json"))]:
        found = _json(path).get("parameters")
        if isinstance(found, int):
            record.parameters = found
    return record


def count_parameters(run: RunConfig) -> int | None:
    """Parameters of the model that the run file describes; None if it cannot be built here. Imports torch."""
    from geomesh_p2p.engine.model import parameter_count
    from geomesh_p2p.engine.tokenizer import load_tokenizer
    from geomesh_p2p.errors import GeoMeshError

    try:
        return parameter_count(run.model, load_tokenizer(run.dataset.tokenizer).highest_id + 1)
    except (GeoMeshError, OSError, ValueError):
        return None


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # half a line of a killed peer
        if isinstance(value, dict):
            yield value


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _numbers(peers: Iterable[PeerRecord]) -> set[int]:
    return {number for peer in peers for number in (*peer.rounds, *peer.commits)}


# ---------------------------------------------------------------- one round, one peer


def summarise_round(number: int, peers: Sequence[PeerRecord], commit: dict[str, Any] | None) -> dict[str, Any]:
    """`seconds` is the median of the members' wall times; `finish_error_share` the largest relative difference between a
    member's planned and real finish. The digest is a list when the peers show different ones."""
    said = [peer.rounds[number] for peer in peers if number in peer.rounds]
    members = [line for line in said if line.get("inner_steps")]
    first = (members or said or [{}])[0]
    digests = {str(line["digest"]) for line in said if line.get("digest")}
    digests |= {str(peer.commits[number]["digest"]) for peer in peers if number in peer.commits}
    finishes = {
        peer.site: [line["planned_finish_seconds"], line["finish_seconds"]]
        for peer in peers
        if (line := peer.rounds.get(number)) and line.get("inner_steps") and not line.get("reused")
    }
    errors = [abs(real - planned) / planned for planned, real in finishes.values() if planned > 0]
    credited = (commit or {}).get("contributors") or []
    return {
        "round": number,
        "term": first.get("term"),
        "members": first.get("members") or [item["site"] for item in credited],
        "topology": first.get("topology") or (commit or {}).get("topology"),
        "tokens": sum(item["tokens"] for item in credited) or sum(line.get("tokens") or 0 for line in said),
        "planned_seconds": first.get("planned_seconds"),
        "seconds": median([line["times"]["wall"] for line in members]) if members else 0.0,
        "validation_seconds": max((line.get("validation_seconds") or 0.0 for line in members), default=0.0),
        "straggler_idle_share": _time_share(members, "straggler_idle"),
        "wan_idle_share": _time_share(members, "wan_idle"),
        "finish_seconds": finishes,
        "finish_error_share": max(errors, default=None),
        "loss": _weighted([(line["loss"], line.get("tokens") or 0) for line in members if line.get("loss") is not None]),
        "digest": digests.pop() if len(digests) == 1 else sorted(digests),
        "digests_equal": len(digests) <= 1,
        "val_ppl": None,
    }


def summarise_peer(peer: PeerRecord) -> dict[str, Any]:
    """`rounds` counts the rounds committed here, `rounds_trained` those with a part of its own; batch and steps of the last."""
    last = peer.trained[-1] if peer.trained else {}
    newest = max((*peer.rounds, *peer.commits), default=0)
    shown = peer.commits.get(newest) or peer.rounds.get(newest) or {}
    lines = list(peer.rounds.values())
    parts = ("compute", "data_wait", "straggler_idle", "wan_idle", "codec", "control")
    return {
        "site": peer.site,
        "peer_id": peer.peer_id,
        "rounds": len(peer.commits) or len(peer.rounds),
        "rounds_trained": len(peer.trained),
        "digest": shown.get("digest"),
        "batch": last.get("batch"),
        "inner_steps": last.get("inner_steps"),
        "tokens": _credited(peer),
        **{f"{part}_seconds": _times(peer.trained, part) for part in parts},
        "bytes_sent": sum(_total(line, "payload_sent") + _total(line, "overhead_sent") for line in lines),
        "bytes_received": sum(_total(line, "payload_received") + _total(line, "overhead_received") for line in lines),
        "restarts": max(0, peer.starts - 1),
    }


def _credited(peer: PeerRecord) -> int:
    """Tokens of this peer in the log, as far as the peer's own history shows the log; else what it reported itself."""
    if peer.commits:
        items = (item for line in peer.commits.values() for item in line["contributors"])
        return sum(item["tokens"] for item in items if item["site"] == peer.site)
    return sum(line.get("tokens") or 0 for line in peer.rounds.values())


def find_fastest(peers: Iterable[PeerRecord]) -> PeerRecord | None:
    """The peer with the least time for a sequence (median over its rounds of step time by batch)."""
    speeds = [
        (median(times), peer)
        for peer in peers
        if (times := [line["step_seconds_median"] / line["batch"] for line in peer.trained if line.get("step_seconds_median")])
    ]
    return min(speeds, key=lambda one: one[0])[1] if speeds else None


def _discarded(peers: Iterable[PeerRecord]) -> int:
    """Attempts that were given up. One that was open when its peers were shut down does not count."""
    reasons: dict[tuple[int, str], set[str]] = defaultdict(set)
    for peer in peers:
        for attempt, why in peer.discards.items():
            reasons[attempt] |= why
    return sum(1 for why in reasons.values() if why != {"shutdown"})


# ---------------------------------------------------------------- bytes


def traffic(peers: Sequence[PeerRecord], parameters: int | None) -> tuple[dict[str, int], float, float]:
    """Bytes sent by all; what fp32 would have sent in the same topology; what an fp32 ring all-reduce would have sent.

    With N members and P parameters one peer sends (N-1)·4P in a gather and 2(N-1)/N·4P in a reduce or a ring.
    """
    lines = [line for peer in peers for line in peer.rounds.values()]
    sent = {key: sum(_total(line, key) for line in lines) for key in ("payload_sent", "overhead_sent")}
    fp32 = ring = 0.0
    for line in (line for peer in peers for line in peer.trained):
        n = len(line.get("members") or ())
        if n > 1 and parameters:
            ring += 2 * (n - 1) / n * FP32_BYTES * parameters
            fp32 += (n - 1 if line.get("topology") == "gather" else 2 * (n - 1) / n) * FP32_BYTES * parameters
    return sent, fp32, ring


def _total(line: dict[str, Any], key: str) -> int:
    return sum((line.get(key) or {}).values())


# ---------------------------------------------------------------- perplexity and time to target


def _add_perplexities(rounds: Sequence[dict[str, Any]], peers: Iterable[PeerRecord]) -> None:
    """Round r's line carries the perplexity of the anchor before it; here each round gets that of the anchor after it."""
    after = {number: ppl for peer in peers for number, ppl in peer.final_ppl.items()}
    for peer in peers:
        for number, line in peer.rounds.items():
            if line.get("validation_ppl") is not None:
                after[number - 1] = float(line["validation_ppl"])
    for one in rounds:
        one["val_ppl"] = after.get(one["round"])


def _first_perplexity(peers: Iterable[PeerRecord]) -> float | None:
    known = {
        number: float(line["validation_ppl"])
        for peer in peers
        for number, line in peer.rounds.items()
        if line.get("validation_ppl") is not None
    }
    return known[min(known)] if known else None


def time_to_target(rounds: Sequence[dict[str, Any]], target: float | None) -> tuple[float | None, float | None, int | None]:
    """(seconds without validation, with it, rounds) until the anchor's perplexity is at or below `target`, or None."""
    without = with_validation = 0.0
    for one in rounds:
        with_validation += one["seconds"]
        without += one["seconds"] - one["validation_seconds"]
        if target is not None and one["val_ppl"] is not None and one["val_ppl"] <= target:
            return without, with_validation, one["round"]
    return None, None, None


# ---------------------------------------------------------------- sums


def _sum(lines: Iterable[dict[str, Any]], key: str) -> float:
    return sum(float(line.get(key) or 0.0) for line in lines)


def _times(lines: Iterable[dict[str, Any]], part: str) -> float:
    return sum(float(line["times"][part]) for line in lines if line.get("times"))


def _time_share(lines: Sequence[dict[str, Any]], part: str) -> float | None:
    return _share(_times(lines, part), _times(lines, "wall"))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _weighted(pairs: Sequence[tuple[float, int]]) -> float | None:
    return _share(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))
