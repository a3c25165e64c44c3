"""Whole peers with the real engine: whose numbers, data or evaluation fail, the others' do not."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geomesh_p2p.config import RunConfig
from geomesh_p2p.core import observations as seen
from geomesh_p2p.core.types import Range
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.feed import Feed, Patience
from geomesh_p2p.swarm.memory import Network
from tests.injection.proof import fired, inject
from tests.mesh.torch_peers import TorchPeer, plain_training, torch_mesh, torch_run, torch_site, write_text


async def until(condition: Callable[[], bool], limit_seconds: float = 60.0) -> None:
    async with asyncio.timeout(limit_seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


async def play(peers: list[TorchPeer], everybody: list[TorchPeer] | None = None) -> None:
    """All of them to the end of the run."""
    for peer in peers:
        peer.start([p.peer for p in everybody or peers])
    async with asyncio.timeout(100.0):
        await asyncio.gather(*(peer.task for peer in peers if peer.task))
    for peer in peers:
        peer.store.close()
        assert peer.session is not None
        assert peer.session.outcome == (0, f"the run has reached round {peer.run.run.rounds}")


async def leave(peers: list[TorchPeer]) -> None:
    for peer in peers:
        assert peer.session is not None
        peer.session.leave("the test is over")
    async with asyncio.timeout(60.0):
        await asyncio.gather(*(peer.task for peer in peers if peer.task))


def of(peer: TorchPeer, kind: type[Any]) -> list[Any]:
    return [event for event in peer.events if isinstance(event, kind)]


def warned(peer: TorchPeer, reason: str) -> list[str]:
    return [event.text for event in of(peer, seen.Warned) if event.reason == reason]


def contributed(peer: TorchPeer, who: str) -> list[int]:
    """Rounds, as `peer` committed them, to which `who` contributed."""
    return [note["round"] for note in peer.commits() if who in [c["site"] for c in note["contributors"]]]


def positions(peer: TorchPeer) -> list[int]:
    """Every position credited in the log, as often as it was."""
    ranges = [r for note in peer.commits() for c in note["contributors"] for r in c["ranges"]]
    return [position for r in ranges for position in range(*_ends(r))]


def _ends(part: Any) -> tuple[int, int]:
    return (part.start, part.stop) if isinstance(part, Range) else tuple(part)


def assert_equal(peers: Iterable[TorchPeer]) -> None:
    peers = list(peers)
    common = set.intersection(*(set(peer.digests()) for peer in peers))
    assert common
    assert all(peer.digests()[r] == peers[0].digests()[r] for peer in peers for r in common)
    assert len({peer.model.state.anchor.tobytes() + peer.model.state.momentum.tobytes() for peer in peers}) == 1


# ---------------------------------------------------------------- numbers


@pytest.mark.fault
@pytest.mark.case("C063")
@pytest.mark.parametrize("topology", ["gather", "reduce"])
async def test_an_infinite_gradient_at_the_sync_step_of_one_peer_delays_nobody(tmp_path: Path, topology: str) -> None:
    run = torch_run((write_text(tmp_path),), planner={"topology": topology})
    peers = torch_mesh(tmp_path, ["a", "b", "c"], run, Network())
    spoilt: list[int] = []

    def spoil(engine: TorchEngine) -> None:
        """The last of each round's four steps."""
        trained = iter(range(1_000_000))

        def hook(grad: torch.Tensor) -> torch.Tensor:
            if next(trained) % 4 != 3:
                return grad
            spoilt.append(1)
            return grad * math.inf

        next(p for p in engine.model.module.parameters() if p.requires_grad).register_hook(hook)

    inject(lambda: setattr(peers[1], "prepare", spoil))
    await play(peers)
    fired(len(spoilt) >= 5, "the last gradient of each of b's rounds was infinite")
    assert_equal(peers)
    assert [sum(e.skipped_steps for e in of(peer, seen.RoundCommitted)) for peer in peers] == [0, 5, 0]
    assert [contributed(peers[0], name) for name in "abc"] == [[1, 2, 3, 4, 5]] * 3
    assert not [note for peer in peers for note in peer.notes if note[0] in ("discard", "lost")]


@pytest.mark.case("C035")
async def test_a_run_of_one_peer_is_plain_training(tmp_path: Path) -> None:
    """Session, plans, exchange and commits included: ten rounds of ten steps end where a loop written by hand does."""
    run = torch_run(
        (write_text(tmp_path),),
        run={"rounds": 10, "min_peers": 1},
        planner={"batch": 4, "inner_steps": 10},
        inner={"scale_learning_rate": "none"},
        outer={"learning_rate": 1.0, "momentum": 0.0},
        codec={"payload": "fp32"},
    )
    (alone,) = torch_mesh(tmp_path, ["alone"], run, Network())
    await play([alone])
    assert contributed(alone, "alone") == list(range(1, 11))
    plain = TorchEngine(run, torch_site("alone"))
    first, *_, last = plain_training(plain, run.inner, steps=100, batch=4)
    assert last < 0.75 * first, "it learns"
    np.testing.assert_allclose(alone.model.state.anchor, plain.weights(), rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- a source that stalls


class Freezing:
    """A source whose reads hang, or fail, from `freeze` to `thaw`, as those of a network file system do."""

    def __init__(self, engine: TorchEngine, fails: bool) -> None:
        self._corpus, self._fails = engine.corpus, fails
        self._open = threading.Event()
        self._open.set()
        self.stopped = 0

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def batch(self, wanted: Any) -> Any:
        if not self._open.is_set():
            self.stopped += 1
            if self._fails:
                raise OSError(5, "Input/output error")
            self._open.wait()
        return self._corpus.batch(wanted)


@pytest.mark.fault
@pytest.mark.case("C081")
@pytest.mark.parametrize(("mode", "read_seconds"), [("uniform", 0.5), ("planned", 60.0)])
@pytest.mark.parametrize(("fails", "words"), [(False, "is silent"), (True, "fails ([Errno 5] Input/output error)")])
async def test_a_peer_whose_data_stalls_says_so_sits_out_and_comes_back(
    tmp_path: Path, mode: str, read_seconds: float, fails: bool, words: str
) -> None:
    """Uniform: its own limit ends the round for it. Planned: the leader closes it after the grace."""
    planner = {"mode": mode, "min_steps": 4, "max_steps": 6, "round_tokens": 600, "grace_seconds": 0.3}
    run = torch_run((write_text(tmp_path),), planner=planner, run={"rounds": 100_000})
    peers = torch_mesh(tmp_path, ["a", "b", "c"], run, Network())
    sources: list[Freezing] = []

    def slow_source(engine: TorchEngine) -> None:
        sources.append(Freezing(engine, fails))
        engine.feed = Feed(sources[0], Patience(read_seconds, warn_seconds=0.2, ahead=1), engine._warn_of_data)

    peers[2].prepare = slow_source
    for peer in peers:
        peer.start([p.peer for p in peers])
    await until(lambda: len(contributed(peers[0], "c")) >= 2)
    inject(sources[0].freeze)
    before = len(peers[0].digests())
    await until(lambda: sources[0].stopped > 0 or len(peers[0].digests()) >= before + 3)
    fired(sources[0].stopped, "a read of c hung or failed")
    reached, last = max(peers[0].digests()), max(contributed(peers[0], "c"))
    await until(lambda: max(peers[0].digests()) >= reached + 3)
    await until(lambda: any("starved" in said for said in warned(peers[2], "abstained")))  # a busy machine has other reasons
    assert max(contributed(peers[0], "c")) <= last + 2, "it cannot have trained"
    assert f"starved: the data source {words}" in warned(peers[2], "starved")[0]
    assert not of(peers[0], seen.PeerLost)
    tries = sources[0].stopped
    if fails:
        await until(lambda: sources[0].stopped > tries)  # it is asked again and again
    sources[0].thaw()
    thawed = max(peers[0].digests())
    await until(lambda: max(contributed(peers[0], "c")) > thawed)
    await leave(peers)
    assert_equal_digests(peers)
    assert len(positions(peers[0])) == len(set(positions(peers[0])))


def assert_equal_digests(peers: list[TorchPeer]) -> None:
    common = set.intersection(*(set(peer.digests()) for peer in peers))
    assert common
    assert all(len({peer.digests()[r] for peer in peers}) == 1 for r in common)


# ---------------------------------------------------------------- evaluation


@pytest.mark.fault
@pytest.mark.case("C047")
@pytest.mark.case("C128")
@pytest.mark.parametrize(
    ("mode", "slow_ones", "slow_seconds", "rounds"), [("uniform", [0, 1], 3.2, 4), ("planned", [0, 1, 6], 30.0, 8)]
)
async def test_a_slow_evaluation_blocks_nobody_and_all_have_the_same_values(
    tmp_path: Path, mode: str, slow_ones: list[int], slow_seconds: float, rounds: int
) -> None:
    """Longer than a peer may be silent, in the first rounds, on one peer; there is a value before the first step. Planned: the
    leader closes c after the grace, which ends its evaluation, once more when it has a vote."""
    planner = {"mode": mode, "min_steps": 4, "max_steps": 6, "round_tokens": 600, "grace_seconds": 1.0}
    run = torch_run((write_text(tmp_path),), planner=planner, run={"rounds": rounds, "validate_every_rounds": 1})
    peers = torch_mesh(tmp_path, ["a", "b", "c"], run, Network())
    seconds: list[float] = []
    cut: list[bool] = []

    def slow(engine: TorchEngine) -> None:
        real = engine.validate

        def validate(share: int, of: int, should_close: Callable[[], bool] | None = None) -> tuple[float, int]:
            begun = time.monotonic()
            until = begun + (slow_seconds if len(seconds) in slow_ones else 0.0)
            closed = False
            while time.monotonic() < until and not closed:
                time.sleep(0.02)
                closed = should_close is not None and should_close()
            cut.append(closed)
            seconds.append(time.monotonic() - begun)
            return real(share, of, should_close)

        engine.validate = validate  # type: ignore[method-assign]

    inject(lambda: setattr(peers[2], "prepare", slow))
    await play(peers)
    fired(seconds and max(seconds) > 0.2, "c's evaluations were slow")
    assert_equal(peers)
    said = [{(e.round, e.perplexity) for e in of(peer, seen.Validated) if not e.final} for peer in peers]
    assert said[0] == said[1] == said[2]
    assert {round for round, _ in said[0]} == set(range(rounds))
    assert not [e for peer in peers[:2] for e in of(peer, seen.PeerLost) if e.site == "c"]
    assert not [note for peer in peers for note in peer.notes if note[0] == "discard"]
    assert contributed(peers[0], "a") == contributed(peers[0], "b") == list(range(1, rounds + 1))
    plans = [fields["members"] for kind, fields in peers[0].notes if kind == "accept"]
    assert all("id-c" in members for members in plans), "slow is no reason to be left out"
    assert contributed(peers[0], "c")[-1] == rounds
    assert [number for number, ended in enumerate(cut) if ended] == (slow_ones if mode == "planned" else [])
    votes = ["id-c" in note["view"] for note in peers[0].commits()]
    assert votes == sorted(votes), "none lost"
    assert votes[-1]
    assert mode == "uniform" or votes[5], "it votes before its last slow evaluation, and after it"


@pytest.mark.case("C128")
async def test_every_second_round_is_validated_from_the_start_on(tmp_path: Path) -> None:
    run = torch_run((write_text(tmp_path),), run={"rounds": 5, "validate_every_rounds": 2})
    peers = torch_mesh(tmp_path, ["a", "b"], run, Network())
    await play(peers)
    said = [{e.round: e.perplexity for e in of(peer, seen.Validated) if not e.final} for peer in peers]
    assert said[0] == said[1]
    assert set(said[0]) == {0, 2, 4}
    final = [e.perplexity for peer in peers for e in of(peer, seen.Validated) if e.final]
    assert len(final) == 2
    assert len(set(final)) == 1


# ---------------------------------------------------------------- who reads what


@pytest.mark.parametrize(
    ("files", "names", "late"),
    [
        pytest.param((100, 80, 5), "abc", "", id="uneven files", marks=[pytest.mark.case("C074"), pytest.mark.case("C075")]),
        pytest.param((60, 60), "abc", "", id="fewer files than peers", marks=pytest.mark.case("C076")),
        pytest.param((90,), "abcd", "", id="one file", marks=pytest.mark.case("C076")),
        pytest.param((90, 40), "ab", "c", id="a join", marks=[pytest.mark.case("C075"), pytest.mark.case("C028")]),
    ],
)
async def test_three_epochs_are_read_once_each_whatever_files_and_peers_there_are(
    tmp_path: Path, files: tuple[int, ...], names: str, late: str
) -> None:
    """Files are one stream and positions are handed out, so no file belongs to a peer and no peer runs out: an epoch's end
    is a position like any other, and all peers end by themselves at the last round."""
    paths = tuple(write_text(tmp_path, f"file{number}", count) for number, count in enumerate(files))
    run = torch_run(paths, planner={"batch": 8, "inner_steps": 8})
    probe = TorchPeer(Network(), tmp_path / "probe", "probe", run, torch_mesh(tmp_path, ["x"], run, Network())[0].founding)
    sequences = probe.make_engine().corpus.sequences
    a_round = 64 * len(names)
    rounds = math.ceil(3 * sequences / a_round)
    run = run.model_copy(update={"run": run.run.model_copy(update={"rounds": rounds})})
    peers = torch_mesh(tmp_path, [*names, *late], run, Network())
    began = [begins_of(peer) for peer in peers]
    everybody = [p.peer for p in peers]
    for peer in peers[: len(names)]:
        peer.start(everybody)
    if late:
        await until(lambda: len(peers[0].digests()) >= 2)
        peers[-1].start(everybody)
    async with asyncio.timeout(100.0):
        await asyncio.gather(*(peer.task for peer in peers if peer.task))
    assert_equal(peers)
    read = positions(peers[0])
    assert len(read) == len(set(read)), "no position twice"
    assert set(range(3 * sequences)) <= set(read), "three epochs are whole"
    assert all(contributed(peers[0], name) for name in names)
    corpus = peers[0].engine.corpus
    for epoch in range(3):
        places = corpus.places(_array(range(epoch * sequences, (epoch + 1) * sequences)))
        assert sorted(places.tolist()) == list(range(sequences)), "each sequence once an epoch"
    if late:
        joint = contributed(peers[0], late)[0]
        assert joint > 1
        assert began[-1][joint] == began[0][joint], "a joiner begins from the others' weights and outer momentum"
        assert joint - 1 not in began[-1]


def begins_of(peer: TorchPeer) -> dict[int, tuple[bytes, bytes]]:
    """With which weights, in the engine itself, and which outer momentum `peer` begins each round; fills as it trains."""
    began: dict[int, tuple[bytes, bytes]] = {}

    def watched(engine: TorchEngine) -> None:
        train = engine.train

        def noting(assignment: Any, plan: Any, should_close: Any, started: float) -> Any:
            began[plan.round] = engine.weights().tobytes(), peer.model.state.momentum.tobytes()
            return train(assignment, plan, should_close, started)

        engine.train = noting  # type: ignore[method-assign]

    peer.prepare = watched
    return began


def _array(numbers: Iterable[int]) -> Any:
    return np.fromiter(numbers, np.int64)


@pytest.mark.fault
@pytest.mark.case("C039")
async def test_what_a_killed_peer_had_begun_is_read_by_others_once(tmp_path: Path) -> None:
    run = torch_run((write_text(tmp_path),), run={"rounds": 100_000})
    peers = torch_mesh(tmp_path, ["a", "b", "c"], run, Network())
    for peer in peers:
        peer.start([p.peer for p in peers])
    victim = peers[2]
    await until(lambda: len(contributed(peers[0], "c")) >= 2)
    if inject(lambda: True):
        await victim.kill()
    fired(victim.task is not None and victim.task.done(), "c's process ended")
    begun = [r for kind, fields in victim.notes if kind == "accept" for r in fields["ranges"]["c"]]
    lost = {p for r in begun for p in range(*_ends(r))} - set(positions(peers[0]))
    reached = max(peers[0].digests())
    await until(lambda: max(peers[0].digests()) >= reached + 5)
    await leave(peers[:2])
    read = positions(peers[0])
    assert len(lost) <= 2 * 8, "at most what it was given for the round that it died in, and the one announced with it"
    assert len(read) == len(set(read)), "repeated: none"
    assert set(read) == set(range(len(read))), "lost: none, the others have read what it had begun"


# ---------------------------------------------------------------- stopped and gone on with


def with_rounds(run: RunConfig, rounds: int) -> RunConfig:
    return run.model_copy(update={"run": run.run.model_copy(update={"rounds": rounds})})


@pytest.mark.case("C069")
@pytest.mark.case("C077")
@pytest.mark.case("C079")
@pytest.mark.case("C095")
@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_run_stopped_in_its_second_epoch_goes_on_as_if_unbroken(tmp_path: Path, shuffle: bool) -> None:
    """Every peer's ranges and learning rates, and with them the digests, are those of the unbroken run: each finds its own
    place, from the log alone, epoch and all."""
    run = torch_run((write_text(tmp_path, documents=60),), dataset={"shuffle": shuffle}, planner={"batch": 4, "inner_steps": 6})

    async def parts(folder: Path, *stops: int) -> list[TorchPeer]:
        peers: list[TorchPeer] = []
        for rounds in stops:
            peers = torch_mesh(folder, ["a", "b", "c"], with_rounds(run, rounds), Network())
            await play(peers)
        return peers

    broken = await parts(tmp_path / "broken", 4, 7)
    whole = await parts(tmp_path / "whole", 7)
    sequences = whole[0].engine.corpus.sequences
    assert sequences < 4 * 72 < 2 * sequences, "the stop was within the second epoch"

    def ranges(peer: TorchPeer) -> dict[int, dict[str, list[tuple[int, int]]]]:
        return {
            note["round"]: {c["site"]: [_ends(r) for r in c["ranges"]] for c in note["contributors"]}
            for note in peer.commits()
            if note["round"] > 4
        }

    def rates(peer: TorchPeer) -> dict[int, float | None]:
        return {event.round: event.learning_rate for event in of(peer, seen.RoundCommitted)}

    assert ranges(whole[0]) == ranges(broken[0])
    for before, after in zip(whole, broken, strict=True):
        expected = rates(before)
        assert rates(after) == {round: expected[round] for round in (5, 6, 7)}
        assert len(set(expected.values())) == 7, "it changes with every round, so that the place in it shows"
    assert all(whole[0].digests()[round] == broken[0].digests()[round] for round in (5, 6, 7))
    assert whole[0].model.state.anchor.tobytes() == broken[0].model.state.anchor.tobytes()


@pytest.mark.case("C093")
@pytest.mark.case("C106")
@pytest.mark.parametrize("names", ["ab", "abcd", "abd"])
async def test_a_run_of_three_goes_on_with_two_four_or_another_third(tmp_path: Path, names: str) -> None:
    run = torch_run((write_text(tmp_path),))
    first = torch_mesh(tmp_path, ["a", "b", "c"], with_rounds(run, 4), Network())
    await play(first)
    weights, tokens = first[0].model.state.anchor.copy(), of(first[0], seen.RoundCommitted)[-1].tokens_total
    again = torch_mesh(tmp_path, list(names), with_rounds(run, 8), Network())
    again[0].founding = first[0].founding
    for peer in again:
        peer.start([p.peer for p in again])
    began = [peer.model.state.anchor.copy() for peer in again if peer.name in "abc"]
    async with asyncio.timeout(100.0):
        await asyncio.gather(*(peer.task for peer in again if peer.task))
    assert all(each.tobytes() == weights.tobytes() for each in began), "the state does not depend on how many saved it"
    assert_equal(again)
    read = positions(first[0]) + positions(again[0])
    assert len(read) == len(set(read)), "no document twice"
    assert set(read) == set(range(len(read))), "none left out"
    assert set(names) <= {c["site"] for note in again[0].commits() for c in note["contributors"]}
    totals = [of(again[0], seen.LogStands)[0].tokens_total, *(e.tokens_total for e in of(again[0], seen.RoundCommitted))]
    assert totals[0] == tokens
    assert totals == sorted(totals), "the run's totals go on over the restart"
    if "c" not in names:
        assert any("without ...id-c" in text for text in warned(again[0], "other_members")), "the difference is said"


# ---------------------------------------------------------------- the next round begun early


async def test_peers_that_train_ahead_stay_equal_and_train_each_position_once(tmp_path: Path) -> None:
    """Real steps in the worker thread, over links on which an exchange takes as long as some of them, with residuals kept."""
    planner = {"mode": "planned", "overlap": "delayed", "min_steps": 4, "max_steps": 12, "round_tokens": 16 * 60}
    run = torch_run((write_text(tmp_path),), planner=planner, codec={"residual": True}, run={"rounds": 8})
    peers = torch_mesh(tmp_path, ["a", "b", "c"], run, Network(latency_seconds=0.1))
    began: list[int] = []

    def watched(engine: TorchEngine) -> None:
        """Notes how many steps a round begins with."""
        train = engine.train

        def noting(assignment: Any, plan: Any, should_close: Any, started: float) -> Any:
            full = plan.of(assignment.peer)
            if full is not None and assignment.ahead and full.inner_steps > assignment.inner_steps:
                began.append(full.inner_steps - assignment.inner_steps)
            return train(assignment, plan, should_close, started)

        engine.train = noting  # type: ignore[method-assign]

    for peer in peers:
        peer.prepare = watched
    await play(peers)
    assert_equal(peers)
    assert [contributed(peers[0], name) for name in "abc"] == [list(range(1, 9))] * 3
    assert len(positions(peers[0])) == len(set(positions(peers[0])))
    assert sum(began) > 10, "rounds begin with steps done before"
    rounds = [event for peer in peers for event in of(peer, seen.RoundCommitted)]
    assert all(min(e.times.compute, e.times.straggler_idle, e.times.wan_idle) >= 0 for e in rounds)
    assert all(e.steps_done == e.inner_steps for e in rounds), "those done ahead are counted"
