"""CPU and wall time of one exchange among N members in one process, over the in-memory transport without delay.

Prints JSON. Everything but the encoding of the contributions is counted: chunks through wire frames, buffers, hashes, and in
a reduce the means and parts. `cpu_ratio_to_memcpy` divides by the time a plain copy of all received bytes takes here.

    python benchmarks/exchange.py [--parameters 8000000] [--members 4] [--repeat 5]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np

from geomesh_p2p.config import CodecSection
from geomesh_p2p.core.canonical import digest_bytes
from geomesh_p2p.core.codec import encode
from geomesh_p2p.core.layout import Layout, Tensor
from geomesh_p2p.core.messages import Finished
from geomesh_p2p.core.types import Assignment, Contribution, Plan, Range, Term
from geomesh_p2p.swarm.exchange import Assembly, Exchange, ExchangeCodec, ExchangeLimits, Missed, in_thread, inline
from geomesh_p2p.swarm.memory import Network


@dataclass
class Listener:
    assembly: asyncio.Future[Assembly]

    def assembled(self, assembly: Assembly) -> None:
        self.assembly.set_result(assembly)

    def lost(self, missed: tuple[Missed, ...]) -> None:
        raise RuntimeError(f"lost {missed}")

    def unequal(self, peers: tuple[str, ...]) -> None:
        raise RuntimeError(f"unequal {peers}")

    def refused(self, peer: str, reason: str) -> None:
        raise RuntimeError(f"{peer}: {reason}")

    def failed(self, error: BaseException) -> None:
        self.assembly.set_exception(error)


def plan_of(topology: str, layout: Layout, members: int) -> Plan:
    edges = [layout.parameters * index // members // 8 * 8 for index in range(members)] + [layout.parameters]
    shares = tuple(Range(low, high) for low, high in itertools.pairwise(edges)) if topology == "reduce" else ()
    assignments = tuple(Assignment(f"p{i}", f"s{i}", 8, 4, 8, (Range(32 * i, 32 * i + 32),), 1.0, 1.0) for i in range(members))
    return Plan(b"r" * 32, 1, Term(1, "p0"), 1, b"b" * 32, assignments, topology, shares, 0, 0, 1.0, 10.0, 1.0, True)  # type: ignore[arg-type]


async def exchange_once(
    topology: str, codec: ExchangeCodec, payloads: list[np.ndarray], threads: bool
) -> tuple[float, float, int]:
    """CPU seconds of the process, wall seconds, chunk bytes sent by all."""
    plan = plan_of(topology, codec.layout, len(payloads))
    network = Network()
    transports = [network.transport(peer) for peer in plan.peers]
    loop = asyncio.get_running_loop()
    listeners = [Listener(loop.create_future()) for _ in payloads]
    exchanges = [
        Exchange(peer, plan, transport, codec, ExchangeLimits(), listener, in_thread if threads else inline)
        for peer, transport, listener in zip(plan.peers, transports, listeners, strict=True)
    ]
    contributions = [
        Contribution(a.peer, a.site, 1, plan.base, 1000, a.ranges, digest_bytes(payload), payload.size)
        for a, payload in zip(plan.members, payloads, strict=True)
    ]
    for exchange, transport in zip(exchanges, transports, strict=True):

        def receive(sender: str, message: object, exchange: Exchange = exchange) -> None:
            if isinstance(message, Finished):
                exchange.member_finished(message.contribution)
            else:
                exchange.receive(sender, message)  # type: ignore[arg-type]

        await transport.start(receive, None)  # type: ignore[arg-type]
        exchange.start()
    cpu, wall = time.process_time(), time.perf_counter()
    for exchange, transport, contribution, payload in zip(exchanges, transports, contributions, payloads, strict=True):
        exchange.contribute(contribution, payload)
        for peer in plan.peers:
            if peer != contribution.peer:
                transport.send(peer, Finished(plan.digest, contribution, 1.0))
    assemblies = await asyncio.gather(*(listener.assembly for listener in listeners))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert len({assembly.body_digest for assembly in assemblies}) == 1
    sent = sum(traffic.payload_sent for transport in transports for traffic in transport.traffic().values())
    for exchange, transport in zip(exchanges, transports, strict=True):
        await exchange.stop("done")
        await transport.stop()
    return cpu, wall, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = options.parameters // 8 // 256
    layout = Layout((Tensor("embedding", rows * 256, rows), Tensor("rest", options.parameters - rows * 256)))
    codec = ExchangeCodec(layout, CodecSection())
    payloads = []
    for seed in range(options.members):
        weights = np.random.default_rng(seed).standard_normal(layout.parameters, dtype=np.float32)
        payload = encode(layout, np.zeros_like(weights), weights, codec.settings)
        assert isinstance(payload, np.ndarray)
        payloads.append(payload)
    volumes = {
        "gather": options.members * codec.payload_bytes,
        "reduce": codec.payload_bytes + codec.part_bytes(Range(0, layout.parameters)),
    }
    report: dict[str, object] = {
        "parameters": layout.parameters,
        "members": options.members,
        "payload_bytes": codec.payload_bytes,
        "repeat": options.repeat,
    }
    for topology in ("gather", "reduce"):
        for threads in (False, True):
            results = [asyncio.run(exchange_once(topology, codec, payloads, threads)) for _ in range(options.repeat)]
            sent = results[0][2]
            source = np.ones(sent, np.uint8)
            target = np.zeros_like(source)
            copies = []
            for _ in range(5):
                begun = time.perf_counter()
                np.copyto(target, source)
                copies.append(time.perf_counter() - begun)
            cpu = statistics.median(result[0] for result in results)
            report[f"{topology}_{'threads' if threads else 'inline'}"] = {
                "cpu_seconds_all_members": round(cpu, 4),
                "wall_seconds": round(statistics.median(result[1] for result in results), 4),
                "payload_bytes_sent_all_members": sent,
                "sent_over_formula": round(sent / (options.members - 1) / volumes[topology], 5),
                "cpu_ratio_to_memcpy": round(cpu / statistics.median(copies), 1),
            }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
