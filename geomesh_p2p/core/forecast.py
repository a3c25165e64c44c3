"""What a round will take: seconds of a step at any batch, seconds of an exchange over measured links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from geomesh_p2p.core.types import Link, PeerId, Profile, Range, StepReport, Topology

Array = npt.NDArray[np.float64]

DEFAULT_BYTES_PER_SECOND = 125e6  # 1 Gbit/s, for a mesh of which no link has been measured yet
# Codec rates on one core, in parameters a second: encode reads two fp32 vectors, decode adds one weighted vector.
ENCODE_PER_SECOND, DECODE_PER_SECOND = 0.7e9, 1.2e9
CONTROL_SECONDS = 0.02  # held record to disk, votes, messages
LARGEST_BATCH = 65_536  # sequences; a larger one in a profile is a mistake
SHARE_UNIT, SMALLEST_SHARE_UNIT = 4096, 8  # parameters; a byte of signs holds 8


# ---------------------------------------------------------------- steps


@dataclass(frozen=True, eq=False)
class StepTimes:
    """`seconds[b]` of one inner step of b sequences, b = 0 ... max_batch, never falling; `live` is the factor by which
    the last round's median step differed from the profile (1.0 without a report)."""

    peer: PeerId
    site: str
    seconds: Array
    live: float
    reported: bool

    @property
    def max_batch(self) -> int:
        return len(self.seconds) - 1

    def finish(self, batch: int, steps: int, last: int) -> float:
        """Seconds of `steps` inner steps, all of `batch` sequences but the last one of `last`."""
        return (steps - 1) * self.step(batch) + self.step(last)

    def step(self, batch: int) -> float:
        """Seconds of one step; beyond the largest batch (of a plan made before the profile changed) in proportion."""
        return float(self.seconds[min(batch, self.max_batch)]) * max(1.0, batch / self.max_batch)


def step_times(profile: Profile, report: StepReport | None) -> StepTimes:
    """The measured curve, piecewise linear between its points, scaled as a whole so that it passes through the report.

    Below the first point the first segment goes on, between proportional time and no gain at all.
    """
    points = sorted({point.batch: point.seconds for point in profile.curve}.items())
    if not points or not all(1 <= batch <= LARGEST_BATCH and 0 < seconds < math.inf for batch, seconds in points):
        raise ValueError(
            f"profile of {profile.site}: needs points of 1 to {LARGEST_BATCH} sequences and seconds > 0, got {points}"
        )
    known, taken = np.array(points, dtype=np.float64).T
    batches = np.arange(1, points[-1][0] + 1, dtype=np.float64)
    seconds = np.interp(batches, known, taken)
    below = batches < known[0]
    if below.any():
        slope = (taken[1] - taken[0]) / (known[1] - known[0]) if len(known) > 1 else taken[0] / known[0]
        line = taken[0] - slope * (known[0] - batches[below])
        seconds[below] = np.clip(line, taken[0] * batches[below] / known[0], taken[0])
    seconds = np.concatenate([[0.0], np.maximum.accumulate(seconds)])
    usable = report is not None and 1 <= report.batch < len(seconds) and 0 < report.seconds < math.inf
    live = float(report.seconds / seconds[report.batch]) if report is not None and usable else 1.0
    return StepTimes(profile.peer, profile.site, seconds * live, live, usable)


# ---------------------------------------------------------------- links


@dataclass(frozen=True, eq=False)
class LinkTable:
    """Rates (bytes a second) and round trips (seconds) by [source, target], peers in member order.

    A pair that was not measured takes the opposite direction's figures, else the median of all that were; `guessed`
    counts those whose rate was not. The diagonal is infinitely fast. `uplinks` is what each may send to all at once.
    """

    rates: Array
    rtts: Array
    guessed: int
    uplinks: Array = field(default_factory=lambda: np.array(np.inf))

    def __len__(self) -> int:
        return len(self.rates)

    def only(self, members: Sequence[int]) -> LinkTable:
        pairs = np.ix_(members, members)
        uplinks = np.broadcast_to(self.uplinks, len(self))[list(members)]
        return LinkTable(self.rates[pairs], self.rtts[pairs], self.guessed, uplinks)

    @classmethod
    def of(cls, peers: Sequence[PeerId], links: Sequence[Link]) -> LinkTable:
        place, size = {peer: index for index, peer in enumerate(peers)}, len(peers)
        found = [
            (place[link.source], place[link.target], link.bytes_per_second or np.nan, link.rtt_seconds)
            for link in links
            if link.source in place and link.target in place and link.source != link.target and _sound(link)
        ]
        rates, rtts = np.full((size, size), np.nan), np.full((size, size), np.nan)
        if found:
            source, target, rate_of, rtt_of = np.array(found).T
            pair = source.astype(np.int64), target.astype(np.int64)
            # Two reports on one pair: the slower one, whatever their order.
            np.fmin.at(rates, pair, rate_of)
            np.fmax.at(rtts, pair, rtt_of)
        guessed = size * (size - 1) - int((~np.isnan(rates)).sum())
        uplinks = np.full(size, np.inf)
        for link in links:
            if link.source == link.target and link.source in place and link.bytes_per_second > 0 and _sound(link):
                uplinks[place[link.source]] = min(uplinks[place[link.source]], link.bytes_per_second)
        rates, rtts = _completed(rates, DEFAULT_BYTES_PER_SECOND), _completed(rtts, 0.0)
        rates = np.minimum(rates, uplinks[:, None])
        np.fill_diagonal(rates, np.inf)
        np.fill_diagonal(rtts, 0.0)
        return cls(rates, rtts, guessed, uplinks)


def _sound(link: Link) -> bool:
    """A rate of 0 is one that nothing has measured yet; its round trip counts all the same."""
    return 0 <= link.bytes_per_second < math.inf and 0 <= link.rtt_seconds < math.inf


def _completed(measured: Array, default: float) -> Array:
    """Gaps filled with the opposite direction's figure, else the median of what was measured, else `default`."""
    known = ~np.isnan(measured)
    usual = float(np.median(measured[known])) if known.any() else default
    both = np.where(known, measured, measured.T)
    return np.where(np.isnan(both), usual, both)


# ---------------------------------------------------------------- exchange


@dataclass(frozen=True)
class Volume:
    """What an exchange moves: a contribution's bytes, and the bytes of a reducer's answer for the whole vector."""

    parameters: int
    payload_bytes: int
    answer_bytes: int


@dataclass(frozen=True)
class Exchange:
    """A topology with its reducer shares, one per member (none in a gather), and the seconds from the last member's finish
    to the commit; `other_seconds` of the topology not taken (None: it was not open to choice)."""

    topology: Topology
    shares: tuple[Range, ...]
    seconds: float
    other_seconds: float | None = None


def gather_seconds(links: LinkTable, volume: Volume) -> float:
    """Every peer sends its contribution to all others at once, each at its pair's rate; the slowest pair or uplink decides."""
    codec = volume.parameters / ENCODE_PER_SECOND + len(links) * volume.parameters / DECODE_PER_SECOND
    if len(links) == 1:
        return codec
    pairs = volume.payload_bytes / links.rates + links.rtts / 2
    uplinks = (len(links) - 1) * volume.payload_bytes / links.uplinks + links.rtts.max(axis=1) / 2
    return codec + float(max(pairs.max(), uplinks.max()))


def reduce_seconds(links: LinkTable, volume: Volume, shares: Sequence[Range]) -> float:
    """Phase 1: each sends reducer j its share of the contribution; phase 2: reducer j answers all with its part."""
    codec = 2 * (volume.parameters / ENCODE_PER_SECOND + volume.parameters / DECODE_PER_SECOND)
    part = np.array([len(share) for share in shares], dtype=np.float64) / volume.parameters
    works = part > 0
    inward = (part * volume.payload_bytes / links.rates + links.rtts / 2)[:, works]
    outward = (part[:, None] * volume.answer_bytes / links.rates + links.rtts / 2)[works, :]
    up_inward = (1 - part) * volume.payload_bytes / links.uplinks + links.rtts[:, works].max(axis=1) / 2
    up_outward = ((len(links) - 1) * part * volume.answer_bytes / links.uplinks + links.rtts.max(axis=1) / 2)[works]
    return codec + float(max(inward.max(), up_inward.max())) + float(max(outward.max(), up_outward.max()))


def commit_seconds(links: LinkTable, leader: int | None) -> float:
    """Held reports to the leader and its commit back: one round trip of its farthest member."""
    trips = links.rtts if leader is None else np.maximum(links.rtts[leader], links.rtts[:, leader])
    return CONTROL_SECONDS + float(trips.max())


def codec_seconds(volume: Volume, topology: Topology, size: int) -> tuple[float, float]:
    """(before the first byte is sent, after the last one has arrived), of one of `size` members."""
    encode, decode = volume.parameters / ENCODE_PER_SECOND, volume.parameters / DECODE_PER_SECOND
    # Averaging a share goes on while its bytes arrive. What is left after the last one is to make its mean again and pack it
    # (answers of one bit are packed by then), and to fold all answers.
    return encode, size * decode if topology == "gather" else encode + 2 * decode


def folded_seconds(
    links: LinkTable,
    volume: Volume,
    topology: Topology,
    shares: Sequence[Range],
    finish: Array,
    leader: int | None,
) -> Array:
    """When each member has folded the committed update, if they end their training at `finish`.

    Each sends what it has as soon as it has it, also while others still train. `gather_seconds` and `reduce_seconds`, by which
    a plan is chosen, are what this comes to if all finish together and nobody answers before all has arrived."""
    encode, decode = codec_seconds(volume, topology, len(links))
    have = finish + encode
    if len(links) > 1 and topology == "gather":
        have = _arrived(have, links, float(volume.payload_bytes), (len(links) - 1.0) * volume.payload_bytes)
    elif len(links) > 1:
        part = np.array([len(share) for share in shares], dtype=np.float64) / volume.parameters
        made = _arrived(have, links, part * volume.payload_bytes, (1 - part) * volume.payload_bytes)
        answers = part * volume.answer_bytes
        made = np.where(part > 0, made, -np.inf)
        have = _arrived(made, links, answers[:, None], (len(links) - 1) * answers)
    have = have + decode
    inward, outward = (links.rtts.max(), links.rtts.max()) if leader is None else (links.rtts[:, leader], links.rtts[leader])
    committed = float((have + inward / 2).max()) + CONTROL_SECONDS
    folded: Array = np.broadcast_to(committed + outward / 2, have.shape)
    return folded


def _arrived(sent: Array, links: LinkTable, sizes: Array | float, whole: Array | float) -> Array:
    """When the last of `sizes` bytes [source, target] has arrived at each target, sent from `sent` on; a source's `whole` bytes
    to all together go through its uplink."""
    uplinks = np.broadcast_to(whole / links.uplinks, len(links))[:, None] * ~np.eye(len(links), dtype=np.bool_)
    arrived: Array = (sent[:, None] + np.maximum(sizes / links.rates, uplinks) + links.rtts / 2).max(axis=0)
    return arrived


def best_fractions(links: LinkTable, volume: Volume) -> Array:
    """Shares s (sum 1) that minimise t1 + t2: t1 >= s_j payload/rate_ij + rtt_ij/2 and t2 >= s_j answer/rate_ji + rtt_ji/2
    for all i != j; of n peers, one with a limited uplink u_i adds t1 >= (1 - s_i) payload/u_i + rtt_i/2 and
    t2 >= (n - 1) s_i answer/u_i + rtt_i/2. A linear program, solved by HiGHS."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    size = len(links)
    columns = []  # of the constraints: share, which t, slope, constant
    for phase, (work, rates, rtts) in enumerate(
        ((volume.payload_bytes, links.rates, links.rtts), (volume.answer_bytes, links.rates.T, links.rtts.T))
    ):
        slopes, constants = work / rates, rtts / 2 - np.diag(np.full(size, np.inf))
        # Per share, only lines above which no other line lies everywhere (of equal or larger slope and constant).
        order = np.lexsort((-constants, -slopes), axis=0)
        slopes, constants = np.take_along_axis(slopes, order, axis=0), np.take_along_axis(constants, order, axis=0)
        highest = np.maximum.accumulate(constants, axis=0)
        rising = np.vstack([np.isfinite(constants[:1]), constants[1:] > highest[:-1]])
        _, share = np.nonzero(rising)
        columns.append((share, np.full(len(share), size + phase), slopes[rising], constants[rising]))
    uplinks = np.broadcast_to(links.uplinks, size)
    limited = np.flatnonzero(np.isfinite(uplinks))
    own, answers = volume.payload_bytes / uplinks[limited], (size - 1) * volume.answer_bytes / uplinks[limited]
    farthest = links.rtts.max(axis=1)[limited] / 2
    columns.append((limited, np.full(len(limited), size), -own, own + farthest))
    columns.append((limited, np.full(len(limited), size + 1), answers, farthest))
    share, which, slope, constant = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    count = len(share)
    at = np.arange(count)
    # In units of the largest constraint, so that the solver's absolute tolerances mean the same for any size of model.
    scale = max(float((np.maximum(slope, 0.0) + constant).max()), 1e-12)
    data, places = np.concatenate([slope / scale, -np.ones(count)]), (np.concatenate([at, at]), np.concatenate([share, which]))
    above = csr_array((data, places), shape=(count, size + 2))
    total = csr_array(np.concatenate([np.ones(size), np.zeros(2)])[None, :])
    cost = np.concatenate([np.zeros(size), np.ones(2)])
    solved = linprog(cost, A_ub=above, b_ub=-constant / scale, A_eq=total, b_eq=[1.0], bounds=(0, None), method="highs")
    if not solved.success:
        return np.full(size, 1 / size)
    fractions: Array = np.clip(solved.x[:size], 0.0, None)
    return fractions / fractions.sum()


def cut(fractions: Sequence[float] | Array, parameters: int) -> tuple[Range, ...]:
    """Ranges in the proportions given that cover [0, parameters): whole units of 4096 parameters, of 8 in small models."""
    unit = SHARE_UNIT if parameters >= 16 * SHARE_UNIT * len(fractions) else SMALLEST_SHARE_UNIT
    ends = np.cumsum(np.asarray(fractions, dtype=np.float64))
    marks = [min(parameters, round(float(end / ends[-1]) * parameters / unit) * unit) for end in ends[:-1]]
    return tuple(Range(start, stop) for start, stop in zip([0, *marks], [*marks, parameters], strict=True))


def choose_exchange(
    links: LinkTable,
    volume: Volume,
    leader: int | None,
    wanted: Topology | None = None,
    last: tuple[Topology, tuple[Range, ...]] | None = None,
    margin: float = 0.0,
) -> Exchange:
    """The faster topology by prediction, or the one `wanted`. `last` names topology and shares of the last round with the
    same members: both stay unless another choice is faster by more than `margin`. Without a last round a reduce must win by
    that margin too, since a gather is exact. `leader` is its place, if a member."""
    size, commit = len(links), commit_seconds(links, leader)
    gather = Exchange("gather", (), gather_seconds(links, volume) + commit)
    if size == 1 or wanted == "gather":
        return gather
    reduce = _reduce(links, volume, commit, cut(best_fractions(links, volume), volume.parameters))
    last_topology, last_shares = last or ("gather", ())
    if last_topology == "reduce" and len(last_shares) == size and last_shares[-1].stop == volume.parameters:
        same = _reduce(links, volume, commit, last_shares)
        reduce = same if same.seconds <= reduce.seconds * (1 + margin) else reduce
    if wanted == "reduce":
        return reduce
    better, worse = (gather, reduce) if gather.seconds <= reduce.seconds else (reduce, gather)
    if worse.topology == last_topology and worse.seconds <= better.seconds * (1 + margin):
        better, worse = worse, better
    return replace(better, other_seconds=worse.seconds)


def equal_exchange(links: LinkTable, volume: Volume, leader: int | None, topology: Topology) -> Exchange:
    """The topology given, with shares that depend on nothing but the number of members and parameters."""
    commit = commit_seconds(links, leader)
    if topology == "gather" or len(links) == 1:
        return Exchange("gather", (), gather_seconds(links, volume) + commit)
    return _reduce(links, volume, commit, cut([1.0] * len(links), volume.parameters))


def _reduce(links: LinkTable, volume: Volume, commit: float, shares: tuple[Range, ...]) -> Exchange:
    return Exchange("reduce", shares, reduce_seconds(links, volume, shares) + commit)
