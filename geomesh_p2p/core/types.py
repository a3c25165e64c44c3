"""The nouns of a run: identities, terms, plans, contributions, updates. All frozen, all free of I/O.

Units are in the names. A *position* is the index of one packed sequence in the endless training stream:
`epoch, place = divmod(position, sequences_per_epoch)`. Ranges are half-open and in positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from geomesh_p2p.core.canonical import MAY_BE_NOT_FINITE, Digest, digest

# A libp2p peer id in base58. Ids of one key type have one length, and base58's alphabet ascends in ASCII, so comparing
# these strings compares the raw bytes (RSA ids start Qm, Ed25519 ids 12D3; that order is the raw bytes' order too).
PeerId = str
Topology = Literal["gather", "reduce"]
GENESIS_ROUND = 0


@dataclass(frozen=True, order=True)
class Term:
    """A leader's reign. The pair is compared in this order, so a term has one leader by construction."""

    number: int
    candidate: PeerId


NO_TERM = Term(0, "")


@dataclass(frozen=True, order=True)
class Range:
    """Positions `start <= p < stop` of the training stream."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fork:
    """From where a run goes on that is not its own: the state of another `run` after `round`."""

    run: Digest
    round: int
    digest: Digest


@dataclass(frozen=True)
class Founding:
    """Round 0, written once by the founder. `run` (its hash) is carried by every frame and record. A fork begins with the
    founder's snapshot of a later round; the others take it as any newcomer does."""

    fingerprint: Digest
    nonce: bytes
    seed: int
    weights: Digest
    founder: PeerId
    fork: Fork | None = None

    @cached_property
    def run(self) -> Digest:
        return digest("founding", self)

    @cached_property
    def base(self) -> Digest:
        """The digest of round 0: configuration and initial weights alone, so that two runs of one set-up can be compared."""
        return digest("round-0", self.fingerprint, self.weights)


# ---------------------------------------------------------------- what the planner knows


@dataclass(frozen=True)
class BatchTime:
    """One measured point of a device's curve: `seconds` for one inner step of `batch` sequences."""

    batch: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """What one site can do. `curve` ascends in batch; its last point is the largest batch that fits."""

    peer: PeerId
    site: str
    device: str
    curve: tuple[BatchTime, ...]

    @property
    def max_batch(self) -> int:
        return self.curve[-1].batch


@dataclass(frozen=True)
class Link:
    """The path from `source` to `target`: round-trip time, and the rate that a transfer reached (0: none has yet). A peer's
    link to itself is its uplink: what it may send to all others together."""

    source: PeerId
    target: PeerId
    rtt_seconds: float
    bytes_per_second: float

    @classmethod
    def uplink(cls, peer: PeerId, bytes_per_second: float) -> Link:
        return cls(peer, peer, 0.0, bytes_per_second)


@dataclass(frozen=True)
class StepReport:
    """What a peer saw in its last round: `batch` sequences took `seconds` a step (median)."""

    peer: PeerId
    batch: int
    seconds: float


# ---------------------------------------------------------------- a plan


@dataclass(frozen=True)
class Assignment:
    """One member's part of a round.

    `inner_steps` counts all inner steps; the last one takes `last_batch` sequences, the others `batch`.
    The lengths of `ranges` sum to batch * (inner_steps - 1) + last_batch. `ahead` is the beginning of its next assignment,
    whole steps of the same batch: what it may train while this round's update is on its way (core/ahead.py).
    """

    peer: PeerId
    site: str
    batch: int
    inner_steps: int
    last_batch: int
    ranges: tuple[Range, ...]
    lr_scale: float
    finish_seconds: float
    reasons: tuple[str, ...] = ()
    ahead: tuple[Range, ...] = ()

    @property
    def sequences(self) -> int:
        return self.batch * (self.inner_steps - 1) + self.last_batch

    @property
    def ahead_steps(self) -> int:
        return sum(r.stop - r.start for r in self.ahead) // self.batch

    @property
    def ahead_seconds(self) -> float:
        return self.finish_seconds * self.ahead_steps * self.batch / self.sequences


@dataclass(frozen=True)
class Bystander:
    """A peer that is in the run but not a member of this round, and why."""

    site: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What the leader assigns for one attempt of a round. Members are ordered by site name.

    `shares` has one (start, stop) of parameters per member, in member order, and covers the parameter vector; it is
    empty in a gather. Predicted figures are in seconds from the plan's arrival, `finish_seconds` and `train_seconds` as if
    nothing of the round had been trained before.
    """

    run: Digest
    round: int
    term: Term
    attempt: int
    base: Digest
    members: tuple[Assignment, ...]
    topology: Topology
    shares: tuple[Range, ...]
    committed_tokens: int
    planned_tokens: int
    train_seconds: float
    exchange_seconds: float
    grace_seconds: float
    may_close: bool
    bystanders: tuple[Bystander, ...] = ()
    reasons: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> Digest:
        return digest("plan", self)

    @cached_property
    def peers(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.members)

    def of(self, peer: PeerId) -> Assignment | None:
        return next((member for member in self.members if member.peer == peer), None)

    @property
    def idle_exchange_seconds(self) -> float:
        """The part of the exchange for which somebody has nothing to train."""
        return max(0.0, self.exchange_seconds - self.ahead_seconds)

    @property
    def ahead_seconds(self) -> float:
        """Of the next round, what every member may train during the exchange."""
        return min((member.ahead_seconds for member in self.members), default=0.0)

    @property
    def round_seconds(self) -> float:
        """From one commit to the next: what is trained during the exchange is the next round's, as its own first steps were."""
        return self.train_seconds + self.idle_exchange_seconds


# ---------------------------------------------------------------- what a round adds


@dataclass(frozen=True)
class Contribution:
    """The header of what one member adds to a round. `payload` is the hash of its encoded bytes, fixed before the first
    of them is sent. Zero tokens is an abstention: no payload, and `reason` says why. `validation_*` are this member's
    share of the validation of the base anchor (sum of token losses in nats, and tokens). `anchor_part` and `state` are hashes
    of what this member has at the base of the round (core/anchors.py); empty: not said."""

    peer: PeerId
    site: str
    round: int
    base: Digest
    tokens: int
    ranges: tuple[Range, ...]
    payload: Digest
    payload_bytes: int
    validation_nats: float = field(default=0.0, metadata={MAY_BE_NOT_FINITE: True})  # a diverged loss is told as it is
    validation_tokens: int = 0
    reason: str = ""
    anchor_part: Digest = b""
    state: Digest = b""

    @property
    def abstains(self) -> bool:
        return self.tokens == 0


@dataclass(frozen=True)
class Rollback:
    """The state after an update is that after `to_round` once more, when the model had been trained on `tokens`."""

    to_round: int
    tokens: int


@dataclass(frozen=True)
class Update:
    """What a round adds to the log: who contributed what, who votes next, and the hash of the body (bits, magnitudes).

    `contributors` are ordered by site name and never abstain. `members` names the attempt's members.
    The body of a gather is the contributors' payloads in order; of a reduce, the reducers' parts in share order.
    An update without contributors has an empty body: it lets a voter leave and moves nothing, or it is a `rollback`.
    """

    round: int
    base: Digest
    topology: Topology
    shares: tuple[Range, ...]
    contributors: tuple[Contribution, ...]
    voters: tuple[PeerId, ...]
    body: Digest
    body_bytes: int
    rollback: Rollback | None = None

    @cached_property
    def digest(self) -> Digest:
        """The round's digest: content only (no peer id, term, attempt, run id, validation or time). It vouches for what
        the contributors say of their state, so that a donor can be checked against the log."""
        if self.rollback is not None:
            return digest("rollback", self.base, self.round, self.rollback)
        return digest(
            "round",
            self.base,
            self.round,
            self.topology,
            self.shares,
            tuple((c.site, c.tokens, c.ranges, c.payload, c.anchor_part, c.state) for c in self.contributors),
            self.body,
        )

    @cached_property
    def seal(self) -> Digest:
        """What a held report names: everything that a commit fixes, the voters included."""
        return digest("seal", self)

    @property
    def tokens(self) -> int:
        return sum(c.tokens for c in self.contributors)


@dataclass(frozen=True)
class Held:
    """A held record's header: `update` was wholly on this peer's disk under (term, attempt) before it was reported."""

    term: Term
    attempt: int
    plan: Digest
    update: Update

    @property
    def rank(self) -> tuple[Term, int]:
        return (self.term, self.attempt)


# ---------------------------------------------------------------- settings of the protocol


@dataclass(frozen=True)
class Timing:
    """Limits of the protocol, in seconds of each peer's own monotonic clock. None of them carries a safety rule."""

    heartbeat_seconds: float = 1.0
    heartbeat_limit_seconds: float = 5.0
    election_seconds: float = 3.0
    lease_seconds: float = 6.0
    settle_seconds: float = 3.0
    retry_seconds: float = 1.0
    leave_seconds: float = 30.0
    max_attempts: int = 5

    @property
    def forget_seconds(self) -> float:
        """A peer that is no voter and was not heard for this long is not kept in mind: it is met again if it comes back."""
        return max(20 * self.heartbeat_limit_seconds, 60.0)


@dataclass(frozen=True)
class Rules:
    """Switches of the rules marked (m): every one is on in the product; tests switch one off and must then find a fault."""

    off: frozenset[str] = field(default_factory=frozenset)

    def on(self, rule: str) -> bool:
        return rule not in self.off
