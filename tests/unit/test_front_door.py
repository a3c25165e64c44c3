"""What a peer hands messages and questions to: from its start on, whoever asks."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p import peer as peers
from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.core.observations import Warned
from geomesh_p2p.peer import Peer, PeerOptions
from geomesh_p2p.swarm.front_door import FrontDoor
from geomesh_p2p.telemetry.sinks import ConsoleReporter
from tests.injection.proof import fired, inject
from tests.process.sites import until

QUESTION = Fetch("dial back", 0, b"", 0, 0)


@pytest.mark.case("C007")
@pytest.mark.case("C017")
@pytest.mark.fault
async def test_a_stranger_of_another_version_does_not_end_the_answers_to_those_who_ask_to_be_dialled_back() -> None:
    strangers, door = list[str](), FrontDoor()
    dialled = Fetched(True, b"dialled", 0, 0, b"", 0)

    async def answer(sender: str, fetch: Fetch) -> Fetched:
        return dialled

    door.membership = other_versions = SimpleNamespace()  # type: ignore[assignment]
    other_versions.on_other_version = lambda peer, version, now: strangers.append(peer)  # type: ignore[attr-defined]
    session: Any = SimpleNamespace(answer=answer)
    assert not (await door.answer("member", QUESTION)).found, "nothing is there yet"
    door.session, door.reaching = session, SimpleNamespace(answer=answer)  # type: ignore[assignment]
    session.answer = None
    assert await door.answer("member", QUESTION) == dialled
    inject(lambda: door.other_version("stranger", 99))
    fired(strangers, "a stranger of another version spoke")
    assert await door.answer("member", QUESTION) == dialled


def test_an_observer_that_fails_ends_no_peer_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunConfig.model_validate({"run": {"id": "toy"}})
    peer = Peer(run, SiteConfig.model_validate({"site": {"name": "a"}}), PeerOptions(), tmp_path)
    heard: list[Any] = []

    def fails(event: Any) -> None:
        raise ValueError("counters can only be incremented by non-negative amounts")

    peer.observers += [fails, heard.append]
    for _ in range(3):
        peer.observe(Warned("refused", "no"))
    assert len(heard) == 3
    told = [record.getMessage() for record in caplog.records]
    assert told == ["function cannot take Warned: the peer goes on, please report this"]


@pytest.mark.case("C120")
def test_a_peer_breaks_its_silence_from_its_start_on_even_while_its_event_loop_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Silence may last half a second here. No event loop runs at all: the console has a thread of its own, and ends it."""
    monkeypatch.setattr(peers, "ConsoleReporter", partial(ConsoleReporter, quiet_seconds=0.5))
    run = RunConfig.model_validate({"run": {"id": "toy", "rounds": 40}, "metrics": {"port": 0}})
    peer = Peer(run, SiteConfig.model_validate({"site": {"name": "a"}}), PeerOptions(), tmp_path)

    def lines() -> list[str]:
        return [text for text in caplog.messages if text == "starting; next: joins the run (when is not known yet)"]

    with caplog.at_level("INFO"), ExitStack() as closing:
        before = set(threading.enumerate())
        peer._open_telemetry("me", closing)
        until(lambda: len(lines()) >= 2, "two status lines", 60.0)
        (console,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "console")
    console.join(60.0)
    assert not console.is_alive()


@pytest.mark.case("C117")
@pytest.mark.parametrize("secret", [False, True])
def test_only_who_is_in_the_run_tells_others_how_to_join_and_what_they_need(
    secret: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_text("a secret of some length")
    net = {"join_secret_file": str(tmp_path / "secret")} if secret else {}
    run = RunConfig.model_validate({"run": {"id": "toy"}, "net": net})
    site = SiteConfig.model_validate({"site": {"name": "a"}})
    newcomer = Peer(run, site, PeerOptions(), tmp_path)
    newcomer.admission = newcomer._admission()
    assert (newcomer.in_the_run, caplog.records) == (False, []), "nothing is said before it is admitted"
    newcomer.joined = True
    assert newcomer.in_the_run
    assert Peer(run, site, PeerOptions(first=True), tmp_path).in_the_run
    with caplog.at_level("INFO"):
        newcomer._tell_others_way_in("/ip4/127.0.0.1/tcp/1/p2p/me")
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("others join with: --bootstrap /ip4/127.0.0.1/tcp/1/p2p/me")
    assert ("the same net.join_secret_file" in told[0]) is secret
    assert any("this run is open" in line for line in told) is not secret
