"""Sites that cannot be dialled, in network namespaces: they train together through a relay, within its caps, and are told what
is wrong; without a relay the others go on. Needs root, iproute2 and nftables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.lab.verify import main as verify
from tests.injection.proof import fired, inject
from tests.process.namespaces import Internet, internet
from tests.process.sites import LIGHT, Site, Sites, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Start = Callable[..., Sites]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Light peers on the hosts of a small internet; the first public host founds the run and is the only seed."""
    made: list[Sites] = []

    def begin(net: Internet, parameters: int, settings: str = "", before: Callable[[], Any] = lambda: None) -> Sites:
        mesh = Sites(tmp_path, [*net.public, *net.private], rounds=100_000, inner_steps=2, command=LIGHT)
        made.append(mesh)
        mesh.environment |= {"LIGHT_PARAMETERS": str(parameters), "LIGHT_TRAIN_SECONDS": "0.2"}
        for site in mesh:
            site.prefix = net.on(site.name)
            with (tmp_path / f"{site.name}.toml").open("a") as file:
                file.write(f'[net]\nlisten = "/ip4/{net.address[site.name]}/tcp/4100"\n{settings}')
        founder = mesh.sites[0]
        founder.start(first=True)
        until(lambda: founder.address_file.exists(), "the founder's address")
        before()
        for site in mesh.sites[1:]:
            site.start(seeds=[founder.address_file.read_text().strip()])
        return mesh

    yield begin
    for mesh in made:
        mesh.stop()


def peer(site: Site) -> str:
    return str(until(lambda: site.history("start"), f"{site.name} to start")[0]["peer"])


def contributors(site: Site) -> set[str]:
    """Of the newest round."""
    commits = site.history("commit")
    return {one["peer"] for one in commits[-1]["contributors"]} if commits else set()


def together(mesh: Sites) -> None:
    everybody = {peer(site) for site in mesh}
    until(lambda: all(contributors(site) == everybody for site in mesh), "a round of all")


def end_well(mesh: Sites) -> None:
    mesh.terminate()
    assert mesh.exit_codes() == [0] * len(mesh.sites)
    digests = mesh.digests()
    assert len(digests) == max(round for round, _ in digests)
    assert verify([str(mesh.folder / "runs" / "tiny")]) == 0


SCRAPE = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"


def measured_rate(site: Site, other: str) -> float:
    """Bytes a second from `site` to `other`, as measured and told to the planner; 0 if they are not yet."""
    (url,) = re.findall(r"metrics on (http://\S+)", site.log())
    command = [*site.prefix, sys.executable, "-c", SCRAPE, url]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(rf'^geomesh_link_bytes_per_second{{.*remote="{other}".*}} (\S+)$', page, re.MULTILINE)
    return float(found[0]) if found else 0.0


@pytest.mark.case("C007")
def test_two_sites_that_can_only_dial_out_train_together_through_a_third(start: Start) -> None:
    """The link between them is the third's: measured as such, and the relay's caps are known before it is used."""
    uplink_mbps = 20.0
    with internet(public=["r"], private=["a", "b"]) as net:
        mesh = start(net, 8_000_000, "relay = true\n", lambda: net.limit("r", uplink_mbps))
        _, a, b = mesh
        for site in (a, b):
            until(lambda s=site: "others reach this peer through r (1,048,576 MiB each way" in s.log(), "a place at the relay")
            assert "not reachable from r on port 4100 (no answer within 5 s; others see this peer at 45.10." in site.log()
            assert net.dropped(site.name) > 0, "its router let somebody in"
        together(mesh)
        for one, other in ((a, b), (b, a)):
            words = "is relayed through r (1,048,576 MiB each way and 2,592,000 s a connection)"
            until(lambda o=one, w=words: w in o.log(), "the relayed link to be named")
            until(
                lambda o=one, n=other.name: 0 < measured_rate(o, n) < 1.5 * uplink_mbps * 1e6 / 8,
                "its rate to be measured, which is no more than the relay's",
            )
        end_well(mesh)


def replacements(site: Site) -> int:
    """How often `site` has replaced a relayed connection, as it says."""
    return max(map(int, re.findall(r"was replaced to stay within its caps: (\d+) times so far", site.log())), default=0)


@pytest.mark.case("C007")
def test_a_relayed_transfer_stays_within_the_relays_caps(start: Start) -> None:
    """2 MiB each way and no more for a connection, half a MiB a round: new connections come in time, and no round is lost."""
    with internet(public=["r"], private=["a", "b"]) as net:
        mesh = start(net, 4_000_000, f"relay = true\nrelay_bytes = {2 * 2**20}\n")
        _, a, b = mesh
        together(mesh)
        for site in (a, b):
            until(lambda s=site: "is relayed through r (2 MiB each way" in s.log(), "the relayed link to be named")
        until(lambda: replacements(a) + replacements(b) >= 3, "three connections to be replaced")
        together(mesh)
        assert not [note for site in mesh for note in site.history("discard")]
        end_well(mesh)


@pytest.mark.fault
@pytest.mark.case("C007")
@pytest.mark.case("C008")
def test_a_site_that_the_others_cannot_dial_is_told_and_takes_part_over_its_own_connections(start: Start) -> None:
    """b dials r and s; they cannot dial b. All agree who is in the run, and bytes flow both ways."""
    with internet(public=["r", "s", "b"], private=[]) as net:
        inject(lambda: net.wall_off("b"))
        mesh = start(net, 1_000_000)
        r, s, b = mesh
        found = until(
            lambda: next((line for line in b.log().splitlines() if "reachable" in line), ""), "b to hear if it can be dialled"
        )
        fired(net.dropped("b"), "somebody is kept from dialling b")
        assert "not reachable from " in found
        assert "on port 4100 (no answer within 5 s; others see this peer at 45.10.3.2)" in found
        for step in ("open TCP port 4100", "net.announce", "net.relay = true"):
            assert step in found
        together(mesh)
        before = r.round
        until(lambda: all(site.round >= before + 5 for site in mesh), "five more rounds of all three")
        together(mesh)
        for site in (r, s):
            assert "reachable: " in site.log()
            until(lambda s=site: measured_rate(s, "b") > 0, f"bytes of {site.name} to b over the connection that b opened")
        end_well(mesh)


@pytest.mark.case("C007")
def test_sites_that_cannot_reach_each_other_and_have_no_relay_do_not_stop_the_run(start: Start) -> None:
    with internet(public=["r", "s"], private=["a", "b"]) as net:
        mesh = start(net, 1_000_000)
        r, s, a, b = mesh
        for site in (a, b):
            until(lambda s=site: "not reachable from " in s.log(), f"{site.name} to hear that it cannot be dialled")
            assert net.dropped(site.name) > 0, "its router let somebody in"
        together(mesh)
        before = r.round
        until(lambda: all(site.round >= before + 10 for site in mesh), "ten more rounds of all four")
        together(mesh)
        assert not [note for site in (r, s) for note in site.history("lost")]
        for site in mesh:
            assert site.log().count("not reachable from ") <= 1
        end_well(mesh)
