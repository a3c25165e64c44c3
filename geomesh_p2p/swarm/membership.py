"""Who is in the run: first words between two peers, admission, and the newest heartbeat of each.

When a peer says Hello, this peer compares protocol version, run, settings, site name and right to join, in that order,
and answers with its own Hello or with the reason for a refusal. Only greeted peers are listened to.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from geomesh_p2p import PROTOCOL_VERSION
from geomesh_p2p.core.bounds import figures_fault, plausible
from geomesh_p2p.core.canonical import Digest, RecordError, pack, unpack
from geomesh_p2p.core.messages import Heartbeat, Hello, Refused
from geomesh_p2p.core.types import Founding, PeerId

MOST_MEMBERS = 512
"""Known at one time, if nothing else is set; one that is not heard gives way to a newcomer."""
REMEMBERED = 512
"""Strangers, of each kind: greeted, refused, refusing."""
FORGET_SECONDS = 600.0
SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")

T = TypeVar("T")


@dataclass
class Acquaintance:
    """A greeted peer. Times are this peer's monotonic clock."""

    peer: PeerId
    site: str
    trains: bool
    heard_at: float
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class Admission:
    """Who may take part: anybody (both empty), the peers listed, or whoever proves the join secret."""

    allow: frozenset[PeerId] = frozenset()
    secret: bytes = b""

    @property
    def closed(self) -> bool:
        return bool(self.allow or self.secret)

    @property
    def needs(self) -> str:
        """What others need to join besides an address, in words to put behind it; empty in an open run."""
        listed = "their peer ids in net.allow here" if self.allow else ""
        secret = "the same net.join_secret_file" if self.secret else ""
        return f" (they need {' and '.join(filter(None, (secret, listed)))})" if self.closed else ""

    def proof(self, prover: PeerId, verifier: PeerId) -> bytes:
        """HMAC-SHA256 over both authenticated ids; empty without a secret."""
        if not self.secret:
            return b""
        return hmac.new(self.secret, f"geomesh join {prover} {verifier}".encode(), hashlib.sha256).digest()

    def refusal(self, me: PeerId, peer: PeerId, proof: bytes) -> str:
        if self.allow and peer not in self.allow:
            return f"peer {peer} is not on the allow list (net.allow)"
        if self.secret and not hmac.compare_digest(proof, self.proof(peer, me)):
            what = "the one given is another" if proof else "none was given"
            return f"the join secret was not proved (net.join_secret_file): {what}"
        return ""

    def way_in(self, peer: PeerId) -> str:
        """What `peer`, which is refused, is to ask those for who are in the run."""
        asked = []
        if self.allow and peer not in self.allow:
            asked.append("to add this peer id to net.allow on all of their peers")
        if self.secret:
            asked.append("for the secret that net.join_secret_file must hold here")
        return f"ask those who run its peers {' and '.join(asked)}"


@dataclass
class Self:
    """What this peer says of itself. `founding` is None until the run is known."""

    peer: PeerId
    site: str
    trains: bool
    fingerprint: Digest
    settings: dict[str, str]
    founding: Founding | None = None
    round: int = 0
    digest: Digest = b""


class Membership:
    """The peers of one run as this peer knows them. Decides; sends through `send`."""

    def __init__(
        self,
        me: Self,
        admission: Admission,
        send: Callable[[PeerId, Hello | Refused], None],
        limit_seconds: float,
        on_complaint: Callable[[PeerId, str, str], None] = lambda peer, reason, text: None,
    ) -> None:
        """`on_complaint(peer, reason, text)` is told of every refusal; whoever listens says it once."""
        self.me = me
        self.admission = admission
        self.limit_seconds = limit_seconds
        self.most_members = MOST_MEMBERS
        self.known: dict[PeerId, Acquaintance] = {}
        self.refused: OrderedDict[PeerId, str] = OrderedDict()
        self.refused_by: OrderedDict[PeerId, Refused] = OrderedDict()
        self.heard_founding: Founding | None = None
        self._send = send
        self._complain = on_complaint
        self._greeted: OrderedDict[PeerId, float] = OrderedDict()
        self._told_version: OrderedDict[PeerId, float] = OrderedDict()

    def admitted(self, peer: PeerId) -> bool:
        """Whether `peer` takes part as far as this peer knows: only then it is listened to and given state."""
        return peer in self.known

    def hello(self, to: PeerId) -> Hello:
        founding = self.me.founding
        return Hello(
            protocol=PROTOCOL_VERSION,
            run=founding.run if founding else b"",
            fingerprint=self.me.fingerprint,
            settings=json.dumps(self.me.settings, sort_keys=True),
            site=self.me.site,
            trains=self.me.trains,
            founded=pack(founding) if founding else b"",
            round=self.me.round,
            digest=self.me.digest,
            proof=self.admission.proof(self.me.peer, to),
        )

    def greet(self, peer: PeerId, now: float, again_seconds: float = 2.0) -> None:
        """Say Hello to a peer that is not known yet, at most every `again_seconds`."""
        if peer == self.me.peer or now - self._greeted.get(peer, -1e9) < again_seconds:
            return
        remember(self._greeted, peer, now)
        self._send(peer, self.hello(peer))

    def on_hello(self, sender: PeerId, hello: Hello, now: float) -> bool:
        """Whether `sender` is (now) accepted. A new acquaintance is greeted back at once."""
        reason, final = self._refusal(sender, hello, now)
        if reason:
            remember(self.refused, sender, reason)
            self._complain(sender, "refused_peer", f"{sender} (site {hello.site[:32]!r}) is refused: {reason}")
            if reason == self.admission.refusal(self.me.peer, sender, hello.proof):
                reason = f"{reason}: {self.admission.way_in(sender)}"
            self._send(sender, Refused(reason, final))
            return False
        self.refused.pop(sender, None)
        if self.me.founding is None and hello.founded:
            self._learn_founding(hello)
        if sender not in self.known:
            remember(self._greeted, sender, now)
            self._send(sender, self.hello(sender))
            self.known[sender] = Acquaintance(sender, hello.site, hello.trains, now)
        else:
            # A Hello from somebody known: it may have restarted, not know us, and say something else of itself.
            known = self.known[sender]
            known.site, known.trains, known.heard_at = hello.site, hello.trains, now
            self.greet(sender, now)
        return True

    def on_refused(self, sender: PeerId, message: Refused) -> bool:
        """Whether this is news. Counts only from a peer that was greeted."""
        if sender not in self._greeted or self.refused_by.get(sender) == message:
            return False
        remember(self.refused_by, sender, message)
        return True

    def on_other_version(self, sender: PeerId, version: int, now: float) -> None:
        """`sender` speaks another protocol version: nothing it says can be read, nor anything said to it. It is told so once
        in a while, in this peer's own version: it recognises that as another one."""
        reason = f"it speaks protocol version {version}, this peer {PROTOCOL_VERSION}: run the same release on all peers"
        if sender in self._greeted:
            remember(self.refused_by, sender, Refused(reason, True))
        if now - self._told_version.get(sender, -1e9) >= FORGET_SECONDS:
            remember(self._told_version, sender, now)
            self._send(sender, Refused(reason, True))

    def _learn_founding(self, hello: Hello) -> None:
        try:
            founding = unpack(Founding, hello.founded)
        except RecordError:
            return
        if founding.fingerprint == self.me.fingerprint and founding.run == hello.run:
            self.heard_founding = founding

    def on_heartbeat(self, sender: PeerId, beat: Heartbeat, now: float) -> bool:
        """Whether the heartbeat counts: strangers are greeted first."""
        acquaintance = self.known.get(sender)
        if acquaintance is None:
            self.greet(sender, now)
            return False
        acquaintance.heard_at = now
        if beat.site != acquaintance.site:
            self._complain(sender, "refused_figures", f"{acquaintance.site} calls itself {beat.site!r} now: not listened to")
            return False
        acquaintance.heartbeat = self.plausible(sender, beat)
        return True

    def plausible(self, sender: PeerId, beat: Heartbeat) -> Heartbeat:
        """`beat` without the figures that cannot be; who sent them is named, and not planned for without a profile."""
        fault = figures_fault(sender, beat)
        if not fault:
            return beat
        self._complain(sender, "refused_figures", f"{beat.site} says {fault}: figures like that are left out of account")
        return plausible(sender, beat)

    def _make_room(self, now: float) -> bool:
        """Whether one more peer can be known: of those not heard, the one heard longest ago is forgotten for it."""
        while len(self.known) >= self.most_members:
            oldest = min(self.known.values(), key=lambda known: known.heard_at)
            if now - oldest.heard_at <= self.limit_seconds:
                return False
            del self.known[oldest.peer]
        return True

    def forget_gone(self, now: float, seconds: float, keep: Collection[PeerId]) -> list[PeerId]:
        """Those that were not heard for `seconds` and are not to be kept: known no longer. Should one come back, it is greeted
        as when it first came."""
        gone = [known.peer for known in self.known.values() if now - known.heard_at > seconds and known.peer not in keep]
        for peer in gone:
            del self.known[peer]
            self._greeted.pop(peer, None)
        return gone

    def heard(self, sender: PeerId, now: float) -> bool:
        acquaintance = self.known.get(sender)
        if acquaintance is None:
            return False
        acquaintance.heard_at = now
        return True

    def live(self, now: float) -> list[Acquaintance]:
        return [a for a in self.known.values() if now - a.heard_at <= self.limit_seconds]

    def sites(self) -> dict[PeerId, str]:
        """Site names of the peers that were greeted."""
        return {peer: acquaintance.site for peer, acquaintance in self.known.items()}

    def site_of(self, peer: PeerId) -> str:
        if peer == self.me.peer:
            return self.me.site
        acquaintance = self.known.get(peer)
        return acquaintance.site if acquaintance else peer[-8:]

    def _refusal(self, sender: PeerId, hello: Hello, now: float) -> tuple[str, bool]:
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol} is not {PROTOCOL_VERSION}: run the same release on all peers", True
        if self.me.founding and hello.run and hello.run != self.me.founding.run:
            theirs, ours = hello.run.hex()[:12], self.me.founding.run.hex()[:12]
            old = "another run has this name, or a folder is of an older one (--run.fresh moves it aside)"
            return f"run {theirs} is not {ours}: {old}", True
        if hello.fingerprint != self.me.fingerprint:
            return f"settings differ: {self.differences(hello.settings)}: use the run file of the run's other peers", True
        if (reason := self.admission.refusal(self.me.peer, sender, hello.proof)) != "":
            return reason, True
        if not SITE_NAME.fullmatch(hello.site):
            return f"site.name {hello.site[:40]!r} is none: small letters, digits and hyphens, at most 32", True
        if sender not in self.known and not self._make_room(now):
            return f"{self.me.site} has as many peers as it may have (net.most_peers is {self.most_members}): raise that", False
        if hello.site == self.me.site:
            return f"site.name {hello.site!r} is taken by {self.me.peer}: give this site another", True
        for other in self.live(now):
            if other.site == hello.site and other.peer != sender:
                return f"site.name {hello.site!r} is taken by {other.peer}: give this site another", False
        return "", False

    def differences(self, settings: str) -> str:
        """The fields of the fingerprint that differ, in one line. `settings` are the other end's, as untrusted JSON."""
        try:
            theirs = json.loads(settings)
            if not isinstance(theirs, dict):
                raise ValueError
        except ValueError:
            return "the other end's settings cannot be read"
        ours = self.me.settings
        names = [name for name in sorted({*theirs, *ours}) if str(theirs.get(name)) != ours.get(name)]
        parts = [f"{n} is {str(theirs.get(n, 'absent'))[:80]}, not {ours.get(n, 'absent')[:80]}" for n in names]
        return "; ".join(parts[:8]) or "fingerprints differ though all named fields are equal"


def remember(of: OrderedDict[PeerId, T], peer: PeerId, value: T) -> None:
    """The newest REMEMBERED entries stay."""
    of[peer] = value
    of.move_to_end(peer)
    while len(of) > REMEMBERED:
        of.popitem(last=False)
