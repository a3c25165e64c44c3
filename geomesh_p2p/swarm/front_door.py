"""What the transport hands messages and questions to, from its start on: greetings only, until the session is there."""

from __future__ import annotations

import time

from geomesh_p2p.core.messages import Fetched, Hello, Message, Order, Refused, Request
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.swarm.budgets import Complaints
from geomesh_p2p.swarm.clocks import answer_clock
from geomesh_p2p.swarm.filler import Filler
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.reaching import Reaching
from geomesh_p2p.swarm.session import Session
from geomesh_p2p.swarm.visits import TRY_AGAIN, Visits


class FrontDoor:
    """Its parts are set as they come into being: the membership before anybody is greeted, the session last."""

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.session: Session | None = None
        self.complaints: Complaints | None = None
        self.reaching: Reaching | None = None
        self.visits: Visits | None = None
        self.filler: Filler | None = None

    def admitted(self, peer: PeerId) -> bool:
        return self.membership is not None and self.membership.admitted(peer)

    def complain(self, peer: PeerId, reason: str, text: str) -> None:
        if self.complaints is not None:
            self.complaints.say(peer, self.admitted(peer), reason, text)

    def other_version(self, peer: PeerId, version: int) -> None:
        if self.membership is not None:
            self.membership.on_other_version(peer, version, time.monotonic())

    def receive(self, sender: PeerId, message: Message) -> None:
        if self.session is not None:
            self.session.receive(sender, message)
        elif self.membership is not None and isinstance(message, Hello):
            self.membership.on_hello(sender, message, time.monotonic())
        elif self.membership is not None and isinstance(message, Refused):
            self.membership.on_refused(sender, message)

    async def answer(self, sender: PeerId, fetch: Request) -> Fetched:
        if self.visits is not None and (told := await self.visits.answer(sender, fetch)) is not None:
            return told
        if isinstance(fetch, Order):
            return Fetched(False, b"this peer is starting: try again", 0, 0, b"", TRY_AGAIN)
        if (time_of_day := answer_clock(fetch)) is not None:
            return time_of_day
        if self.session is None:
            return Fetched(False, b"", 0, 0, b"", 0)
        if self.filler is not None and self.admitted(sender) and (filler := self.filler.answer(sender, fetch)) is not None:
            return filler
        if self.reaching is not None and (answer := await self.reaching.answer(sender, fetch)) is not None:
            return answer
        return await self.session.answer(sender, fetch)
