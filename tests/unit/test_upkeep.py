"""A daemon is started again when it dies or hangs, and given up when that happens too often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from geomesh_p2p.errors import TemporaryError
from geomesh_p2p.swarm import upkeep
from geomesh_p2p.swarm.upkeep import Deaths, OnExit, Upkeep


def test_a_death_now_and_then_is_mended_at_once_and_many_in_a_row_are_not() -> None:
    deaths = Deaths(most=4, window_seconds=100.0)
    assert [deaths.died(now) for now in (0.0, 200.0, 400.0)] == [0.0, 0.0, 0.0]
    assert [deaths.died(now) for now in (410.0, 420.0)] == [upkeep.FIRST_PAUSE_SECONDS, 2 * upkeep.FIRST_PAUSE_SECONDS]
    assert deaths.died(430.0) is None
    assert deaths.died(2000.0) == 0.0


class FakeDaemon:
    def __init__(self, on_exit: OnExit) -> None:
        self.on_exit = on_exit
        self.ended = self.stopped = self.hangs = False

    def die(self, words: str = "aargh") -> None:
        self.ended = True
        self.on_exit(-9, words)

    def kill(self, why: str) -> None:
        self.die(why)

    async def answers(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stopped = True


class Place:
    def __init__(self) -> None:
        self.made: list[FakeDaemon] = []
        self.opened: list[FakeDaemon] = []
        self.warnings: list[tuple[str, str]] = []
        self.given_up: list[tuple[int, str]] = []
        self.broken = ""
        self.on_opened: Callable[[FakeDaemon], None] = lambda daemon: None
        self.upkeep = Upkeep(self.start, self.open, lambda *w: self.warnings.append(w), lambda *w: self.given_up.append(w))

    async def start(self, on_exit: OnExit) -> FakeDaemon:
        await asyncio.sleep(0)
        if self.broken:
            raise TemporaryError(self.broken)
        self.made.append(FakeDaemon(on_exit))
        return self.made[-1]

    async def open(self, daemon: FakeDaemon) -> None:
        await asyncio.sleep(0)
        self.opened.append(daemon)
        self.on_opened(daemon)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(upkeep, "PROBE_SECONDS", 0.001)


async def test_it_is_started_again_and_used_as_before() -> None:
    place = Place()
    await place.upkeep.start()
    first = place.upkeep.daemon
    assert first is not None
    first.die()
    assert place.upkeep.daemon is None
    await place.until(lambda: place.upkeep.daemon)
    assert place.made == place.opened == [first, place.upkeep.daemon]
    assert first.stopped
    assert place.warnings == [("daemon_died", "the libp2p daemon ended with -9 (aargh): starting it again")]
    await place.upkeep.stop()
    assert all(daemon.stopped for daemon in place.made)
    assert place.given_up == []


@pytest.mark.case("C014")
async def test_it_is_given_up_after_several_deaths_with_its_last_words() -> None:
    place = Place()
    await place.upkeep.start()
    for number in range(upkeep.MOST_DEATHS):
        await place.until(lambda: place.upkeep.daemon)
        assert place.upkeep.daemon is not None
        place.upkeep.daemon.die(f"death {number}")
    await place.until(lambda: place.given_up)
    assert place.given_up == [(-9, f"death {upkeep.MOST_DEATHS - 1}")]
    assert len(place.warnings) == upkeep.MOST_DEATHS - 1
    assert place.upkeep.daemon is None


async def test_one_that_does_not_start_again_is_given_up_with_the_reason() -> None:
    place = Place()
    await place.upkeep.start()
    place.broken = "no such file"
    place.made[0].die()
    await place.until(lambda: place.given_up)
    assert place.given_up == [(0, "no such file")]
    assert "could not be started again (no such file)" in place.warnings[-1][1]


async def test_one_that_dies_while_it_is_made_ready_is_replaced() -> None:
    place = Place()
    await place.upkeep.start()
    place.on_opened = lambda daemon: daemon.die() if len(place.made) == 2 else None
    place.made[0].die()
    await place.until(lambda: place.upkeep.daemon)
    assert place.upkeep.daemon is place.made[2]
    assert place.made[1].stopped


async def test_the_first_start_raises() -> None:
    place = Place()
    place.broken = "no such file"
    with pytest.raises(TemporaryError, match="no such file"):
        await place.upkeep.start()


async def test_one_that_hangs_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "SILENT_SECONDS", 0.01)
    place = Place()
    await place.upkeep.start()
    place.made[0].hangs = True
    await place.until(lambda: len(place.made) == 2 and place.upkeep.daemon)
    assert "did not answer" in place.warnings[0][1]
    await place.upkeep.stop()


async def test_an_end_while_stopping_is_no_death() -> None:
    place = Place()
    await place.upkeep.start()
    await place.upkeep.stop()
    place.made[0].die()
    await asyncio.sleep(0.01)
    assert len(place.made) == 1
    assert not place.warnings
