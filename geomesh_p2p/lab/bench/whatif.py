"""`geomesh plan --what-if SETTING`: what a round would be under a setting, and what it gains on equal work sent in fp32.

The plan is the one that a leader makes once all links are measured. Its round is reckoned as the virtual rounds of a benchmark
are, without playing a run. Trains nothing, and loads nothing that trains.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.forecast import LinkTable, Volume, codec_seconds
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.reasons import explain
from geomesh_p2p.core.types import Plan
from geomesh_p2p.errors import DataError
from geomesh_p2p.lab.bench.clock import World
from geomesh_p2p.lab.bench.methods import METHODS
from geomesh_p2p.lab.bench.scaling import world_of
from geomesh_p2p.lab.bench.settings import Setting, load_setting
from geomesh_p2p.lab.bench.timeline import foreseen
from geomesh_p2p.lab.bench.work import fastest_alone
from geomesh_p2p.lab.whatif import (
    DAY_SECONDS,
    duration,
    early_sending,
    exchange_seconds,
    forecast,
    layout_from_files,
    sent_bytes,
    size_text,
    table,
    volume_of,
)

NOISE_DRAWS = 16
TOKENS_A_PARAMETER = 20
FULL_TEXT_SITES = 16      # with more, the text has no reasons for single sites
MOST_ROWS = 32
AS_FAST = 0.995           # of one site's tokens a second, and less is slower than it


@dataclass(frozen=True)
class Question:
    """`setting` is the name of one that ships, or a path. `parameters`: of another model than the run file's, under the rates
    as written. `tokens`: how long do they take? `egress_usd_per_gb` goes before the setting's prices."""

    setting: str
    tokens: int | None = None
    parameters: int | None = None
    egress_usd_per_gb: float | None = None


def answer(run: RunConfig, question: Question, as_json: bool = False) -> str:
    """As text or JSON. Raises ConfigError."""
    setting = load_setting(question.setting)
    if question.parameters is None:
        try:
            layout = layout_from_files(run)
        except DataError as error:
            raise DataError(f"{error}; or give --parameters P, which needs neither tokenizer nor model") from error
        tokens = question.tokens or run.inner.total_tokens
        world = world_of(run, setting, tokens)
    else:
        layout = Layout((Tensor("model", question.parameters),))
        tokens, world = question.tokens or TOKENS_A_PARAMETER * question.parameters, World(setting)
    return _told(run, layout, world, tokens, question, as_json)


def _told(run: RunConfig, layout: Layout, world: World, tokens: int, question: Question, as_json: bool) -> str:
    plan, figures = predicted(run, volume_of(layout, run), world, tokens, question.egress_usd_per_gb)
    equal = uniform_fp32(run, world.setting, plan)
    _, beside = predicted(equal, volume_of(layout, equal), world, tokens, question.egress_usd_per_gb)
    alone = _alone(run, world.setting, tokens)
    found = {
        "setting": world.setting.name,
        "about": world.setting.about,
        "sources": list(world.setting.sources),
        "run": run.run.id,
        "parameters": layout.parameters,
        "sequence_length": run.model.sequence_length,
        "rate_scale": world.rate_scale,
        "tokens": tokens,
        "plan": figures,
        "uniform_fp32": beside,
        "tokens_per_second_ratio": figures["tokens_per_second"] / beside["tokens_per_second"],
        "fastest_alone": alone,
        "warnings": _slower_than_one(alone, {"this run": figures, "uniform, fp32": beside}),
        "notes": [
            *world.setting.notes(),
            *_kept(run, volume_of(layout, run), world, plan, figures),
            *_notes(run, world, plan, figures, question),
        ],
    }
    return json.dumps(found, indent=2) if as_json else _text(plan, found)


def _alone(run: RunConfig, setting: Setting, tokens: int) -> dict[str, Any]:
    """The fastest site by itself, without the setting's changes."""
    still = setting.model_copy(update={"changes": ()})
    name, seconds = fastest_alone(still, tokens / run.model.sequence_length)
    batch = next(site.max_batch for site in setting.sites if site.name == name)
    return {"site": name, "batch": batch, "tokens_per_second": tokens / seconds, "seconds_to_tokens": seconds}


def _slower_than_one(alone: dict[str, Any], beside: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name} is slower than {alone['site']} alone ({figures['tokens_per_second']:,.0f} tokens/s instead of"
        f" {alone['tokens_per_second']:,.0f}): that does not pay in time"
        for name, figures in beside.items()
        if figures["tokens_per_second"] < AS_FAST * alone["tokens_per_second"]
    ]


def _kept(run: RunConfig, volume: Volume, world: World, plan: Plan, figures: dict[str, Any]) -> list[str]:
    """Says which sites are members because of run.min_peers alone, and what that costs."""
    if run.planner.mode != "planned" or run.run.min_peers < 2 or len(plan.members) > run.run.min_peers:
        return []
    free = run.model_copy(update={"run": run.run.model_copy(update={"min_peers": 1})})
    fewer, without = predicted(free, volume, world, figures["tokens"])
    sites = sorted({member.site for member in plan.members} - {member.site for member in fewer.members})
    gain = 1 - figures["tokens_per_second"] / without["tokens_per_second"]
    if not sites or gain <= 0:
        return []
    rates = f"{without['tokens_per_second']:,.0f} tokens/s instead of {figures['tokens_per_second']:,.0f}"
    names = ", ".join(sites)
    less = f"a token would cost {gain:.1%} less without {'it' if len(sites) == 1 else 'them'} ({rates})"
    return [f"run.min_peers = {run.run.min_peers} keeps {names} in the round: {less}"]


def uniform_fp32(run: RunConfig, setting: Setting, plan: Plan) -> RunConfig:
    """What `plan` is held against: DiLoCo's equal batch and steps, fp32, with as many tokens a round."""
    length = plan.planned_tokens / (setting.reference_round_sequences * run.model.sequence_length)
    return replace(METHODS["diloco"], length=length).run_config(run, setting, run.inner.total_tokens)


def predicted(
    run: RunConfig, volume: Volume, world: World, tokens: int, price: float | None = None
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a round once links are known, and its figures: those of `lab.whatif.forecast`, egress and its cost a day, and
    the seconds that `tokens` take. The setting is taken as it is without its changes; noise is averaged."""
    world = replace(world, setting=world.setting.model_copy(update={"changes": ()}))
    plan = foreseen(run, volume, world)
    at = [world.setting.names.index(member.site) for member in plan.members]
    figures = forecast(plan, run, volume, _exchange(plan, volume, world, at))
    for of_a_run_file in ("rounds", "run_seconds"):
        figures.pop(of_a_run_file)
    figures["codec_share"] = sum(codec_seconds(volume, plan.topology, len(at))) / figures["round_seconds"]
    figures["tokens"], figures["seconds_to_tokens"] = tokens, tokens / figures["tokens_per_second"]
    _bill(plan, volume, [world.setting.sites[k].region or world.setting.names[k] for k in at], figures)
    for member, k in zip(figures["members"], at, strict=True):
        member["device"] = world.setting.sites[k].device
        member["egress_usd_per_day"] = _cost(member["egress_bytes_per_day"], world.setting, k, price)
    devices = {site.name: site.device for site in world.setting.sites}
    for bystander in figures["bystanders"]:
        bystander["device"] = devices[bystander["site"]]
    costs = [member["egress_usd_per_day"] for member in figures["members"]]
    figures["egress_usd_per_day"] = None if None in costs else sum(costs)
    return plan, figures


def _exchange(plan: Plan, volume: Volume, world: World, at: list[int]) -> float:
    pairs, draws = np.ix_(at, at), NOISE_DRAWS if world.setting.links.jitter_share else 1
    moments = (world.at(draw, 0.0) for draw in range(draws))
    return fmean(exchange_seconds(plan, volume, LinkTable(m.rates[pairs], m.rtts[pairs], 0)) for m in moments)


def _bill(plan: Plan, volume: Volume, regions: list[str], figures: dict[str, Any]) -> None:
    """Egress is what leaves a site's region."""
    apart = np.array([[a != b for b in regions] for a in regions])
    a_day = (sent_bytes(plan, volume) * apart).sum(axis=1) * DAY_SECONDS / figures["round_seconds"]
    for member, count in zip(figures["members"], a_day, strict=True):
        member["egress_bytes_per_day"] = float(count)
    figures["egress_bytes_per_day"] = float(a_day.sum())


def _cost(count: float, setting: Setting, site: int, price: float | None) -> float | None:
    for known in (price, setting.sites[site].egress_usd_per_gb, setting.egress_usd_per_gb):
        if known is not None:
            return count / 1e9 * known
    return None


# ---------------------------------------------------------------- in words


def _notes(run: RunConfig, world: World, plan: Plan, figures: dict[str, Any], question: Question) -> list[str]:
    setting, found = world.setting, []
    if question.parameters is not None:
        found.append("rates are those written in the setting, for a model of any size")
    elif setting.stands_for_parameters is not None:
        found.append(
            f"rates are {world.rate_scale:.3g} x those of the setting, which stands for"
            f" {setting.stands_for_parameters:,.0f} parameters"
        )
    else:
        found.append(
            f"rates are {world.rate_scale:.3g} x those of the setting: with them its reference (equal work, fp32) waits for"
            f" links {world.reference_wan_idle_share:.1%} of its time"
        )
    found.append(
        f"a sequence is {run.model.sequence_length} tokens (model.sequence_length); the seconds it takes are the setting's, for"
        " any model"
    )
    if setting.links.jitter_share:
        found.append(f"jitter: the exchange is the mean of {NOISE_DRAWS} draws of the setting's noise")
    if setting.changes:
        found.append(f"what changes on the way ({len(setting.changes)} in the setting) is not counted")
    found += early_sending(plan, figures["exchange_seconds"])
    if figures["egress_usd_per_day"] is None:
        found.append("egress has no price: give --egress-usd-per-gb, or egress_usd_per_gb in the setting")
    return found


def _text(plan: Plan, found: dict[str, Any]) -> str:
    figures, beside = found["plan"], found["uniform_fp32"]
    lines = [
        f"setting {found['setting']}: {found['about']}",
        f"run {found['run']}: {found['parameters']:,} parameters; a round, once links are measured, would be",
        "",
        *_sites(figures["members"], figures["bystanders"]),
        "",
        *table(("", "", f"this run ({figures['mode']})", "uniform, fp32", "ratio"), _compared(figures, beside)),
        "",
        _one_site(found["fastest_alone"], figures, beside),
        *(f"warning: {text}" for text in found["warnings"]),
        "",
    ]
    lines += explain(plan)[1:] if len(plan.members) <= FULL_TEXT_SITES else list(plan.reasons)
    if len(plan.members) > FULL_TEXT_SITES and plan.bystanders:
        first = plan.bystanders[0]
        lines.append(f"{len(plan.bystanders)} sites follow; the first is {first.site}: {first.reason}")
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"]), *(f"source: {text}" for text in found["sources"])])


def _one_site(alone: dict[str, Any], ours: dict[str, Any], other: dict[str, Any]) -> str:
    facts = f"{alone['site']} alone, batch {alone['batch']}: {alone['tokens_per_second']:,.0f} tokens/s"
    ratios = [figures["tokens_per_second"] / alone["tokens_per_second"] for figures in (ours, other)]
    took = f"{ours['tokens']:,} tokens in {duration(alone['seconds_to_tokens'])}"
    return f"{facts}, {took}; this run is {ratios[0]:.3g} times as fast, uniform fp32 {ratios[1]:.3g} times"


def _sites(members: list[dict[str, Any]], bystanders: list[dict[str, Any]]) -> list[str]:
    head = ("site", "device", "batch", "steps", "tokens", "finish s", "idle", "sent/round", "egress/day", "USD/day")
    rows: list[tuple[str, ...]] = [
        (
            m["site"],
            m["device"],
            str(m["batch"]),
            str(m["inner_steps"]),
            f"{m['tokens']:,}",
            f"{m['finish_seconds']:.3f}",
            f"{m['straggler_idle_share']:.2%}",
            size_text(m["bytes_sent"]),
            size_text(m["egress_bytes_per_day"]),
            _usd(m["egress_usd_per_day"]),
        )
        for m in members
    ]
    rows += [(b["site"], b["device"], "-", "0", "0", "follows", *["-"] * (len(head) - 6)) for b in bystanders]
    more = len(rows) - MOST_ROWS
    rows = rows[:MOST_ROWS]
    return table(head, rows) + ([f"and {more} more sites (--json has them all)"] if more > 0 else [])


def _compared(ours: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, ...]]:
    def row(name: str, key: str, text: Any, ratio: bool = True) -> tuple[str, ...]:
        a, b = ours[key], other[key]
        return name, "", text(a), text(b), f"{a / b:.3g}" if ratio and a is not None and b else ""

    return [
        row("round", "round_seconds", lambda s: f"{s:.4g} s"),
        row("training", "train_seconds", lambda s: f"{s:.4g} s"),
        row("exchange", "exchange_seconds", lambda s: f"{s:.4g} s"),
        row("straggler idle", "straggler_idle_share", lambda s: f"{s:.2%}"),
        row("WAN idle", "wan_idle_share", lambda s: f"{s:.2%}"),
        row("topology", "topology", str, ratio=False),
        row("tokens/round", "planned_tokens", lambda n: f"{n:,}"),
        row("tokens/s", "tokens_per_second", lambda n: f"{n:,.0f}"),
        row("bytes/round", "bytes_per_round", size_text),
        row("egress/day", "egress_bytes_per_day", size_text),
        row("USD/day", "egress_usd_per_day", _usd),
        row(f"{ours['tokens']:,} tokens", "seconds_to_tokens", duration),
    ]


def _usd(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.2f}"
