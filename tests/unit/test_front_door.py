"""What a peer hands messages and questions to: from its start on, whoever asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from geomesh_p2p.core.messages import Fetch, Fetched
from geomesh_p2p.peer import FrontDoor
from tests.injection.proof import fired, inject

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
