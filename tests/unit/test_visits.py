"""Who may ask and order, and where an order goes: once to the peer that it is for, never to and fro."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.core.messages import Fetch, Fetched, Order
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import Founding
from geomesh_p2p.swarm.links import LinkTable
from geomesh_p2p.swarm.membership import Acquaintance, Admission, Membership, Self
from geomesh_p2p.swarm.visits import TRY_AGAIN, Host, Visits

SECRET = Admission(secret=b"a secret")
FOUNDING = Founding(b"f" * 32, b"nonce", 0, b"w" * 32, "me")


class Transport:
    """Passes requests on to nobody but `answers`, by peer."""

    def __init__(self) -> None:
        self.links, self.circuits = LinkTable(), SimpleNamespace(relay=lambda peer: "")
        self.passed: list[tuple[str, Order]] = []
        self.answers: dict[str, Fetched] = {}

    def addresses_of(self, peer: str) -> tuple[str, ...]:
        return (f"/ip4/192.0.2.1/tcp/1/p2p/{peer}",)

    async def request(self, to: str, order: Order, timeout_seconds: float) -> Fetched:
        self.passed.append((to, order))
        if to not in self.answers:
            raise Unreachable(to)
        return self.answers[to]


class Scene:
    """The peer "me", of site a, which knows b ("other"); b leads."""

    def __init__(self, admission: Admission = SECRET) -> None:
        self.transport, self.done = Transport(), list[str]()
        self.leader = "other"
        me = Self("me", "a", True, FOUNDING.fingerprint, {}, FOUNDING)
        self.membership = Membership(me, admission, lambda *_: None, 5.0)
        self.membership.known["other"] = Acquaintance("other", "b", True, 0.0)
        def stop() -> None:
            self.done.append("stop")

        host = Host(lambda: {"site": "a"}, lambda: self.leader, self.done.append, stop, self.roll_back)
        self.visits = Visits(self.membership, self.transport, host)  # type: ignore[arg-type]

    async def roll_back(self, round: int) -> tuple[bool, str]:
        self.done.append(f"back to {round}")
        return round < 7, "in words"

    async def order(
        self, verb: str, site: str = "", sender: str = "visitor", passed_on: bool = False, round: int = 0
    ) -> Any:
        proof = self.membership.admission.proof(sender, "me")
        return await self.visits.answer(sender, Order(verb, site, round, passed_on, proof))


async def test_a_question_is_answered_for_whoever_may_join() -> None:
    scene = Scene()
    proof = SECRET.proof("visitor", "me")
    told = await scene.visits.answer("visitor", Fetch("status", 0, proof, 0, 0))
    assert told is not None
    assert told.found
    status = json.loads(told.data)
    assert (status["site"], status["run"]) == ("a", FOUNDING.run.hex())
    assert [other["site"] for other in status["others"]] == ["b"]
    assert status["heartbeat_limit_seconds"] == 5.0
    assert (await scene.visits.answer("other", Fetch("status", 0, b"", 0, 0))).found  # type: ignore[union-attr]


@pytest.mark.parametrize(("admission", "proof", "why"), [
    (SECRET, b"", "join_secret_file): none was given"),
    (SECRET, b"x" * 32, "join_secret_file): the one given is another"),
    (SECRET, SECRET.proof("visitor", "another"), "join secret"),
    (Admission(frozenset({"friend"})), b"", "allow list"),
])  # fmt: skip
@pytest.mark.parametrize("what", ["status", "drain", "stop", "rollback"])
async def test_nobody_else_learns_or_does_anything(admission: Admission, proof: bytes, why: str, what: str) -> None:
    scene = Scene(admission)
    asked = Fetch(what, 0, proof, 0, 0) if what == "status" else Order(what, "a", 0, False, proof)
    told = await scene.visits.answer("visitor", asked)
    assert told is not None
    assert not told.found
    assert why in told.header.decode()
    assert told.data == b""
    assert (scene.done, scene.transport.passed) == ([], [])


async def test_questions_of_members_for_state_are_not_a_visitors() -> None:
    assert await Scene().visits.answer("other", Fetch("manifest", 0, b"", 0, 0)) is None


async def test_a_drain_of_this_site_is_done_here() -> None:
    scene = Scene()
    told = await scene.order("drain", "a")
    assert told.found
    assert scene.done == ["drained by a visitor (visitor)"]
    assert scene.transport.passed == []


async def test_a_drain_of_another_site_is_passed_on_in_this_peers_name() -> None:
    scene = Scene()
    scene.transport.answers["other"] = Fetched(True, b"b leaves", 0, 0, b"", 0)
    assert (await scene.order("drain", "b")).header == b"b leaves"
    assert scene.transport.passed == [("other", Order("drain", "b", 0, True, SECRET.proof("me", "other")))]
    assert scene.done == []


async def test_a_site_that_is_unknown_or_silent_is_told() -> None:
    scene = Scene()
    assert "no site 'c' here: there are a, b" in (await scene.order("drain", "c")).header.decode()
    assert "b does not answer" in (await scene.order("drain", "b")).header.decode()


async def test_the_leader_is_told_to_stop_the_run_and_who_leads_does_it() -> None:
    scene = Scene()
    scene.transport.answers["other"] = Fetched(True, b"the run stops", 0, 0, b"", 0)
    assert (await scene.order("stop")).header == b"the run stops"
    assert scene.done == []
    scene.leader = "me"
    assert (await scene.order("stop")).found
    assert scene.done == ["stop"]


@pytest.mark.parametrize("leader", ["", "other"])
async def test_without_a_leader_that_answers_it_is_done_here(leader: str) -> None:
    scene = Scene()
    scene.leader = leader
    assert (await scene.order("stop")).found
    assert scene.done == ["stop"]


async def test_what_was_passed_on_goes_no_further() -> None:
    scene = Scene()
    assert (await scene.order("stop", sender="other", passed_on=True)).found
    assert "b does not answer" in (await scene.order("drain", "b", sender="other", passed_on=True)).header.decode()
    assert scene.transport.passed == []


async def test_other_words_are_no_order() -> None:
    assert "'format' is no order" in (await Scene().order("format")).header.decode()


async def test_a_rollback_is_for_the_leader_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "geomesh.visits")
    scene = Scene()
    told = await scene.order("rollback", round=3)
    assert "the leader does not answer" in told.header.decode()
    assert told.hint == TRY_AGAIN
    ordered = "rollback to round 3 ordered by a visitor (visitor): "
    assert caplog.messages == [f"{ordered}refused, the leader does not answer: try again"]
    scene.transport.answers["other"] = Fetched(True, b"b will", 0, 0, b"", 0)
    assert (await scene.order("rollback", round=3)).header == b"b will"
    assert scene.transport.passed[-1] == ("other", Order("rollback", "", 3, True, SECRET.proof("me", "other")))
    assert scene.done == []
    assert caplog.messages[-1] == f"{ordered}b will"
    scene.leader = ""
    told = await scene.order("rollback", round=3)
    assert "there is no leader now" in told.header.decode()
    assert told.hint == TRY_AGAIN
    assert scene.done == []


@pytest.mark.parametrize(("round", "will"), [(3, True), (8, False)])
async def test_the_leader_says_whether_it_can_go_back(round: int, will: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "geomesh.visits")
    scene = Scene()
    scene.leader = "me"
    told = await scene.order("rollback", sender="other", passed_on=True, round=round)
    assert (told.found, told.header, told.hint) == (will, b"in words", 0)
    assert scene.done == [f"back to {round}"]
    outcome = "in words" if will else "refused, in words"
    assert caplog.messages == [f"rollback to round {round} ordered by a visitor, passed on by b: {outcome}"]
