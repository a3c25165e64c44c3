"""What `geomesh status` and `rollback` say: of peers that are gone, of what a rollback undoes, of addresses that are none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from geomesh_p2p.cli import main
from geomesh_p2p.core.messages import Fetched
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.errors import GeoMeshError, RefusedError, TemporaryError, UnreachableError
from geomesh_p2p.lab import status as lab_status
from geomesh_p2p.lab.status import NO_TERMINAL_COLUMNS, Call, look, shown, undoing
from geomesh_p2p.swarm.visitor import Visitor
from geomesh_p2p.swarm.visits import TRY_AGAIN
from geomesh_p2p.telemetry.board import StatusBoard

PEER = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{PEER}"


def other(site: str, heard_seconds_ago: float = 0.5, leaving: bool = False, phase: str = "training") -> dict[str, Any]:
    return {
        "site": site, "peer": site, "heard_seconds_ago": heard_seconds_ago, "phase": phase, "round": 4, "trains": True,
        "ready": True, "leaving": leaving, "step_batch": 8, "step_seconds": 0.5, "device": "cpu", "rtt_seconds": 0.01,
        "bytes_per_second": None, "relayed": False, "addresses": [],
    }  # fmt: skip


def answer(*others: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of site a, which plans for everybody."""
    own = StatusBoard("a", 10, run_id="ops").snapshot()
    sites = ["a", *(one["site"] for one in others)]
    plan = {"members": [{"site": site, "batch": 777, "inner_steps": 55} for site in sites]}
    return {**own, "peer": "a", "run": "ab" * 32, "heartbeat_limit_seconds": 5.0, "plan": plan, "others": others, **more}


class Asked:
    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told

    async def status(self, address: str) -> dict[str, Any]:
        return self.told


async def seen(told: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(the peers as JSON, their lines of the table), by site."""
    run = await look(Asked(told), ADDRESS)  # type: ignore[arg-type]
    console = Console(width=NO_TERMINAL_COLUMNS, soft_wrap=True, no_color=True)
    with console.capture() as capture:
        console.print(shown(run))
    lines = capture.get().splitlines()
    peers = {peer["site"]: peer for peer in run["peers"]}
    return peers, {site: next(line for line in lines if line.split()[:1] == [site]) for site in peers} | {"": "\n".join(lines)}


async def test_a_peer_that_is_not_heard_is_lost_and_one_that_had_said_so_has_left() -> None:
    told = answer(other("b"), other("c", 43.4), other("d", 43.4, leaving=True), other("e", leaving=True, phase="leaving"))
    peers, lines = await seen(told)
    assert {site: (peer["lost"], peer.get("ready")) for site, peer in peers.items() if site != "a"} == {
        "b": (False, True), "c": (True, False), "d": (False, False), "e": (False, True)
    }  # fmt: skip
    assert "lost (not heard for 43 s)" in lines["c"]
    assert "left (not heard for 43 s)" in lines["d"]
    assert lines["e"].count("leaving") == 1
    assert all(figure in lines["b"] for figure in ("training", "777", "55", "0.50 s"))
    assert not any(figure in lines["c"] + lines["d"] for figure in ("training", "777", "55", "0.50 s"))


async def test_what_is_waited_for_stays_out_of_the_table_if_it_is_long() -> None:
    long = "a leader; voters not heard: some-site-in-the-west, another-site-in-the-east"
    _, lines = await seen(answer(other("b"), phase="idle", waiting_for=long))
    assert long not in lines["a"]
    assert f"a waits for {long}" in lines[""].splitlines()
    _, lines = await seen(answer(other("b"), phase="exchange", waiting_for="the exchange"))
    assert "exchange (the exchange)" in lines["a"]
    assert "a waits for" not in lines[""]


async def test_the_header_names_the_run() -> None:
    _, lines = await seen(answer())
    assert lines[""].startswith("run ops (abababababab); round 0 of 10")


def test_what_a_rollback_undoes_is_said_as_far_as_it_is_known() -> None:
    measured = [{"round": 8, "perplexity": 9.0}, {"round": 12, "perplexity": 7.5}]
    asked = {"round": 13, "perplexity": 7.5, "perplexity_round": 12, "perplexities": measured}
    rounds = "undoes 3 rounds (11 to 13), and the round going on"
    assert undoing(asked, 10) == f"{rounds}; perplexity 7.50 after round 12; 9.00 after round 8"
    assert undoing(asked, 4).endswith("; that of round 4 is not known")
    assert undoing({**asked, "perplexity": None}, 12) == "undoes round 13, and the round going on"


def test_another_call_like_this_one_can_be_copied() -> None:
    call = Call(ADDRESS, None, Path("the secret"), "@seed.addr")
    again = "geomesh rollback @seed.addr --to-round 7 --join-secret-file 'the secret'"
    assert call.again("rollback", "--to-round", "7") == again


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(self: Visitor) -> Visitor:
        raise AssertionError("this is to be said before anything is started")

    monkeypatch.setattr(Visitor, "__aenter__", started)


@pytest.mark.usefixtures("no_daemon")
@pytest.mark.parametrize(("words", "said"), [
    (["status", "127.0.0.1:42101"], '"127.0.0.1:42101" is not a multiaddress: write it like /ip4/127.0.0.1/tcp/42101/p2p/'),
    (["status", "h100:4100"], "write it like /dns4/h100/tcp/4100/p2p/PEER_ID"),
    (["status", "nonsense"], "write it like /ip4/203.0.113.5/tcp/31337/p2p/PEER_ID"),
    (["stop", "/ip4/127.0.0.1/tcp/4100"], "it must end in /p2p/PEER_ID"),
    (["drain", "@nope.addr", "b"], "ADDR @nope.addr: there is no such file"),
    (["status", ADDRESS, "--join-secret-file", "nope.secret"], "--join-secret-file nope.secret cannot be read"),
    (["rollback", ADDRESS, "--to-round", "-1"], "--to-round -1: no run has such a round"),
    (["rollback", ADDRESS, "--to-round", "9" * 20], "no run has such a round"),
    (["rollback", ADDRESS, "--to-round", "0"], "add --yes"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_anything_is_started(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1
    assert "--bootstrap" not in told
    assert "urandom" not in told, "nobody makes a secret to look at a run that has one"


@pytest.mark.parametrize(("fetched", "kind", "said"), [
    (Fetched(False, b"there is no leader now: try again", 0, 0, b"", TRY_AGAIN), TemporaryError, "no leader now"),
    (Fetched(False, b"round 7 is the last one", 0, 0, b"", 0), RefusedError, "round 7"),
    (Unreachable("[/ip4/127.0.0.1/tcp/4100] peer id mismatch"), UnreachableError, "take the address anew"),
    (Unreachable("[/ip4/127.0.0.1/tcp/4100] connection refused"), UnreachableError, "see that this peer is up"),
])  # fmt: skip
async def test_why_an_order_was_not_taken_decides_what_it_ends_with(
    fetched: Fetched | Unreachable, kind: type[GeoMeshError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(self: Visitor, *_: Any) -> Fetched:
        if isinstance(fetched, Unreachable):
            raise fetched
        return fetched

    monkeypatch.setattr(Visitor, "_ask", ask)
    with pytest.raises(kind, match=said) as caught:
        await Visitor().order(ADDRESS, "rollback", round=7)
    assert type(caught.value) is kind


def test_a_run_that_stands_ends_the_wait_for_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader took the order, and then lost its quorum."""
    looks: list[float] = []

    async def told(self: Visitor, address: str) -> dict[str, Any]:
        looks.append(1.0)
        return answer() | {"round": 40, "rolled_back": None, "round_seconds": 2.0, "waiting_for": "a quorum of the voters: b"}

    async def taken(self: Visitor, *_: Any, **more: Any) -> str:
        return "the run goes back to round 30 after the round going on"

    monkeypatch.setattr(Visitor, "status", told)
    monkeypatch.setattr(Visitor, "order", taken)
    monkeypatch.setattr(Visitor, "__aenter__", lambda self: _at_once(self))
    monkeypatch.setattr(lab_status, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(lab_status, "time", SimpleNamespace(monotonic=lambda: sum(looks)))
    with pytest.raises(TemporaryError, match=r"nothing was committed for 70 s \(a quorum of the voters: b\)"):
        lab_status.rollback(lab_status.Call("x"), 30)


async def _at_once(visitor: Visitor) -> Visitor:
    return visitor
