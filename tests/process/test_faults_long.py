"""Faults of real peers that take their time: loops of kills, links that are slow or late, clocks that are wrong, processes that
are busy. One mesh of four light peers for most of them."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.injection.clock import SKEW
from tests.injection.process import Faults, ProcessFault, kill, pause, stopped, wake
from tests.injection.proof import fired, inject, injecting
from tests.injection.proxy import ANYBODY, Rule
from tests.injection.script import MIDDLE, At, Fault
from tests.process.ground import Ground, ground_of, struck_down
from tests.process.sites import LIGHT, Sites, met_anew, until

pytestmark = [pytest.mark.long, pytest.mark.fault, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground_of(tmp_path_factory.mktemp("long")) as ground:
        yield ground
        assert ground.in_good_order() == []
        assert verify([str(ground.mesh.folder / "runs" / "tiny")]) == 0


# ---------------------------------------------------------------- again and again


@pytest.mark.case("C032")
def test_one_peer_killed_and_started_twelve_times(ground: Ground) -> None:
    """Nobody else ends, and the rounds go on all the while."""
    mesh, victim, rng = ground.mesh, ground.mesh["b"], random.Random(0)
    others = ground.others(victim)
    pids, before = [site.process and site.process.pid for site in others], mesh["a"].round
    for _ in range(12):
        code = inject(lambda: kill(victim))
        fired(code == -signal.SIGKILL, "kill -9 of b")
        time.sleep(rng.uniform(0, 1))
        starts = len(victim.history("start"))
        victim.start()
        until(lambda n=starts: len(victim.history("start")) > n, "it to be up")  # type: ignore[misc]
        time.sleep(rng.uniform(0, 2))  # anywhere in its coming back
    mesh.together()
    assert pids == [site.process and site.process.pid for site in others]
    assert all(site.alive for site in others)
    assert mesh["a"].round > before + 12


@pytest.mark.case("C043")
def test_whoever_leads_is_killed_every_five_seconds(ground: Ground) -> None:
    mesh = ground.mesh
    before, first_note = mesh["a"].round, len(mesh["a"].history())
    until_moment, kills = time.monotonic() + 60.0, 0
    while time.monotonic() < until_moment:
        leader = mesh.leader
        assert leader is not None
        code = inject(lambda one=leader: kill(one) if one.alive else None)  # type: ignore[misc]
        fired(code == -signal.SIGKILL, "kill -9 of the leader")
        kills += 1
        leader.start()
        time.sleep(5.0)
    mesh.together()
    assert kills >= 8
    assert mesh["a"].round > before + 3, "rounds are still committed"
    terms = [tuple(note["term"]) for note in mesh["a"].history()[first_note:] if note["kind"] == "term"]
    assert terms == sorted(terms)
    assert len(set(terms)) >= 3
    plans: dict[tuple[object, ...], set[str]] = {}
    for site in mesh:
        for note in site.history("accept"):
            plans.setdefault((note["round"], tuple(note["term"]), note["attempt"]), set()).add(note["plan"])
    assert all(len(found) == 1 for found in plans.values())


@pytest.mark.case("C044")
def test_a_founder_in_a_crash_loop_closes_nothing(ground: Ground) -> None:
    """It ends five times by an exception in training; the others go on, and while it is away a newcomer gets in through one
    of them."""
    mesh, victim = ground.mesh, ground.mesh["a"]
    for crash in range(5):
        row = ground.faults.arm(At("a", "training"), ProcessFault("crash"))
        ground.faults.victim(row, until)
        fired(injecting() and victim.process is not None and victim.process.wait(120) == 1, "an exit by exception")
        before = mesh["b"].round
        until(lambda b=before: mesh["b"].round > b, "the others to go on")  # type: ignore[misc]
        if crash == 4:
            mesh.add("e").start(seeds=[mesh["c"].address_file.read_text().strip()])
            until(lambda: mesh["e"].round > 0, "the newcomer to follow the rounds without the founder")
        victim.start()
    mesh.together()
    newcomer = mesh["e"]
    newcomer.process.terminate()  # type: ignore[union-attr]
    assert newcomer.process is not None
    assert newcomer.process.wait(120) == 0
    mesh.sites.remove(newcomer)
    mesh.together()


# ---------------------------------------------------------------- inside the exchange


@pytest.mark.case("C058")
def test_killed_at_the_middle_chunk(ground: Ground) -> None:
    _, round = struck_down(ground, At("member", "exchange", step=MIDDLE))
    assert len({site.commits()[round]["digest"] for site in ground.mesh}) == 1


@pytest.mark.case("C058")
@pytest.mark.parametrize("step", [0, MIDDLE])
def test_stopped_at_a_chunk(ground: Ground, step: int) -> None:
    """The others do not wait for it for ever, and it holds the same bits once it wakes up."""
    mesh, row = ground.mesh, ground.faults.arm(At("member", "exchange", step=step), Fault("pause"))
    victim = ground.faults.victim(row, until)
    fired(victim is not None and victim.process is not None, "SIGSTOP at a chunk")
    assert victim is not None
    assert victim.process is not None
    pid = victim.process.pid
    fired(until(lambda: stopped(pid), "it to be stopped"), "SIGSTOP at a chunk")
    mesh.advance(3, ground.others(victim))
    wake(victim)
    mesh.together()
    claim = ground.faults.claim(row)
    assert claim is not None
    assert len({site.commits()[claim["round"]]["digest"] for site in mesh}) == 1


# ---------------------------------------------------------------- links


@pytest.mark.case("C055")
def test_one_slow_link_delays_and_ends_nothing(ground: Ground) -> None:
    """d sends at 30 kB/s: rounds go on, with or without it; nobody ends, and the old pace is back with the old link."""
    mesh, network = ground.mesh, ground.network
    inject(lambda: network.rule("d", ANYBODY, Rule(bytes_per_second=30_000.0)))
    held_up = injecting() and until(lambda: network.count("d").throttled_seconds > 0, "bytes of d to be held up")
    fired(held_up, "a link of 30 kB/s")
    mesh.advance(5, ground.others(mesh["d"]))
    network.heal()
    mesh.together()


@pytest.mark.case("C056")
@pytest.mark.parametrize("who", ["c", ANYBODY])
def test_seconds_of_latency_with_jitter_lose_nobody(ground: Ground, who: str) -> None:
    mesh, network = ground.mesh, ground.network
    since = time.time()
    inject(lambda: network.rule(who, ANYBODY, Rule(delay_seconds=1.0, jitter_seconds=0.5)))
    if injecting():
        mesh.advance(3)
    fired(network.count(who).delayed_bytes > 0, "latency of seconds")
    mesh.advance(3)
    lost = [note["peer_site"] for site in mesh for note in site.history("lost") if note["time"] > since]
    assert lost == [], "below the heartbeat limit nobody is taken for lost"
    network.heal()
    mesh.together()


# ---------------------------------------------------------------- busy and silent processes


@pytest.mark.case("C046")
def test_an_inner_step_that_holds_the_interpreter_is_forgiven(ground: Ground) -> None:
    """Longer than the heartbeat limit: taken for lost, and back by itself."""
    mesh, victim = ground.mesh, ground.mesh["b"]
    starts, since = len(victim.history("start")), time.time()
    row = ground.faults.arm(At("b", "training"), ProcessFault("hold_gil", seconds=7.0))
    ground.faults.victim(row, until)
    others = ground.others(victim)

    def silent() -> bool:
        return any(n["time"] > since and n["peer_site"] == "b" for site in others for n in site.history("lost"))

    fired(injecting() and until(silent, "b to be silent"), "an interpreter lock held for 7 s")
    mesh.advance(2, others)
    mesh.together()
    assert victim.alive
    assert len(victim.history("start")) == starts


@pytest.mark.case("C047")
def test_a_writer_that_stalls_silences_nobody(ground: Ground) -> None:
    """A snapshot takes three times the heartbeat limit: its peer is heard all the while."""
    mesh, since = ground.mesh, time.time()
    row = ground.faults.arm(At("c", "saving"), ProcessFault("stall", seconds=10.0))
    ground.faults.victim(row, until)
    fired(ground.faults.claim(row), "a writer that stalls")
    mesh.advance(3, ground.others(mesh["c"]))
    until(lambda: time.time() - since > 11, "the writer to go on")
    mesh.together()
    lost = [note["peer_site"] for site in mesh for note in site.history("lost") if note["time"] > since]
    assert lost == []
    plans = [note for note in mesh["a"].history("accept") if note["time"] > since]
    assert all(mesh["c"].peer in note["members"] for note in plans), "slow is no reason to be left out"
    commits = [note for note in mesh["a"].history("commit") if note["time"] > since]
    assert all(mesh["c"].peer in note["view"] for note in commits), "it keeps its vote"


# ---------------------------------------------------------------- other places


@pytest.mark.case("C060")
def test_a_peer_comes_back_at_another_address(ground: Ground) -> None:
    mesh, victim = ground.mesh, ground.mesh["c"]
    former, peer = victim.address_file.read_text().strip(), victim.peer
    for other in ground.others(victim):
        until(lambda o=other: former in o.knows(), f"{other.name} to remember c")  # type: ignore[misc]
    code = inject(lambda: kill(victim))
    fired(code == -signal.SIGKILL, "the end of c")
    inject(lambda: mesh.move(victim))
    victim.address_file.unlink()
    victim.start()
    address = until(victim.address_file.exists, "c to listen") and victim.address_file.read_text().strip()
    assert address != former
    for other in ground.others(victim):
        met_anew(other, address, former)
    mesh.together()
    assert victim.peer == peer


@pytest.mark.case("C062")
@pytest.mark.case("C104")
def test_a_dead_peer_is_listed_no_longer(tmp_path: Path) -> None:
    """Not among the members and their series after the heartbeat limit, and not in the directory after a record's life: who
    comes then does not hear of it."""
    with ground_of(tmp_path, "abc") as ground:
        mesh, dead = ground.mesh, ground.mesh["c"]
        until(lambda: all('remote="c"' in site.metrics() for site in ground.others(dead)), "series of c")
        code = inject(lambda: kill(dead))
        fired(code == -signal.SIGKILL, "kill -9 of c")
        until(lambda: all(site.metric("geomesh_members") == 2 for site in ground.others(dead)), "two members", 30.0)
        mesh.advance(3, ground.others(dead))
        pages = [site.metrics() for site in ground.others(dead)]
        assert all('remote="' in page and 'remote="c"' not in page for page in pages), "nor does a later round bring them back"
        dead.address_file.unlink()
        until(lambda: all(site.sizes().get("directory_records") == 2 for site in ground.others(dead)), "two records", 200.0)
        newcomer = mesh.add("d")
        newcomer.start()
        until(lambda: newcomer.round and len(newcomer.history("join")) == 2, "the newcomer to meet both")
        assert ground.network.count("d", "c").connections == 0
        mesh.sites.remove(dead)
        assert ground.in_good_order() == []


# ---------------------------------------------------------------- clocks


@pytest.mark.case("C011")
def test_clocks_that_differ_by_an_hour_and_jump(tmp_path: Path) -> None:
    """Ten seconds ahead and behind, an hour ahead, and a jump of two hours back in the middle: all meet through one seed, keep
    their leader, and are found by a newcomer whose clock is an hour behind when every record has been renewed."""
    mesh = Sites(tmp_path, ["a", "b", "c", "d"], rounds=100_000, command=LIGHT)
    for name, skew in (("b", "10"), ("c", "-10"), ("d", "3600")):
        mesh[name].environment[SKEW] = skew if injecting() else "0"
    faults = Faults(mesh)
    try:
        mesh["a"].start(first=True)
        until(mesh["a"].address_file.exists, "the founder's address")
        seed = [mesh["a"].address_file.read_text().strip()]
        for name in "bcd":
            mesh[name].start(seeds=seed)
        mesh.together()
        fired(abs(mesh["d"].history()[-1]["time"] - time.time()) > 3000, "a clock an hour ahead")
        row = faults.arm(At("a", "after_plan"), Fault("clock_jump", amount=-7200.0))
        faults.victim(row, until)
        mesh.advance(3)
        fired(abs(mesh["a"].history()[-1]["time"] - time.time()) > 7000, "a jump of two hours")
        begun, leaders = time.monotonic(), sum(len(site.history("leader")) for site in mesh)
        until(lambda: time.monotonic() - begun > 35, "every record to be renewed")
        late = mesh.add("e")
        late.environment[SKEW] = "-3600" if injecting() else "0"
        late.start(seeds=seed)
        mesh.together()
        for site in mesh:  # not through the seed alone: each has read each other's record
            others = {other.name for other in mesh if other is not site}
            until(lambda site=site, others=others: others == {note["peer_site"] for note in site.history("join")}, "all")
        assert sum(len(site.history("leader")) for site in mesh) == leaders
        assert all(site.history("lost") == [] for site in mesh)
        mesh.terminate()
        assert set(mesh.exit_codes()) == {0}
        assert verify([str(mesh.folder / "runs" / "tiny")]) == 0
    finally:
        mesh.stop()


# ---------------------------------------------------------------- how fast


@pytest.mark.case("C042")
def test_a_partition_of_a_minute_is_one_digest_again(ground: Ground) -> None:
    """One half goes on, the other stays where it is; after the heal it has every round that it missed, and all train on."""
    mesh, network = ground.mesh, ground.network
    inject(lambda: network.partition({"a", "b"}, {"c", "d"}))
    begun = time.monotonic()
    fired(network.holds("a", "c") and until(lambda: network.count("a", "c").frozen_seconds, "bytes held up"), "the split")
    until(lambda: time.monotonic() - begun > 60, "a minute")
    halves = [sorted(mesh[name].round for name in names) for names in ("ab", "cd")]
    stuck, reached = sorted(max(half) for half in halves)
    assert reached >= stuck + 3, "one half alone goes on"
    network.heal()
    mesh.together()
    logs = [{n: note["digest"] for n, note in site.commits().items()} for site in mesh]
    for missed in range(stuck + 1, reached + 2):  # a snapshot may have stood for some of them
        assert len({log[missed] for log in logs if missed in log}) == 1, f"one digest of round {missed}"


@pytest.mark.case("C041")
def test_a_leader_that_sleeps_again_and_again(ground: Ground) -> None:
    """Four leaders in turn stopped for a little more than the lease: each wakes up with an old term and follows."""
    mesh = ground.mesh
    for _ in range(4):
        leader = mesh.leader
        assert leader is not None
        assert leader.process is not None
        pid = leader.process.pid
        inject(lambda one=leader: pause(one))  # type: ignore[misc]
        fired(stopped(pid), "SIGSTOP of the leader")
        mesh.advance(1, ground.others(leader))
        wake(leader)
        mesh.advance(2)
    mesh.together()
