"""report.json and report.md of a mesh, from what its peers left behind: metrics.jsonl, history.jsonl, config.json.

Where a peer's time goes is measured by the peer (core/observations.PeerTimes); here and in lab/figures.py it is only added up.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from geomesh_p2p.config import RunConfig
from geomesh_p2p.lab.figures import PARTS, Credits, PeerRecord, Tally, read_peer, share, summarise_round, traffic_of
from geomesh_p2p.lab.report_text import render
from geomesh_p2p.lab.table import idle_in_words

STEADY_FROM_ROUND = 3
# Above this share of overrun seconds the emulated speeds were not kept, and idle figures say nothing.
MAX_OVERRUN_SHARE = 0.01
FP32_BYTES = 4


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
    idle = idle_in_words(report["straggler_idle_share"], report["wan_idle_share"])
    line = ", ".join([f"{report['rounds_committed']} rounds, {report['tokens']:,} tokens: {perplexity}", *idle])
    if report["idle_valid"]:
        return line
    return f"{line} (the idle figures are not valid: emulated speeds were not kept, overrun above 1%)"


def summarise(folder: Path, run: RunConfig, sites: Sequence[str], time_scale: float | None = None) -> dict[str, Any]:
    """The report of the run in `folder`, with the peers of `sites`. Figures without any data are null."""
    peers = [read_peer(folder / site, site) for site in sites]
    parameters = next((peer.parameters for peer in peers if peer.parameters), None)
    credits = Credits(peers)
    rounds = [summarise_round(number, peers, credits) for number in sorted(_numbers(peers))]
    _add_perplexities(rounds, peers)
    if parameters is None and rounds:
        parameters = count_parameters(run)
    lines = [line for peer in peers for line in peer.trained]
    whole = Tally.total(peer.tally for peer in peers)
    steady = Tally.of(line for line in lines if line["round"] >= STEADY_FROM_ROUND)
    fastest = find_fastest(peers)
    sent, fp32, ring = traffic(peers, parameters)
    overrun = share(_sum(lines, "overrun_seconds"), _sum(lines, "emulated_seconds"))
    finish_errors = [one["finish_error_share"] or 0.0 for one in rounds if one["round"] >= STEADY_FROM_ROUND]
    perplexities = [one["val_ppl"] for one in rounds if one["val_ppl"] is not None]
    reached = time_to_target(rounds, run.run.target_ppl)
    return {
        "run_id": run.run.id,
        "parameters": parameters,
        "rounds_committed": max((one["round"] for one in rounds), default=0),
        "rounds_discarded": _discarded(peers),
        "tokens": credits.tokens,
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
        "straggler_idle_share": whole.share("straggler_idle"),
        "straggler_idle_share_steady": steady.share("straggler_idle"),
        "straggler_idle_share_fastest": fastest.tally.share("straggler_idle") if fastest else None,
        "fastest_site": fastest.site if fastest else None,
        "wan_idle_share": whole.share("wan_idle"),
        "wan_idle_share_steady": steady.share("wan_idle"),
        "compute_share": whole.share("compute"),
        **{f"{part}_share": whole.share(part) for part in ("data_wait", "codec", "control")},
        "emulation_overrun_share": overrun or 0.0,
        "emulation_time_scale": time_scale,
        "idle_valid": (overrun or 0.0) <= MAX_OVERRUN_SHARE,
        "finish_error_share_steady": max(finish_errors, default=None),
        "bytes_payload": sent["payload_sent"],
        "bytes_total": sent["payload_sent"] + sent["overhead_sent"],
        "bytes_ratio_to_fp32": share(sent["payload_sent"], fp32),
        "bytes_ratio_to_fp32_ring": share(sent["payload_sent"], ring),
        "rounds": rounds,
        "peers": [summarise_peer(peer, credits) for peer in peers],
    }


def count_parameters(run: RunConfig) -> int | None:
    """Parameters of the model that the run file describes; None if it cannot be built here. Imports torch."""
    from geomesh_p2p.engine.model import parameter_count
    from geomesh_p2p.engine.tokenizer import load_tokenizer
    from geomesh_p2p.errors import GeoMeshError

    try:
        return parameter_count(run.model, load_tokenizer(run.dataset.tokenizer).highest_id + 1)
    except (GeoMeshError, OSError, ValueError):
        return None


def _numbers(peers: Iterable[PeerRecord]) -> set[int]:
    return {number for peer in peers for number in (*peer.rounds, *peer.commits)}


# ---------------------------------------------------------------- one peer


def summarise_peer(peer: PeerRecord, credits: Credits) -> dict[str, Any]:
    """`rounds` counts the rounds committed here, `rounds_trained` those with a part of its own; batch and steps of the last."""
    last = peer.trained[-1] if peer.trained else {}
    newest = max((*peer.rounds, *peer.commits), default=0)
    shown = peer.commits.get(newest) or peer.rounds.get(newest) or {}
    return {
        "site": peer.site,
        "peer_id": peer.peer_id,
        "rounds": len(peer.commits) or len(peer.rounds),
        "rounds_trained": len(peer.trained),
        "digest": shown.get("digest"),
        "batch": last.get("batch"),
        "inner_steps": last.get("inner_steps"),
        "tokens": credits.by_site[peer.site],
        **{f"{part}_seconds": peer.tally.seconds[part] for part in PARTS},
        **{f"{part}_share": peer.tally.share(part) for part in ("straggler_idle", "wan_idle")},
        "bytes_sent": peer.tally.bytes_sent,
        "bytes_received": peer.tally.bytes_received,
        "restarts": max(0, peer.starts - 1),
    }


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
    sent = {key: sum(traffic_of(line, key) for line in lines) for key in ("payload_sent", "overhead_sent")}
    fp32 = ring = 0.0
    for line in (line for peer in peers for line in peer.trained):
        n = len(line.get("members") or ())
        if n > 1 and parameters:
            ring += 2 * (n - 1) / n * FP32_BYTES * parameters
            fp32 += (n - 1 if line.get("topology") == "gather" else 2 * (n - 1) / n) * FP32_BYTES * parameters
    return sent, fp32, ring


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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
