"""What a check before a start has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fatal"]


@dataclass(frozen=True)
class Finding:
    """`text` says what was found, with its value; `next_step` what to do about it; `exit_code` is a fatal one's."""

    check: str
    level: Level
    text: str
    next_step: str = ""
    exit_code: int = 0

    def __post_init__(self) -> None:
        if (self.level == "fatal") != (self.exit_code != 0):
            raise ValueError(f"{self.check}: a fatal finding has an exit code, no other has one")
        if (self.level == "ok") == bool(self.next_step):
            raise ValueError(f"{self.check}: what is not in order has a next step, what is has none")

    @property
    def line(self) -> str:
        return f"{self.text}: {self.next_step}" if self.next_step else self.text


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, next_step: str) -> Finding:
    return Finding(check, "warning", text, next_step)


def fatal(check: str, text: str, next_step: str, exit_code: int) -> Finding:
    return Finding(check, "fatal", text, next_step, exit_code)


def fatals(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "fatal"]


def refused(check: str, message: str, exit_code: int) -> Finding:
    """A fatal finding from an error's one line, which says what to do behind its last colon or semicolon."""
    at = max(message.rfind(": "), message.rfind("; "))
    if at < 0:
        return fatal(check, message, "mend that and start again", exit_code)
    return fatal(check, message[:at], message[at + 2 :], exit_code)
