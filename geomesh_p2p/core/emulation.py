"""How long a step of an emulated device takes, and how far all of a host are slowed down so that it can keep up."""

from __future__ import annotations

from collections.abc import Sequence

from geomesh_p2p.config import EmulationSection

EMULATED_SHARE = 0.8
"""Share of its fair part of this host that the fastest emulated peer uses; the rest absorbs noise."""


def emulated_seconds(emulation: EmulationSection, time_scale: float, batch: int) -> float:
    """Seconds of one emulated inner step of `batch` sequences."""
    return time_scale * (emulation.fixed_seconds + batch * emulation.sequence_seconds)


def time_scale_for(tokens_per_second: float, emulations: Sequence[EmulationSection], sequence_length: int) -> float:
    """The time scale of all emulated peers of one host that together really do `tokens_per_second`.

    The fastest of the N gets EMULATED_SHARE / N of that rate at its largest batch; the others follow in proportion.
    """
    if tokens_per_second <= 0 or not emulations:
        raise ValueError(
            f"a time scale needs a rate above 0 and at least one device, not {tokens_per_second} and {len(emulations)}"
        )
    fastest = max(e.max_batch * sequence_length / emulated_seconds(e, 1.0, e.max_batch) for e in emulations)
    return fastest / (EMULATED_SHARE * tokens_per_second / len(emulations))
