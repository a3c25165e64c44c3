"""The benchmark's report: what is worse is said as what is better, nothing is missing, invented or fetched."""

from __future__ import annotations

import builtins
import html
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from geomesh_p2p import cli
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.bench import command
from geomesh_p2p.lab.bench.claims import checked
from geomesh_p2p.lab.bench.command import TUNED, Request, TrainingsFailed, _best, _target, _to_report, bench, table
from geomesh_p2p.lab.bench.methods import METHODS as METHOD_OF
from geomesh_p2p.lab.bench.methods import with_default_outer
from geomesh_p2p.lab.bench.report import figures
from geomesh_p2p.lab.bench.report.pages import HTML, MARKDOWN, NO_PICTURES, again, pages, write
from geomesh_p2p.lab.bench.report.tables import methods, time_table, training_table, waiting_table, work_table
from geomesh_p2p.lab.bench.report.words import summary
from geomesh_p2p.lab.bench.results import _spread
from geomesh_p2p.lab.bench.runner import Failed, varied
from geomesh_p2p.lab.bench.settings import load_setting
from geomesh_p2p.lab.bench.work import fastest_alone, little_work
from tests.unit.bench_reports import BUDGET, DIGEST, outcomes, report
from tests.unit.benching import SEQUENCE_LENGTH, place, run_config, setting

# As in the interface of report.json, for `mesh` and `bench` alike, and for `bench` alone.
FIGURES = """
    rounds_committed rounds_discarded tokens wall_seconds val_ppl_first val_ppl_last time_to_target_seconds straggler_idle_share
    straggler_idle_share_steady straggler_idle_share_fastest wan_idle_share wan_idle_share_steady compute_share
    emulation_overrun_share emulation_time_scale bytes_payload bytes_total bytes_ratio_to_fp32 bytes_ratio_to_fp32_ring
    rounds_to_target tokens_to_target final_ppl continuation_accuracy continuation_stderr
    """.split()
ROUND = "round term members topology planned_seconds seconds straggler_idle_share wan_idle_share digest val_ppl".split()
PEER = """
    site peer_id rounds digest batch inner_steps tokens compute_seconds data_wait_seconds straggler_idle_seconds
    wan_idle_seconds codec_seconds control_seconds bytes_sent bytes_received restarts
    """.split()
METHODS = {"diloco": 10.0, "diloco-2x": 10.0, "diloco-4x": 10.0, "diloco-1bit": 10.1, "async": 11.0, "ddp": 9.9,
           "geomesh-fp32": 10.0, "geomesh": 10.2}  # fmt: skip
NOTHING = ("continuation_accuracy", "continuation_stderr", "bytes_total", "rounds_discarded")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = report(tmp_path_factory.mktemp("report"), METHODS)
    found["methods"][TUNED] = _best(found["methods"])
    return found


@pytest.fixture(scope="module")
def drawn(whole: dict[str, Any]) -> dict[str, str]:
    return pages(whole)


def pair(ours: Mapping[str, Any], other: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A report of two methods with little more than what is given. Shares are the same for both."""
    same = {"engine": "virtual", "tokens": 1000, "straggler_idle_share": 0.1, "wan_idle_share": 0.2, "compute_share": 0.7}
    return {
        "setting": "made-up", "setting_about": "two methods", "seeds": [1, 2], "target_ppl": 5.0, "sites": [], "links": {},
        "methods": {"diloco": {**same, **other}, "geomesh": {**same, **ours}}, **fields,
    }  # fmt: skip


def spread(name: str, value: float, low: float, high: float) -> dict[str, float]:
    return {name: value, f"{name}_min": low, f"{name}_max": high}


def said(found: Mapping[str, Any]) -> str:
    return "\n".join(summary(found))


# ---------------------------------------------------------------- in words


def test_what_is_better_and_what_is_worse_are_both_said() -> None:
    ours = {"time_to_target_seconds": 25.0, **spread("final_ppl", 5.2, 5.19, 5.21), "bytes_payload": 3.0, "seeds": [1, 2]}
    other = {"time_to_target_seconds": 100.0, **spread("final_ppl", 5.0, 4.99, 5.01), "bytes_payload": 90.0, "seeds": [1, 2],
             "limit_to_target_seconds": 20.0}  # fmt: skip
    text = said(pair(ours, other))
    assert "75.0% less time (4.0 times as fast)" in text
    assert "The limit is 80.0% less" in text
    worse, better = text.split("Worse than diloco: ")[1].split("Better: ")
    assert "final perplexity +4.0%" in worse
    assert "overlap" not in worse
    assert "time to the target -75.0%" in better
    assert "bytes sent -96.7%" in better


def test_a_method_of_ours_that_is_slower_is_called_so() -> None:
    text = said(pair({"time_to_target_seconds": 120.0, "final_ppl": 4.9}, {"time_to_target_seconds": 100.0, "final_ppl": 5.0}))
    assert "20.0% more time, it is slower" in text
    assert "Worse than diloco: time to the target +20.0%. Better: final perplexity -2.0%." in text
    assert "Later at the target than diloco: geomesh (+20.0%)." in text
    text = said(pair({"time_to_target_seconds": 5850.0, "final_ppl": 4.9}, {"time_to_target_seconds": 100.0, "final_ppl": 5.0}))
    assert "58.5 times as long, it is slower" in text


def test_where_nothing_is_worse_it_says_none_and_where_the_seeds_overlap_it_says_that() -> None:
    ours = {"time_to_target_seconds": 50.0, **spread("final_ppl", 4.99, 4.9, 5.1), "seeds": [1, 2]}
    other = {"time_to_target_seconds": 100.0, **spread("final_ppl", 5.0, 4.95, 5.05), "seeds": [1, 2]}
    text = said(pair(ours, other))
    assert "Worse than diloco: none." in text
    assert "final perplexity -0.2% (the seeds' ranges overlap)" in text


@pytest.mark.parametrize(
    ("mine", "theirs", "wanted"),
    [
        (None, 100.0, "geomesh does not reach perplexity 5.000; diloco does after 100.0 s."),
        (50.0, None, "geomesh reaches perplexity 5.000 after 50.0 s; diloco does not."),
        (None, None, "geomesh does not reach perplexity 5.000; diloco does not either."),
    ],
)
def test_a_target_that_is_not_reached_is_said(mine: float | None, theirs: float | None, wanted: str) -> None:
    text = said(pair({"time_to_target_seconds": mine}, {"time_to_target_seconds": theirs}))
    assert wanted in text
    if theirs and not mine:
        assert "Worse than diloco: time to the target (geomesh does not get there)" in text


def by_seed(*seconds: float | None) -> dict[str, Any]:
    return {**_spread("time_to_target_seconds", seconds), "time_to_target_seconds_by_seed": list(seconds)}


def test_a_seed_that_does_not_reach_the_target_is_said_and_its_range_has_no_end() -> None:
    found = pair(by_seed(20.0, 24.0, None), by_seed(100.0, 90.0, 110.0), seeds=[1, 2, 3])
    text = said(found)
    assert "geomesh reaches perplexity 5.000 after 24.0 s (1 of 3 seeds does not reach it), diloco after 100.0 s" in text
    assert "Worse than diloco: seeds that reach the target 2 of 3 instead of 3 of 3." in text
    assert "time to the target -76.0% (the seeds' ranges overlap)" in text
    assert "24.0 (20.0 .. not reached)" in time_table(found).rows[1]
    assert "24.0 (2 of 3 seeds)" in table({**found, "parameters": 1, "budget_tokens": 1})


def test_what_half_of_the_seeds_reach_has_no_median_and_is_said() -> None:
    found = pair(by_seed(20.0, 24.0), by_seed(100.0, None))
    text = said(found)
    assert "geomesh reaches perplexity 5.000 after 22.0 s; diloco does with 1 of 2 seeds only." in text
    assert "Better: time to the target (diloco gets there with 1 of 2 seeds only), seeds that reach" not in text
    assert "Better: time to the target (diloco gets there with 1 of 2 seeds only) and seeds that reach" in text
    assert "- (100.0 .. not reached)" in time_table(found).rows[0]
    assert "- (1 of 2 seeds)" in table({**found, "parameters": 1, "budget_tokens": 1})
    turned = said(pair(by_seed(100.0, None), by_seed(20.0, 24.0)))
    assert "geomesh reaches perplexity 5.000 with 1 of 2 seeds only; diloco does after 22.0 s." in turned
    del found["methods"]["geomesh"]
    assert "No method reaches perplexity 5.000 with more than half of its seeds; with some: diloco (1 of 2)." in said(found)


def test_a_target_that_is_met_at_the_start_breaks_nothing(tmp_path: Path) -> None:
    found = report(tmp_path, {"diloco": 10.0, "geomesh": 10.0}, (1, 2), target=1e9)
    assert "after 0.0 s, diloco after 0.0 s: no difference." in said(found)
    assert "Later at the target" not in said(found)
    assert "time_to_target" not in said(found)
    parsed(pages(found)[HTML])
    said_of_it, holds = checked(found)
    assert not holds
    assert "time to target below that of diloco, as a share: 0 " in said_of_it[0]
    late = said(pair(by_seed(5.0), by_seed(0.0)))
    assert "geomesh reaches perplexity 5.000 after 5.0 s, diloco after 0.0 s: it is slower." in late
    assert "Later at the target than diloco: geomesh (after 5.0 s)." in late


def test_a_share_that_reads_the_same_is_not_worse() -> None:
    assert "Worse than diloco: none." in said(pair({"wan_idle_share": 0.001804}, {"wan_idle_share": 0.001796}))


def test_a_site_that_never_trains_is_said(tmp_path: Path) -> None:
    where = setting(sites=[place("far", 400.0), place("near", 0.4)])
    found = report(tmp_path, {"geomesh": 10.0}, (1,), where)
    assert [peer["rounds"] for peer in found["methods"]["geomesh"]["peers"]] == [0, 12]
    assert found["methods"]["geomesh"]["sites_without_work"] == ["far"]
    assert "Sites that never trained, and are not in the idle shares: far (geomesh)." in said(found)


def test_a_site_with_far_less_work_than_its_speed_is_said_wherever_something_is_won(tmp_path: Path) -> None:
    """One round of sixteen, as where a leader leaves a site out once it knows its links."""
    where = setting(sites=[place("far", 0.4), place("near", 0.1)])

    def peers(far: int, rounds: int) -> list[dict[str, Any]]:
        return [{"site": "far", "tokens": far, "rounds": rounds}, {"site": "near", "tokens": 1000 - far, "rounds": 16}]

    assert little_work(where, [peers(51, 16)], [16]) == [], "a quarter of its share, which is a fifth"
    assert little_work(where, [[{"site": "far", "tokens": None}, {"site": "near", "tokens": 3}]], [16]) == []
    little = little_work(where, [peers(400, 16), peers(6, 1), peers(40, 8)], [16, 16, 16])
    assert little == [{"site": "far", "rounds": 1, "of_rounds": 16, "tokens_share": 0.006, "speed_share": pytest.approx(0.2)}]
    found = pair({"time_to_target_seconds": 50.0, "sites_with_little_work": little}, {"time_to_target_seconds": 100.0})
    told = "far trained 0.60% of the tokens in 1 of 16 rounds, with 20.00% of all sites' best speed"
    assert f"Far less work than their speed allows, with geomesh: {told}." in said(found)
    assert "Worse than diloco: work for far (0.60% of the tokens, with 20.00% of the speed)." in said(found)


def test_a_site_left_out_of_a_run_is_in_its_report(tmp_path: Path) -> None:
    links = {"pairs": [{"between": ["far", "near"], "mbps": 0.01, "rtt_ms": 100}]}
    methods = report(tmp_path, {"diloco": 10.0, "geomesh": 10.0}, (1,), setting(links=links))["methods"]
    assert methods["diloco"]["sites_with_little_work"] == []
    [far] = methods["geomesh"]["sites_with_little_work"]
    assert (far["site"], far["of_rounds"]) == ("far", methods["geomesh"]["rounds_committed"])
    assert 0 < far["rounds"] < far["of_rounds"] / 2
    assert methods["geomesh"]["sites_without_work"] == []


def test_what_the_fastest_site_would_take_alone_is_said(whole: dict[str, Any]) -> None:
    assert whole["fastest_alone_site"] == "near"
    for method in whole["methods"].values():
        assert method["fastest_alone_seconds"] == pytest.approx(method["tokens"] / SEQUENCE_LENGTH * 0.1)
    found = pair({"wall_seconds": 50.0, "fastest_alone_seconds": 80.0}, {"wall_seconds": 100.0, "fastest_alone_seconds": 80.0},
                 fastest_alone_site="near")  # fmt: skip
    told = said(found)
    assert "Against near alone (the same tokens at its best batch, no exchange): diloco 100.0 s instead of 80.0 s" in told
    assert "instead of 80.0 s, 25.0% more time, it is slower; geomesh 50.0 s instead of 80.0 s, 37.5% less time" in told
    assert "Perplexity is not compared." in told


def test_the_waiting_of_one_site_does_not_read_as_training_without_a_mesh(whole: dict[str, Any]) -> None:
    head = waiting_table(whole).head
    assert "for slower sites, of near" in head
    assert not any("alone" in text for text in head)
    assert "for slower sites, of the fastest" in waiting_table({**whole, "fastest_site": None}).head


def test_alone_a_site_has_the_speed_of_the_settings_changes() -> None:
    slow = {"site": "near", "speed": 0.5, "begins_share": 0.25, "ends_share": 0.75}
    assert fastest_alone(setting(changes=[slow]), 100) == ("near", pytest.approx(15.0))
    assert fastest_alone(setting(changes=[{**slow, "speed": 0.05}]), 100) == ("far", pytest.approx(40.0))


def test_outer_constants_are_told_and_that_nobody_tuned_the_defaults(whole: dict[str, Any], tmp_path: Path) -> None:
    constants = {name: method["constants"] for name, method in whole["methods"].items()}
    assert (constants["diloco"]["outer_momentum"], constants["diloco"]["payload"]) == (0.9, "fp32")
    assert (constants["geomesh"]["outer_momentum"], constants["geomesh"]["payload"]) == (0.5, "sign")
    row = next(row for row in methods(whole).rows if row[0] == "diloco")
    assert row[2:7] == ("0.7", "0.9", "fp32", "reduce", "none")
    played = [METHOD_OF["diloco"], METHOD_OF["geomesh"]]
    left = with_default_outer(run_config(tmp_path), played)
    assert left == {"outer.learning_rate": ["diloco"], "outer.momentum": ["diloco"]}
    assert with_default_outer(run_config(tmp_path, outer={"momentum": 0.9}), played) == {"outer.learning_rate": ["diloco"]}
    assert with_default_outer(run_config(tmp_path, outer={"momentum": 0.9, "learning_rate": 0.7}), played) == {}
    assert with_default_outer(run_config(tmp_path), varied(played, ["outer.learning_rate=0.5", "outer.momentum=0.8"])) == {}
    text = said({**whole, "outer_defaults": left})
    assert "diloco ran with GeoMesh's defaults of outer.learning_rate and outer.momentum, because the run file" in text
    assert "defaults" not in said(whole)


def test_time_is_taken_apart_into_tokens_and_seconds_a_token_and_into_rounds() -> None:
    ours = {"time_to_target_seconds": 30.0, "tokens_to_target": 1100, "rounds_to_target": 5}
    other = {"time_to_target_seconds": 100.0, "tokens_to_target": 1000, "rounds_to_target": 10}
    text = said(pair(ours, other))
    assert "geomesh needs 1.100 times diloco's tokens, 0.273 times the time for each" in text
    assert "in rounds: 0.500 times as many, each 0.600 times as long" in text


def test_unequal_tokens_one_seed_and_broken_emulation_are_said() -> None:
    found = pair({"tokens": 900, "final_ppl": 5.1}, {"final_ppl": 5.0, "emulation_overrun_share": 0.05}, seeds=[1])
    text = said(found)
    assert "not at equal tokens: geomesh trained 0.900 of diloco's" in text
    assert "One seed" in text
    assert "not valid: diloco" in text


def test_what_failed_stands_on_top_of_both_pages(tmp_path: Path) -> None:
    error = "nothing finite came of 50 inner steps in a row"
    failed = [{"method": "ddp", "seed": seed, "exit_code": 4, "error": error} for seed in (1, 3)]
    failed += [{"method": "async", "seed": 2, "exit_code": 1, "error": "Traceback:\n  File 3\nValueError: <odd>\n"}]
    found = {**report(tmp_path, {"diloco": 10.0, "geomesh": 10.0}), "failed": failed}
    told = [f"ddp failed with seeds 1 and 3 and is not compared: {error}.",
            "async failed with seed 2 and is not compared: ValueError: <odd>."]  # fmt: skip
    assert summary(found)[:2] == told
    text = pages(found)
    assert text[MARKDOWN].index(told[1]) < text[MARKDOWN].index("geomesh reaches")
    assert told[0] in text[HTML]
    assert "failed" not in said({**found, "failed": None})
    assert said({**found, "failed": [{**failed[0], "error": ""}]}).startswith("ddp failed with seed 1 and is not compared: -.")


def test_how_many_methods_failed_is_told_in_good_english(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = outcomes(tmp_path, {"diloco": 10.0, "geomesh": 10.0}, (1,), setting())
    failed = [Failed(name, 1, 4, "diverged") for name in ("ddp", "async", "diloco-1bit")]
    assert _to_report(found, failed[:1]) == found
    assert "1 of 3 trainings failed, of ddp: the report is without that" in capsys.readouterr().err
    _to_report(found, failed[:2])
    assert "2 of 4 trainings failed, of ddp and async: the report is without them" in capsys.readouterr().err
    with pytest.raises(TrainingsFailed, match=r"2 of 2 .* of ddp and async: no report; .* without them reports"):
        _to_report([], failed[:2])


def test_continuation_choice_is_better_if_it_is_higher() -> None:
    text = said(pair({"continuation_accuracy": 0.36, "seeds": [1]}, {"continuation_accuracy": 0.35, "seeds": [1]}))
    assert "Better: continuation choice +1.00 points" in text


def test_of_continuation_choice_the_interval_is_said() -> None:
    paired = {"difference": -0.012, "low": -0.02, "high": -0.004}
    ours = {"continuation_accuracy": 0.33, "continuation_stderr": 0.01, "continuation_against_diloco": paired}
    found = pair(ours, {"continuation_accuracy": 0.35})
    assert "Worse than diloco: continuation choice -1.20 points (95% interval -2.00 to -0.40)" in said(found)
    assert "33.00% +- 1.00%; -1.20 points against diloco (95%: -2.00 to -0.40)" in training_table(found).rows[1]


def test_the_other_methods_are_told_in_brief_and_without_ours_the_first_and_the_best() -> None:
    found = pair({"time_to_target_seconds": 50.0, "final_ppl": 5.0}, {"time_to_target_seconds": 100.0, "final_ppl": 5.0})
    found["methods"]["async"] = {"engine": "virtual", "time_to_target_seconds": 40.0, "final_ppl": 5.5}
    assert "against the others: async +25.0%, -9.1%." in said(found)
    del found["methods"]["geomesh"]
    assert "async reaches perplexity 5.000 first, after 40.0 s. The lowest final perplexity is 5.000, of diloco." in said(found)


def test_training_ahead_has_a_sentence_of_its_own_and_its_reasons(tmp_path: Path) -> None:
    found = pair({"time_to_target_seconds": 30.0, "final_ppl": 5.0, "plan": ["of geomesh"]},
                 {"time_to_target_seconds": 100.0, "final_ppl": 5.0})  # fmt: skip
    found |= {"parameters": 1, "budget_tokens": 1, "fastest_alone_site": "near"}
    before = summary(found)
    found["methods"]["geomesh-delayed"] = {
        **found["methods"]["geomesh"], "time_to_target_seconds": 20.0, "final_ppl": 4.5, "wan_idle_share": 0.01,
        "wall_seconds": 50.0, "fastest_alone_seconds": 40.0, "plan": ["of geomesh-delayed"],
    }  # fmt: skip
    found["methods"]["async"] = {"engine": "virtual", "time_to_target_seconds": 16.0, "final_ppl": 5.0}
    told = [line for line in summary(found) if line not in before]
    assert told[0].startswith("geomesh's time to the target and final perplexity against the others: async")
    sooner = "geomesh-delayed reaches perplexity 5.000 after 20.0 s, diloco after 100.0 s: 80.0% less time (5.0 times as fast)."
    worse = "Worse than diloco: none. Better: time to the target -80.0%, final perplexity -10.0%"
    assert told[1].startswith(f"{sooner} {worse} and waiting for links 1.00% instead of 20.00%.")
    assert told[2] == "geomesh-delayed's time to the target and final perplexity against the others: async +25.0%, -10.0%."
    assert "geomesh-delayed 50.0 s instead of 40.0 s, 25.0% more time, it is slower" in told[3]
    text = pages({**found, "links": {}, "gantt_seconds": 1.0, "methods": {
        name: {**m, "curves": [], "rounds": [], "gantt": []} for name, m in found["methods"].items()}})[MARKDOWN]  # fmt: skip
    first, second = (text.index(f"in the middle of {name}'s run") for name in ("geomesh", "geomesh-delayed"))
    assert first < text.index("\nof geomesh\n") < second < text.index("\nof geomesh-delayed\n")


def test_training_ahead_alone_is_told_once(tmp_path: Path) -> None:
    found = pair({"time_to_target_seconds": 30.0}, {"time_to_target_seconds": 100.0})
    found["methods"] = {"diloco": found["methods"]["diloco"], "geomesh-delayed": found["methods"]["geomesh"]}
    assert said(found).count("geomesh-delayed reaches") == 1


def test_of_training_ahead_in_a_sweep_the_soonest_has_the_sentence() -> None:
    found = pair({"time_to_target_seconds": 30.0}, {"time_to_target_seconds": 100.0})
    for name, seconds in (("a=1", 25.0), ("a=2", 20.0)):
        found["methods"][f"geomesh-delayed[{name}]"] = {**found["methods"]["geomesh"], "time_to_target_seconds": seconds}
    assert "geomesh-delayed[a=2] reaches perplexity 5.000 after 20.0 s" in said(found)
    assert "geomesh-delayed[a=1] reaches" not in said(found)


def test_who_is_compared_with_the_tuned_length_is_said() -> None:
    found = pair({"time_to_target_seconds": 30.0}, {"time_to_target_seconds": 100.0})
    found["methods"] |= {TUNED: {**found["methods"]["diloco"], "time_to_target_seconds": 60.0, "is": "diloco-2x"},
                         "geomesh-delayed": {**found["methods"]["geomesh"], "time_to_target_seconds": 15.0}}  # fmt: skip
    for name, share in (("geomesh", "50.0%"), ("geomesh-delayed", "75.0%")):
        assert f"{name} against {TUNED} (the best of three round lengths, here diloco-2x): {share} less time" in said(found)


def test_the_slowest_link_and_the_slowest_site_are_named() -> None:
    harsh = load_setting("harsh")
    found = report_of_setting(harsh)
    text = said(found)
    assert "The slowest site is rtx6000ada: 11.9 sequences/s, 8.1 times slower than h100." in text
    assert "The slowest link is a100 to l40s: 20 Mbit/s" in text
    equal = said(report_of_setting(load_setting("homogeneous")))
    assert "All sites are equally fast." in equal
    assert "All links have the same rate, 820 Mbit/s" in equal
    far = said(report_of_setting(load_setting("azure4")))
    assert "The longest round trip is" in far
    regions = said(report_of_setting(load_setting("halos")))
    assert "and 15 more, all between r1 and r3" in regions


def report_of_setting(where: Any) -> dict[str, Any]:
    from geomesh_p2p.lab.bench.detail import setting_facts

    return {**pair({}, {}), **setting_facts(where), "rate_scale": 0.001}


# ---------------------------------------------------------------- the file


def test_report_json_has_every_figure_and_null_where_virtual_time_has_none(whole: dict[str, Any]) -> None:
    json.dumps(whole, allow_nan=False)
    for name, method in whole["methods"].items():
        for figure in FIGURES:
            assert {figure, f"{figure}_min", f"{figure}_max"} <= method.keys(), (name, figure)
        assert all(method[figure] is None for figure in NOTHING)
        assert method["digests"] == [DIGEST] * 3
        assert all(one.keys() >= set(ROUND) for one in method["rounds"])
        assert [peer["site"] for peer in method["peers"]] == ["far", "near"]
        assert all(peer.keys() >= set(PEER) for peer in method["peers"])
        assert sum(one["tokens"] for one in method["rounds"]) == method["tokens"]
        assert median(method["time_to_target_seconds_by_seed"]) == method["time_to_target_seconds"]
        assert method["sites_without_work"] == []


def test_ratios_of_bytes_are_shares_as_in_a_meshs_report(whole: dict[str, Any]) -> None:
    """fp32 in a reduce sends what the ring sends; signs a thirty-second of it, and their magnitudes."""
    fp32, signs, gradients = (whole["methods"][name] for name in ("diloco", "diloco-1bit", "ddp"))
    assert fp32["bytes_ratio_to_fp32_ring"] == pytest.approx(1)
    assert fp32["bytes_ratio_to_fp32"] == pytest.approx(1)
    assert gradients["bytes_ratio_to_fp32_ring"] == pytest.approx(1)
    assert 1 / 32 < signs["bytes_ratio_to_fp32_ring"] == pytest.approx(signs["bytes_payload"] / fp32["bytes_payload"], rel=0.1)
    assert whole["methods"]["async"]["bytes_ratio_to_fp32_ring"] is None


def test_the_limit_to_the_target_is_that_of_its_tokens(whole: dict[str, Any]) -> None:
    for method in whole["methods"].values():
        share = method["tokens_to_target"] / method["tokens"]
        assert method["limit_to_target_seconds"] == pytest.approx(share * method["limit_seconds"])
        assert method["limit_to_target_seconds"] <= method["time_to_target_seconds"]


def test_site_by_site_stands_what_a_site_did_in_most_rounds_and_not_in_a_shorter_last_one(tmp_path: Path) -> None:
    """A dozen rounds and a half: in the last one each site has half of the steps."""
    found = report(tmp_path, {"diloco": 10.0, "geomesh": 10.0}, (1,), budget=BUDGET + BUDGET // 24)
    (far, _) = found["methods"]["diloco"]["peers"]
    assert (far["batch"], far["inner_steps"]) == (4, 1)
    assert (far["usual_batch"], far["usual_steps"]) == (4, 2)
    assert work_table(found).rows[0][:5] == ("diloco", "far", "13", "4", "2")
    assert "batch and steps are those of a site's median round, by sequences" in pages(found)[MARKDOWN]
    for peer in found["methods"]["diloco"]["peers"]:
        del peer["usual_batch"], peer["usual_steps"]
    assert work_table(found).rows[0][3:5] == ("-", "-"), "an older report has the last round's alone"


def test_of_async_it_is_said_how_often_a_site_sent(tmp_path: Path) -> None:
    found = report(tmp_path, {"async": 10.0, "diloco": 10.0}, (1,))
    peers = found["methods"]["async"]["peers"]
    assert [peer["rounds"] for peer in peers] == [12, 12], "validations in between"
    for peer in peers:
        done = peer["tokens"] // (2 * 4 * SEQUENCE_LENGTH)
        assert peer["times_sent"] in (done, done - 1), "after two steps of four sequences, unless the last time is not answered"
    far, near = (peer["times_sent"] for peer in peers)
    assert near < 12 < far, "one waits for its link, to the other, which is the server"
    assert [row[2] for row in work_table(found).rows] == [str(far), str(near), "12", "12"]
    assert "async has no rounds: in their place stands how often a site sent" in pages(found)[MARKDOWN]


def test_rounds_of_a_change_count_from_its_third_on(tmp_path: Path) -> None:
    where = setting(changes=[{"site": "near", "speed": 0.25, "begins_share": 0.3, "ends_share": 0.8}])
    found = report(tmp_path, {"geomesh": 10.0, "geomesh-static": 10.0}, (1,), where)
    planned, static = (found["methods"][name]["straggler_idle_share_settled"] for name in ("geomesh", "geomesh-static"))
    assert planned < static
    assert "From the third round of a change" in said(found)
    changed = [one["changed"] for one in found["methods"]["geomesh"]["rounds"]]
    assert any(changed)
    assert not changed[0]
    assert "pictures/changes.svg" in pages(found)


# ---------------------------------------------------------------- the pages

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Collects text and cells, and whether every element is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.drawn = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loads += [f"{tag} {name}={value}" for name, value in attrs
                       if name in ("src", "href", "xlink:href", "srcset") and not (value or "").startswith("#")]  # fmt: skip
        self.drawn += tag == "svg"
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def test_the_page_is_well_formed_and_needs_nothing_but_itself(drawn: dict[str, str]) -> None:
    text = drawn[HTML]
    page = parsed(text)
    assert page.drawn == 5
    assert page.loads == []
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"https?:|<script|@import|url\((?!#)", text)
    references = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert references <= set(page.ids)


def test_every_method_and_site_is_on_both_pages_and_in_the_pictures(whole: dict[str, Any], drawn: dict[str, str]) -> None:
    found = drawn
    for text in (found[HTML], found[MARKDOWN]):
        for name in (*whole["methods"], "far", "near", "device of far", "two sites"):
            assert name in text, name
    for name in METHODS:
        assert f">{name}<" in found["pictures/gantt.svg"], name
        assert f">{name}<" in found["pictures/perplexity.svg"], name
    for name in ("far", "near"):
        assert f">{name}<" in found["pictures/gantt.svg"]


def test_figures_on_the_pages_are_those_of_the_report(whole: dict[str, Any], drawn: dict[str, str]) -> None:
    found = drawn
    cells = parsed(found[HTML]).cells
    for method in whole["methods"].values():
        low, high = method["final_ppl_min"], method["final_ppl_max"]
        text = f"{method['final_ppl']:.3f} ({low:.3f} .. {high:.3f})"
        assert text in cells
        assert f"| {text} |" in found[MARKDOWN]
        assert f"{method['wan_idle_share']:.2%}" in cells
        assert f"{method['limit_to_target_seconds']:.1f}" in cells
        assert f"{method['bytes_payload'] / 1e6:,.1f}" in cells
        change = method["time_to_target_seconds"] / whole["methods"]["diloco"]["time_to_target_seconds"] - 1
        assert f"{change:+.1%}" in cells


def test_pictures_are_xml_and_the_same_report_gives_the_same_bytes(whole: dict[str, Any], drawn: dict[str, str]) -> None:
    found = drawn
    for name, text in found.items():
        if name.endswith(".svg"):
            ElementTree.fromstring(text)
            assert "#010203" not in text
            assert "currentColor" in text
    assert pages(json.loads(json.dumps(whole))) == found


def test_what_is_missing_is_a_dash_and_breaks_nothing(whole: dict[str, Any]) -> None:
    bare = json.loads(json.dumps(whole))
    for method in bare["methods"].values():
        for key, value in method.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                method[key] = None
        method |= {"curves": [{key: [] for key in curve} for curve in method["curves"]], "gantt": [], "rounds": [], "peers": [],
                   "plan": []}  # fmt: skip
    bare["target_ppl"] = None
    bare["links"] = bare["rate_scale"] = bare["stands_for_parameters"] = None
    found = pages(bare)
    parsed(found[HTML])
    assert "None" not in found[MARKDOWN]
    assert "nan" not in found[MARKDOWN]
    assert not any(name.endswith(".svg") for name in found)


@pytest.mark.parametrize("names", [("ddp",), ("geomesh",), ("async", "geomesh"), ("diloco", "async")])
def test_any_choice_of_methods_has_a_report(names: tuple[str, ...], tmp_path: Path) -> None:
    found = report(tmp_path, {name: METHODS[name] for name in names}, (1,), target=0.5)
    assert "nan" not in pages(found)[MARKDOWN]
    parsed(pages(found)[HTML])


def test_one_site_has_a_report(tmp_path: Path) -> None:
    alone = setting(sites=[place("only", 0.1)], links={}, reference_round_sequences=8)
    parsed(pages(report(tmp_path, {"diloco": 10.0, "geomesh": 10.0}, (1,), alone))[HTML])


def test_names_are_text_not_markup(whole: dict[str, Any]) -> None:
    odd = json.loads(json.dumps(whole))
    odd["methods"] = {f"{name}[codec=<b>|&x]": method for name, method in odd["methods"].items()}
    text = pages(odd)
    parsed(text[HTML])
    assert "<b>" not in text[HTML]
    assert "codec=<b>\\|&x" in text[MARKDOWN]


def test_without_matplotlib_there_are_tables(whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    import sys

    for name in [one for one in sys.modules if one.partition(".")[0] == "matplotlib" or "bench.report." in one]:
        if not name.endswith((".pages", ".words", ".tables", ".figures", ".blocks", ".setting")):
            monkeypatch.delitem(sys.modules, name)
    import geomesh_p2p.lab.bench.report as room

    for name in ("plots", "style", "gantt"):
        monkeypatch.delattr(room, name, raising=False)
    found = pages(whole)
    assert sorted(found) == [HTML, MARKDOWN]
    assert NO_PICTURES in found[MARKDOWN]
    assert "geomesh" in found[MARKDOWN]


def test_pages_are_made_again_from_the_file_alone(whole: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, whole)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for path in before:
        if path.suffix != ".json":
            path.unlink()
    assert again(tmp_path) == json.loads(json.dumps(whole))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"methods": 3}'])
def test_what_is_no_report_is_a_users_mistake(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match="geomesh bench"):
        again(tmp_path)


LEAST: dict[str, Any] = {"setting": "s", "setting_about": "", "parameters": 1, "budget_tokens": 1, "seeds": [1],
                         "target_ppl": 5.0, "methods": {"diloco": {"engine": "virtual"}}}  # fmt: skip


@pytest.mark.parametrize("key", LEAST)
def test_a_report_that_lacks_something_is_damaged_and_says_what(key: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({name: value for name, value in LEAST.items() if name != key}))
    with pytest.raises(ConfigError, match=f"has no {key}: it is damaged, or of another version") as caught:
        again(tmp_path)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": {}}, "has no methods"),
        ({"methods": {"diloco": 3}}, "has no engine of diloco"),
        ({"seeds": 3}, "has no seeds"),
        ({}, "cannot be read as a report"),
        ({"sites": [{"name": "near"}], "methods": {"diloco": {"engine": "virtual", "curves": []}}}, "cannot be read"),
    ],
)
def test_a_report_that_is_damaged_within_is_a_users_mistake(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(json.dumps({**LEAST, **changes}))
    assert cli.main(["bench", "configs/quickstart.toml", "--report-only", "--check", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_without_a_largest_it_is_said_why() -> None:
    assert figures.spread(spread("final_ppl", 5.0, 4.0, math.inf), "final_ppl", ".1f") == "5.0 (4.0 .. no number)"


def test_what_is_no_number_is_null_in_the_file_and_a_dash_on_the_page(tmp_path: Path) -> None:
    found = report(tmp_path, {"diloco": 10.0, "geomesh": float("nan")}, (1, 2))
    found["methods"]["geomesh"]["wan_idle_share"] = float("inf")
    write(tmp_path, found)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert read["methods"]["geomesh"]["final_ppl"] is None
    assert read["methods"]["geomesh"]["final_ppl_by_seed"] == [None, None]
    assert read["methods"]["geomesh"]["curves"][0]["val_ppl"][-1] is None
    assert "nan" not in (tmp_path / "report.md").read_text()
    assert again(tmp_path) == read
    assert checked(read)[1] is False
    table(read)


def test_without_a_number_of_the_reference_the_target_is_what_all_reach(tmp_path: Path) -> None:
    ends_at = {"diloco": math.nan, "geomesh": 10.0}
    lost, fine = outcomes(tmp_path, ends_at, (1,), setting())
    assert _target(None, [fine]) == (min(fine.curve.val_ppl), OF_ALL)
    assert _target(None, [lost, fine]) == (100.0, OF_ALL)
    nothing = replace(lost, curve=replace(lost.curve, val_ppl=(float("nan"),) * len(lost.curve.val_ppl)))
    found, rule = _target(None, [nothing])
    assert math.isnan(found)
    assert rule == OF_ALL


RULE = "1.1 times diloco's final perplexity with the same seed"
OF_ALL = command.WORST


@pytest.mark.parametrize(
    ("names", "given", "lost", "wanted"),
    [
        (("diloco", "geomesh"), None, (), RULE),
        (("diloco", "geomesh"), 12.0, (), "run.target_ppl"),
        (("async", "geomesh"), None, (), OF_ALL),
        (("diloco", "geomesh"), None, (2,), f"{RULE} (seeds 1 and 3) or {OF_ALL} (seed 2)"),
    ],
)
def test_how_the_target_was_chosen_is_in_the_report_and_on_both_pages(
    names: tuple[str, ...], given: float | None, lost: tuple[int, ...], wanted: str, tmp_path: Path, monkeypatch: Any
) -> None:
    def played(queue: Any, *_: Any) -> Any:
        return [
            one
            for job in queue
            for ends_at in [math.nan if job.seed in lost and job.method.name == "diloco" else 10.0]
            for one in outcomes(tmp_path, {job.method.name: ends_at}, (job.seed,), setting())
        ], []

    monkeypatch.setattr(command, "play_all", played)
    out = tmp_path / "out"
    run = run_config(tmp_path, **({"run": {"id": "bench", "target_ppl": given}} if given else {}))
    found = bench(run, Request(setting_file(tmp_path), names, (1, 2, 3), BUDGET, out=out))
    assert found["target_rule"] == wanted
    assert ("the worst of the methods' lowest perplexities (as a rule their final ones)" in wanted) is (OF_ALL in wanted)
    target = f"{found['target_ppl']:.3f}" + (" (median over seeds)" if given is None else "")
    for page in (MARKDOWN, HTML):
        text = html.unescape((out / page).read_text())
        assert f"The target is a perplexity of {target}: {wanted}." in text
        assert f"the target is a perplexity of {target}: {wanted}." in text


def test_a_report_from_before_the_rule_was_kept_has_pages(whole: dict[str, Any]) -> None:
    assert "target_rule" not in whole
    text = pages(whole)[MARKDOWN]
    assert "The target is" not in text
    assert "; the target is a perplexity of 12.000." in text


def test_seeds_that_are_given_twice_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def played(queue: Any, *_: Any) -> Any:
        found = [one for job in queue for one in outcomes(tmp_path, {job.method.name: 10.0}, (job.seed,), setting())]
        return found, []

    monkeypatch.setattr(command, "play_all", played)
    found = bench(run_config(tmp_path), Request(setting_file(tmp_path), ("diloco",), (2, 1, 2), BUDGET, out=tmp_path / "out"))
    assert found["seeds"] == found["methods"]["diloco"]["seeds"] == [2, 1]
    assert found["reference_wan_idle_share"] is None
    assert found["outer_defaults"] == {"outer.learning_rate": ["diloco"], "outer.momentum": ["diloco"]}


@pytest.mark.long
def test_the_command_writes_all_files_prints_the_table_and_makes_the_pages_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    request = Request(setting_file(tmp_path), ("diloco", "geomesh"), tokens=BUDGET, out=out, processes=1)
    report = bench(run_config(tmp_path), request)
    printed = table(report)
    assert {"report.json", "report.md", "report.html", "pictures"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert cli.main(["bench", "configs/quickstart.toml", "--report-only", "--out", str(out)]) == 0
    assert capsys.readouterr().out == printed + "\n"
    assert (out / "report.html").read_text() == before


def setting_file(folder: Path) -> str:
    path = folder / "two.toml"
    path.write_text("""
        about = "two sites"
        reference_round_sequences = 16
        reference_batch = 4
        stands_for_parameters = 1000000
        sites = [
            { name = "far", device = "slow", fixed_seconds = 0.0, sequence_seconds = 0.4, max_batch = 8 },
            { name = "near", device = "fast", fixed_seconds = 0.0, sequence_seconds = 0.1, max_batch = 8 },
        ]
        links = { most_mbps = 8 }
    """)
    return str(path)
