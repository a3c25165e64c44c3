"""Ten faults of real peers, one after the other on one mesh: nothing is lost, and everybody is back.

Four light peers behind proxies. Each test leaves the mesh as it found it; the last one stops it in good order and has the
independent checker read all histories. More of the kind: test_faults_long.py; in virtual time: tests/mesh.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.injection.process import gone, kill, pause, stopped, wake
from tests.injection.proof import fired, inject, injecting
from tests.injection.proxy import Network, family
from tests.injection.script import LAST, At, Fault, Phase
from tests.process.ground import LEASE_SECONDS, Ground, ground_of, struck_down
from tests.process.sites import until

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with ground_of(tmp_path_factory.mktemp("faults")) as ground:
        yield ground


@pytest.mark.fault
@pytest.mark.case("C040")
@pytest.mark.parametrize(
    ("phase", "step"), [("before_plan", None), ("after_plan", None), ("exchange", 1), ("before_commit", None), ("in_commit", 1)]
)
def test_leader_killed(ground: Ground, phase: Phase, step: int | None) -> None:
    mesh = ground.mesh
    name, round = struck_down(ground, At("leader", phase, step=step))
    later = [note["term"] for site in mesh for note in site.history("commit") if note["round"] == round + 2 and note["term"]]
    assert later, "the rounds after it were committed"
    assert all(term[1] != mesh[name].peer for term in later), "by another leader"


@pytest.mark.fault
@pytest.mark.case("C045")
@pytest.mark.case("C058")
@pytest.mark.parametrize(("phase", "step"), [("after_plan", None), ("exchange", 0), ("exchange", LAST)])
def test_member_killed_between_plan_and_exchange_or_at_a_chunk(ground: Ground, phase: Phase, step: int | None) -> None:
    name, round = struck_down(ground, At("member", phase, step=step))
    digests = {site.commits()[round]["digest"] for site in ground.mesh}
    assert len(digests) == 1, "all hold the same bits of the round in which it died"
    contributors = {c["site"] for c in ground.mesh["a"].commits()[round]["contributors"]}
    assert {"a", "b", "c", "d"} - {name} <= contributors, "which counts all who lived"


@pytest.mark.fault
@pytest.mark.case("C041")
def test_a_paused_leader_wakes_up_with_an_old_term(ground: Ground) -> None:
    mesh = ground.mesh
    leader = mesh.leader
    assert leader is not None
    assert leader.process is not None
    pid = leader.process.pid
    inject(lambda: pause(leader))
    fired(stopped(pid), "SIGSTOP of the leader")
    began = time.monotonic()
    others = [site for site in mesh if site is not leader]
    mesh.advance(2, others)
    until(lambda: time.monotonic() - began > 3 * LEASE_SECONDS, "three leases")
    wake(leader)
    mesh.together()
    assert leader.alive
    accepted = {(n["round"], tuple(n["term"]), n["attempt"], n["plan"]) for site in mesh for n in site.history("accept")}
    assert len({key[:3] for key in accepted}) == len(accepted), "one plan a round, term and attempt"


@pytest.mark.fault
@pytest.mark.case("C042")
def test_an_even_split_has_one_half_that_goes_on(ground: Ground) -> None:
    mesh, network = ground.mesh, ground.network
    halves = {"a", "b"}, {"c", "d"}
    before = network.count("a", "c").frozen_seconds + network.count("c", "a").frozen_seconds
    inject(lambda: network.partition(*halves))
    fired(until_frozen(network, before), "the split")
    lowest = min(mesh, key=lambda site: site.peer)
    winners = [mesh[name] for name in next(half for half in halves if lowest.name in half)]
    losers = [site for site in mesh if site not in winners]
    mesh.advance(5, winners)
    reached = max(site.round for site in losers)
    assert reached < max(site.round for site in winners) - 2, "the half without the lowest id commits nothing"
    network.heal()
    mesh.together()
    assert len(mesh.digests()) == len({round for round, _ in mesh.digests()}), "one history"


def until_frozen(network: Network, before: float) -> bool:
    """Whether bytes between the halves were held up; False at once while there is no rule that could."""
    deadline = time.monotonic() + 10
    while network.holds("a", "c") and time.monotonic() < deadline:
        if network.count("a", "c").frozen_seconds + network.count("c", "a").frozen_seconds > before:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.fault
@pytest.mark.case("C090")
def test_the_disk_of_a_running_peer_is_full(ground: Ground) -> None:
    """It says so in a line and ends, as it could promise nothing any more; with space it goes on where it was."""
    mesh, victim = ground.mesh, ground.mesh["c"]
    row = ground.faults.arm(At("c", "before_held"), Fault("full_disk"))
    ground.faults.victim(row, until)
    fired("File too large" in victim.log() or (injecting() and until(lambda: "File too large" in victim.log(), "it to say so")),
          "a write that the kernel refuses")  # fmt: skip
    assert victim.process is not None
    assert victim.process.wait(120) == 75
    said = victim.log().splitlines()[-1]
    assert said.startswith("geomesh: ")
    assert "cannot" in said
    assert "start" in said
    mesh.advance(3, [site for site in mesh if site is not victim])
    victim.start()
    mesh.together()


@pytest.mark.fault
@pytest.mark.case("C038")
def test_all_killed_at_once_go_on_from_the_last_commit(ground: Ground) -> None:
    mesh = ground.mesh
    codes = inject(lambda: [kill(site) for site in mesh])
    fired(codes == [-signal.SIGKILL] * 4, "kill -9 of all")
    last = max(site.round for site in mesh)
    digests = {site.commits()[last]["digest"] for site in mesh if last in site.commits()}
    assert len(digests) == 1
    for site in mesh:
        site.start()
    mesh.together()
    for site in mesh:
        assert site.commits()[last]["digest"] in digests, "the history that was there"
        assert site.history("start")[-1]["round"] in (last, last - 1)


def test_and_nothing_was_lost(ground: Ground) -> None:
    """In good order to the end: exit codes, the checker over all histories, and no peer had a bug to report."""
    mesh = ground.mesh
    pids = [pid for site in mesh if site.process is not None for pid in family(site.process.pid) if pid != os.getpid()]
    assert ground.in_good_order() == []
    assert all(gone(pid) for pid in pids), "helpers end with their peers"
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0
