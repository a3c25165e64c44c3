"""Observers: what metrics, files and console make of the same events."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import shutil
import socket
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from geomesh_p2p.config import MetricsSection
from geomesh_p2p.core import observations as seen
from geomesh_p2p.core.types import Assignment, Plan, Range, Term
from geomesh_p2p.errors import ConfigError, TemporaryError
from geomesh_p2p.jsonlines import JsonLines
from geomesh_p2p.lab.figures import Credits, perplexity_before, summarise_round
from geomesh_p2p.lab.table import SiteView, round_line
from geomesh_p2p.telemetry import log as logs
from geomesh_p2p.telemetry import metrics as metrics_module
from geomesh_p2p.telemetry.control import TOLD
from geomesh_p2p.telemetry.metrics import MAX_REASONS, TABLE, TIMED_PHASES, Metrics, free_bytes, what_changed
from geomesh_p2p.telemetry.metrics_server import MetricsServer
from geomesh_p2p.telemetry.sinks import ConsoleReporter, HistoryWriter, MetricsFile, describe, jsonable
from tests.injection.proof import fired, inject, injecting

MEMBER = Assignment("QmA", "north", 8, inner_steps=4, last_batch=8, ranges=(Range(0, 32),), lr_scale=1.0, finish_seconds=2.0)
PLAN = Plan(
    run=b"\1" * 32,
    round=5,
    term=Term(3, "QmA"),
    attempt=1,
    base=b"\2" * 32,
    members=(MEMBER, replace(MEMBER, peer="QmB", site="south", ranges=(Range(32, 64),))),
    topology="gather",
    shares=(),
    committed_tokens=1000,
    planned_tokens=800,
    train_seconds=2.0,
    exchange_seconds=0.5,
    grace_seconds=1.0,
    may_close=True,
)
ROUND = seen.RoundCommitted(
    round=5,
    digest=b"\xab" * 32,
    term=3,
    leader="north",
    attempt=1,
    topology="gather",
    members=("north", "south"),
    contributors=("north", "south"),
    voters=2,
    batch=8,
    inner_steps=4,
    planned_tokens=800,
    tokens=400,
    tokens_total=1800,
    loss=2.5,
    validation_ppl=12.0,
    learning_rate=1e-3,
    planned_finish_seconds=2.0,
    finish_seconds=2.1,
    planned_seconds=2.5,
    times=seen.PeerTimes(compute=2.0, data_wait=0.1, straggler_idle=0.2, wan_idle=0.3, codec=0.05, control=0.15, wall=2.8),
    step_seconds_median=0.5,
    steps_done=4,
    skipped_steps=1,
    overrun_seconds=0.0,
    emulated_seconds=2.0,
    payload_sent={"south": 100},
    payload_received={"south": 90},
    overhead_sent={"south": 7},
    overhead_received={"south": 6},
    relayed_sent={"south": 5},
    relayed_received={"south": 4},
    credited={"north": 400, "south": 400},
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"geomesh_{name}", {"site": "north", **labels})


def test_series_exist_at_zero_before_anything_happened() -> None:
    metrics = Metrics("north", outer_learning_rate=0.7)
    for phase in TIMED_PHASES:
        assert value(metrics, "seconds_total", phase=phase) == 0
    assert value(metrics, "rounds_committed_total") == 0
    assert value(metrics, "rounds_discarded_total", reason="member_lost") == 0
    assert value(metrics, "learning_rate", optimizer="outer") == 0.7


def test_what_is_not_known_yet_is_absent_rather_than_zero() -> None:
    metrics = Metrics("north", outer_learning_rate=0.7)
    unknown = {"loss", "validation_perplexity", "round_seconds", "finish_seconds", "batch", "round"}
    assert all(value(metrics, name) is None for name in unknown)
    metrics(ROUND)
    metrics(seen.Validated(4, 12.0, final=False))
    assert all(value(metrics, name) is not None for name in unknown)


def test_a_committed_round_is_counted() -> None:
    metrics = Metrics("north", outer_learning_rate=0.7)
    metrics(ROUND)
    metrics(replace(ROUND, round=6, validation_ppl=None, loss=None, abstained="not finite"))
    metrics(seen.Validated(4, 12.0, final=False))
    assert value(metrics, "validation_round") == 4
    assert value(metrics, "round") == 6
    assert value(metrics, "rounds_committed_total") == 2
    assert value(metrics, "tokens_total") == 800
    assert value(metrics, "validation_perplexity") == 12.0
    assert value(metrics, "loss") == 2.5
    assert value(metrics, "seconds_total", phase="wan_idle") == pytest.approx(0.6)
    assert value(metrics, "payload_bytes_total", direction="sent", remote="south") == 200
    assert value(metrics, "overhead_bytes_total", direction="received", remote="south") == 12
    assert value(metrics, "finish_planned_seconds") == 2.0
    assert value(metrics, "skipped_steps_total") == 2
    assert value(metrics, "abstentions_total") == 1


def test_every_observation_has_its_effect() -> None:
    clock = FakeClock()
    metrics = Metrics("north", outer_learning_rate=0.7, clock=clock)
    for event, name, labels, expected in (
        (seen.PhaseChanged("training", 5), "phase", {"phase": "training"}, 1),
        (seen.PhaseChanged("exchange", 5), "phase", {"phase": "training"}, 0),
        (seen.TrainingProgress(5, 1, 4, 1234.0, 2.0), "tokens_per_second", {}, 1234),
        (seen.RoundDiscarded(5, 1, "member_lost"), "rounds_discarded_total", {"reason": "member_lost"}, 1),
        (seen.RoundDiscarded(5, 1, "cosmic rays"), "rounds_discarded_total", {"reason": "other"}, 1),
        (seen.Validated(5, 11.0, final=True), "validation_perplexity", {}, 11),
        (seen.MembersChanged(("north", "south"), "north", 4), "members", {}, 2),
        (seen.PeerJoined("QmB", "south"), "joins_total", {}, 1),
        (ROUND, "relayed_bytes_total", {"direction": "sent", "remote": "south"}, 5),
        (ROUND, "relayed_bytes_total", {"direction": "received", "remote": "south"}, 8),
        (seen.PeerLost("QmB", "south", 5.0), "losses_total", {}, 1),
        (seen.LeaderChanged(4, "north", self_is_leader=True), "is_leader", {}, 1),
        (seen.LinkMeasured("west", 0.1, 5e6), "link_rtt_seconds", {"remote": "west"}, 0.1),
        (seen.Given("snapshot", 1000), "given_bytes_total", {"what": "snapshot"}, 1000),
        (seen.Given("anything", 1000), "given_bytes_total", {"what": "update"}, 0),
        (seen.CaughtUpTo(9, 4, 1.0), "catch_up_rounds_total", {}, 4),
        (seen.Saved("snapshot", 9, 0.5, 1000), "checkpoint_seconds", {}, 0.5),
        (seen.Warned("digest_mismatch", "south differs"), "digest_mismatches_total", {}, 1),
        (seen.Warned("slow_disk", "slow"), "warnings_total", {"reason": "slow_disk"}, 1),
    ):
        metrics(event)
        assert value(metrics, name, **labels) == expected, name
    clock.now += 12
    assert value(metrics, "checkpoint_age_seconds") == 12


@pytest.mark.case("C104")
@pytest.mark.parametrize("farewell", [seen.PeerLost("QmB", "south", 5.0), seen.MembersChanged(("north", "west"), "north", 3)])
def test_a_lost_peers_series_go(farewell: object) -> None:
    metrics = Metrics("north", outer_learning_rate=0.7)
    metrics(ROUND)
    metrics(seen.LinkMeasured("south", 0.1, 5e6))
    metrics(seen.LinkMeasured("west", 0.1, 5e6))
    metrics(farewell)

    def remotes() -> set[str]:
        samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
        return {sample.labels["remote"] for sample in samples if "remote" in sample.labels}

    assert remotes() == {"west"}
    metrics(seen.LinkMeasured("south", 0.1, 5e6))
    metrics(ROUND)
    assert remotes() == {"west"}, "the rest of the round in which it was lost does not bring it back"
    metrics(seen.MembersChanged(("north", "south", "west"), "north", 3))
    metrics(seen.LinkMeasured("south", 0.1, 5e6))
    assert remotes() == {"south", "west"}


@pytest.mark.case("C119")
def test_the_share_of_signs_that_agree_is_a_metric_by_member() -> None:
    """With the updates, of which one's own signs are a part; not with the others alone, which the warning goes by."""
    metrics = Metrics("north", outer_learning_rate=0.7)
    metrics(seen.Agreed(5, with_update={"south": 0.51, "west": 0.75}, with_others={"south": 0.5, "west": 0.7}))
    assert [value(metrics, "agreement_share", remote=site) for site in ("south", "west")] == [0.51, 0.75]
    metrics(seen.Agreed(6, with_update={"south": 0.49}, with_others={"south": 0.48}))
    assert [value(metrics, "agreement_share", remote=site) for site in ("south", "west")] == [0.49, 0.75]


def test_labels_stay_bounded_whatever_reasons_come() -> None:
    metrics = Metrics("north", outer_learning_rate=0.7)
    for number in range(MAX_REASONS * 3):
        metrics(seen.Warned(f"reason-{number}", "text"))
    reasons = {s.labels["reason"] for m in metrics.registry.collect() for s in m.samples if m.name == "geomesh_warnings"}
    assert len(reasons) <= MAX_REASONS + 1
    assert value(metrics, "warnings_total", reason="other") == MAX_REASONS * 2


def test_replans_say_what_changed() -> None:
    slower = replace(PLAN, round=6, members=(replace(MEMBER, inner_steps=3), PLAN.members[1]))
    assert what_changed(None, PLAN) == ""
    assert what_changed(PLAN, replace(PLAN, round=6)) == ""
    assert what_changed(PLAN, replace(PLAN, attempt=2)) == "attempt"
    assert what_changed(PLAN, replace(PLAN, round=6, members=PLAN.members[:1])) == "members"
    assert what_changed(PLAN, replace(PLAN, round=6, topology="reduce")) == "topology"
    assert what_changed(PLAN, replace(PLAN, round=6, members=(replace(MEMBER, batch=4), PLAN.members[1]))) == "batch"
    assert what_changed(PLAN, slower) == "steps"
    metrics = Metrics("north", outer_learning_rate=0.7)
    metrics(seen.PlanAdopted(PLAN))
    metrics(seen.PlanAdopted(slower))
    assert value(metrics, "replans_total", reason="steps") == 1


# ---------------------------------------------------------------- the port


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics = Metrics("north", outer_learning_rate=0.7)
    metrics(seen.PhaseChanged("training", 5))
    server = MetricsServer(metrics, MetricsSection())
    yield server
    server.close()


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.host}:{server.port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_served_and_hold_the_whole_table(server: MetricsServer) -> None:
    status, text = get(server, "/metrics")
    assert status == 200
    assert 'geomesh_phase{phase="training",site="north"} 1.0' in text
    assert "geomesh_process_resident_memory_bytes" in text
    for name, (kind, _, help_text) in TABLE.items():
        assert f"# HELP geomesh_{name}{'_total' if kind.__name__ == 'Counter' else ''} {help_text}" in text


def test_health_says_phase_and_round(server: MetricsServer) -> None:
    status, text = get(server, "/healthz")
    assert (status, json.loads(text)) == (200, {"phase": "training", "round": 5, "waiting_for": ""})


def test_anything_else_is_not_found(server: MetricsServer) -> None:
    assert get(server, "/")[0] == 404


@pytest.mark.case("C103")
def test_three_peers_on_one_host_answer_each_on_a_port_of_its_own() -> None:
    names = ("north", "south", "west")
    servers = [MetricsServer(Metrics(name, 0.7), MetricsSection()) for name in names]
    assert len({server.port for server in servers}) == 3
    for name, server in zip(names, servers, strict=True):
        sites = set(re.findall(r'site="(\w+)"', get(server, "/metrics")[1]))
        assert sites == {name}
        server.close()


@pytest.mark.fault
@pytest.mark.case("C103")
def test_a_port_that_is_taken_is_named_and_another_one_serves() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        inject(taken.listen)
        if not injecting():
            taken.close()
        server = MetricsServer(Metrics("north", 0.7), MetricsSection(port=port))
        try:
            fired(server.port != port, "another process has the port")
            assert server.instead.startswith(f"metrics.port = {port} on 127.0.0.1 cannot be had: ")
            assert server.instead.endswith(f"metrics are on port {server.port} instead")
            assert 'site="north"' in get(server, "/metrics")[1]
        finally:
            server.close()


def test_what_a_dashboard_needs_of_time_and_disk(tmp_path: Path) -> None:
    clock = FakeClock()
    metrics = Metrics("north", 0.7, clock=clock, round_goal=60, folder=tmp_path)
    assert value(metrics, "round_goal") == 60
    assert 0 < (value(metrics, "disk_free_bytes") or 0) <= shutil.disk_usage(tmp_path).total
    assert math.isnan(value(metrics, "round_age_seconds") or 0.0)
    metrics(seen.PlanAdopted(PLAN))
    metrics(ROUND)
    metrics(seen.Saved("snapshot", 5, 0.1, 1000))
    clock.now += 30.0
    assert value(metrics, "round_age_seconds") == 30.0
    assert value(metrics, "checkpoint_round") == 5
    assert value(metrics, "exchange_seconds") == pytest.approx(0.35)
    assert value(metrics, "exchange_planned_seconds") == 0.5
    assert math.isnan(free_bytes(tmp_path / "gone"))


def test_the_disk_is_foretold_from_what_was_free_after_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, free = FakeClock(), [10e9]
    monkeypatch.setattr(metrics_module, "free_bytes", lambda folder: free[0])
    metrics = Metrics("north", 0.7, clock=clock, folder=tmp_path)
    assert value(metrics, "disk_full_seconds") is None
    for _ in range(60):
        metrics(seen.Kept(1000, 200, 1200))
        clock.now += 60.0
        free[0] -= 60e6
    assert value(metrics, "disk_full_seconds") == pytest.approx(6.46e9 / 1e6, rel=0.01)
    assert value(metrics, "kept_bytes", what="snapshots") == 1000
    assert value(metrics, "kept_bytes", what="updates") == 200


def test_metrics_are_served_on_loopback_alone_unless_a_host_is_set() -> None:
    with closing(MetricsServer(Metrics("north", 0.7), MetricsSection())) as server:
        listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [c.laddr.ip for c in listening if c.laddr.port == server.port] == ["127.0.0.1"]
    with closing(MetricsServer(Metrics("north", 0.7), MetricsSection(host="0.0.0.0"))) as server:
        listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [c.laddr.ip for c in listening if c.laddr.port == server.port] == ["0.0.0.0"]


def test_a_host_that_is_not_this_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host = '192\.0\.2\.1'"):
        MetricsServer(Metrics("north", 0.7), MetricsSection(host="192.0.2.1", port=9464))


@pytest.mark.case("C106")
def test_what_a_run_has_come_to_never_falls_over_a_restart() -> None:
    """The run's figures come from the log: absent until it is read, then at least what they were."""

    def scraped(metrics: Metrics) -> list[float | None]:
        return [value(metrics, "run_tokens"), value(metrics, "round")]

    before = Metrics("north", 0.7)
    before(seen.LogStands(0, 0))
    before(replace(ROUND, round=5, tokens_total=1800))
    assert scraped(before) == [1800, 5]
    after = Metrics("north", 0.7)
    assert scraped(after) == [None, None], "no series is no fall"
    after(seen.LogStands(5, 1800))
    assert scraped(after) == [1800, 5]
    after(replace(ROUND, round=6, tokens_total=2600))
    assert scraped(after) == [2600, 6]
    assert value(after, "tokens_total") == 400, "a process's own counter begins at zero, and its help says so"
    assert "begins at zero with it, for rate()" in TABLE["tokens"][2]


# ---------------------------------------------------------------- files


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_history_lines_have_hex_digests_and_plain_terms_and_ranges(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    writer = HistoryWriter(path, peer="QmA", site="north", clock=FakeClock())
    fields = {"round": 5, "term": Term(3, "QmB"), "plan": b"\1\2", "ranges": {"north": (Range(0, 32),)}}
    writer.write("accept", fields, run=b"\xff")
    (line,) = read(path)
    assert 0 <= line.pop("uptime_seconds") < 60
    assert [line] == [
        {
            "time": 1000.0,
            "peer": "QmA",
            "site": "north",
            "run": "ff",
            "kind": "accept",
            "round": 5,
            "term": [3, "QmB"],
            "plan": "0102",
            "ranges": {"north": [[0, 32]]},
        }
    ]


def test_history_goes_on_after_a_restart_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    first = HistoryWriter(path, "QmA", "north")
    first.write("start", {"round": 1}, b"")
    first.close()
    with path.open("a") as file:
        file.write('{"torn": ' + "x" * 200_000)
    second = HistoryWriter(path, "QmA", "north")
    second.write("start", {"round": 2}, b"")
    second.close()
    assert [line["round"] for line in read(path)] == [1, 2]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"torn"')
    JsonLines(path).close()
    assert path.read_text() == ""


def test_a_full_disk_is_said_in_one_line() -> None:
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(TemporaryError, match="/dev/full: cannot be written: No space left on device"):
        lines.append({"kind": "start"})


def test_metrics_lines_are_of_the_kinds_that_matter(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, "north", clock=FakeClock())
    for event in (seen.PlanAdopted(PLAN), seen.TrainingProgress(5, 1, 4, 10.0, 2.0), replace(ROUND, loss=float("nan"))):
        file(event)
    plan, committed = read(path)
    assert (plan["kind"], plan["digest"]) == ("plan", PLAN.digest.hex())
    assert (committed["kind"], committed["site"], committed["time"]) == ("round", "north", 1000.0)
    assert committed["digest"] == "ab" * 32
    assert committed["loss"] is None, "NaN is no JSON"
    assert committed["times"] == jsonable(ROUND.times)
    assert committed["payload_sent"] == {"south": 100}


def test_metrics_file_never_raises_and_says_once_why_it_stopped(caplog: pytest.LogCaptureFixture) -> None:
    file = MetricsFile(Path("/dev/full"), "north")
    for _ in range(3):
        file(ROUND)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left" in caplog.text


# ---------------------------------------------------------------- console and logs


def test_silence_is_broken_with_phase_round_members_speed_and_next_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    console = ConsoleReporter("north", quiet_seconds=30, clock=clock, rounds=40)
    console(seen.MembersChanged(("north", "south"), "south", 3))
    console(seen.PhaseChanged("training", 4))
    clock.now += 10
    console(seen.TrainingProgress(5, step=5, steps=20, tokens_per_second=2210.0, loss=2.31))
    console.tick()
    assert caplog.messages == []
    clock.now += 20
    console.tick()
    console.tick()
    (line,) = caplog.messages
    for part in ("round 5 of 40: training", "step 5 of 20", "2,210 tokens/s", "2 members (north, south), leader south"):
        assert part in line
    assert line.endswith("next: exchange in about 90 s")


@pytest.mark.case("C120")
def test_whatever_a_peer_does_a_line_at_least_every_30_s_says_what_how_far_and_what_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every phase for two minutes each, in silence but for what a peer observes of itself."""
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    console = ConsoleReporter("north", clock=clock, rounds=40)
    said: dict[str, list[tuple[float, str]]] = {}

    def wait(phase: str, seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1
            console.tick()
            said.setdefault(phase, []).extend((clock.now, line) for line in caplog.messages)
            caplog.clear()

    wait("starting", 120)
    console(seen.LogStands(3, 1000))
    console(seen.MembersChanged(("north", "south"), "south", 3))
    for number in (4, 5, 6):
        console(replace(ROUND, round=number))
    caplog.clear()
    for phase in seen.PHASES[1:]:
        if phase == "training":
            console(seen.PlanAdopted(PLAN))
        console(seen.PhaseChanged(phase, 4, "" if phase == "training" else "south"))
        if phase == "training":
            console(seen.TrainingProgress(5, 5, 20, 2210.0, 2.31))
        if phase == "exchange":
            console(seen.ExchangeProgress(5, 30_000_000, 60_000_000, 25_000_000, 70.0))
        wait(phase, 120)
    assert set(said) == set(seen.PHASES)
    for phase, lines in said.items():
        times = [at for at, _ in lines]
        assert len(times) >= 3
        assert max(late - early for early, late in pairwise(times)) <= 31, phase
        for _, line in lines[1:]:
            assert re.search(r"starting" if phase == "starting" else rf"round \d+ of 40: {phase.replace('_', ' ')}", line), line
            assert "tokens/s" in line or phase == "starting", line
            assert "2 members (north, south), leader south" in line or phase == "starting", line
            assert re.search(r"next: .*(in about \d+ s|once .* is there|any moment|when is not known)", line), line
            assert "the run's end in about" in line or phase == "starting", line
    assert "exchange, 50%, 30.0 MB in, 25.0 MB out, 70 s left" in said["exchange"][1][1]
    assert "waiting for south since" in said["straggler_idle"][1][1]


def lines_of(console: ConsoleReporter) -> str:
    return str(console.status)


def test_before_the_log_is_read_a_line_says_no_round_and_no_members() -> None:
    console = ConsoleReporter("north", rounds=40)
    assert lines_of(console) == "starting; next: joins the run (when is not known yet)"
    console(seen.LogStands(12, 5000))
    assert lines_of(console) == "round 12 of 40: starting; next: joins the run (when is not known yet)"


def test_the_runs_end_is_foretold_from_whole_rounds_of_ones_own_alone() -> None:
    """Neither the rounds that were caught up nor the first one after them, which began before this peer was there."""
    console = ConsoleReporter("north", rounds=40)
    console(seen.LogStands(0, 0))
    console(seen.PhaseChanged("catch_up", 0, "the updates up to round 20"))
    for number in range(1, 21):
        console(replace(ROUND, round=number, members=(), times=replace(ROUND.times, wall=0.01)))
    console(seen.CaughtUpTo(20, 20, 0.2))
    console(seen.PhaseChanged("training", 20))
    assert "end in" not in lines_of(console)
    assert "the run " not in lines_of(console)
    for number, wall in ((21, 0.5), (22, 30.0)):
        console(replace(ROUND, round=number, times=replace(ROUND.times, wall=wall)))
        assert "end in" not in lines_of(console)
    console(replace(ROUND, round=23, times=replace(ROUND.times, wall=50.0)))
    assert "the run 20 tokens/s" in lines_of(console), "1,600 tokens of all in 80 s"
    assert "the run's end in about 11 min" in lines_of(console), "17 rounds of 40 s"
    console(seen.CaughtUpTo(30, 7, 0.1))
    assert "end in" not in lines_of(console)


def test_an_observer_that_keeps_up_foretells_the_runs_end_too() -> None:
    console = ConsoleReporter("watcher", rounds=40)
    console(seen.LogStands(0, 0))
    console(seen.CaughtUpTo(20, 20, 0.2))
    for number in (21, 22, 23):
        assert "end in" not in lines_of(console)
        console(seen.CaughtUpTo(number, 1, 0.1))
        console(replace(ROUND, round=number, members=(), times=replace(ROUND.times, wall=40.0)))
    assert "the run's end in about 11 min" in lines_of(console)


def test_whoever_waits_for_min_peers_says_for_how_many_and_for_how_long() -> None:
    clock = FakeClock()
    console = ConsoleReporter("north", clock=clock, rounds=40)
    for number in (3, 4, 5):
        console(replace(ROUND, round=number))
    console(seen.PhaseChanged("idle", 5, "a plan of south"))
    console(seen.PhaseChanged("training", 5))
    console(seen.PhaseChanged("idle", 5, "2 more peers, min_peers is 4", lacking=2))
    clock.now += 40
    console(seen.PhaseChanged("idle", 5, "1 more peer, min_peers is 4", lacking=1))
    clock.now += 20
    line = lines_of(console)
    assert "waiting for 1 more peer, min_peers is 4 since 60 s" in line, "since it waits for any"
    assert line.endswith("next: the next plan once that is there")
    for wrong in ("straggler", "any moment", "the run's end"):
        assert wrong not in line


def test_a_wait_that_is_no_part_of_the_plan_is_not_called_late() -> None:
    clock = FakeClock()
    console = ConsoleReporter("north", clock=clock)
    for _ in range(2):
        console(seen.PhaseChanged("straggler_idle", 4, "the contributions of south"))
        clock.now += 1
        console(seen.PhaseChanged("exchange", 4, "the exchange"))
    console(seen.PhaseChanged("straggler_idle", 5, "the contributions of south"))
    clock.now += 30
    assert lines_of(console).endswith("next: exchange once that is there")


def test_a_committed_round_says_what_is_the_runs_and_what_is_this_peers_own() -> None:
    line = describe(replace(ROUND, credited={"north": 400, "south": 800}))
    assert line.startswith("round 5 committed by 2 of 2, 1,200 tokens in 2.8 s; here 400 tokens, loss 2.500, idle 0.2 s for")
    caught_up = describe(replace(ROUND, members=(), tokens=0, loss=None, validation_ppl=None))
    assert caught_up == "round 5 committed by 2, 800 tokens; digest abababababab"


def test_a_round_without_contributions_says_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = ConsoleReporter("north")
    console(seen.RolledBack(5, 2))
    empty = replace(ROUND, contributors=(), credited={}, tokens=0, loss=None, validation_ppl=None)
    console(empty)
    assert caplog.messages == ["round 5: the state after round 2 once more, by order"]
    console(replace(empty, round=6, gone=("south",)))
    console(replace(empty, round=7))
    assert caplog.messages[1].startswith("round 6: south leaves; ")
    assert caplog.messages[2].startswith("round 7 committed without contributions; ")


def test_that_nobody_leads_is_said_once_and_only_if_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    console, metrics = ConsoleReporter("north", clock=clock, lease_seconds=10.0), Metrics("north", 0.7)
    console(seen.PhaseChanged("idle", 4, "a leader to be elected"))
    for observer in (console, metrics):
        observer(seen.LeaderChanged(4, "", False))
    for _ in range(10):
        clock.now += 1
        console.tick()
    assert not caplog.messages
    for _ in range(10):
        clock.now += 1
        console.tick()
    assert caplog.messages == ["no leader for 11 s: waiting for a leader to be elected"]
    for observer in (console, metrics):
        observer(seen.LeaderChanged(5, "south", False))
    assert caplog.messages[1:] == ["leader of term 5: south"]
    assert value(metrics, "elections_total") == 1, "that there is none is no election"
    console(seen.LeaderChanged(5, "", False))
    clock.now += 11
    console.tick()
    assert len(caplog.messages) == 3, "another time without a leader is told again"


@pytest.mark.case("C121")
def test_an_exchange_shows_percent_bytes_and_time_left_on_screen_and_as_metrics() -> None:
    progress = seen.ExchangeProgress(5, 45_000_000, 60_000_000, 40_000_000, 15.4)
    console, metrics, view = ConsoleReporter("north"), Metrics("north", 0.7), SiteView("north")
    for observer in (console, metrics):
        observer(seen.PhaseChanged("exchange", 4, "the exchange"))
        observer(progress)
    view.take({"event": TOLD[type(progress)], **jsonable(progress)})
    assert "exchange, 75%, 45.0 MB in, 40.0 MB out, 15 s left" in str(console.status)
    assert "next: commit in about 15 s" in str(console.status)
    assert view.state == "exchange 75.0%, 45.0 MB in, 40.0 MB out, 15 s left"
    for name, expected in (("share", 0.75), ("received_bytes", 4.5e7), ("sent_bytes", 4e7), ("remaining_seconds", 15.4)):
        assert value(metrics, f"exchange_{name}") == expected
    view.take({"event": "exchange", **jsonable(replace(progress, expected_bytes=0, received_bytes=0, remaining_seconds=None))})
    assert view.state == "exchange 100.0%, 0 B in, 40.0 MB out"


def test_whoever_waits_says_for_whom_since_when_and_how_long_still() -> None:
    clock = FakeClock()
    console = ConsoleReporter("north", clock=clock)
    console(seen.PhaseChanged("commit", 4, waiting_for="south, west", deadline_seconds=20.0))
    clock.now += 8
    assert "round 5: commit; waiting for south, west since 8 s" in str(console.status)
    assert "gives up waiting in 12 s" in str(console.status)


def test_a_perplexity_is_said_with_the_round_whose_model_it_is_of() -> None:
    """A round's contributions bring the perplexity of the anchor before it; the report's column is by that model's round."""
    assert "perplexity of round 4: 12.00" in describe(ROUND)
    assert describe(seen.Validated(5, 11.0, final=True)) == "perplexity of round 5: 11.000"
    view = SiteView("north")
    view.take({"event": "round", **jsonable(ROUND)})
    one = summarise_round(5, [view.record], Credits([view.record]))
    assert "val ppl of round 4 12.00" in round_line(one, perplexity_before(5, [view.record]))
    assert "no contributions: a voter leaves" in round_line({**one, "contributors": []}, None)


def test_events_that_matter_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    console = ConsoleReporter("north")
    console(ROUND)
    console(seen.PeerLost("QmB", "south", 5.2))
    console(seen.LinkMeasured("south", 0.1, 5e6))
    console(seen.PeerLost("QmB", "south", 5.2, left=True))
    assert caplog.messages[1:] == ["south is lost: not heard for 5.2 s", "south has left"]
    assert "round 5 committed by 2 of 2" in caplog.messages[0]
    assert "abababababab" in caplog.messages[0]
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING, logging.INFO]


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("restored_logging")
def test_json_logs_are_one_object_a_line_even_for_tracebacks_and_chatty_libraries() -> None:
    chatty = logging.getLogger("hivemind")
    own = io.StringIO()
    chatty.addHandler(logging.StreamHandler(own))
    stream = io.StringIO()
    logs.setup("json", site="north", stream=stream)
    logging.getLogger("geomesh").info("hello %s", "you", extra={"fields": {"round": 5}})
    chatty.info("chatter")
    chatty.warning("trouble")
    warnings.warn("old ways", stacklevel=1)
    try:
        raise ValueError("a bug")
    except ValueError:
        logging.getLogger("geomesh").exception("failed")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "warning", "error"]
    assert {line["site"] for line in lines} == {"north"}
    assert (lines[0]["message"], lines[0]["round"]) == ("hello you", 5)
    assert lines[1]["message"] == "trouble"
    assert "ValueError: a bug" in lines[3]["exception"]
    assert own.getvalue() == ""


@pytest.mark.usefixtures("restored_logging")
def test_console_logs_also_go_to_a_file(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs.setup("console", site="north", file=tmp_path / "peer.log", stream=stream)
    logging.getLogger("geomesh").warning("disk is nearly full")
    assert stream.getvalue().endswith("north  warning: disk is nearly full\n")
    assert (tmp_path / "peer.log").read_text() == stream.getvalue()
