"""Joiners in virtual time: a crowd, one during a long exchange, one slower than the rounds. Whole peers, shared uplinks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from geomesh_p2p.config import RunConfig
from geomesh_p2p.swarm.exchange import ExchangeLimits
from geomesh_p2p.swarm.memory import Network
from geomesh_p2p.swarm.virtual_time import run_virtual
from tests.mesh.calm import calm_mesh, until
from tests.mesh.toy import ToyPeer, toy_run

SIZE = 1_000_000          # 8 MB of state, 125 kB a contribution
STATE_BYTES = 8 * SIZE


def run_of(**planner: Any) -> RunConfig:
    run = toy_run(topology="reduce", **planner)
    section = run.run.model_copy(update={"rounds": 100_000})
    save = run.save.model_copy(update={"keep_updates": 12})  # so that joiners need a snapshot
    return run.model_copy(update={"run": section, "save": save})


class Watched:
    """When each round was committed at one peer, and who contributed."""

    def __init__(self, peer: ToyPeer) -> None:
        self.peer, self.at = peer, dict[int, float]()
        self.task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            assert self.peer.session is not None
            for round in range(len(self.at) + 1, self.peer.session.replica.round + 1):
                self.at[round] = asyncio.get_running_loop().time()
            await asyncio.sleep(0.02)

    def contributors(self, round: int) -> set[str]:
        note = next(note for note in self.peer.commits() if note["round"] == round)
        return {item["site"] for item in note["contributors"]}

    def seconds(self, first: int, last: int, of: set[str]) -> list[float]:
        """Durations of the rounds in first..last to which exactly `of` contributed."""
        return [
            self.at[round] - self.at[round - 1] for round in range(first, last + 1) if self.contributors(round) == of
        ]


async def leave_all(peers: list[ToyPeer]) -> None:
    for peer in peers:
        await peer.kill()


@pytest.mark.long
@pytest.mark.case("C025")
def test_six_joiners_at_once_slow_the_running_peers_by_at_most_a_quarter(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network(latency_seconds=0.02)
        names = ["a", "b", "c", *(f"joiner{i}" for i in range(6))]
        peers = calm_mesh(tmp_path, names, run_of(), network, 0.5, SIZE)
        for peer in peers:
            network.set_uplink(peer.peer, 500_000.0)
        everybody = [peer.peer for peer in peers]
        running, joiners = peers[:3], peers[3:]
        for peer in running:
            peer.start(everybody)
        watched = Watched(peers[0])
        await until(lambda: len(watched.at) >= 18)
        began = max(watched.at)
        for peer in joiners:
            peer.start(everybody)
        await until(lambda: all(any(n[0] == "contribute" for n in peer.notes) for peer in joiners))
        ended = max(watched.at)
        before, during = watched.seconds(2, began, {"a", "b", "c"}), watched.seconds(began + 1, ended, {"a", "b", "c"})
        given = {peer.name: sum(peer.session.donor.given.values()) for peer in running if peer.session}
        turned = sum(peer.session.donor.turned_away for peer in running if peer.session)
        print(f"rounds before {mean(before):.2f} s, while it gives {mean(during):.2f} s ({len(during)}), to round {ended};")
        print(f"given by donor {given}, busy answers {turned}")
        assert mean(during) <= 1.25 * mean(before)
        assert len(during) >= 3
        assert all(given.values()), "all of them gave"
        assert turned, "a donor that gives to two sends the third elsewhere"
        assert sum(given.values()) <= 1.3 * 6 * STATE_BYTES
        assert len({peer.digests().get(ended) for peer in running}) == 1
        await leave_all(peers)
        watched.task.cancel()

    run_virtual(main())


@pytest.mark.long
@pytest.mark.case("C022")
def test_a_joiner_during_a_long_exchange_is_answered_and_the_exchange_goes_on(tmp_path: Path) -> None:
    """Exchanges take about forty seconds; in the first second of one a joiner comes. After it the links are fast again."""

    async def main() -> None:
        network = Network(latency_seconds=0.02)
        limits = ExchangeLimits(chunk_bytes=8192, deadline_seconds=30.0)
        peers = calm_mesh(tmp_path, ["a", "b", "c", "late"], run_of(), network, 0.5, SIZE, limits=limits)
        everybody, running, late = [peer.peer for peer in peers], peers[:3], peers[3]

        def cap(bytes_per_second: float) -> None:
            for peer in peers:
                network.set_uplink(peer.peer, bytes_per_second)

        cap(6_000.0)
        for peer in running:
            peer.start(everybody)
        watched = Watched(peers[0])
        await until(lambda: len(watched.at) >= 15, 3000.0)
        assert peers[0].session is not None
        desk, donor = peers[0].session.desk, peers[0].session.donor
        await until(lambda: desk.sending)
        await asyncio.sleep(1.0)
        late.start(everybody)
        await until(lambda: len(watched.at) >= 16)
        given, turned = sum(donor.given.values()), donor.turned_away
        cap(500_000.0)
        await until(lambda: any(item["site"] == "late" for note in peers[0].commits() for item in note["contributors"]))
        alone, with_joiner = median(watched.seconds(8, 15, {"a", "b", "c"})), watched.at[16] - watched.at[15]
        print(f"rounds of {alone:.1f} s, with the joiner {with_joiner:.1f} s, in which {given} bytes were given, {turned} busy")
        assert alone > 30.0
        assert with_joiner <= 1.25 * alone
        assert given or turned, "it was served, or told when"
        first = next(fields for kind, fields in late.notes if kind == "contribute")
        assert first["base"] == bytes.fromhex(peers[0].digests()[first["round"] - 1]), "it never trained from another base"
        assert not any(kind == "mismatch" for peer in peers for kind, _ in peer.notes), "and from the same anchor"
        await leave_all(peers)
        watched.task.cancel()

    run_virtual(main())


@pytest.mark.long
@pytest.mark.case("C023")
def test_a_joiner_whose_download_takes_one_and_a_half_rounds_takes_part_within_three(tmp_path: Path) -> None:
    async def main() -> None:
        network = Network(latency_seconds=0.02)
        peers = calm_mesh(tmp_path, ["a", "b", "c", "slow"], run_of(), network, 2.0, SIZE)
        everybody, slow = [peer.peer for peer in peers], peers[3]
        for peer in peers[:3]:  # rounds take 16 s, the state 24
            network.set_link(peer.peer, slow.peer, one_way=True, bytes_per_second=STATE_BYTES / 3 / 24.0)
        for peer in peers[:3]:
            peer.start(everybody)
        watched = Watched(peers[0])
        await until(lambda: len(watched.at) >= 15)
        slow.start(everybody)
        begun = asyncio.get_running_loop().time()
        came = max(watched.at) + 1  # the round under way
        await until(lambda: any(kind == "adopt" for kind, _ in slow.notes))
        download = (asyncio.get_running_loop().time() - begun) / mean(watched.seconds(8, 15, {"a", "b", "c"}))
        await until(lambda: any("slow" in watched.contributors(round) for round in watched.at))
        first = min(round for round in watched.at if "slow" in watched.contributors(round))
        adopted = next(fields["round"] for kind, fields in slow.notes if kind == "adopt")
        print(f"came in round {came}, took the state of round {adopted} in {download:.2f} rounds, took part in round {first}")
        assert download > 1.2
        assert first <= came + 3
        await leave_all(peers)
        watched.task.cancel()

    run_virtual(main())
