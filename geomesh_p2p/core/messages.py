"""What peers say to each other. Every message is a frozen dataclass; swarm/wire.py turns it into a frame and back.

Control messages are small and may be lost, repeated or late: the state machines repeat what matters. Bulk messages
(`Chunk`) carry bytes. Every frame carries the run id beside the message, so it is not repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.types import Contribution, Held, Link, PeerId, Plan, Profile, Range, Term, Update


@dataclass(frozen=True)
class Hello:
    """First word on every connection: versions and settings are compared before anything else."""

    protocol: int
    run: Digest              # empty: not known yet (a joiner)
    fingerprint: Digest
    settings: str            # the fingerprint's fields as JSON, so that a refusal can name those that differ
    site: str
    trains: bool
    founded: bytes           # the packed Founding record, empty if not known yet
    round: int
    digest: Digest
    proof: bytes             # HMAC over both authenticated ids with the join secret; empty in an open run


@dataclass(frozen=True)
class Refused:
    """The other end will not take part with this peer; `final` means that trying again is useless."""

    reason: str
    final: bool


@dataclass(frozen=True)
class Heartbeat:
    """Sent to every known peer of the run each heartbeat, by a task that training cannot hold up."""

    site: str
    term: Term
    leader: PeerId           # whom the sender follows, or empty
    round: int               # last committed round
    digest: Digest
    phase: str
    trains: bool
    ready: bool              # holds the anchor of `round` and may be planned for
    leaving: bool
    profile: Profile | None
    step_batch: int          # last round's batch and median seconds a step; 0 if none
    step_seconds: float
    links: tuple[Link, ...]  # measured from the sender
    stop_after: int          # the round after which the run is stopped, by order; 0: none was given
    sent_at: float           # sender's monotonic clock, echoed by HeartbeatEcho for the round-trip time


@dataclass(frozen=True)
class HeartbeatEcho:
    sent_at: float


@dataclass(frozen=True)
class VoteRequest:
    """`pre` asks whether a vote would be given, and changes nothing at the voter."""

    pre: bool
    term: Term
    round: int
    digest: Digest
    held: Held | None


@dataclass(frozen=True)
class Vote:
    """`term` is the voter's own current term; `asked` the term of the request that this answers."""

    pre: bool
    asked: Term
    granted: bool
    term: Term
    leader: PeerId
    round: int
    digest: Digest
    held: Held | None


@dataclass(frozen=True)
class PlanOffer:
    plan: Plan


@dataclass(frozen=True)
class PlanRefused:
    plan: Digest
    term: Term               # the refuser's own term
    leader: PeerId
    round: int
    digest: Digest
    reason: str


@dataclass(frozen=True)
class Finished:
    """A member's contribution is final (trained and encoded). Sent to all members; the bytes follow as chunks."""

    plan: Digest
    contribution: Contribution
    train_seconds: float


@dataclass(frozen=True)
class Close:
    """The leader asks a late member to stop at its next step boundary."""

    plan: Digest


@dataclass(frozen=True)
class Lost:
    """A member's exchange missed chunk deadlines of `peers`; the leader may open another attempt."""

    plan: Digest
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class HeldReport:
    """The sender holds `update` on its disk under (term, attempt). The header travels with it: a leader that lost its own
    exchange, or is no member, then knows what to fetch."""

    round: int
    term: Term
    attempt: int
    plan: Digest
    update: Update


@dataclass(frozen=True)
class HoldAgain:
    """The leader has `held` held under its own (term, attempt): its predecessor's update (Raft's figure 8), an update without
    bits that lets a voter leave, or, pushed to voters that lost their exchange, the update of its own attempt. A receiver
    that lacks the body fetches it from the leader, then answers with a HeldReport of this rank."""

    round: int
    term: Term
    attempt: int
    held: Held


@dataclass(frozen=True)
class Commit:
    """Valid by itself: the update of `update.round` was held by a quorum of the view before it."""

    term: Term
    update: Update


@dataclass(frozen=True)
class Leave:
    """The sender wants to be left out of the next view."""

    reason: str


# ---------------------------------------------------------------- requests with an answer, and bulk


FETCHED = ("update", "header", "held", "manifest", "snapshot")
"""What state is asked for in a Fetch; others have names of their own for what they ask (reachability, clocks)."""


@dataclass(frozen=True)
class Fetch:
    """`what` is update | header | held | manifest | snapshot | founding | status | clock; `round`, `offset` and `length` choose
    the bytes. A `header` is an update without its body; a `manifest` that of the newest snapshot up to `round` (0: of any).
    Or dial-back: `offset` is the asker's own port. Or filler: piece `offset` of those before the exchange of `round`."""

    what: str
    round: int
    seal: Digest
    offset: int
    length: int


@dataclass(frozen=True)
class Fetched:
    """`header` is packed metadata (an Update, a snapshot manifest, a status); `total` the length of the whole body.
    `found` false: the sender does not have it; `hint` says what it has instead (its oldest round)."""

    found: bool
    header: bytes
    offset: int
    total: int
    data: bytes
    hint: int


@dataclass(frozen=True)
class Order:
    """What whoever may join can tell a run: `verb` is `stop`, `drain`, which is for `site` alone, or `rollback`, to the state
    after `round`. `proof` as in a Hello. A peer passes it on once, in its own name. Answered by a Fetched whose header says in
    words what was done, or why not."""

    verb: str
    site: str
    round: int
    passed_on: bool
    proof: bytes

    @property
    def what(self) -> str:
        return self.verb


@dataclass(frozen=True)
class Busy:
    """In the header of a Fetched that found nothing: a donor that gives to as many as it can. Ask again after so many seconds,
    or somebody else at once."""

    seconds: float
    elsewhere: tuple[PeerId, ...]


@dataclass(frozen=True)
class Chunk:
    """Bytes `offset ...` of one stream of an exchange. `kind` is contribution | part; `owner` whose bytes they are."""

    plan: Digest
    kind: str
    owner: PeerId
    payload: Digest          # hash of the whole, as named in the contribution's header or the part's
    share: int               # which reducer share these bytes belong to; 0 in a gather
    offset: int
    total: int
    data: bytes


@dataclass(frozen=True)
class ChunkAck:
    """Everything of (kind, owner, share) up to `offset` is here."""

    plan: Digest
    kind: str
    owner: PeerId
    share: int
    offset: int


@dataclass(frozen=True)
class PartHeader:
    """A reducer's part: the hashes of exactly the contributions it averaged, and the hash of its encoded mean."""

    plan: Digest
    share: int
    contributions: tuple[Digest, ...]
    payload: Digest
    payload_bytes: int


@dataclass(frozen=True)
class ChunkWanted:
    """Send me these bytes of (kind, owner, share). Asked of the owner after a missed deadline, and of other members, who
    pass on what they hold. Without gaps a part's header alone is asked for."""

    plan: Digest
    kind: str
    owner: PeerId
    share: int
    gaps: tuple[Range, ...]  # half-open, in bytes of the stream


@dataclass(frozen=True)
class ChunkMissing:
    """Answer to ChunkWanted: the sender does not have (kind, owner, share) either; it waits for `peers` itself."""

    plan: Digest
    kind: str
    owner: PeerId
    share: int
    peers: tuple[PeerId, ...]


Message = (
    Hello | Refused | Heartbeat | HeartbeatEcho | VoteRequest | Vote | PlanOffer | PlanRefused | Finished | Close | Lost
    | HeldReport | HoldAgain | Commit | Leave | Fetch | Fetched | Chunk | ChunkAck | PartHeader | ChunkWanted
    | ChunkMissing | Order
)
Request = Fetch | Order
"""What is answered by a Fetched, on a stream of its own."""
