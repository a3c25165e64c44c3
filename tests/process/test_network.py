"""Links between real peers go down, come back, stay half open, or carry one way only: the run goes on, with one digest."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.injection.proof import fired, inject
from tests.injection.proxy import ANYBODY, Network, Rule
from tests.process.sites import LIGHT, Site, Sites, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def peer_id(site: Site) -> str:
    return str(site.history("start")[0]["peer"])


def met_since(site: Site, moment: float) -> set[str]:
    return {note["peer_site"] for note in site.history("join") if note["time"] > moment}


def contributes_after(site: Site, round: int, by: Site) -> bool:
    """Whether `site` contributed to a round after `round`, as `by` has recorded."""
    return any(
        note["round"] > round and peer_id(site) in [c["peer"] for c in note["contributors"]] for note in by.history("commit")
    )


def closings(site: Site, other: str) -> int:
    """How often `site` has found its connection with `other` dead, and closed it."""
    return site.log().count(f"{other}: its connection is dead, it is closed and the peer dialled again")


def ends_well(mesh: Sites) -> None:
    mesh.terminate()
    assert mesh.exit_codes() == [0] * len(mesh.sites)
    digests = mesh.digests()
    assert len(digests) == max(round for round, _ in digests)
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0


@pytest.mark.fault
@pytest.mark.case("C059")
@pytest.mark.case("C008")
@pytest.mark.case("C061")
def test_links_cut_in_warm_up_then_half_open_then_one_way(tmp_path: Path, network: Network) -> None:
    mesh = Sites(tmp_path, ["a", "b", "c"], rounds=100_000, command=LIGHT, network=network)
    mesh.environment["LIGHT_TRAIN_SECONDS"] = "0.5"
    for site in mesh:
        site.extra = ["--run.min_peers", "3", "--net.reach_seconds", "400"]
    a, b, c = mesh
    try:
        # Before the first round: a and b have met and wait for a third; then nobody reaches anybody, and c comes meanwhile.
        a.start(first=True)
        until(lambda: a.address_file.exists(), "the founder's address")
        b.start()
        until(lambda: network.count("b", "a").bytes > 0 and (b.folder / "founding.record").exists(), "b to join")
        inject(lambda: network.partition({"a"}, {"b"}, {"c"}, rule=Rule(cut=True)))
        fired(network.count("b", "a").resets + network.count("a", "b").resets, "the cut between a and b")
        c.start()
        until(lambda: network.count("c", "a").refused > 2 and network.count("b", "a").refused > 2, "both to try again")
        # libp2p by itself waits 5 s more than the square of its failures: by then 41 s.
        until(lambda: network.count("b", "a").cut_seconds > 90.0, "a long cut")
        healed = time.time()
        network.heal()
        for site in mesh:
            both = {"a", "b", "c"} - {site.name}
            until(lambda s=site, o=both: met_since(s, healed) == o, f"{site.name} to hear both", 30.0)  # type: ignore[misc]
        until(lambda: all(site.round >= 1 for site in mesh), "the first round")

        # All connections of c are forgotten by a middlebox: no end hears of it, and what is new gets through.
        dropped, ways = network.count().idle_drops, [(a, "c"), (b, "c"), (c, "a"), (c, "b")]
        closed = sum(closings(s, o) for s, o in ways)
        inject(lambda: network.around("c", Rule(idle_seconds=0.0)))
        until(lambda: network.count().idle_drops > dropped, "c's connections to be dropped")
        fired(network.count().idle_drops - dropped, "the silent loss of c's connections")
        network.heal()
        until(lambda: sum(closings(s, o) for s, o in ways) > closed, "a connection to be found dead and closed", 30.0)
        before = a.round
        until(lambda: contributes_after(c, before + 1, a), "c to contribute again")

        # What b says does not arrive at c any more; c's words arrive at b.
        before, closed = a.round, closings(b, "c") + closings(c, "b")
        inject(lambda: network.rule("b", "c", Rule(freeze=True)))
        until(lambda: network.count("b", "c").frozen_seconds > 5.0, "a cut one way")
        fired(network.count("b", "c").frozen_seconds, "the cut from b to c")
        until(lambda: closings(b, "c") + closings(c, "b") > closed, "the connection to be found dead and closed", 30.0)
        dialled = network.count("b", "c").connections + network.count("c", "b").connections
        until(lambda: network.count("b", "c").connections + network.count("c", "b").connections > dialled, "a new dial", 30.0)
        until(lambda: all(site.round >= before + 6 for site in mesh), "rounds in spite of a cut one way")
        views = [{tuple(site.commits()[before + n]["view"]) for site in mesh} for n in range(1, 7)]
        assert all(len(view) == 1 for view in views), "all agree who takes part"
        network.heal()
        before = a.round
        until(lambda: all(contributes_after(site, before, a) for site in mesh), "all three again")
        ends_well(mesh)
    finally:
        mesh.stop()


@pytest.mark.fault
@pytest.mark.case("C061")
def test_idle_links_are_kept_alive_through_long_inner_phases(tmp_path: Path, network: Network) -> None:
    """A middlebox forgets connections that are idle for a third of the inner phase; no exchange needs a second attempt."""
    mesh = Sites(tmp_path, ["a", "b"], rounds=4, inner_steps=1, command=LIGHT, network=network)
    mesh.environment["LIGHT_TRAIN_SECONDS"] = "6.0"
    try:
        inject(lambda: network.rule(ANYBODY, ANYBODY, Rule(idle_seconds=2.0)))
        mesh.start()
        with socket.create_connection(("127.0.0.1", int(mesh["a"].address_file.read_text().split("/")[4]))):
            until(lambda: network.count("?", "a").connections, "a stranger's connection")
            until(lambda: mesh.sites[0].round >= 2, "two long inner phases")
            fired(network.count("?", "a").idle_drops + network.count("a", "?").idle_drops, "the loss of an idle connection")
        assert mesh.exit_codes() == [0, 0]
        assert len(mesh.digests()) == 4
        for site in mesh:
            assert len({note["attempt"] for note in site.history("accept")}) == 1, "a second attempt"
            assert site.history("lost") == site.history("discard") == []
    finally:
        mesh.stop()
