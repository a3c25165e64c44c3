"""Figures of report.json for people: how they are written, and what they are set against. Missing ones are "-"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

REFERENCE = "diloco"
TUNED = "diloco-tuned-H"
FIRST = "geomesh"
DELAYED = "geomesh-delayed"
UNEQUAL_TOKENS = 0.01       # more than this is said


def is_ours(name: str) -> bool:
    return name.startswith(FIRST)


def measured(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def finite(value: Any) -> Any:
    """As JSON can say it: null for a number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def ratio(method: Mapping[str, Any], other: Mapping[str, Any] | None, key: str) -> float | None:
    a, b = method.get(key), (other or {}).get(key)
    return a / b if measured(a) and measured(b) and b else None


def unequal_tokens(method: Mapping[str, Any], other: Mapping[str, Any], name: str, most: float = UNEQUAL_TOKENS) -> str:
    """What it trained of the tokens of `name`, the other; empty if that is as many, or not known."""
    share = ratio(method, other, "tokens")
    return f"trained {share:.3f} of {name}'s tokens" if share is not None and abs(share - 1) > most else ""


def overlap(method: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Whether the ranges over seeds have something in common. Without a largest, as where a seed does not reach the target, a
    range has no end."""
    low, high, other_low, other_high = (m.get(f"{key}_{end}") for m in (method, other) for end in ("min", "max"))
    if not (measured(low) and measured(other_low)):
        return False
    return (not measured(other_high) or low <= other_high) and (not measured(high) or other_low <= high)


@dataclass(frozen=True)
class Reached:
    """How many of a method's seeds reach the target."""

    seeds: int
    of: int

    @property
    def some(self) -> bool:
        return 0 < self.seeds < self.of

    @property
    def note(self) -> str:
        """In brackets behind a time; empty if all seeds reach it, or none."""
        missing = self.of - self.seeds
        return f" ({missing} of {self.of} seeds {'does' if missing == 1 else 'do'} not reach it)" if self.some else ""

    def __str__(self) -> str:
        return f"{self.seeds} of {self.of}"


def reached(method: Mapping[str, Any]) -> Reached:
    """Without figures by seed: all or none, as the median is."""
    seconds = method.get("time_to_target_seconds_by_seed") or [method.get("time_to_target_seconds")]
    return Reached(sum(measured(one) for one in seconds), len(seconds))


# ---------------------------------------------------------------- as text


def number(value: float | None, form: str) -> str:
    return format(value, form) if measured(value) else "-"


def spread(method: Mapping[str, Any], key: str, form: str, scale: float = 1.0) -> str:
    """The median; smallest and largest behind it if they differ."""
    value, endless = method.get(key), "not reached" if "to_target" in key else "no number"
    if not measured(value):
        least = method.get(f"{key}_min")
        return f"- ({format(least * scale, form)} .. {endless})" if measured(least) else "-"
    low, high = method.get(f"{key}_min"), method.get(f"{key}_max")
    text = format(value * scale, form)
    if low == high == value or not measured(low):
        return text
    return f"{text} ({format(low * scale, form)} .. {format(high * scale, form) if measured(high) else endless})"


def signed(value: float | None) -> str:
    """A ratio as a difference: 0.25 is -75.0%."""
    return f"{value - 1:+.1%}" if measured(value) else "-"


def percent(share: float | None) -> str:
    return f"{share:.2%}" if measured(share) else "-"


def times(value: float | None) -> str:
    return f"{value:.3g} x" if measured(value) else "-"


def short(value: float) -> str:
    """Three figures or so, without powers of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def target_text(report: Mapping[str, Any]) -> str:
    """With how it was chosen, if the report has that. Empty without a target."""
    target, by_seed, rule = report["target_ppl"], report.get("target_ppl_by_seed") or (), report.get("target_rule")
    if not measured(target):
        return ""
    text = f"target is a perplexity of {target:.3f}" + (" (median over seeds)" if len(set(by_seed)) > 1 else "")
    return f"{text}: {rule}" if rule else text


def little_text(site: Mapping[str, Any]) -> str:
    """Of an entry of sites_with_little_work."""
    done = f"{percent(site['tokens_share'])} of the tokens in {number(site['rounds'], '.0f')} of {site['of_rounds']} rounds"
    return f"{site['site']} trained {done}, with {percent(site['speed_share'])} of all sites' best speed"


def of_seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {listed([str(seed) for seed in seeds])}"


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"
