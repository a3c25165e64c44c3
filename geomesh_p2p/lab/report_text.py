"""report.md: the report as a page for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from geomesh_p2p.lab.table import number, percent, size


def render(report: dict[str, Any]) -> str:
    """Markdown with the figures of a report (see lab/report.py)."""
    parts = [f"# Run {report['run_id']}", *_summary(report), "", "## Rounds", "", *_rounds(report["rounds"])]
    parts += ["", "## Sites", "", *_peers(report["peers"]), "", "## Planned and real finish (seconds)", "", *_finishes(report)]
    return "\n".join(parts) + "\n"


def _summary(report: dict[str, Any]) -> list[str]:
    target = report["target_ppl"]
    reached = "no target was set" if target is None else f"{target:.2f} was not reached"
    if target is not None and report["time_to_target_seconds"] is not None:
        reached = f"{target:.2f} after {report['time_to_target_seconds']:.1f} s and {report['rounds_to_target']} rounds"
    facts = {
        "size": f"{count(report['parameters'])} parameters, {len(report['peers'])} sites",
        "rounds": f"{report['rounds_committed']} committed, {report['rounds_discarded']} attempts given up",
        "tokens": f"{count(report['tokens'])} in {report['wall_seconds']:.1f} s, {count(report['tokens_per_round'])} a round",
        "validation perplexity": f"{number(report['val_ppl_first'], '.2f')} -> {number(report['val_ppl_last'], '.2f')}",
        "target": reached,
        "compute": percent(report["compute_share"]),
        "straggler idle": _idle(report, "straggler_idle_share"),
        "straggler idle of the fastest": f"{percent(report['straggler_idle_share_fastest'])} ({report['fastest_site'] or '-'})",
        "WAN idle": _idle(report, "wan_idle_share"),
        "data wait, codec, control": ", ".join(percent(report[f"{part}_share"]) for part in ("data_wait", "codec", "control")),
        "planned against real finish": f"within {percent(report['finish_error_share_steady'])} from round 3 on",
        "bytes sent": f"{size(report['bytes_payload'])} of payload, {size(report['bytes_total'])} in all",
        "payload against fp32, same topology": fraction(report["bytes_ratio_to_fp32"]),
        "payload against an fp32 ring all-reduce": fraction(report["bytes_ratio_to_fp32_ring"]),
        "digest": f"`{report['digest']}`",
        "digests": "equal on all peers in every round" if report["digests_equal"] else "different, see the rounds below",
    }
    if report["emulation_time_scale"] is not None:
        overrun = percent(report["emulation_overrun_share"])
        facts["emulated speeds"] = f"step times scaled by {report['emulation_time_scale']:.4g}; {overrun} overrun"
    lines = ["", *table(("", ""), facts.items())]
    if not report["idle_valid"]:
        lines += ["", "**Emulated speeds were not kept (overrun above 1%): the idle figures are not valid.**"]
    return lines


def _idle(report: dict[str, Any], key: str) -> str:
    return f"{percent(report[key])} ({percent(report[key + '_steady'])} from round 3 on)"


def _rounds(rounds: Sequence[dict[str, Any]]) -> list[str]:
    head = (
        "round", "term", "members", "topology", "tokens", "planned s", "real s", "straggler idle", "WAN idle", "loss",
        "val ppl of this round's model", "digest",
    )  # fmt: skip
    return table(head, map(_round, rounds))


def _round(one: dict[str, Any]) -> tuple[Any, ...]:
    digests = [one["digest"]] if isinstance(one["digest"], str) else one["digest"]
    return (
        one["round"],
        one["term"],
        len(one["members"]),
        one["topology"],
        count(one["tokens"]),
        number(one["planned_seconds"], ".2f"),
        number(one["seconds"], ".2f"),
        percent(one["straggler_idle_share"]),
        percent(one["wan_idle_share"]),
        number(one["loss"], ".3f"),
        number(one["val_ppl"], ".2f"),
        " != ".join(digest[:12] for digest in digests),
    )


def _peers(peers: Sequence[dict[str, Any]]) -> list[str]:
    parts = ("compute", "data_wait", "straggler_idle", "wan_idle", "codec", "control")
    names = [f"{part.replace('_', ' ')} s" for part in parts]
    head = ("site", "rounds", "batch", "steps", "tokens", *names, "sent", "received", "restarts")
    return table(
        head,
        (
            (
                peer["site"],
                peer["rounds"],
                peer["batch"],
                peer["inner_steps"],
                count(peer["tokens"]),
                *(number(peer[f"{part}_seconds"], ".1f") for part in parts),
                size(peer["bytes_sent"]),
                size(peer["bytes_received"]),
                peer["restarts"],
            )
            for peer in peers
        ),
    )


def _finishes(report: dict[str, Any]) -> list[str]:
    sites = [peer["site"] for peer in report["peers"]]

    def cell(one: dict[str, Any], site: str) -> str:
        pair = one["finish_seconds"].get(site)
        return "-" if pair is None else f"{pair[0]:.2f} / {pair[1]:.2f}"

    rows = [
        (one["round"], *(cell(one, site) for site in sites), percent(one["finish_error_share"])) for one in report["rounds"]
    ]
    return table(("round", *sites, "largest difference"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join("-" if cell is None else str(cell) for cell in row) + " |" for row in rows]


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def fraction(ratio: float | None) -> str:
    """A ratio as one over a number: "1/31.6"."""
    return "-" if not ratio else f"1/{1 / ratio:.1f}"
