"""`geomesh plan`: what the first round would be, from run file and site files alone. Trains nothing.

An emulated site's curve and links come from its site file, another site's curve from the profile file it names. Links that
no file describes count as 1 Gbit/s without delay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geomesh_p2p.config import LinkSection, ModelSection, RunConfig, SiteConfig
from geomesh_p2p.core import codec
from geomesh_p2p.core.emulation import emulated_seconds
from geomesh_p2p.core.forecast import DEFAULT_BYTES_PER_SECOND, LinkTable, Volume, codec_seconds, folded_seconds
from geomesh_p2p.core.layout import Layout, Tensor, layout_of
from geomesh_p2p.core.plan import PlanInputs, Sites, Slot, WorkLeft, plan_round
from geomesh_p2p.core.reasons import explain
from geomesh_p2p.core.types import NO_TERM, BatchTime, Link, Plan, Profile, Range
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.loading import SiteFile

DAY_SECONDS = 86_400
BYTES_VOCABULARY = 256
EARLY_SENDING = 0.01
ENDLESS = Range(0, 2**62)


def what_if(run: RunConfig, sites: Sequence[SiteFile], as_json: bool = False) -> str:
    """The plan of the first round as text or JSON. Raises ConfigError or DataError if a site's speed is not known."""
    layout = layout_from_files(run)
    volume, configs = volume_of(layout, run), [site.config for site in sites]
    plan = plan_from_files(run, configs, layout)
    links = LinkTable.of(plan.peers, links_from_files(run, configs))
    figures = forecast(plan, run, volume, exchange_seconds(plan, volume, links))
    figures["devices"] = {site.name: _device(site.config) for site in sites if site.config.site.trains}
    figures["observers"] = [site.name for site in sites if not site.config.site.trains]
    figures["upload_mbps"] = upload_mbps(run, [site.config for site in sites])
    figures["notes"] = early_sending(plan, figures["exchange_seconds"]) + _notes(configs)
    return json.dumps(figures, indent=2) if as_json else render(plan, figures)


# ---------------------------------------------------------------- from files to planner inputs


def llama_layout(model: ModelSection, vocabulary: int, granularity: Any = "tensor") -> Layout:
    """The tensors of the Llama that a run file describes, without building it: projections without biases, two norms a
    layer, one at the end; tied embeddings count once."""
    hidden, inner = model.hidden_size, model.intermediate_size
    key_value = hidden // model.heads * model.kv_heads
    shapes: list[tuple[str, tuple[int, ...], bool]] = [("embed_tokens", (vocabulary, hidden), True)]
    for layer in range(model.layers):
        shapes += [
            (f"{layer}.q_proj", (hidden, hidden), False),
            (f"{layer}.k_proj", (key_value, hidden), False),
            (f"{layer}.v_proj", (key_value, hidden), False),
            (f"{layer}.o_proj", (hidden, hidden), False),
            (f"{layer}.gate_proj", (inner, hidden), False),
            (f"{layer}.up_proj", (inner, hidden), False),
            (f"{layer}.down_proj", (hidden, inner), False),
            (f"{layer}.input_layernorm", (hidden,), False),
            (f"{layer}.post_attention_layernorm", (hidden,), False),
        ]
    shapes.append(("norm", (hidden,), False))
    if not model.tie_embeddings:
        shapes.append(("lm_head", (vocabulary, hidden), False))
    return layout_of(shapes, granularity)


def llama_parameters(model: ModelSection, vocabulary: int) -> int:
    return llama_layout(model, vocabulary).parameters


def layout_from_files(run: RunConfig) -> Layout:
    """The run's layout. Loads a tokenizer or a model's configuration only if the run file names one."""
    vocabulary = BYTES_VOCABULARY
    if run.dataset.tokenizer != "bytes":
        from geomesh_p2p.engine.tokenizer import load_tokenizer

        vocabulary = load_tokenizer(run.dataset.tokenizer).highest_id + 1
    if not run.model.path and not run.model.freeze:
        return llama_layout(run.model, vocabulary, run.codec.granularity)
    from geomesh_p2p.engine.model import parameter_count

    return Layout((Tensor(run.model.path or "llama", parameter_count(run.model, vocabulary)),))


def volume_of(layout: Layout, run: RunConfig) -> Volume:
    return Volume(
        parameters=layout.parameters,
        payload_bytes=codec.payload_bytes(layout, run.codec),
        answer_bytes=codec.part_bytes(layout, run.codec, 0, layout.parameters),
    )


def plan_from_files(run: RunConfig, sites: Sequence[SiteConfig], layout: Layout) -> Plan:
    """The plan of the first round; site names stand for the peer ids that only a running mesh has."""
    trainers = [site for site in sites if site.site.trains]
    inputs = PlanInputs(
        slot=Slot(b"", 1, NO_TERM, 1, b""),
        sites=Sites(
            profiles=tuple(_profile(site, run, layout) for site in trainers),
            links=links_from_files(run, trainers),
            min_members=run.run.min_peers,
        ),
        work=WorkLeft(volume_of(layout, run), run.model.sequence_length, (ENDLESS,)),
    )
    return plan_round(inputs, run.planner, run.inner)


def links_from_files(run: RunConfig, sites: Sequence[SiteConfig]) -> tuple[Link, ...]:
    """The ways between all trainers, and the uplinks of those that have a limit."""
    trainers = [site for site in sites if site.site.trains]
    return (
        *(_link(a, b) for a in trainers for b in trainers if a is not b),
        *(Link.uplink(name, mbps * 1e6 / 8) for name, mbps in upload_mbps(run, trainers).items()),
    )


def _device(site: SiteConfig) -> str:
    return site.emulation.device if site.emulation else site.device.name


def _profile(site: SiteConfig, run: RunConfig, layout: Layout) -> Profile:
    return Profile(site.site.name, site.site.name, _device(site), _curve(site, run, layout))


def _curve(site: SiteConfig, run: RunConfig, layout: Layout) -> tuple[BatchTime, ...]:
    limit = site.device.max_batch
    if site.emulation is not None:
        emulation = site.emulation
        largest = min(emulation.max_batch, limit or emulation.max_batch)
        scale = emulation.time_scale or 1.0
        ends = sorted({1, largest})  # a line: its ends say it all
        return tuple(BatchTime(batch, emulated_seconds(emulation, scale, batch)) for batch in ends)
    if not site.device.profile:
        raise ConfigError(
            f"site {site.site.name}: its speed is not known; run `geomesh profile` there and name the file in device.profile"
        )
    from geomesh_p2p.engine.profiles import read_profile

    curve = read_profile(Path(site.device.profile), layout.parameters, run.model.sequence_length)
    return tuple(point for point in curve if limit is None or point.batch <= limit) or curve[:1]


def _link(source: SiteConfig, target: SiteConfig) -> Link:
    """The slower rate and the longer round trip of what both ends say about each other."""
    unnamed = LinkSection()
    ends = [
        near.links.get(far.site.name, near.links.get("default", unnamed)) for near, far in ((source, target), (target, source))
    ]
    rates = [DEFAULT_BYTES_PER_SECOND if end.mbps is None else end.mbps * 1e6 / 8 for end in ends]
    return Link(source.site.name, target.site.name, max(end.rtt_ms for end in ends) / 1000, min(rates))


def upload_mbps(run: RunConfig, sites: Sequence[SiteConfig]) -> dict[str, float]:
    """Of the sites that limit it, by name."""
    limits = {site.site.name: site.net.get("upload_mbps", run.net.upload_mbps) for site in sites}
    return {name: float(limit) for name, limit in limits.items() if isinstance(limit, int | float)}


def _notes(sites: Sequence[SiteConfig]) -> list[str]:
    note = (
        "emulated devices are taken at time scale 1; a mesh on one machine stretches their steps (not the links) until the"
        " fastest is slow enough to be real, and the exchange then takes a smaller share of the round"
    )
    return [note] if any(site.emulation and site.emulation.time_scale is None for site in sites) else []


# ---------------------------------------------------------------- from a plan to figures and text


def exchange_seconds(plan: Plan, volume: Volume, links: LinkTable) -> float:
    """From the last finish until all have folded the commit, over the links of the plan's members in their order. Shorter than
    the plan's own figure if some finish early, and so send while the others train."""
    finish = np.array([a.finish_seconds for a in plan.members])
    leader = plan.peers.index(plan.term.candidate) if plan.term.candidate in plan.peers else None
    folded = folded_seconds(links, volume, plan.topology, plan.shares, finish, leader)
    return float(folded.max()) - plan.train_seconds


def early_sending(plan: Plan, exchange: float) -> list[str]:
    """Says why the exchange is shorter than the plan's reasons have it, if it is so by more than 1%."""
    if exchange > plan.exchange_seconds * (1 - EARLY_SENDING):
        return []
    planned = f"not {plan.exchange_seconds:.4g} as if all finished together"
    return [f"the exchange takes {exchange:.4g} s, {planned}: who is done sends while others train"]


def forecast(plan: Plan, run: RunConfig, volume: Volume, exchange: float) -> dict[str, Any]:
    """Every predicted figure of a round: times, idle shares, bytes sent per site, egress a day. Keys carry their units.
    `exchange` is in seconds, from the last finish on; what members train through is not idle (planner.overlap). Nobody
    trains while it encodes or folds."""
    held_up = sum(codec_seconds(volume, plan.topology, len(plan.members))) if plan.ahead_seconds else 0.0
    idle_exchange = max(held_up, exchange - plan.ahead_seconds)
    round_seconds = plan.train_seconds + idle_exchange
    sent = [round(count) for count in sent_bytes(plan, volume).sum(axis=1)]
    rounds_a_day = DAY_SECONDS / round_seconds
    members = [
        {
            "site": a.site,
            "batch": a.batch,
            "inner_steps": a.inner_steps,
            "last_batch": a.last_batch,
            "tokens": a.sequences * run.model.sequence_length,
            "lr_scale": a.lr_scale,
            "finish_seconds": a.finish_seconds,
            "straggler_idle_share": (plan.train_seconds - a.finish_seconds) / round_seconds,
            "bytes_sent": sent[k],
            "egress_bytes_per_day": sent[k] * rounds_a_day,
            "share": list(_pair(plan.shares[k])) if plan.shares else None,
            "reasons": list(a.reasons),
        }
        for k, a in enumerate(plan.members)
    ]
    idle = sum(plan.train_seconds - a.finish_seconds for a in plan.members) / len(plan.members)
    return {
        "run": run.run.id,
        "mode": run.planner.mode,
        "parameters": volume.parameters,
        "topology": plan.topology,
        "planned_tokens": plan.planned_tokens,
        "train_seconds": plan.train_seconds,
        "exchange_seconds": exchange,
        "idle_exchange_seconds": idle_exchange,
        "round_seconds": round_seconds,
        "rounds": run.run.rounds,
        "run_seconds": run.run.rounds * round_seconds,
        "tokens_per_second": plan.planned_tokens / round_seconds,
        "straggler_idle_share": idle / round_seconds,
        "wan_idle_share": idle_exchange / round_seconds,
        "payload_bytes": volume.payload_bytes,
        "bytes_per_round": sum(sent),
        "egress_bytes_per_day": sum(sent) * rounds_a_day,
        "grace_seconds": plan.grace_seconds,
        "may_close": plan.may_close,
        "members": members,
        "bystanders": [{"site": b.site, "reason": b.reason} for b in plan.bystanders],
        "reasons": list(plan.reasons),
    }


def _pair(share: Range) -> tuple[int, int]:
    return share.start, share.stop


def sent_bytes(plan: Plan, volume: Volume) -> npt.NDArray[np.float64]:
    """[from, to], of the plan's members in their order."""
    size = len(plan.members)
    if plan.topology == "gather":
        sent = np.full((size, size), float(volume.payload_bytes))
    else:
        parts = np.array([len(share) / volume.parameters for share in plan.shares])
        sent = parts[None, :] * volume.payload_bytes + parts[:, None] * volume.answer_bytes
    np.fill_diagonal(sent, 0.0)
    return sent


def render(plan: Plan, figures: dict[str, Any]) -> str:
    """The figures of `forecast` as a table, then the reasons."""
    devices = figures.get("devices", {})
    head = ("site", "device", "batch", "steps", "last", "tokens", "lr x", "finish s", "idle", "sent/round", "egress/day")
    rows = [
        (
            m["site"],
            devices.get(m["site"], ""),
            str(m["batch"]),
            str(m["inner_steps"]),
            str(m["last_batch"]),
            f"{m['tokens']:,}",
            f"{m['lr_scale']:.2f}",
            f"{m['finish_seconds']:.3f}",
            f"{m['straggler_idle_share']:.2%}",
            size_text(m["bytes_sent"]),
            size_text(m["egress_bytes_per_day"]),
        )
        for m in figures["members"]
    ]
    exchange = f"{figures['idle_exchange_seconds']:.3f} s {figures['topology']} and commit"
    times = f"{figures['train_seconds']:.3f} s training + {exchange}"
    if plan.ahead_seconds:
        times += f" (of {figures['exchange_seconds']:.3f} s; the rest is trained through)"
    whole_run = f"{figures['rounds']} rounds in about {duration(figures['run_seconds'])}"
    sent_a_day = size_text(figures["egress_bytes_per_day"])
    lines = [
        f"run {figures['run']}: {figures['parameters']:,} parameters, planner.mode {figures['mode']}; the first round would be",
        "",
        *table(head, rows),
        "",
        f"round      {figures['round_seconds']:.3f} s = {times}",
        f"tokens     {figures['planned_tokens']:,} a round, {figures['tokens_per_second']:,.0f} a second",
        f"idle       straggler {figures['straggler_idle_share']:.2%}, WAN {figures['wan_idle_share']:.2%} of the round",
        f"bytes      {size_text(figures['bytes_per_round'])} a round in all, {sent_a_day} a day",
        f"run        {whole_run}, validation and saving not counted",
        "",
        *explain(plan)[1:],
    ]
    for site, mbps in figures.get("upload_mbps", {}).items():
        lines.append(f"{site} sends at most {mbps:g} Mbit/s to all others together (net.upload_mbps)")
    lines += [f"{site} follows: an observer (site.trains is false)" for site in figures.get("observers", [])]
    lines += [f"note: {note}" for note in figures.get("notes", [])]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first two left, numbers right."""
    widths = [max(len(row[k]) for row in (head, *rows)) for k in range(len(head))]
    pads = [str.ljust if k < 2 else str.rjust for k in range(len(head))]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def size_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
