"""The seams: what the algorithm and the session need from the other rooms. Implementations live in swarm and engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.log import LogState
from geomesh_p2p.core.messages import Chunk, Fetched, Message, Request
from geomesh_p2p.core.retention import Retained
from geomesh_p2p.core.types import Assignment, BatchTime, Contribution, Founding, Held, PeerId, Plan, Range, Rollback, Update

Vector = npt.NDArray[np.float32]


class Clock(Protocol):
    def __call__(self) -> float:
        """Monotonic seconds."""
        ...


class Observer(Protocol):
    """Is told what happened, as frozen events from core/telemetry_events.py; must not raise and must not block."""

    def __call__(self, event: Any) -> None: ...


# ---------------------------------------------------------------- transport


class Unreachable(Exception):
    """The peer could not be reached, or the connection broke, within the deadline."""


class Transport(Protocol):
    """Frames between authenticated peers. `memory.py` and `transport.py` pass the same contract tests.

    send():    control messages; never blocks, never raises; per destination they keep their order; a message that cannot
               be delivered is dropped (and counted). The newest is worth more than the oldest: a bounded queue drops from
               its front.
    send_bulk(): one chunk; returns when the stream has taken it (back-pressure), raises Unreachable on failure. Chunks may
               overtake each other and control messages.
    request(): one Fetch or Order, answered by the other end's `on_request`; raises Unreachable at the deadline.
    run:       the run id that every frame carries; empty until it is known (settable). Frames of another run are dropped,
               but for Hello, Refused and Fetches of `founding` and `status`.
    """

    peer: PeerId
    run: bytes

    async def start(
        self,
        on_message: Callable[[PeerId, Message], None],
        on_request: Callable[[PeerId, Request], Awaitable[Fetched]],
    ) -> None: ...

    def send(self, to: PeerId, message: Message) -> None: ...

    async def send_bulk(self, to: PeerId, chunk: Chunk) -> None: ...

    async def request(self, to: PeerId, fetch: Request, timeout_seconds: float) -> Fetched: ...

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Addresses under which `peer` may be dialled from now on (the newest replace the older)."""
        ...

    def forget(self, peer: PeerId) -> None:
        """`peer` has been gone for long: drop whatever is kept for it. Should it come back, it is a new acquaintance."""
        ...

    def traffic(self) -> "dict[PeerId, PeerTraffic]":
        """Bytes by remote since the start, counted at the stream boundary."""
        ...

    async def stop(self) -> None: ...


@dataclass
class PeerTraffic:
    payload_sent: int = 0
    overhead_sent: int = 0
    payload_received: int = 0
    overhead_received: int = 0
    relayed_sent: int = 0
    """Of all bytes, those that went through a relay."""
    relayed_received: int = 0
    dropped: int = 0

    @property
    def sent(self) -> int:
        return self.payload_sent + self.overhead_sent

    @property
    def received(self) -> int:
        return self.payload_received + self.overhead_received


# ---------------------------------------------------------------- disk


class Store(Protocol):
    """One peer's folder. Every write is to a new file, fsynced, then renamed (and the folder fsynced). Raises OSError."""

    def load_durable(self) -> Durable | None: ...

    def save_durable(self, durable: Durable) -> None: ...

    def load_held(self) -> tuple[Held, bytes] | None: ...

    def save_held(self, held: Held, body: Sequence[memoryview | bytes]) -> None: ...

    def load_founding(self) -> Founding | None: ...

    def save_founding(self, founding: Founding) -> None: ...

    def append(self, update: Update, body: Sequence[memoryview | bytes]) -> None:
        """Add round `update.round` to the log; drops a held record of that round or an older one."""
        ...

    def read_update(self, round: int) -> tuple[Update, bytes] | None: ...

    def read_header(self, round: int) -> Update | None:
        """The update without its body; None if it is not here, or not to be read."""
        ...

    def rounds(self) -> range:
        """Rounds whose updates are on disk (contiguous)."""
        ...

    def sizes(self) -> dict[int, int]:
        """Bytes on disk of each update, by round, ascending."""
        ...

    def prune(self, first_kept: int) -> None:
        """Delete the updates of rounds before `first_kept`."""
        ...


class SnapshotManifest(Protocol):
    """What a snapshot holds: where the log stood, and the hashes that its bytes are checked against."""

    @property
    def state(self) -> LogState: ...

    @property
    def content(self) -> Digest:
        """Hash of all that every peer has in common after the round: what contributions to the next one name as `state`."""
        ...

    @property
    def size_bytes(self) -> int: ...

    def pack(self) -> bytes: ...


class SnapshotReceiver(Protocol):
    def missing(self) -> list[Range]:
        """Byte ranges still wanted, ascending."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """One whole range of `missing()`; raises DataError if it is not what the manifest says."""
        ...

    def finish(self) -> None: ...

    def close(self) -> None:
        """Stop for now; what was received stays."""
        ...


class SnapshotStore(Protocol):
    """The snapshots of one peer; every write is published only once it is whole and checked. Raises OSError, DataError."""

    def write(
        self,
        state: LogState,
        anchor: Vector,
        momentum: Vector,
        residual: Vector | None = None,
        save_inner: Callable[[str], None] | None = None,
        part_residual: tuple[Range, Vector] | None = None,
    ) -> SnapshotManifest: ...

    def delete_older(self, newest: int) -> None:
        """Delete those that are more than the run file says, `newest` not among them."""
        ...

    def rounds(self) -> list[int]: ...

    def sizes(self) -> dict[int, int]:
        """Bytes on disk by round, ascending."""
        ...

    def prune(self, updates: Mapping[int, int]) -> Retained:
        """Delete those for which, beside `updates` (bytes by round), there is no room."""
        ...

    def manifest(self, round: int) -> SnapshotManifest:
        """Raises LookupError if there is none of `round`."""
        ...

    def content(self, state: LogState, anchor: Vector, momentum: Vector) -> Digest:
        """The `content` of the manifest that a snapshot of this state has, or would have."""
        ...

    def described(self, packed: bytes) -> SnapshotManifest:
        """A manifest that another peer sent. Raises ValueError."""
        ...

    def receive(self, manifest: Any) -> SnapshotReceiver:
        """Go on with (or begin) receiving what `manifest` describes."""
        ...

    def receiving(self) -> list[int]:
        """Rounds of which a snapshot was received in part, ascending."""
        ...

    def forget_received(self) -> None:
        """Drop what was received in part."""
        ...

    def read_chunk(self, round: int, offset: int, length: int) -> bytes: ...

    def read_state(self, round: int) -> tuple[Vector, Vector]:
        """(anchor, momentum) of a snapshot."""
        ...


class Past(Protocol):
    """The states of earlier rounds that can be made from what is on this peer's disk."""

    def __call__(self, round: int, trusting: bool = False) -> tuple[Vector, Vector] | None:
        """(anchor, momentum) after `round`, from states of which the log says that most had the same; `trusting`: if there is
        none, from one of which it says nothing. None if nothing leads there. Raises OSError."""
        ...

    def rollback(self, to_round: int) -> Rollback:
        """What takes a run back to the state after `to_round`. Raises LookupError if nothing leads there, as far as can be told
        without reading it all; DataError."""
        ...


# ---------------------------------------------------------------- engine


@dataclass(frozen=True)
class InnerResult:
    """What a run of inner steps came to. `step_seconds` are one number per step, `loss` the mean training loss (nats),
    `stopped` says what ended it early, or why there are no tokens."""

    tokens: int
    ranges: tuple[Range, ...]
    steps: int
    loss: float
    seconds: float
    data_wait_seconds: float
    step_seconds: tuple[float, ...]
    skipped_steps: int
    overrun_seconds: float
    learning_rate: float
    stopped: str = ""


class Engine(Protocol):
    """The local model, data and device. Blocking methods run in one worker thread, never two at a time."""

    @property
    def parameters(self) -> int: ...

    def weights(self) -> Vector:
        """The trainable weights as one flat fp32 vector in layout order (on a CPU: a view, not a copy)."""
        ...

    def set_weights(self, anchor: Vector) -> None: ...

    def initial_weights(self) -> Vector:
        """The weights at construction, made anew (slow)."""
        ...

    def measure(self) -> tuple[BatchTime, ...]:
        """step_seconds(batch) up to the largest batch that fits, on the real model (or the emulated device's curve)."""
        ...

    def train(self, assignment: Assignment, plan: Plan, should_close: Callable[[], bool], started: float) -> InnerResult:
        """Run the assigned inner steps from the current weights. Stops early, at a step boundary, when `should_close()`."""
        ...

    def validate(self, share: int, of: int, should_close: Callable[[], bool] | None = None) -> tuple[float, int]:
        """Sum of token losses (nats) and tokens over the share-th of `of` parts of the validation set, current weights.
        Ends early, with what it has, once `should_close()`."""
        ...

    def save_inner(self, path: str) -> None: ...

    def load_inner(self, path: str) -> None: ...

    def forget_inner(self) -> None:
        """The inner optimizer's state is then that of a new one."""
        ...


class LocalEngine(Engine, Protocol):
    """An engine as the composition root needs it. `settings` are the fields of the run's fingerprint, by name;
    `time_scale` that of an emulated device (None: not known yet)."""

    time_scale: float | None

    @property
    def layout(self) -> Layout: ...

    @property
    def weights_digest(self) -> Digest: ...

    @property
    def device_label(self) -> str: ...

    @property
    def settings(self) -> dict[str, str]: ...

    @property
    def speed_depends_on(self) -> dict[str, str]:
        """What `measure` depends on, by name; empty if it measures nothing (an emulated device, a profile given)."""
        ...

    def disagreement(self, curve: tuple[BatchTime, ...]) -> str:
        """Why `curve`, once measured here, is wrong now, by a few steps; "" if it holds."""
        ...

    def measure_rate(self, seconds: float) -> float:
        """Tokens a second of real, unpaced steps."""
        ...


# ---------------------------------------------------------------- the mesh, as the algorithm sees it


@dataclass(frozen=True)
class TrainRound:
    """Train for `plan` from the anchor (whatever the weights were), then hand the contribution to `Mesh.contribute`."""

    plan: Plan
    mine: Assignment
    validate: bool
    content: Callable[[Vector, Vector], Digest] | None = None
    """Hash of the state (anchor, momentum) at the base, if that is a snapshot round."""


@dataclass(frozen=True)
class LocalRound:
    """What training for a plan came to. `payload` are the encoded bytes (uint8), None if the contribution abstains; they must
    not change until the round's update is folded, which reads them."""

    contribution: Contribution
    payload: Any
    result: InnerResult
    codec_seconds: float
    validation_seconds: float
    residual_norm: float | None = None
    """Of what earlier contributions had left unsaid, which is in this one; None if that is not kept, or nothing."""
    ahead_seconds: float = 0.0
    """Of `result.seconds`: what was spent before the plan was here (core/ahead.py)."""
    ahead_data_wait_seconds: float = 0.0


@dataclass(frozen=True)
class FoldUpdate:
    """`update` is committed: fold it into the anchor and go on from there."""

    update: Update
    body: Any
    """A buffer of the update's bytes, or a list of the buffers that they came in (core/outer.py)."""
    own_payload: Any


@dataclass(frozen=True)
class RollBack:
    """`update`, a rollback, is committed and in the log on disk: from there `rebuild` (as MakeAnew's) makes the earlier state.
    The inner optimizer begins anew, for its moments are of what is undone."""

    update: Update
    rebuild: Callable[[int], tuple[Vector, Vector] | None]


@dataclass(frozen=True)
class AdoptState:
    """A snapshot of `round` was received: its anchor and outer state replace the local ones."""

    round: int
    load: Callable[[], tuple[Vector, Vector]]


@dataclass(frozen=True)
class SaveState:
    """Write a snapshot of `round`; `write` gets (anchor, momentum, residual) and a function that saves the inner state."""

    round: int
    write: Callable[[Vector, Vector, Vector | None, Callable[[str], None]], None]


@dataclass(frozen=True)
class ValidateAll:
    """Validate the anchor on the whole validation set (the end of a run)."""

    round: int


@dataclass(frozen=True)
class MakeAnew:
    """The anchor may be wrong. `rebuild` makes (anchor, momentum) of a round anew from what the log agrees with; None if
    nothing on disk is."""

    rebuild: Callable[[int], tuple[Vector, Vector] | None]


Work = TrainRound | FoldUpdate | RollBack | AdoptState | SaveState | ValidateAll | MakeAnew
Made = Literal["sound", "repaired", "rolled_back", "lost"]
"""What MakeAnew or RollBack came to: the anchor was right; it was not, and is now; it is the earlier one; nothing on disk can
be trusted, or leads there."""


class Closes(Protocol):
    def should_close(self, plan: Plan) -> bool:
        """Whether inner steps for `plan` are to end at the next step boundary. Called from the worker thread."""
        ...


class WorkWaits(Protocol):
    def has_work(self) -> bool:
        """Whether the next piece of work is here: whoever trains ahead then stops. Called from the worker thread."""
        ...


class Mesh(Closes, WorkWaits, Protocol):
    """What the algorithm needs from the other peers: its next piece of work, in the order of the log, and an ear."""

    async def next_work(self) -> Work | None:
        """The next piece of work; None at the end of this peer's part."""
        ...

    def contribute(self, plan: Plan, local: LocalRound) -> None: ...

    def trained_ahead(self, result: InnerResult) -> None:
        """Steps of the round after that of the last contribution have just been done."""
        ...

    def folded(self, update: Update, part: int, part_hash: Digest, codec_seconds: float) -> None:
        """`update` is in the anchor, whose part number `part` then has this hash."""
        ...

    def validated(self, round: int, nats: float, tokens: int) -> None: ...

    def made_anew(self, round: int, outcome: Made) -> None:
        """MakeAnew or RollBack is done; the anchor is that of `round`."""
        ...
