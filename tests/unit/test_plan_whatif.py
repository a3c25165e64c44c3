"""`geomesh plan`: figures and text from run file and site files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geomesh_p2p.config import EmulationSection, LinkSection, ModelSection, RunConfig, SiteConfig
from geomesh_p2p.core.types import BatchTime
from geomesh_p2p.engine.model import build, parameter_count
from geomesh_p2p.engine.profiles import write_profile
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.whatif import (
    forecast,
    layout_from_files,
    llama_layout,
    llama_parameters,
    plan_from_files,
    upload_mbps,
    volume_of,
    what_if,
)
from geomesh_p2p.loading import SiteFile

RUN = RunConfig.model_validate({"run": {"id": "r", "rounds": 10}, "model": {"hidden_size": 64, "intermediate_size": 160}})


def site(name: str, speed: float, largest: int = 16, **more: object) -> SiteConfig:
    emulation = EmulationSection(
        device=f"dev {name}", fixed_seconds=0.02 / speed, sequence_seconds=0.04 / speed, max_batch=largest
    )
    return SiteConfig.model_validate({"site": {"name": name}, "emulation": emulation, **more})


def files(*sites: SiteConfig) -> list[SiteFile]:
    return [SiteFile(Path(f"{s.site.name}.toml"), s) for s in sites]


PAPER = (site("h100", 4.0), site("a100", 2.0), site("l40s", 1.1, 10), site("rtx", 1.0, 8))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_parameters_are_counted_as_the_engine_counts_them(tie: bool, kv_heads: int) -> None:
    model = ModelSection(hidden_size=64, intermediate_size=100, layers=3, heads=4, kv_heads=kv_heads, tie_embeddings=tie)
    assert llama_parameters(model, 300) == parameter_count(model, 300)


def test_the_layout_has_as_many_magnitudes_as_the_engines() -> None:
    engines = build(RUN.model, 256, seed=1).layout
    ours = llama_layout(RUN.model, 256)
    assert sorted((t.size, t.rows) for t in ours.tensors) == sorted((t.size, t.rows) for t in engines.tensors)


def test_figures_of_a_planned_round() -> None:
    layout = layout_from_files(RUN)
    plan = plan_from_files(RUN, PAPER, layout)
    volume = volume_of(layout, RUN)
    figures = forecast(plan, RUN, volume, plan.exchange_seconds)
    assert [m["site"] for m in figures["members"]] == ["a100", "h100", "l40s", "rtx"]
    assert figures["straggler_idle_share"] <= 0.005
    assert figures["round_seconds"] == figures["train_seconds"] + figures["exchange_seconds"]
    assert {m["bytes_sent"] for m in figures["members"]} == {3 * volume.payload_bytes}
    assert figures["bytes_per_round"] == 12 * volume.payload_bytes
    assert figures["egress_bytes_per_day"] == pytest.approx(figures["bytes_per_round"] * 86_400 / figures["round_seconds"])
    uniform = RUN.model_copy(update={"planner": RUN.planner.model_copy(update={"mode": "uniform"})})
    plan = plan_from_files(uniform, PAPER, layout)
    idle = forecast(plan, uniform, volume, plan.exchange_seconds)["straggler_idle_share"]
    assert idle >= 8 * max(figures["straggler_idle_share"], 0.005)


def test_what_is_trained_through_is_no_idle_time() -> None:
    slow = {"default": LinkSection(mbps=0.15)}
    sites = files(*(site(name, speed, links=slow) for name, speed in (("h100", 4.0), ("a100", 2.0), ("rtx", 1.0))))
    plain = json.loads(what_if(RUN, sites, as_json=True))
    run = RUN.model_copy(update={"planner": RUN.planner.model_copy(update={"overlap": "delayed"})})
    figures, text = json.loads(what_if(run, sites, as_json=True)), what_if(run, sites)
    assert plain["idle_exchange_seconds"] == plain["exchange_seconds"] > 0.05 * plain["train_seconds"]
    assert figures["exchange_seconds"] == pytest.approx(plain["exchange_seconds"], rel=0.05)
    assert figures["idle_exchange_seconds"] < 0.1 * figures["exchange_seconds"]
    assert figures["round_seconds"] == figures["train_seconds"] + figures["idle_exchange_seconds"]
    assert figures["tokens_per_second"] > 1.05 * plain["tokens_per_second"]
    assert "the rest is trained through" in text
    assert "planner.overlap = delayed" in text
    assert "trained through" not in what_if(RUN, sites)


def test_who_is_done_early_sends_while_others_train() -> None:
    run = RUN.model_copy(update={"planner": RUN.planner.model_copy(update={"mode": "uniform"})})
    slow = {"default": LinkSection(mbps=0.03)}
    sites = files(site("fast", 4.0, links=slow), site("slow", 1.0), site("slow2", 1.0))
    figures, text = json.loads(what_if(run, sites, as_json=True)), what_if(run, sites)
    fast, late = figures["members"][0], figures["members"][1]
    alone = 8 * figures["payload_bytes"] / 3e4
    assert 0 < late["finish_seconds"] - fast["finish_seconds"] < alone, "bytes are still under way when the last finish"
    # The way is as slow for what the late ones send, and that starts when they have finished.
    assert figures["exchange_seconds"] == pytest.approx(alone, rel=0.05)
    assert "who is done sends" not in text
    uplink = files(site("fast", 4.0, net={"upload_mbps": 0.03}), site("slow", 1.0), site("slow2", 1.0))
    figures, text = json.loads(what_if(run, uplink, as_json=True)), what_if(run, uplink)
    waited = figures["members"][1]["finish_seconds"] - figures["members"][0]["finish_seconds"]
    assert figures["exchange_seconds"] == pytest.approx(2 * alone - waited, rel=0.05)
    assert "note: the exchange takes" in text
    assert "as if all finished together: who is done sends while others train" in text


def test_a_reduce_sends_one_bit_and_gets_two_back() -> None:
    run = RUN.model_copy(update={"planner": RUN.planner.model_copy(update={"topology": "reduce"})})
    layout = layout_from_files(run)
    plan = plan_from_files(run, PAPER, layout)
    figures = forecast(plan, run, volume_of(layout, run), plan.exchange_seconds)
    payload = figures["payload_bytes"]
    assert figures["bytes_per_round"] == pytest.approx(4 * (1 + 2) * 3 / 4 * payload, rel=0.02)  # magnitudes are sent once
    assert [m["share"][0] for m in figures["members"]] == [0, *(m["share"][1] for m in figures["members"][:-1])]


def test_links_are_the_slower_of_both_ends() -> None:
    near, far = {"rtt_ms": 10.0, "mbps": 100.0}, {"rtt_ms": 400.0, "mbps": 1.0}
    sites = [site("a", 1.0, links={"b": near}), site("b", 1.0, links={"default": far}), site("c", 1.0)]
    assert sites[0].links["b"] == LinkSection(rtt_ms=10.0, mbps=100.0)
    layout = layout_from_files(RUN)
    slow = plan_from_files(RUN, sites, layout).exchange_seconds
    fast = plan_from_files(RUN, [site("a", 1.0, links={"b": near}), site("b", 1.0), site("c", 1.0)], layout).exchange_seconds
    payload_seconds = volume_of(layout, RUN).payload_bytes / (1e6 / 8)
    assert slow - fast > payload_seconds * 0.5
    assert fast < 0.1


def test_a_limited_uplink_is_shown_and_planned_with() -> None:
    office = site("office", 1.0, net={"upload_mbps": 1.0})
    sites = [office, site("a", 1.0), site("b", 1.0)]
    layout = layout_from_files(RUN)
    free = plan_from_files(RUN, sites[1:], layout).exchange_seconds
    plan = plan_from_files(RUN, sites, layout)
    assert plan.exchange_seconds - free > 0.9 * volume_of(layout, RUN).payload_bytes / (1e6 / 8)
    assert json.loads(what_if(RUN, files(*sites), as_json=True))["upload_mbps"] == {"office": 1.0}
    assert "office sends at most 1 Mbit/s to all others together (net.upload_mbps)" in what_if(RUN, files(*sites))
    for_all = RUN.model_copy(update={"net": RUN.net.model_copy(update={"upload_mbps": 8.0})})
    assert upload_mbps(for_all, sites) == {"office": 1.0, "a": 8.0, "b": 8.0}


def test_text_and_json_say_the_same() -> None:
    observer = SiteConfig.model_validate({"site": {"name": "watcher", "trains": False}})
    everything = files(*PAPER, observer)
    figures = json.loads(what_if(RUN, everything, as_json=True))
    text = what_if(RUN, everything)
    for member in figures["members"]:
        (row,) = [line for line in text.splitlines() if line.startswith(f"{member['site']} ")][:1]
        assert f"{member['tokens']:,}" in row
        assert figures["devices"][member["site"]] in row
        assert all(reason in text for reason in member["reasons"])
    assert all(reason in text for reason in figures["reasons"])
    assert figures["observers"] == ["watcher"]
    assert "watcher follows" in text
    assert "time scale" in text


def test_a_measured_site_is_planned_from_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    parameters = layout_from_files(RUN).parameters
    write_profile(
        path, "GPU", parameters, RUN.model.sequence_length, [BatchTime(1, 0.03), BatchTime(4, 0.09), BatchTime(16, 0.33)]
    )
    measured = SiteConfig.model_validate({"site": {"name": "gpu"}, "device": {"profile": str(path), "max_batch": 4}})
    plan = plan_from_files(RUN, [site("h100", 1.0), measured], layout_from_files(RUN))
    gpu = plan.members[0]
    assert gpu.site == "gpu"
    assert gpu.batch <= 4
    unknown = SiteConfig.model_validate({"site": {"name": "gpu"}})
    with pytest.raises(ConfigError, match=r"site gpu: .*geomesh profile"):
        plan_from_files(RUN, [unknown], layout_from_files(RUN))
