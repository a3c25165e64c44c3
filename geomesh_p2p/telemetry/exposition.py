"""The text of metrics as Prometheus reads it (exposition format 0.0.4), for gauges and counters.

The client library's own writer checks and escapes every name and label anew each time, which is most of what a scrape costs.
Here what stands before a value is made once a series.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[tuple[str, str], ...]


class Exposition:
    """Remembers the series of the last text, so that the next one is cheap."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Labels], str] = {}

    def text(self, metrics: Iterable[Metric]) -> bytes:
        lines: list[str] = []
        known: dict[tuple[str, Labels], str] = {}
        for metric in metrics:
            name = metric.name + "_total" * (metric.type == "counter")
            lines.append(f"# HELP {name} {escaped(metric.documentation)}\n# TYPE {name} {metric.type}\n")
            for sample in metric.samples:
                series = (sample.name, tuple(sample.labels.items()))
                start = known[series] = self._known.get(series) or before_value(*series)
                lines.append(f"{start}{floatToGoString(sample.value)}\n")
        self._known = known
        return "".join(lines).encode()


def before_value(name: str, labels: Labels) -> str:
    inner = ",".join('{}="{}"'.format(label, escaped(value).replace('"', r"\"")) for label, value in sorted(labels))
    return f"{name}{{{inner}}} " if inner else f"{name} "


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
