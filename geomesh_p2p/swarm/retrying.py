"""When to open the next stream to a peer: after failures, and after streams that were refused or reset as soon as opened."""

from __future__ import annotations

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.25, 5.0
SHORT_LIFE_SECONDS = 2.0     # a stream that was lost sooner says nothing for the next one
AT_ONCE_SECONDS = 0.1        # streams lost within that time were lost together: of one connection


class Retrying:
    """Times are those of any one clock, and arguments."""

    def __init__(self) -> None:
        self._failures = self._short_lives = 0
        self._failed_until = self._wary_until = 0.0
        self._counted_at = -1e9

    def wait_seconds(self, now: float) -> float:
        return max(0.0, self._failed_until - now, self._wary_until - now)

    def failed(self, now: float) -> None:
        """No stream could be opened."""
        self._failed_until = now + _pause(self._failures)
        self._failures += 1

    def opened(self) -> None:
        self._failures = 0

    def lost(self, now: float, opened_at: float) -> None:
        """A stream that was open is lost."""
        if now - opened_at >= SHORT_LIFE_SECONDS:
            self._short_lives = 0
        elif now - self._counted_at >= AT_ONCE_SECONDS:
            self._counted_at = now
            self._wary_until = now + _pause(self._short_lives)
            self._short_lives += 1

    def news(self) -> None:
        """The peer was heard of, or has another address."""
        self._failures, self._failed_until = 0, 0.0

    def another(self) -> None:
        """The other end is a new process, which may behave."""
        self.news()
        self._short_lives, self._wary_until = 0, 0.0


def _pause(failures: int) -> float:
    return float(min(FIRST_RETRY_SECONDS * 2 ** min(failures, 16), LAST_RETRY_SECONDS))
