"""Settings of a benchmark: sites with their devices, links, and what changes while a run goes on.

A setting is a TOML file (those that ship: settings/*.toml), its matrices CSV files beside it. Units are in the names; a rate
is that of one direction of a pair of sites, both directions at once.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from geomesh_p2p.config import Section
from geomesh_p2p.errors import ConfigError
from geomesh_p2p.loading import checked, read_toml

SHIPPED = Path(__file__).parent / "settings"
Array = npt.NDArray[np.float64]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Place(Section):
    """A site and its emulated device: a step of b sequences takes fixed_seconds + b * sequence_seconds."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    region: str = ""
    device: str
    fixed_seconds: float = Field(ge=0)
    sequence_seconds: PositiveFloat
    max_batch: PositiveInt
    egress_usd_per_gb: float | None = Field(default=None, ge=0)
    """Of bytes that leave its region, if it differs from the setting's. A GB is 1e9 bytes."""

    def step_seconds(self, batch: int) -> float:
        return self.fixed_seconds + batch * self.sequence_seconds

    @property
    def best_rate(self) -> float:
        """Sequences a second at the largest batch."""
        return self.max_batch / self.step_seconds(self.max_batch)


class Pair(Section):
    """The way between two sites or regions, both directions."""

    between: tuple[str, str]
    mbps: PositiveFloat | None = None
    rtt_ms: float = Field(default=0.0, ge=0)


class Links(Section):
    """Round trips and rates by pair, from a matrix by region, or from a rule; the first that says something holds."""

    pairs: tuple[Pair, ...] = ()
    rtt_ms_file: str = ""
    """CSV beside the setting: a row and a column per region (or site), round trips in ms."""
    most_mbps: PositiveFloat = 1000.0
    """The rate of a pair is this,"""
    mbit_per_round_trip: PositiveFloat | None = None
    """or this much per round trip where that is less."""
    same_region_mbps: PositiveFloat = 10_000.0
    """Between sites of one region, which have no delay."""
    jitter_share: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of the logarithm of each transfer's rate and delay."""


class Change(Section):
    """From `begins_share` of the run's tokens until `ends_share`: `site` computes at `speed` times its speed, or the ways
    `between` two sites (both directions) have `rate` times their rate."""

    begins_share: Share
    ends_share: Share
    site: str = ""
    speed: PositiveFloat = 1.0
    between: tuple[str, str] | None = None
    rate: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _changes_something(self) -> Change:
        if self.begins_share >= self.ends_share:
            raise ValueError(f"begins_share = {self.begins_share:g} must be below ends_share = {self.ends_share:g}")
        if not self.site and self.between is None:
            raise ValueError("names nothing that changes: give a site and its speed, or between and its rate")
        if self.speed != 1 and not self.site:
            raise ValueError("speed is that of a site: name it")
        if self.rate != 1 and self.between is None:
            raise ValueError("rate is that of a way: give the two sites that it is between")
        return self


class Setting(Section):
    name: str
    about: str
    sources: tuple[str, ...] = ()
    reference_round_sequences: PositiveInt
    """Sequences of one round of the reference (diloco): equal batch and steps for all sites."""
    reference_batch: PositiveInt = 8
    stands_for_parameters: PositiveFloat | None = None
    """Rates are for a model of so many parameters: a smaller one gets proportionally slower links, so that the ratio of
    transfer to compute stays."""
    reference_wan_idle_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Instead: rates are scaled until the reference waits for the links for this share of its time."""
    egress_usd_per_gb: float | None = Field(default=None, ge=0)
    """Price of bytes that leave a site's region; None: not known."""
    sites: tuple[Place, ...]
    links: Links = Links()
    changes: tuple[Change, ...] = ()
    folder: str = ""

    @model_validator(mode="after")
    def _names_fit(self) -> Setting:
        if not self.sites:
            raise ValueError("sites: there are none")
        names = [site.name for site in self.sites]
        if len(set(names)) != len(names):
            raise ValueError("sites: two have the same name")
        if names != sorted(names):
            raise ValueError("sites: order them by name")
        if (self.stands_for_parameters is None) == (self.reference_wan_idle_share is None):
            raise ValueError("give either stands_for_parameters or reference_wan_idle_share")
        regions = {site.region for site in self.sites if site.region}
        pairs = [pair.between for pair in self.links.pairs]
        if unknown := [name for pair in pairs for name in pair if name not in {*names, *regions}]:
            raise ValueError(f"links.pairs name {unknown[0]!r}, which is neither a site nor a region")
        changed = [name for change in self.changes for name in ((change.site,) if change.site else ()) + (change.between or ())]
        if unknown := [name for name in changed if name not in names]:
            what = "a region: name its sites" if unknown[0] in regions else "no site"
            raise ValueError(f"changes name {unknown[0]!r}, which is {what}")
        ways = [change.between for change in self.changes if change.between is not None]
        # Between a region and itself are its sites.
        if alone := [a for a, b in [*pairs, *ways] if a == b and a not in regions]:
            raise ValueError(f"links or changes have a way from {alone[0]!r} to itself")
        if alone := [a for a, b in ways if a == b]:
            raise ValueError(f"changes have a way from {alone[0]!r} to itself")
        if twice := [pair for k, pair in enumerate(pairs) if set(pair) in [set(other) for other in pairs[:k]]]:
            raise ValueError(f"links.pairs have {twice[0][0]!r} and {twice[0][1]!r} twice: a pair is both directions")
        return self

    def notes(self) -> list[str]:
        """What a reader of its figures has to know, and who wrote it may have overlooked."""
        return self._assumed_rates() + self._lowered_batch()

    def _assumed_rates(self) -> list[str]:
        """Nobody chose the rate of a way that a default stands for."""
        links, written = self.links, self.links.model_fields_set
        unwritten = [(a, b) for a, b in combinations(self.sites, 2) if not self._has_rate(a, b)]
        inside = [pair for pair in unwritten if _in_one_region(*pair)] if "same_region_mbps" not in written else []
        ruled = written & {"most_mbps", "mbit_per_round_trip"}
        between = [pair for pair in unwritten if not _in_one_region(*pair)] if not ruled else []
        notes = []
        if inside:
            assumed = f"{links.same_region_mbps:g} Mbit/s is assumed, as in one data centre"
            notes.append(_of_unwritten(inside, f" in {inside[0][0].region}", assumed, "same_region_mbps"))
        if between:
            notes.append(_of_unwritten(between, "", f"{links.most_mbps:g} Mbit/s is assumed", "most_mbps"))
        return notes

    def _lowered_batch(self) -> list[str]:
        least = min(self.sites, key=lambda site: site.max_batch)
        if least.max_batch >= self.reference_batch:
            return []
        limit = f"max_batch = {least.max_batch} of {least.name}"
        taken = f"where all have the same batch, it is {least.max_batch}"
        return [f"reference_batch = {self.reference_batch} is more than {limit}: {taken}"]

    def best_speed(self, site: str) -> float:
        """The highest that the changes leave a site at any time of a run, in terms of its own."""
        mine = [change for change in self.changes if change.site == site]
        moments = {0.0, *(share for change in mine for share in (change.begins_share, change.ends_share) if share < 1)}
        return max(self.speed(site, share) for share in moments)

    def speed(self, site: str, share: float) -> float:
        """Of a site once `share` of the run's tokens are committed, in terms of its own."""
        mine = [change for change in self.changes if change.site == site]
        return math.prod(change.speed for change in mine if change.begins_share <= share < change.ends_share)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @cached_property
    def rates(self) -> Array:
        """[from, to] in bytes a second, as they are written; infinite on the diagonal."""
        return self._matrix(lambda a, b: self._mbps(a, b) * 1e6 / 8, math.inf)

    @cached_property
    def rtts(self) -> Array:
        """[from, to] in seconds."""
        return self._matrix(lambda a, b: self._rtt_ms(a, b) / 1000, 0.0)

    def _matrix(self, value: Callable[[Place, Place], float], diagonal: float) -> Array:
        """Asked once for each pair of regions, and of sites that have links of their own."""
        own = {name for pair in self.links.pairs for name in pair.between}
        own |= {name for ends in self._round_trips for name in ends} if self.links.rtt_ms_file else set()
        kinds = [site.region if site.region and site.name not in own else f"site {site.name}" for site in self.sites]
        examples = dict(zip(kinds, self.sites, strict=True))
        order = {kind: place for place, kind in enumerate(examples)}
        alone = {kind for kind in examples if kinds.count(kind) == 1}
        by_kind = np.array(
            [
                [diagonal if a == b and a in alone else value(one, other) for b, other in examples.items()]
                for a, one in examples.items()
            ]
        )
        at = [order[kind] for kind in kinds]
        found = by_kind[np.ix_(at, at)]
        np.fill_diagonal(found, diagonal)
        return found

    def _pair(self, a: Place, b: Place) -> Pair | None:
        names = ({a.name, a.region}, {b.name, b.region})
        for pair in self.links.pairs:
            x, y = pair.between
            if (x in names[0] and y in names[1]) or (y in names[0] and x in names[1]):
                return pair
        return None

    def _has_rate(self, a: Place, b: Place) -> bool:
        pair = self._pair(a, b)
        return pair is not None and pair.mbps is not None

    def _rtt_ms(self, a: Place, b: Place) -> float:
        if (pair := self._pair(a, b)) is not None:
            return pair.rtt_ms
        if _in_one_region(a, b):
            return 0.0
        if not self.links.rtt_ms_file:
            if self.links.pairs and "most_mbps" not in self.links.model_fields_set:
                raise ConfigError(f"[links] says nothing of {a.name} and {b.name}: give the pair, or most_mbps for all others")
            return 0.0
        matrix = self._round_trips
        for one, other in ((a, b), (b, a)):
            for row in (one.name, one.region):
                for column in (other.name, other.region):
                    if (row, column) in matrix:
                        return matrix[row, column]
        raise ConfigError(f"{self.links.rtt_ms_file}: no round trip between {a.region or a.name} and {b.region or b.name}")

    def _mbps(self, a: Place, b: Place) -> float:
        pair = self._pair(a, b)
        if pair is not None and pair.mbps is not None:
            return pair.mbps
        if _in_one_region(a, b):
            return self.links.same_region_mbps
        rtt, per_trip = self._rtt_ms(a, b) / 1000, self.links.mbit_per_round_trip
        return self.links.most_mbps if per_trip is None or rtt == 0 else min(self.links.most_mbps, per_trip / rtt)

    @cached_property
    def _round_trips(self) -> dict[tuple[str, str], float]:
        path = Path(self.folder) / self.links.rtt_ms_file
        try:
            rows = list(csv.reader(path.open(encoding="utf-8")))
            columns = rows[0][1:]
            return {
                (row[0], column): _milliseconds(value)
                for row in rows[1:]
                for column, value in zip(columns, row[1:], strict=True)
                if value
            }
        except (OSError, ValueError, IndexError) as error:
            wanted = "a header row, then a row per region"
            raise ConfigError(f"{path}: not a matrix of round trips in ms ({error}): {wanted}") from None


def _in_one_region(a: Place, b: Place) -> bool:
    return a.region == b.region != ""


def _of_unwritten(pairs: Sequence[tuple[Place, Place]], where: str, assumed: str, key: str) -> str:
    (a, b), *others = pairs
    more = f" (nor for {len(others)} more such pairs)" if others else ""
    remedy = f"write the pair in links.pairs, or links.{key}"
    return f"no rate is written for {a.name} and {b.name}{where}{more}: {assumed}, and no delay unless one is written; {remedy}"


def _milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError(f"{text} is no time")
    return value


def shipped() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_setting(name: str) -> Setting:
    """A setting that ships, by name, or one of your own, by path. Raises ConfigError."""
    own = name.endswith(".toml") or Path(name).name != name
    path = Path(name) if own else SHIPPED / f"{name}.toml"
    if not own and not path.exists():
        near = difflib.get_close_matches(name, shipped(), n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"no setting {name!r}{meant}: {', '.join(shipped())}, or a .toml file of your own")
    given = read_toml(path)
    if taken := sorted({"name", "folder"} & given.keys()):
        raise ConfigError(f"{path}: {' and '.join(taken)}: not for the file to say, a setting has its file's name and folder")
    return checked(Setting, {**given, "name": path.stem, "folder": str(path.parent)}, str(path))
