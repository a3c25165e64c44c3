"""report.json: every figure from hand-made lines whose sums are known."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core.observations import PeerTimes, RoundCommitted
from geomesh_p2p.lab.figures import Credits, read_peer
from geomesh_p2p.lab.report import find_fastest, headline, summarise, traffic, write_report
from geomesh_p2p.lab.table import SiteView, table, title
from tests.histories import good_story

SITES = ("east", "west")
PARAMETERS = 1_000_000
# Names that dashboards and tests rely on.
TOP = set(
    """
    run_id parameters rounds_committed rounds_discarded tokens wall_seconds val_ppl_first val_ppl_last
    time_to_target_seconds digest straggler_idle_share straggler_idle_share_steady straggler_idle_share_fastest
    wan_idle_share wan_idle_share_steady compute_share emulation_overrun_share emulation_time_scale bytes_payload
    bytes_total bytes_ratio_to_fp32 bytes_ratio_to_fp32_ring rounds peers
    """.split()
)
ROUND = set(
    """
    round term members topology planned_seconds seconds straggler_idle_share wan_idle_share digest val_ppl
    """.split()
)
PEER = set(
    """
    site peer_id rounds digest batch inner_steps tokens compute_seconds data_wait_seconds straggler_idle_seconds
    wan_idle_seconds codec_seconds control_seconds bytes_sent bytes_received restarts
    """.split()
)

# Per round: (straggler idle of east, WAN idle of both, wall of both), seconds.
ROUNDS = {1: (4.0, 2.0, 10.0), 2: (3.0, 2.0, 10.0), 3: (0.1, 0.5, 10.0), 4: (0.1, 0.3, 10.0)}
PERPLEXITY = {1: 240.0, 2: 60.0, 3: 20.0, 4: 12.0}  # of the anchor before the round


def times(straggler: float, wan: float, wall: float) -> PeerTimes:
    return PeerTimes(wall - straggler - wan - 0.6, 0.1, straggler, wan, 0.2, 0.3, wall)


def line(site: str, number: int, **changes: Any) -> dict[str, Any]:
    """One metrics line as a peer writes it."""
    straggler, wan, wall = ROUNDS[number]
    east = site == "east"
    event = RoundCommitted(
        round=number,
        digest=bytes([number]) * 32,
        term=1,
        leader="east",
        attempt=1,
        topology="gather" if number < 3 else "reduce",
        members=SITES,
        contributors=SITES,
        voters=2,
        batch=8 if east else 2,
        inner_steps=20,
        planned_tokens=2000,
        tokens=1600 if east else 400,
        tokens_total=2000 * number,
        loss=2.0 if east else 3.0,
        validation_ppl=PERPLEXITY[number],
        learning_rate=1e-3,
        planned_finish_seconds=8.0,
        finish_seconds=8.4 if east and number == 4 else 8.0,
        planned_seconds=9.0,
        times=times(straggler if east else 0.0, wan, wall),
        step_seconds_median=0.4 if east else 0.3,
        steps_done=20,
        skipped_steps=0,
        overrun_seconds=0.02,
        emulated_seconds=8.0,
        payload_sent={"west" if east else "east": 125_000},
        payload_received={"west" if east else "east": 125_000},
        overhead_sent={"west" if east else "east": 1_000},
        overhead_received={"west" if east else "east": 1_000},
        validation_seconds=0.25,
    )
    found = {field.name: getattr(event, field.name) for field in fields(event)}
    found["times"] = {field.name: getattr(event.times, field.name) for field in fields(event.times)}
    found["digest"] = event.digest.hex()
    return {"time": 100.0 + number, "site": site, "kind": "round", **found, **changes}


def history(site: str, number: int) -> dict[str, Any]:
    contributors = [
        {"site": "east", "peer": "pe", "tokens": 1600, "ranges": [[0, 10]], "payload": "00"},
        {"site": "west", "peer": "pw", "tokens": 400, "ranges": [[10, 12]], "payload": "00"},
    ]
    content = {"round": number, "digest": (bytes([number]) * 32).hex(), "contributors": contributors}
    return {"peer": f"p{site[0]}", "site": site, "kind": "commit", **content}


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for site in SITES:
        final = {"time": 200.0, "site": site, "kind": "validated", "round": 4, "perplexity": 7.5, "final": True}
        write(tmp_path / site / "metrics.jsonl", [*(line(site, number) for number in ROUNDS), final])
        start = {"peer": f"p{site[0]}", "site": site, "kind": "start", "round": 0}
        write(tmp_path / site / "history.jsonl", [start, *(history(site, number) for number in ROUNDS)])
        (tmp_path / site / "config.json").write_text(json.dumps({"parameters": PARAMETERS}))
    return tmp_path


def config(target: float | None = 15.0) -> RunConfig:
    return RunConfig.model_validate({"run": {"id": "toy", "rounds": 4, "target_ppl": target}})


def report_of(folder: Path, target: float | None = 15.0) -> dict[str, Any]:
    return summarise(folder, config(target), SITES, time_scale=0.5)


def test_every_name_is_there(folder: Path) -> None:
    report = report_of(folder)
    assert set(report) >= TOP
    assert all(set(one) >= ROUND for one in report["rounds"])
    assert all(set(one) >= PEER for one in report["peers"])


def test_shares_are_sums_over_sums(folder: Path) -> None:
    report = report_of(folder)
    assert report["straggler_idle_share"] == pytest.approx((4 + 3 + 0.1 + 0.1) / 80)
    assert report["straggler_idle_share_steady"] == pytest.approx(0.2 / 40)
    assert report["wan_idle_share"] == pytest.approx(2 * (2 + 2 + 0.5 + 0.3) / 80)
    assert report["wan_idle_share_steady"] == pytest.approx(2 * 0.8 / 40)
    assert report["compute_share"] == pytest.approx((80 - 7.2 - 9.6 - 8 * 0.6) / 80)
    assert report["control_share"] == pytest.approx(8 * 0.3 / 80)
    assert report["rounds"][0]["straggler_idle_share"] == pytest.approx(4 / 20)
    assert report["wall_seconds"] == pytest.approx(40)
    assert report["peers"][0]["straggler_idle_seconds"] == pytest.approx(7.2)
    assert report["peers"][1]["codec_seconds"] == pytest.approx(0.8)


def test_the_fastest_takes_least_time_for_a_sequence(folder: Path) -> None:
    """west has the shorter step (0.3 s), but of 2 sequences against 8."""
    report = report_of(folder)
    assert report["fastest_site"] == "east"
    assert report["straggler_idle_share_fastest"] == pytest.approx(7.2 / 40)
    assert find_fastest([]) is None


def test_tokens_digests_and_finishes(folder: Path) -> None:
    report = report_of(folder)
    assert report["tokens"] == 8000
    assert report["tokens_per_round"] == 2000
    assert [peer["tokens"] for peer in report["peers"]] == [6400, 1600]
    assert report["digest"] == "04" * 32
    assert report["digests_equal"] is True
    assert report["rounds"][3]["finish_error_share"] == pytest.approx(0.05)
    assert report["finish_error_share_steady"] == pytest.approx(0.05)
    assert report["rounds"][0]["loss"] == pytest.approx((2.0 * 1600 + 3.0 * 400) / 2000)
    assert report["peers"][0]["rounds"] == 4
    assert report["peers"][0]["peer_id"] == "pe"


def test_perplexity_belongs_to_the_anchor_after_the_round(folder: Path) -> None:
    report = report_of(folder)
    assert report["val_ppl_first"] == 240.0
    assert [one["val_ppl"] for one in report["rounds"]] == [60.0, 20.0, 12.0, 7.5]
    assert report["val_ppl_last"] == 7.5


def test_time_to_target_leaves_validation_out(folder: Path) -> None:
    report = report_of(folder, target=15.0)  # first reached by the anchor of round 3
    assert report["time_to_target_seconds"] == pytest.approx(3 * 10 - 3 * 0.25)
    assert report["time_to_target_with_validation_seconds"] == pytest.approx(30)
    assert report["rounds_to_target"] == 3
    assert report_of(folder, target=5.0)["time_to_target_seconds"] is None
    assert report_of(folder, target=None)["time_to_target_seconds"] is None


def test_bytes_against_fp32(folder: Path) -> None:
    report = report_of(folder)
    assert report["bytes_payload"] == 8 * 125_000
    assert report["bytes_total"] == 8 * 126_000
    # Two peers: (N-1)·4P in a gather is what 2(N-1)/N·4P is in a reduce and a ring.
    assert report["bytes_ratio_to_fp32"] == pytest.approx(1 / 32)
    assert report["bytes_ratio_to_fp32_ring"] == pytest.approx(1 / 32)
    assert report["peers"][0]["bytes_sent"] == report["peers"][0]["bytes_received"] == 4 * 126_000


def test_bytes_of_gather_and_reduce_among_four(folder: Path) -> None:
    four = ["a", "b", "c", "d"]
    for site in SITES:
        changed = [line(site, number, members=four) for number in ROUNDS]
        write(folder / site / "metrics.jsonl", changed)
    _, fp32, ring = traffic([read_peer(folder / site, site) for site in SITES], PARAMETERS)
    assert ring == pytest.approx(8 * 1.5 * 4 * PARAMETERS)
    assert fp32 == pytest.approx((4 * 3 + 4 * 1.5) * 4 * PARAMETERS)  # rounds 1 and 2 gather, 3 and 4 reduce


def test_overrun_makes_idle_figures_invalid(folder: Path) -> None:
    assert report_of(folder)["emulation_overrun_share"] == pytest.approx(0.02 / 8)
    assert report_of(folder)["idle_valid"] is True
    for site in SITES:
        write(folder / site / "metrics.jsonl", [line(site, number, overrun_seconds=0.1) for number in ROUNDS])
    report = write_report(folder, config(), SITES, 0.5)
    assert report["emulation_overrun_share"] == pytest.approx(0.0125)
    assert report["idle_valid"] is False
    assert "the idle figures are not valid" in (folder / "report.md").read_text()


def test_rounds_of_a_bystander_do_not_count_for_it(folder: Path) -> None:
    idle = {"batch": 0, "inner_steps": 0, "times": {**line("west", 4)["times"], "straggler_idle": 9.0}}
    write(folder / "west" / "metrics.jsonl", [*(line("west", number) for number in (1, 2, 3)), line("west", 4, **idle)])
    report = report_of(folder)
    assert report["straggler_idle_share"] == pytest.approx(7.2 / 70)
    assert report["peers"][1]["rounds"] == 4
    assert report["peers"][1]["rounds_trained"] == 3
    assert report["peers"][1]["batch"] == 2


def test_unequal_digests_are_said(folder: Path) -> None:
    write(folder / "west" / "metrics.jsonl", [line("west", number, digest="ee" * 32) for number in ROUNDS])
    report = write_report(folder, config(), SITES, None)
    assert report["digests_equal"] is False
    assert len(report["rounds"][0]["digest"]) == 2
    assert " != " in (folder / "report.md").read_text()


def test_the_live_table_and_the_report_have_the_same_figures(folder: Path) -> None:
    """Over two runs of a mesh: the first two rounds are on disk when the second begins, the others are told to it. west
    commits its last round without having seen that its part was in it, and tells one round twice."""
    for site in SITES:
        write(folder / site / "metrics.jsonl", [line(site, number) for number in (1, 2)])
        write(folder / site / "history.jsonl", [history(site, number) for number in (1, 2)])
    views = [SiteView(site, read_peer(folder / site, site)) for site in SITES]
    credits = Credits(view.record for view in views)
    told = {site: [line(site, number, credited={"east": 1600, "west": 400}) for number in (3, 3, 4)] for site in SITES}
    told["west"][-1] |= {"tokens": 0}
    for view in views:
        for one in told[view.site]:
            view.take({"event": "round", **one})
            credits.take(view.site, one)
    for site in SITES:
        write(folder / site / "metrics.jsonl", [*(line(site, number) for number in (1, 2)), *told[site]])
        write(folder / site / "history.jsonl", [history(site, number) for number in ROUNDS])
    report = report_of(folder)
    said = title("toy", 4, 4, views, credits)
    assert said == "toy: round 4 of 4, 8,000 tokens, straggler idle 9.0%, WAN idle 12.0%"
    assert headline({**report, "idle_valid": False}).endswith(
        "WAN idle 12.0% (the idle figures are not valid: emulated speeds were not kept, overrun above 1%)"
    )
    perplexity = "validation perplexity 240.00 -> 12.00"
    assert headline(report) == f"4 rounds, 8,000 tokens: {perplexity}, straggler idle 9.0%, WAN idle 12.0%"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(said, views))
    rows = [row.split() for row in console.export_text().splitlines()[-2:]]
    for row, view, peer in zip(rows, views, report["peers"], strict=True):
        idle = [f"{100 * peer[f'{part}_share']:.1f}%" for part in ("straggler_idle", "wan_idle")]
        assert row[-4:] == [*idle, "504.0", "kB"]
        assert peer["bytes_sent"] == view.record.tally.bytes_sent == 504_000
        assert peer["tokens"] == credits.by_site[view.site]
    assert [peer["tokens"] for peer in report["peers"]] == [6400, 1600]


def test_a_killed_peer_leaves_half_a_line_and_one_no_files(folder: Path) -> None:
    path = folder / "west" / "metrics.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:2]) + '\n{"time": 103, "site": "we')
    (folder / "west" / "history.jsonl").unlink()
    report = summarise(folder, config(), (*SITES, "north"), None)
    assert report["rounds_committed"] == 4
    assert [peer["rounds"] for peer in report["peers"]] == [4, 2, 0]
    assert report["peers"][2]["digest"] is None


def test_nothing_at_all_is_a_report_too(tmp_path: Path) -> None:
    report = write_report(tmp_path, config(), SITES, None)
    assert report["rounds_committed"] == 0
    assert report["val_ppl_last"] is None
    assert report["straggler_idle_share"] is None
    assert "# Run toy" in (tmp_path / "report.md").read_text()


def test_discards_and_restarts_come_from_the_histories(tmp_path: Path) -> None:
    """The synthetic story gives up one attempt and restarts two peers; an attempt open at the end does not count."""
    story = good_story()
    story.note("alder", "discard", round=9, term=[2, "x"], attempt=1, plan="99", reason="shutdown")
    story.write(tmp_path)
    (tmp_path / "alder" / "config.json").write_text(json.dumps({"parameters": PARAMETERS}))
    sites = tuple(story.lines)
    report = summarise(tmp_path, config(), sites, None)
    assert report["rounds_discarded"] == 1
    assert [peer["restarts"] for peer in report["peers"]] == [1, 0, 0, 1, 0]
    assert report["rounds_committed"] == 8
    assert report["digest"] == story.digest(8)
    credited = sum(len(r) for update in story.updates for c in update.contributors for r in c.ranges)
    assert report["tokens"] == 32 * credited


def test_parameters_are_counted_from_the_run_file_if_no_peer_says(folder: Path) -> None:
    for site in SITES:
        (folder / site / "config.json").unlink()
    small = {"hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "tie_embeddings": True}
    run = RunConfig.model_validate({"run": {"id": "toy"}, "model": small})
    expected = 256 * 16 + 4 * 16 * 16 + 3 * 16 * 32 + 3 * 16  # embedding, attention, MLP, three norms
    assert summarise(folder, run, SITES)["parameters"] == expected


def test_the_page_has_a_row_for_each_round_and_site(folder: Path) -> None:
    write_report(folder, config(), SITES, 0.5)
    page = (folder / "report.md").read_text()
    assert len(re.findall(r"^\| \d \| 1 \| 2 \| (gather|reduce) \|", page, re.MULTILINE)) == 4
    assert re.search(r"^\| east \| 4 \| 8 \| 20 \| 6,400 \|", page, re.MULTILINE)
    assert "| 4 | 8.00 / 8.40 | 8.00 / 8.00 | 5.0% |" in page
    assert "| payload against fp32, same topology | 1/32.0 |" in page
    assert "15.00 after 29.2 s and 3 rounds" in page
