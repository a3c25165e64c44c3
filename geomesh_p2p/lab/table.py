"""What a person sees of a running mesh: one live table on a terminal, else one plain line for each committed round.

All figures are those of the report, as far as the run has come (lab/figures.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from geomesh_p2p.lab.figures import Credits, PeerRecord, Tally


@dataclass
class SiteView:
    """The newest that a site has said of itself, and what it has come to in the run (`record`)."""

    site: str
    record: PeerRecord = field(default_factory=lambda: PeerRecord(""))
    state: str = "starting"
    round: int = 0
    batch: int = 0
    inner_steps: int = 0
    step: int = 0
    tokens_per_second: float = 0.0
    loss: float | None = None
    longest_round_seconds: float = 0.0
    newest_told: int = 0  # round of which it has given an account since it was started; `round` may be ahead of it

    def take(self, event: dict[str, Any]) -> None:
        """Fold one control line of the site into what is shown."""
        kind = event["event"]
        if kind == "phase":
            waits = event.get("waiting_for")
            self.round = max(self.round, int(event.get("round") or 0))  # where it resumed, before it commits one
            self.state = str(event.get("phase", "")) + (f" ({waits})" if waits else "")
        elif kind == "progress":
            self.state, self.step = "training", int(event.get("step", 0))
            self.tokens_per_second = float(event.get("tokens_per_second") or 0.0)
            self.loss = event.get("loss", self.loss)
        elif kind == "exchange":
            self.state = _exchange(event)
        elif kind == "plan":
            mine: dict[str, int] = next((member for member in event["plan"]["members"] if member["site"] == self.site), {})
            self.batch, self.inner_steps, self.step = mine.get("batch", 0), mine.get("inner_steps", 0), 0
        elif kind == "exit":
            self.state = f"ended ({event.get('exit_code')})" + (f": {event['reason']}" if event.get("reason") else "")
        elif kind == "round":
            self._take_round(event)

    def _take_round(self, event: dict[str, Any]) -> None:
        self.record.take(event)
        self.round = int(event["round"])
        self.newest_told = max(self.newest_told, self.round)
        self.batch, self.inner_steps = int(event.get("batch") or 0), int(event.get("inner_steps") or 0)
        self.step = 0
        self.loss = self.loss if event.get("loss") is None else event["loss"]
        times = event.get("times") or {}
        self.longest_round_seconds = max(self.longest_round_seconds, float(times.get("wall") or 0.0))


def _exchange(event: dict[str, Any]) -> str:
    """How far an exchange is, in words."""
    received, expected, left = int(event["received_bytes"]), int(event["expected_bytes"]), event.get("remaining_seconds")
    parts = [f"exchange {percent(received / expected if expected else 1.0)}", f"{size(received)} in"]
    parts.append(f"{size(int(event['sent_bytes']))} out")
    return ", ".join(parts + ([f"{float(left):.0f} s left"] if left is not None else []))


# What the columns of numbers take at most, with the space behind them.
NUMBERS_WIDTH = 54


def table(title: str, views: Collection[SiteView], width: int = 120) -> Table:
    """Fits `width` columns: of the state, which alone may be long, as much is shown as there is room for."""
    room = max(8, width - NUMBERS_WIDTH - max((len(view.site) for view in views), default=0) - 2)
    shown = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
    shown.add_column("site", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    for name in ("round", "batch", "steps", "tok/s", "loss", "idle", "WAN", "sent"):
        shown.add_column(name, justify="right", no_wrap=True)
    for view in views:
        tally = view.record.tally
        steps = f"{view.step}/{view.inner_steps}" if view.step else str(view.inner_steps or "")
        shown.add_row(
            view.site,
            view.state if len(view.state) <= room else view.state[: room - 1] + "…",
            str(view.round or ""),
            str(view.batch or ""),
            steps,
            f"{view.tokens_per_second:,.0f}" if view.tokens_per_second else "",
            number(view.loss, ".3f"),
            percent(tally.share("straggler_idle")),
            percent(tally.share("wan_idle")),
            size(tally.bytes_sent),
        )
    return shown


def title(run: str, newest: int, rounds: int, views: Collection[SiteView], credits: Credits) -> str:
    """What the run has come to, in the words of its report's headline."""
    whole = Tally.total(view.record.tally for view in views)
    idle = idle_in_words(whole.share("straggler_idle"), whole.share("wan_idle"))
    return ", ".join([f"{run}: round {newest} of {rounds}", f"{credits.tokens:,} tokens", *idle])


def idle_in_words(straggler: float | None, wan: float | None) -> list[str]:
    shares = {"straggler idle": straggler, "WAN idle": wan}
    return [f"{what} {percent(share)}" for what, share in shares.items() if share is not None]


def round_line(one: Mapping[str, Any], perplexity: float | None) -> str:
    """One line for a committed round, as the report has it; `perplexity` is of the model that it began from."""
    digests = [one["digest"]] if isinstance(one["digest"], str) else one["digest"]
    members = len(one["members"] or ())  # a peer that caught up does not know them
    digest = f"digest {' != '.join(digest[:12] for digest in digests)}"
    if not one["contributors"]:
        return f"round {one['round']:>3}  {digest}  no contributions: a voter leaves, or the run goes back (geomesh rollback)"
    parts = [
        f"round {one['round']:>3}",
        digest,
        f"{len(one['contributors'])}{f' of {members}' if members else ''} contributed",
        f"loss {number(one['loss'], '.3f')}",
        f"val ppl of round {one['round'] - 1} {number(perplexity, '.2f')}",
        f"{one['seconds']:.1f} s",
        f"straggler idle {percent(one['straggler_idle_share'])}",
        f"WAN idle {percent(one['wan_idle_share'])}",
    ]
    return "  ".join(parts)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
