"""The image and the mesh of docker-compose.yml, as a user starts them: in any order, stopped, killed, started again."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator

import pytest

from tests.operate.docker import ROOT, Compose, run
from tests.process.sites import until

pytestmark = [pytest.mark.timeout(1500)]
PATIENCE_SECONDS = 300.0


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    """The image is built; nothing runs yet."""
    compose = Compose("geomesh-test", GEOMESH_RUN__ROUNDS="100000", GEOMESH_PLANNER__ROUND_TOKENS="8192")
    compose.build()
    compose("down", "--volumes")
    try:
        yield compose
    finally:
        compose("down", "--volumes")


def committed(compose: Compose, rounds: int, sites: tuple[str, ...] = Compose.peers) -> None:
    """Waits until these sites have `rounds` more in common than any of them has now, with equal digests."""
    goal = rounds + max((max(compose.commits(site), default=0) for site in sites), default=0)
    until(
        lambda: all(max(compose.commits(site), default=0) >= goal for site in sites),
        f"{', '.join(sites)} to reach round {goal}\n{compose.logs(sites)}",
        PATIENCE_SECONDS,
    )
    digests = [compose.commits(site) for site in sites]
    common = set.intersection(*(set(of) for of in digests))
    assert goal in common
    for round in common:
        assert len({of[round] for of in digests}) == 1, f"round {round}"


def test_peers_started_in_any_order_train_together(compose: Compose) -> None:
    for site in ("l40s", "rtx6000ada", "h100", "a100"):  # two that wait for the founder's address, it, and one more
        compose("up", "-d", "--no-deps", site)
    committed(compose, 5)


def test_the_image_is_small_and_its_peer_is_not_root(compose: Compose) -> None:
    inspected = json.loads(run("docker", "image", "inspect", "geomesh"))[0]
    assert inspected["Size"] < 2.2e9
    assert compose("exec", "-T", "a100", "id", "-u").strip() == "10001"
    look = "for tool in gcc cc make git; do command -v $tool; done; ls -d ~root/.cache/pip /wheels /src 2>/dev/null; true"
    assert compose("exec", "-T", "a100", "sh", "-c", look) == "", "no compiler, no cache, no source is left"


def test_every_peer_is_healthy_and_serves_its_metrics(compose: Compose) -> None:
    for site in compose.peers:
        until(lambda site=site: compose.state(site)["Health"]["Status"] == "healthy", f"{site} to be healthy", 120.0)
        with urllib.request.urlopen(f"http://{compose.address(site)}:9464/metrics", timeout=10) as page:
            assert f'geomesh_round{{site="{site}"}}' in page.read().decode()


def test_status_from_within_any_container(compose: Compose) -> None:
    told = json.loads(compose("exec", "-T", "rtx6000ada", "geomesh", "status", "@/shared/address", "--json"))
    assert {peer["site"] for peer in told["peers"]} == set(compose.peers)


def test_a_stopped_peer_saves_ends_with_0_in_time_and_catches_up(compose: Compose) -> None:
    others = tuple(site for site in compose.peers if site != "a100")
    compose("stop", "a100")
    state = compose.state("a100")
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
    assert "left: signal SIGTERM" in compose.logs(("a100",))
    committed(compose, 2, others)
    compose("start", "a100")
    committed(compose, 2)


def goes_on(compose: Compose, ended: tuple[str, ...]) -> None:
    """Those that have ended are started again; what each had committed stays as it was, and all go on from there."""
    before = {site: compose.commits(site) for site in ended}
    for site in reversed(ended):
        compose("up", "-d", "--no-deps", site)
    committed(compose, 2)
    for site, known in before.items():
        after = compose.commits(site)
        assert {round: after[round] for round in known} == known, site


def test_all_containers_killed_at_once_go_on_bit_by_bit(compose: Compose) -> None:
    """As when a host loses its power: the volumes are what is left."""
    run("docker", "kill", *(compose.container(site) for site in compose.peers))
    goes_on(compose, compose.peers)


def test_a_second_ctrl_c_ends_a_peer_at_once_and_it_goes_on_bit_by_bit(compose: Compose) -> None:
    starts, peer = started(compose, "l40s"), compose.container("l40s")
    until(lambda: compose.state("l40s")["Running"], "l40s to run")
    for _ in range(2):
        run("docker", "kill", "--signal", "INT", peer)
    until(lambda: not compose.state("l40s")["Running"] or started(compose, "l40s") > starts, "its end", PATIENCE_SECONDS)
    state = compose.state("l40s")
    assert state["Running"] or state["ExitCode"] == 130
    assert "left: " not in compose.logs(("l40s",)).rpartition("leaving after a round")[2]
    goes_on(compose, ("l40s",))


def started(compose: Compose, site: str) -> int:
    return sum(note["kind"] == "start" for note in compose.history(site))


def test_a_restarted_container_is_the_same_peer(compose: Compose) -> None:
    def peer() -> str:
        return next(note["peer"] for note in reversed(compose.history("l40s")) if note["kind"] == "start")

    before = peer()
    compose("restart", "-t", "120", "l40s")
    committed(compose, 2)
    assert peer() == before


def test_nothing_that_compose_names_is_missing() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for path in re.findall(r"(?:\./)?((?:deploy|configs)/[\w./-]+)", text):
        assert (ROOT / path.rstrip(".")).exists(), path
