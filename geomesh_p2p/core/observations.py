"""What a peer tells its observers (metrics, metrics.jsonl, console): frozen facts, so that they cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass, field

from geomesh_p2p.core.types import PeerId, Plan


@dataclass(frozen=True)
class PhaseChanged:
    """`phase` is one of PHASES; `waiting_for` names whom or what, `deadline_seconds` how long still at most. `lacking`: how
    many peers must still come, by min_peers, before there is anything to do."""

    phase: str
    round: int
    waiting_for: str = ""
    deadline_seconds: float | None = None
    lacking: int = 0


PHASES = ("starting", "joining", "idle", "planning", "training", "straggler_idle", "exchange", "commit",
          "catch_up", "saving", "validating", "leaving")  # fmt: skip


@dataclass(frozen=True)
class TrainingProgress:
    round: int
    step: int
    steps: int
    tokens_per_second: float
    loss: float


@dataclass(frozen=True)
class ExchangeProgress:
    """Of the exchange going on here: payload bytes received of those expected, sent so far, and when the rest will be here
    at the rate so far (None before the first byte)."""

    round: int
    received_bytes: int
    expected_bytes: int
    sent_bytes: int
    remaining_seconds: float | None

    @property
    def share(self) -> float:
        return self.received_bytes / self.expected_bytes if self.expected_bytes else 1.0


@dataclass(frozen=True)
class LogStands:
    """Where the log stands, told as soon as it is read and again when this peer begins to take part: what a run has come to
    does not depend on restarts."""

    round: int
    tokens_total: int


@dataclass(frozen=True)
class PlanAdopted:
    plan: Plan


@dataclass(frozen=True)
class PeerTimes:
    """Where one peer's time in one round went (seconds; they add up to `wall`): see measurement of a round in the docs."""

    compute: float
    data_wait: float
    straggler_idle: float
    wan_idle: float
    codec: float
    control: float
    wall: float


@dataclass(frozen=True)
class RoundCommitted:
    """One committed round as this peer saw it. One line of metrics.jsonl (kind "round").

    `planned_finish_seconds` and `finish_seconds` count from the plan's arrival at this peer to its last inner step;
    `planned_seconds` is the whole round as predicted. A peer that was no member has zero batch and steps.
    `tokens`, `loss`, `times` and all that is trained are this peer's own; `credited` are all contributors' tokens of this round
    by site, and `tokens_total` the run's, from the founding on. Traffic is this round's, by remote site.
    `gone` names the voters of the round before that vote no more, as far as this peer saw that round.
    `validation_ppl` is of the anchor *before* this round's update
    (the anchor of round - 1), None if it was not validated; `validation_seconds` is what it took here (part of control).
    """

    round: int
    digest: bytes
    term: int
    leader: str
    attempt: int
    topology: str
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    voters: int
    batch: int
    inner_steps: int
    planned_tokens: int
    tokens: int
    tokens_total: int
    loss: float | None
    validation_ppl: float | None
    learning_rate: float
    planned_finish_seconds: float
    finish_seconds: float
    planned_seconds: float
    times: PeerTimes
    step_seconds_median: float
    steps_done: int
    skipped_steps: int
    overrun_seconds: float
    emulated_seconds: float
    payload_sent: dict[str, int] = field(default_factory=dict)
    payload_received: dict[str, int] = field(default_factory=dict)
    overhead_sent: dict[str, int] = field(default_factory=dict)
    overhead_received: dict[str, int] = field(default_factory=dict)
    relayed_sent: dict[str, int] = field(default_factory=dict)
    """Of all bytes, those that went through a relay."""
    relayed_received: dict[str, int] = field(default_factory=dict)
    abstained: str = ""
    reused: bool = False
    residual_norm: float | None = None
    validation_seconds: float = 0.0
    credited: dict[str, int] = field(default_factory=dict)
    gone: tuple[str, ...] = ()

    @property
    def round_tokens(self) -> int:
        return sum(self.credited.values())


@dataclass(frozen=True)
class RoundDiscarded:
    round: int
    attempt: int
    reason: str


@dataclass(frozen=True)
class RolledBack:
    """The run's state after `round` is that after `to_round` once more, by order."""

    round: int
    to_round: int


@dataclass(frozen=True)
class Validated:
    """The anchor of `round` has this perplexity: one committed number, or (final) this peer's own over the whole set."""

    round: int
    perplexity: float
    final: bool


@dataclass(frozen=True)
class MembersChanged:
    """Sites known and heard; `self_site` included."""

    sites: tuple[str, ...]
    leader: str
    term: int


@dataclass(frozen=True)
class PeerJoined:
    peer: PeerId
    site: str


@dataclass(frozen=True)
class PeerLost:
    """`left`: as it had said that it would, and after a round without it."""

    peer: PeerId
    site: str
    silent_seconds: float
    left: bool = False


@dataclass(frozen=True)
class LeaderChanged:
    term: int
    leader: str
    self_is_leader: bool


@dataclass(frozen=True)
class Given:
    """Bytes of state that another peer, which joins or catches up, was given: `what` is one of messages.FETCHED."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Agreed:
    """Smoothed shares of each contributor's signs (by site) that agree with the updates committed, and with the other
    contributors alone: see core/agreement.py."""

    round: int
    with_update: dict[str, float]
    with_others: dict[str, float]


@dataclass(frozen=True)
class LinkMeasured:
    remote: str
    rtt_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class CaughtUpTo:
    round: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Saved:
    what: str
    round: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Kept:
    """Bytes on disk after a save, and the most that snapshots and log together grow to."""

    snapshot_bytes: int
    update_bytes: int
    fullest_bytes: int


@dataclass(frozen=True)
class Warned:
    """Something a person should know; `reason` is from a fixed list (it becomes a label), `text` says it in words."""

    reason: str
    text: str
