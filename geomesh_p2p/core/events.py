"""What happens to a replica (inputs) and what it asks its driver to do (actions).

The replica (core/replica.py) is a pure state machine: `handle(event, now) -> list[Action]`. Its driver (swarm/session.py
over real sockets, the simulator over virtual time) carries the actions out *in order, one after the other*; a `Save...`
action is on disk before the next action of the same list is begun, and nothing is handled between them. If a save fails,
the driver drops the rest of the list and hands in `SaveFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.messages import Message
from geomesh_p2p.core.types import Contribution, Held, PeerId, Plan, Profile, Rollback, Term, Update

# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class Tick:
    """Time has passed; sent at least at `Replica.next_deadline()`."""


@dataclass(frozen=True)
class Received:
    sender: PeerId
    message: Message


@dataclass(frozen=True)
class Ready:
    """The local engine holds the anchor of the last committed round and can train."""

    profile: Profile


@dataclass(frozen=True)
class Planned:
    """The planner's answer to NeedPlan; `plan` None: nothing can be planned now, `reason` says why (asked again later)."""

    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True)
class Trained:
    """Local training for `plan` is done and its contribution is final (it may abstain)."""

    plan: Digest
    contribution: Contribution
    train_seconds: float


@dataclass(frozen=True)
class Assembled:
    """The exchange of `plan` is complete here: the body of `update` is in the driver's hands."""

    plan: Digest
    update: Update


@dataclass(frozen=True)
class ExchangeLost:
    """The exchange of `plan` missed chunk deadlines of these peers."""

    plan: Digest
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class ExchangeMoved:
    """The exchange of `plan` has gone on since this was last said, or since it began."""

    plan: Digest


@dataclass(frozen=True)
class FetchedHeld:
    """The body of a held update asked for by FetchHeld has arrived and fits its hash."""

    held: Held


@dataclass(frozen=True)
class CaughtUp:
    """What CatchUp asked for is here, verified, on disk and applied, in this order: the state of a snapshot (None: none was
    needed, `updates` follow this peer's own last round), then `updates`. The replica appends them to its `log` itself."""

    updates: tuple[Update, ...]
    state: LogState | None = None


@dataclass(frozen=True)
class FetchFailed:
    what: str
    sender: PeerId


@dataclass(frozen=True)
class ClaimAnswered:
    """What ProveClaim came to: `peer` has shown that the log goes on from round `base`; it has shown no such thing; or it has
    not answered."""

    peer: PeerId
    base: int
    proof: Literal["proved", "refuted", "silent"]


@dataclass(frozen=True)
class SaveFailed:
    reason: str


@dataclass(frozen=True)
class Hashed:
    """This peer's own hash after `round`: of one part of its anchor (anchor_part), or of its whole state."""

    round: int
    of: Literal["anchor_part", "state"]
    value: Digest


@dataclass(frozen=True)
class StateChecked:
    """What CheckState asked for is done. `outcome` is sound | repaired; `round` that of the anchor then."""

    round: int
    outcome: str


@dataclass(frozen=True)
class LeaveWanted:
    """The operator asked this peer to go (SIGTERM, drain). `exit_code` is that of an end in good order then."""

    reason: str
    exit_code: int = 0


@dataclass(frozen=True)
class StopWanted:
    """An operator wants the run to end soon, everywhere after the same round."""


@dataclass(frozen=True)
class RollbackWanted:
    """An operator wants the state of an earlier round back, for the whole run; this peer leads."""

    rollback: Rollback


Event = (
    Tick | Received | Ready | Planned | Trained | Assembled | ExchangeLost | ExchangeMoved | FetchedHeld | CaughtUp
    | FetchFailed | ClaimAnswered | SaveFailed | Hashed | StateChecked | LeaveWanted | StopWanted | RollbackWanted
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class Durable:
    """What a peer must not forget: one unit with its identity key. `accepted` is the newest plan it accepted
    (round, term, attempt, digest); a restarted peer never trains for it again."""

    term: Term
    voted: bool                                   # whether this peer gave its vote in `term`
    accepted_round: int = 0
    accepted_term: Term = field(default_factory=lambda: Term(0, ""))
    accepted_attempt: int = 0
    accepted_plan: Digest = b""


@dataclass(frozen=True)
class SaveDurable:
    """Write and fsync. `why` is vote | term | plan."""

    durable: Durable
    why: str


@dataclass(frozen=True)
class SaveHeld:
    """Write the held record with the update's body and fsync; replaces the one before."""

    held: Held


@dataclass(frozen=True)
class AppendCommit:
    """`update` is committed: append it to the log with its body, apply it to the anchor, drop the held record.

    Its body is here: in the held record of the same seal, or just assembled. (A peer without it gets a CatchUp instead.)"""

    update: Update


@dataclass(frozen=True)
class Send:
    to: PeerId
    message: Message


@dataclass(frozen=True)
class NeedPlan:
    """Leader: compute the plan for (round, attempt) with exactly these members.

    `previous` is the plan of the attempt before, whose surviving members keep their ranges and work; None for a fresh
    round. `gather`: the topology must be gather. The answer comes back as `Planned`; whoever the plan then leaves out
    loses its vote, and a plan whose members hold no quorum of the view is not used."""

    round: int
    attempt: int
    term: Term
    base: Digest
    members: tuple[PeerId, ...]
    previous: Plan | None
    gather: bool = False


@dataclass(frozen=True)
class Train:
    """Train for `plan`. `reuse` true: the work for an earlier attempt of this round stands (same base, ranges within those
    given now): if its contribution is final the driver answers with Trained at once; if it is still being trained, training
    goes on and the driver answers with Trained for `plan` when it is done."""

    plan: Plan
    reuse: bool


@dataclass(frozen=True)
class CloseTraining:
    """Stop at the next step boundary and contribute what was trained."""

    plan: Digest


@dataclass(frozen=True)
class Rewind:
    """Weights go back to the anchor; a contribution that was made or is being made is void."""

    reason: str


@dataclass(frozen=True)
class StartExchange:
    """Take part in the exchange of `plan`: send own bytes as soon as they are final, collect the others'."""

    plan: Plan


@dataclass(frozen=True)
class MemberFinished:
    """A member's contribution header has arrived: the exchange now knows what to expect from it."""

    plan: Digest
    contribution: Contribution


@dataclass(frozen=True)
class StopExchange:
    plan: Digest
    reason: str


@dataclass(frozen=True)
class FetchHeld:
    """Get the body of `held` from one of `sources`; answered by FetchedHeld or FetchFailed."""

    held: Held
    sources: tuple[PeerId, ...]


@dataclass(frozen=True)
class ProveClaim:
    """`peer` claims to have committed `round`: have it show the update that follows `base`, where this peer's log stands, or a
    snapshot of a later round, beside all other work; answered by ClaimAnswered."""

    peer: PeerId
    round: int
    base: LogState


@dataclass(frozen=True)
class CatchUp:
    """Get to `round` (or beyond) from one of `sources`, by updates or by snapshot and updates; answered by CaughtUp or
    FetchFailed."""

    round: int
    digest: Digest
    sources: tuple[PeerId, ...]


@dataclass(frozen=True)
class CheckState:
    """The anchor here may be wrong. Before anything is trained again: make it anew from the newest snapshot that the log
    agrees with and the updates since, by others' help if need be; answered by StateChecked."""


@dataclass(frozen=True)
class Note:
    """One line of history.jsonl: `kind` from HISTORY_KINDS, with the fields the independent checker needs."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Halt:
    """The peer must stop: exit code and the one line that explains it. Code 0: it has left as it wanted."""

    exit_code: int
    reason: str


Action = (
    SaveDurable | SaveHeld | AppendCommit | Send | NeedPlan | Train | CloseTraining | Rewind | StartExchange | MemberFinished
    | StopExchange | FetchHeld | ProveClaim | CatchUp | CheckState | Note | Halt
)

# The fields of each kind, by their names in the line. A driver writes (and flushes) a note before it begins the next action
# of the list, so a note that stands *after* the save and *before* the sends it speaks of survives a kill.
# HELD is {"round", "term", "attempt", "seal"} or null; CONTRIBUTOR is {"site", "peer", "tokens", "ranges", "payload",
# "anchor_part", "state"}; the last two may be empty.
HISTORY_KINDS = {
    "start": "peer (re)started, first note of every process: round, digest, term, held (HELD); sequence_length if known",
    "founding": "round 0 founded or learnt: base (digest of round 0), founder, view",
    "adopt": "the state of a round was taken from a snapshot: round, digest, view",
    "anchor": "this peer's hash of one part of its anchor after a round (optional): round, digest, part, hash",
    "mismatch": "contributors of the next round had different bases: round (the base), of (anchor_part | state), part, odd "
    "(peer ids), tied (nobody knows which is right)",
    "checked": "the own anchor was made anew from what the log agrees with: round, outcome (sound | repaired)",
    "term": "a higher term was adopted: term, leader (or empty)",
    "vote": "a vote given, the one for oneself too (no pre-votes): term, to, round (own committed), held (own HELD)",
    "leader": "this peer became leader: term, round (own committed), voters (of the winning quorum)",
    "accept": "a plan accepted: round, term, attempt, plan, base, members (peer ids), ranges (by site), "
    "deadline_seconds (if known)",
    "refuse": "a plan refused: round, term, attempt, plan, reason",
    "contribute": "own contribution final: round, plan, base, tokens (0: abstains), ranges, payload",
    "held": "held record durable: round, term, attempt, plan, seal, digest (the update's)",
    "commit": "committed here: round, digest, base, seal, term (null if caught up), view (voters), contributors (CONTRIBUTORs "
    "in site order), committed_by (leader | message | catch_up); topology, shares, body: what else the digest covers",
    "discard": "an attempt was given up: round, term, attempt, plan, reason (from DISCARD_REASONS)",
    "join": "a peer became known and ready: peer_id, peer_site",
    "lost": "a peer was not heard for the limit: peer_id, peer_site, seconds, left (as it had said)",
    "blame": "a member sent what is refused by rule: peer_id, peer_site, round, reason",
    "unproved": "a peer claims rounds for which it shows nothing that follows this peer's log: peer_id, peer_site, round (own "
    "committed), claimed",
    "leave": "this peer leaves: reason",
    "stop": "this peer ended: exit_code, reason",
}

DISCARD_REASONS = (
    "member_lost", "higher_term", "exchange_failed", "unequal_held", "plan_refused", "stepped_down", "shutdown",
    "too_few_voters",
)
