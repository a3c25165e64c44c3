"""The tables of a benchmark's report. Figures are those of report.json, rounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geomesh_p2p.lab.bench.report.blocks import Block, Heading, Points, Table
from geomesh_p2p.lab.bench.report.figures import (
    REFERENCE,
    TUNED,
    listed,
    measured,
    number,
    percent,
    ratio,
    short,
    signed,
    spread,
    times,
)
from geomesh_p2p.lab.bench.report.setting import pairs_of, rate_of

Report = Mapping[str, Any]
MOST_LINKS = 28         # of eight sites; with more, the slowest are listed


def _name(name: str, method: Mapping[str, Any]) -> str:
    return f"{name} (= {method['is']})" if "is" in method else name


def _references(report: Report) -> dict[str, Mapping[str, Any]]:
    """What all are set against."""
    return {name: report["methods"][name] for name in (REFERENCE, TUNED) if name in report["methods"]}


def _against(report: Report) -> list[str]:
    return [f"against {name}" for name in _references(report)]


# ---------------------------------------------------------------- results


def time_table(report: Report) -> Table:
    head = ("method", "engine", "to target s", *_against(report), "limit s", "all tokens s", *_against(report), "limit s")
    rows = [
        (
            _name(name, m),
            m["engine"],
            spread(m, "time_to_target_seconds", ".1f"),
            *(signed(ratio(m, other, "time_to_target_seconds")) for other in _references(report).values()),
            number(m.get("limit_to_target_seconds"), ".1f"),
            spread(m, "wall_seconds", ".1f"),
            *(signed(ratio(m, other, "wall_seconds")) for other in _references(report).values()),
            number(m.get("limit_seconds"), ".1f"),
        )
        for name, m in report["methods"].items()
    ]
    return Table(head, rows)


def training_table(report: Report) -> Table:
    head = ("method", "tokens", "rounds", "tokens a round", "rounds to target", "tokens to target", "final perplexity",
            *_against(report), "continuation choice")  # fmt: skip
    rows = [
        (
            _name(name, m),
            number(m.get("tokens"), ",.0f"),
            number(m.get("rounds_committed"), ",.0f"),
            number(m.get("tokens_per_round"), ",.0f"),
            spread(m, "rounds_to_target", ",.0f"),
            spread(m, "tokens_to_target", ",.0f"),
            spread(m, "final_ppl", ".3f"),
            *(_fine(ratio(m, other, "final_ppl")) for other in _references(report).values()),
            _accuracy(m),
        )
        for name, m in report["methods"].items()
    ]
    return Table(head, rows)


def _fine(value: float | None) -> str:
    return f"{value - 1:+.2%}" if measured(value) else "-"


def _accuracy(method: Mapping[str, Any]) -> str:
    accuracy, error = method.get("continuation_accuracy"), method.get("continuation_stderr")
    if not measured(accuracy):
        return "-"
    text = f"{accuracy:.2%}" + (f" +- {error:.2%}" if measured(error) else "")
    paired = method.get("continuation_against_diloco")
    if not paired:
        return text
    low, high = (f"{100 * paired[end]:+.2f}" for end in ("low", "high"))
    return f"{text}; {100 * paired['difference']:+.2f} points against {REFERENCE} (95%: {low} to {high})"


def waiting_table(report: Report) -> Table:
    fastest = report.get("fastest_site") or "the fastest"
    head = ("method", "training", "for slower sites", "steady", f"for slower sites, of {fastest}", "for links", "steady",
            "MB sent", *(f"of {name}'s" for name in _references(report)), "of an fp32 ring's", "attempts given up")  # fmt: skip
    rows = [
        (
            _name(name, m),
            percent(m.get("compute_share")),
            percent(m.get("straggler_idle_share")),
            percent(m.get("straggler_idle_share_steady")),
            percent(m.get("straggler_idle_share_fastest")),
            percent(m.get("wan_idle_share")),
            percent(m.get("wan_idle_share_steady")),
            spread(m, "bytes_payload", ",.1f", 1e-6),
            *(times(ratio(m, other, "bytes_payload")) for other in _references(report).values()),
            times(m.get("bytes_ratio_to_fp32_ring")),
            number(m.get("rounds_discarded"), ".0f"),
        )
        for name, m in report["methods"].items()
    ]
    return Table(head, rows)


def agreement(report: Report) -> list[Block]:
    """Real processes against virtual time, if that was measured: with the plans that virtual time makes, and with those that
    the processes made."""
    sources = {"real": "", "the same plans": "replayed_", "virtual": "virtual_"}
    shares = {"for slower sites": "straggler_idle_share_steady", "for links": "wan_idle_share_steady"}
    head = ("method", *(f"s a round, {source}" for source in sources), "difference",
            *(f"{share}, {source}" for share in shares for source in sources))  # fmt: skip
    rows = [
        (
            name,
            *(number(m.get(f"{prefix}round_seconds_steady"), ".3f") for prefix in sources.values()),
            signed(ratio({"x": m["round_seconds_steady"]}, {"x": m.get("virtual_round_seconds_steady")}, "x")),
            *(percent(m.get(f"{prefix}{key}")) for key in shares.values() for prefix in sources.values()),
        )
        for name, m in report["methods"].items()
        if measured(m.get("round_seconds_steady"))
    ]
    return [Heading("Real processes against virtual time"), Table(head, rows)] if rows else []


# ---------------------------------------------------------------- what was compared


def about(report: Report) -> list[str]:
    model = f"model: {number(report.get('parameters'), ',.0f')} parameters (run file {report.get('run_id', '-')})"
    work = f"{number(report.get('budget_tokens'), ',.0f')} tokens for each training; seeds {_seeds(report)}"
    facts = [
        f"setting {report['setting']}: {report['setting_about']}.",
        f"{model}; {work}.",
        f"a round of {REFERENCE}: {number(report.get('reference_round_tokens'), ',.0f')} tokens, equal for all sites.",
        _rates(report),
        *_noise(report),
        *(_changed(change) for change in report.get("changes") or ()),
    ]
    return facts + [text if text.startswith("assumed") else f"source: {text}" for text in report.get("sources") or ()]


def _seeds(of: Mapping[str, Any]) -> str:
    return listed([str(seed) for seed in of.get("seeds") or ()])


def _rates(report: Report) -> str:
    scale, stands = report.get("rate_scale"), report.get("stands_for_parameters")
    if not measured(scale):
        return "rates are those of the setting."
    text = f"rates are {scale:.3g} times those of the setting"
    share = report.get("reference_wan_idle_share")
    if measured(share):
        text += f", so that {REFERENCE} waits {share:.1%} of its time for them"
    if measured(stands):
        text += f": this model waits for its links as one of {short(stands)} parameters would with the rates as written"
    return text + "."


def _noise(report: Report) -> list[str]:
    share = (report.get("links") or {}).get("jitter_share")
    return [f"the logarithm of each round's rates and delays has a standard deviation of {share:g}."] if share else []


def _changed(change: Mapping[str, Any]) -> str:
    when = f"from {change['begins_share']:.0%} to {change['ends_share']:.0%} of the tokens"
    said = []
    if change.get("site"):
        said.append(f"{change['site']} has {change['speed']:.3g} times its speed")
    if change.get("between"):
        said.append(f"{' to '.join(change['between'])} has {change['rate']:.3g} times its rate")
    return f"{when}, {listed(said)}."


def methods(report: Report) -> Table:
    rows = [
        (
            _name(name, m),
            m.get("about") or "-",
            number((known := m.get("constants") or {}).get("outer_learning_rate"), "g"),
            number(known.get("outer_momentum"), "g"),
            *(str(known.get(key) or "-") for key in ("payload", "topology", "overlap")),
            m["engine"],
            _seeds(m if m.get("seeds") else report),
        )
        for name, m in report["methods"].items()
    ]
    head = ("method", "what", "outer learning rate", "outer momentum", "payload", "topology", "overlap", "engine", "seeds")
    return Table(head, rows, words=True)


def sites(report: Report) -> Table:
    head = ("site", "region", "device", "s a step", "s a sequence more", "most sequences a step", "sequences/s at most")
    rows = [
        (
            site["name"],
            site.get("region") or "-",
            site["device"],
            number(site["fixed_seconds"], ".4g"),
            number(site["sequence_seconds"], ".4g"),
            number(site["max_batch"], "d"),
            number(rate_of(site), ".1f"),
        )
        for site in report.get("sites") or ()
    ]
    return Table(head, rows)


def links(report: Report) -> list[Block]:
    pairs = sorted(pairs_of(report), key=lambda pair: pair[2])
    if not pairs:
        return []
    shown = pairs[:MOST_LINKS]
    scale = report.get("rate_scale")
    head = ("link", "Mbit/s, as written", "Mbit/s, for this model", "round trip ms")
    rows = [
        (
            f"{one} to {other}",
            short(rate),
            number(rate * scale, ".4g") if measured(scale) else "-",
            number(trip, ".4g"),
        )
        for one, other, rate, trip in shown
    ]
    more = len(pairs) - len(shown)
    found: list[Block] = [Table(head, rows)]
    return found + ([Points([f"and {more} more links, none slower: report.json has them all."])] if more else [])


def how_work(report: Report) -> str:
    """What the columns of `work_table` mean."""
    text = "Sums over all rounds, medians over seeds; batch and steps are those of a site's median round, by sequences."
    sent = [name for name, m in report["methods"].items()
            if any(measured(peer.get("times_sent")) for peer in m.get("peers") or ())]  # fmt: skip
    has = "has" if len(sent) == 1 else "have"
    return f"{text} {listed(sent)} {has} no rounds: in their place stands how often a site sent." if sent else text


def work_table(report: Report) -> Table:
    seconds = ("training s", "for slower sites s", "for links s")
    head = ("method", "site", "rounds", "batch", "steps", "tokens", *seconds, "MB sent")
    rows = []
    for name, m in report["methods"].items():
        for peer in () if "is" in m else m.get("peers") or ():
            sent, times_sent = peer.get("bytes_sent"), peer.get("times_sent")
            rows.append(
                (
                    name,
                    peer["site"],
                    number(times_sent if measured(times_sent) else peer.get("rounds"), ".0f"),
                    number(peer.get("usual_batch"), ".0f"),
                    number(peer.get("usual_steps"), ".0f"),
                    number(peer.get("tokens"), ",.0f"),
                    number(peer.get("compute_seconds"), ",.1f"),
                    number(peer.get("straggler_idle_seconds"), ",.1f"),
                    number(peer.get("wan_idle_seconds"), ",.1f"),
                    number(sent / 1e6, ",.1f") if measured(sent) else "-",
                )
            )
    return Table(head, rows)
