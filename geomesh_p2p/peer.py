"""One peer, put together: configuration, engine, disk, transport, protocol, telemetry; signals and the way out."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.canonical import digest
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.log import RoundLog
from geomesh_p2p.core.messages import Fetch, Fetched, Hello, Message, Refused
from geomesh_p2p.core.outer import OuterState, apply_update
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.state import Settings
from geomesh_p2p.core.types import NO_TERM, Founding, Held, PeerId, Profile, Timing
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.engine import TorchEngine, fingerprint_fields
from geomesh_p2p.errors import DataError, RefusedError, TemporaryError, UnreachableError
from geomesh_p2p.swarm.directory import Directory, Record
from geomesh_p2p.swarm.exchange import ExchangeCodec, ExchangeLimits
from geomesh_p2p.swarm.membership import Admission, Membership, Self
from geomesh_p2p.swarm.planning import LeadersPlanner
from geomesh_p2p.swarm.session import ExchangeSetup, Planning, Session, Surroundings
from geomesh_p2p.swarm.transport import Libp2pTransport
from geomesh_p2p.telemetry import log as logs
from geomesh_p2p.telemetry.control import ControlChannel
from geomesh_p2p.telemetry.metrics import Metrics, MetricsServer
from geomesh_p2p.telemetry.sinks import ConsoleReporter, HistoryWriter, MetricsFile
from geomesh_p2p.train import LocalModel, train

log = logging.getLogger("geomesh")
CALIBRATION_SECONDS = 3.0
DIRECTORY_SECONDS = 10.0


@dataclass(frozen=True)
class PeerOptions:
    """What only the command line says."""

    first: bool = False
    control_fd_in: int | None = None
    control_fd_out: int | None = None
    log_format: logs.LogFormat = "console"
    address_file: str = ""


def run_peer(run: RunConfig, site: SiteConfig, options: PeerOptions) -> int:
    """Run one peer in the foreground until the run has ended, it has left, or it cannot go on. The exit code."""
    folder = Path(run.run.folder) / run.run.id / site.site.name
    if run.run.fresh and folder.exists():
        aside = folder.with_name(f"{folder.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.rename(aside)
    peer = Peer(run, site, options, folder)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(peer.main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(peer.main())


class Peer:
    """One peer's rooms, and the order in which they are opened and closed."""

    def __init__(self, run: RunConfig, site: SiteConfig, options: PeerOptions, folder: Path) -> None:
        self.run, self.site, self.options, self.folder = run, site, options, folder
        self.name = site.site.name
        self.observers: list[Callable[[Any], None]] = []
        self.control: ControlChannel | None = None
        self.session: Session | None = None
        self.stopping: str | None = None
        self.signals = 0

    def observe(self, event: Any) -> None:
        for observer in self.observers:
            observer(event)

    # ---------------------------------------------------------------- from start to end

    async def main(self) -> int:
        with DiskStore(self.folder) as store, ExitStack() as closing:
            logs.setup(self.options.log_format, self.name)
            self._listen()
            self._save_config()
            front = FrontDoor()
            transport = Libp2pTransport(
                self.run.net,
                self.folder / "identity.key",
                self.site.links,
                on_warning=lambda reason, text: self.observe(obs.Warned(reason, text)),
                on_daemon_exit=self._daemon_died,
            )
            self._open_telemetry(transport.peer, closing)
            await transport.start(front.receive, front.answer)
            try:
                self._announce_address(transport.addresses())
                return await self._take_part(store, transport, front)
            finally:
                await transport.stop()

    async def _take_part(self, store: DiskStore, transport: Libp2pTransport, front: FrontDoor) -> int:
        engine = await asyncio.to_thread(TorchEngine, self.run, self.site, report=self.observe)
        await self._calibrate(engine)
        snapshots = Snapshots(self.folder, self.run.save.keep_snapshots)

        settings = fingerprint_fields(self.run, engine)
        me = Self(transport.peer, self.name, self.site.site.trains, digest("settings", tuple(settings.items())), settings)
        membership = Membership(me, self._admission(), transport.send, self.run.net.heartbeat_limit_seconds)
        front.membership = membership
        founding = await self._founding(store, engine, transport, membership)
        me.founding, transport.run = founding, founding.run
        directory = Directory(transport, self.run.run.id)
        await directory.start()
        meeting = asyncio.ensure_future(self._meet(directory, transport, membership))
        try:
            log, state = self._replayed(store, snapshots, engine, founding)
            me.round, me.digest = log.round, log.digest

            profile = Profile(transport.peer, self.name, engine.device_label, await asyncio.to_thread(engine.measure))
            (self.folder / "profile.json").write_text(json.dumps([[point.batch, point.seconds] for point in profile.curve]))
            durable = store.load_durable() or Durable(NO_TERM, False)
            replica = Replica(transport.peer, self.name, log, durable, held_of(store), self._replica_settings())
            history = HistoryWriter(self.folder / "history.jsonl", transport.peer, self.name)
            if log.round == 0:
                first = {"base": founding.base, "founder": founding.founder, "view": [founding.founder]}
                history.write("founding", first, founding.run)
            around = Surroundings(
                transport=transport,
                store=store,
                snapshots=snapshots,
                membership=membership,
                links=transport.links,
                observe=self.observe,
                history=lambda kind, fields: history.write(kind, fields, founding.run),
            )
            planner = LeadersPlanner(self.run, engine.layout)
            codec = ExchangeCodec(engine.layout, self.run.codec)
            session = self.session = Session(
                around,
                replica,
                Planning(planner.make, self.run.run.validate_every_rounds, self.run.run.rounds, self.run.save),
                ExchangeSetup(codec, ExchangeLimits(chunk_bytes=self.run.net.chunk_bytes), 4 * codec.payload_bytes + 2**22),
                profile,
            )
            front.session = session
            if self.stopping is not None:
                session.leave(self.stopping)
            model = LocalModel(transport.peer, self.name, engine, engine.layout, state, self.run.codec, self.run.outer)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(session.run())
                    both.create_task(train(session.bench, model))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            assert session.outcome is not None
            return self._ended(*session.outcome)
        finally:
            meeting.cancel()
            await asyncio.gather(meeting, return_exceptions=True)
            await directory.stop()

    # ---------------------------------------------------------------- opening

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, f"signal {number.name}")
        if self.options.control_fd_in is not None and self.options.control_fd_out is not None:
            self.control = ControlChannel(self.options.control_fd_in, self.options.control_fd_out)
            self.control.start(lambda: self._stop("the mesh that started this peer is gone"))
            self.observers.append(self.control)

    def _stop(self, reason: str) -> None:
        """The first time: leave in good order. The second time: at once."""
        if self.stopping is not None:
            os._exit(130)
        self.stopping = reason
        if self.session is not None:
            self.session.leave(reason)

    def _save_config(self) -> None:
        resolved = {"run": self.run.model_dump(mode="json"), "site": self.site.model_dump(mode="json")}
        (self.folder / "config.json").write_text(json.dumps(resolved, indent=1))

    def _open_telemetry(self, peer: str, closing: ExitStack) -> None:
        metrics = Metrics(self.name, self.run.outer.learning_rate)
        server = MetricsServer(metrics, self.run.metrics)
        file, console = MetricsFile(self.folder / "metrics.jsonl", self.name), ConsoleReporter(self.name)
        console.start()
        for part in (server, file, console):
            closing.callback(part.close)
        self.observers += [metrics, file, console]
        log.info("peer %s; metrics on http://%s:%d/metrics", peer, self.run.metrics.host, server.port)

    def _announce_address(self, addresses: tuple[str, ...]) -> None:
        log.info("others join with: --bootstrap %s", addresses[0])
        if self.options.address_file:
            path = Path(self.options.address_file)
            aside = path.with_name(f"{path.name}.{os.getpid()}")
            aside.write_text(addresses[0] + "\n")
            aside.replace(path)
        if self.control is not None:
            self.control.tell("address", address=addresses[0])

    def _daemon_died(self, code: int, output: str) -> None:
        if self.session is not None:
            self.session.fail(TemporaryError(f"the libp2p daemon ended with {code} ({output}): start this peer again"))

    def _admission(self) -> Admission:
        net = self.run.net
        secret = Path(net.join_secret_file).read_bytes().strip() if net.join_secret_file else b""
        if not secret and not net.allow:
            log.info("this run is open: whoever reaches it may join (see net.allow and net.join_secret_file)")
        return Admission(frozenset(net.allow), secret)

    async def _calibrate(self, engine: TorchEngine) -> None:
        """Under `geomesh mesh`, all emulated peers of the host run real steps at once; it answers with the time scale."""
        if self.control is None or self.site.emulation is None or engine.time_scale is not None:
            return
        self.control.tell("ready_to_calibrate")
        await self.control.answer("calibrate")
        rate = await asyncio.to_thread(engine.measure_rate, CALIBRATION_SECONDS)
        self.control.tell("calibration", tokens_per_second=rate)
        engine.time_scale = float(await self.control.answer("time_scale"))

    # ---------------------------------------------------------------- the run

    async def _founding(
        self, store: DiskStore, engine: TorchEngine, transport: Libp2pTransport, membership: Membership
    ) -> Founding:
        """The run's founding record: from disk, made here (--first), or from the first peer that answers."""
        me, founding = membership.me, store.load_founding()
        if founding is not None:
            if founding.fingerprint != me.fingerprint:
                raise RefusedError(f"{self.folder} is of a run with other settings: choose another run.id, or pass --run.fresh")
            return founding
        if self.options.first:
            founding = Founding(me.fingerprint, secrets.token_bytes(16), self.run.run.seed, engine.weights_digest, me.peer)
            store.save_founding(founding)
            return founding
        deadline = time.monotonic() + self.run.net.reach_seconds
        seeds = await transport.connect_seeds(self.run.net.seeds)
        while membership.heard_founding is None:
            for seed in seeds:
                membership.greet(seed, time.monotonic())
            if membership.refused_me is not None and membership.refused_me.final:
                raise RefusedError(f"the run refuses this peer: {membership.refused_me.reason}")
            if time.monotonic() > deadline:
                said = f": {membership.refused_me.reason}" if membership.refused_me else ""
                limit = f"{self.run.net.reach_seconds:g} s (net.reach_seconds)"
                raise UnreachableError(f"no answer from the run after {limit}{said}")
            await asyncio.sleep(0.1)
        founding = membership.heard_founding
        if founding.weights != engine.weights_digest:
            raise DataError("the initial weights made here differ from the run's: use the releases of the other peers")
        store.save_founding(founding)
        return founding

    def _replayed(
        self, store: DiskStore, snapshots: Snapshots, engine: TorchEngine, founding: Founding
    ) -> tuple[RoundLog, OuterState]:
        """The newest snapshot, and the updates on disk since: where this peer stood when it stopped."""
        snapshot = snapshots.newest()
        if snapshot is None:
            log_, state = RoundLog.founded(founding), OuterState.founded(engine.weights().copy())
        else:
            for problem in snapshot.problems:
                log.warning("%s", problem)
            log_, state = RoundLog(snapshot.manifest.state), OuterState(snapshot.anchor, snapshot.momentum)
            if snapshot.inner is not None:
                engine.load_inner(str(snapshot.inner))
        while (found := store.read_update(log_.round + 1)) is not None:
            update, body = found
            log_.append(update)
            apply_update(state, engine.layout, self.run.codec, self.run.outer, update, body)
        engine.set_weights(state.anchor)
        return log_, state

    def _replica_settings(self) -> Settings:
        net = self.run.net
        timing = Timing(
            heartbeat_seconds=net.heartbeat_seconds,
            heartbeat_limit_seconds=net.heartbeat_limit_seconds,
            election_seconds=net.election_seconds,
            lease_seconds=net.heartbeat_limit_seconds + net.heartbeat_seconds,
            settle_seconds=net.settle_seconds,
        )
        return Settings(
            timing=timing,
            trains=self.site.site.trains,
            min_peers=self.run.run.min_peers,
            final_round=self.run.run.rounds,
            seed=secrets.randbits(32),
        )

    async def _meet(self, directory: Directory, transport: Libp2pTransport, membership: Membership) -> None:
        """Keep the own record alive in the directory, and greet whom it lists."""
        me, addresses = membership.me, transport.addresses()
        for seed in await transport.connect_seeds(self.run.net.seeds, required=False):
            membership.greet(seed, time.monotonic())
        while True:
            run = me.founding.run if me.founding else b""
            await directory.announce(Record(run, me.fingerprint, me.site, me.trains, addresses, me.round, me.digest))
            for record in await directory.peers():
                transport.learn(record.peer, record.addresses)
                if record.peer not in membership.known:
                    membership.greet(record.peer, time.monotonic())
            await asyncio.sleep(1.0 if len(membership.known) < self.run.run.min_peers - 1 else DIRECTORY_SECONDS)

    def _ended(self, exit_code: int, reason: str) -> int:
        log.info("%s", reason)
        if self.control is not None:
            self.control.tell("exit", exit_code=exit_code, reason=reason)
        return 130 if exit_code == 0 and self.stopping == "signal SIGINT" else exit_code


class FrontDoor:
    """What the transport hands messages to, from its start on: greetings only, until the session is there."""

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.session: Session | None = None

    def receive(self, sender: PeerId, message: Message) -> None:
        if self.session is not None:
            self.session.receive(sender, message)
        elif self.membership is not None and isinstance(message, Hello):
            self.membership.on_hello(sender, message, time.monotonic())
        elif self.membership is not None and isinstance(message, Refused):
            self.membership.refused_me = message

    async def answer(self, sender: PeerId, fetch: Fetch) -> Fetched:
        if self.session is None:
            return Fetched(False, b"", 0, 0, b"", 0)
        return await self.session.answer(sender, fetch)


def held_of(store: DiskStore) -> Held | None:
    found = store.load_held()
    return found[0] if found else None
