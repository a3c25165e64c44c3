"""One peer, put together: configuration, engine, disk, transport, protocol, telemetry; signals and the way out."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.canonical import Digest, digest
from geomesh_p2p.core.codec import payload_bytes
from geomesh_p2p.core.events import Durable
from geomesh_p2p.core.layout import Layout
from geomesh_p2p.core.ports import LocalEngine
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.state import Settings
from geomesh_p2p.core.types import NO_TERM, Founding, PeerId, Profile, Timing
from geomesh_p2p.doctor import preflight
from geomesh_p2p.engine.checkpoint import DiskStore, Snapshots
from geomesh_p2p.engine.files import Made, move_aside, replace_text, require_space
from geomesh_p2p.engine.forking import fork
from geomesh_p2p.engine.profiles import step_times
from geomesh_p2p.engine.resume import Rebuilder, Resumed, resume, retire_identity_without_state
from geomesh_p2p.environment import has_uvloop
from geomesh_p2p.errors import GeoMeshError, NotListedError, RefusedError, TemporaryError
from geomesh_p2p.seed_files import SeedFiles
from geomesh_p2p.swarm.acquaintances import Acquaintances
from geomesh_p2p.swarm.addresses import parse, remembering_port
from geomesh_p2p.swarm.clocks import watch_clocks
from geomesh_p2p.swarm.directory import Directory
from geomesh_p2p.swarm.exchange import ExchangeCodec, ExchangeLimits
from geomesh_p2p.swarm.exchanging import ExchangeSetup
from geomesh_p2p.swarm.filler import Filler, windows_close
from geomesh_p2p.swarm.front_door import FrontDoor
from geomesh_p2p.swarm.identity import load_identity, read_secret
from geomesh_p2p.swarm.joining import found, join, keep_meeting
from geomesh_p2p.swarm.membership import Admission, Membership, Self
from geomesh_p2p.swarm.offload import in_own_thread
from geomesh_p2p.swarm.planning import LeadersPlanner
from geomesh_p2p.swarm.reaching import Reaching
from geomesh_p2p.swarm.session import Planning, Session, Surroundings
from geomesh_p2p.swarm.transport import Libp2pTransport
from geomesh_p2p.swarm.visits import Host, Visits
from geomesh_p2p.telemetry import log as logs
from geomesh_p2p.telemetry.board import StatusBoard
from geomesh_p2p.telemetry.control import ControlChannel
from geomesh_p2p.telemetry.metrics import Metrics
from geomesh_p2p.telemetry.metrics_server import MetricsServer
from geomesh_p2p.telemetry.sinks import ConsoleReporter, HistoryWriter, MetricsFile
from geomesh_p2p.train import LocalModel, train

log = logging.getLogger("geomesh")
CALIBRATION_SECONDS = 3.0
MOST_BUGS_TOLD = 32
AT_ONCE, ITS_ROUND = "ended at once: what was committed is saved", ", the round going on is lost here"
EARLY_BYTES = 2**22   # of an exchange that has not begun here, beside four contributions

T = TypeVar("T")
MakeEngine = Callable[[RunConfig, SiteConfig, Callable[[Any], None]], LocalEngine]


def torch_engine(run: RunConfig, site: SiteConfig, report: Callable[[Any], None]) -> LocalEngine:
    from geomesh_p2p.engine.engine import TorchEngine
    from geomesh_p2p.engine.token_cache import users_folder

    return TorchEngine(run, site, cache=users_folder() if run.dataset.keep_tokens else None, report=report)


@dataclass(frozen=True)
class PeerOptions:
    """What only the command line says."""

    first: bool = False
    fork_from: int | None = None
    control_fd_in: int | None = None
    control_fd_out: int | None = None
    log_format: logs.LogFormat = "console"
    address_file: str = ""
    seed_files: Mapping[str, str] = field(default_factory=dict)
    """Seeds that were read from a file (@FILE), by the address that was in it."""


def run_peer(run: RunConfig, site: SiteConfig, options: PeerOptions, make_engine: MakeEngine = torch_engine) -> int:
    """Run one peer in the foreground until the run has ended, it has left, or it cannot go on. The exit code."""
    folder = Path(run.run.folder) / run.run.id / site.site.name
    require_space(folder, 0)
    if run.run.fresh and (aside := move_aside(folder)) is not None:
        print(f"geomesh: the old folder was moved to {aside}", file=sys.stderr)
    if options.fork_from is not None and (aside := _fork(run, site, folder, options.fork_from, make_engine)) is not None:
        print(f"geomesh: a new run goes on from round {options.fork_from}; the old one was moved to {aside}", file=sys.stderr)
    peer = Peer(run, site, options, folder, make_engine)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        code = runner.run(peer.main())
    if peer.abandoned:
        logging.shutdown()
        os._exit(code)  # the interpreter's own end would meet a thread that is still at work in native code
    return code


def _fork(run: RunConfig, site: SiteConfig, folder: Path, round: int, make_engine: MakeEngine) -> Path | None:
    engine, founder = make_engine(run, site, lambda event: None), load_identity(folder / "identity.key").peer
    return fork(folder, round, (fingerprint_of(words(run, engine)), founder), engine, (engine.layout, run.codec, run.outer))


def words(run: RunConfig, engine: LocalEngine) -> dict[str, str]:
    """What all peers of a run have in common, by name."""
    return {"run.id": run.run.id, **engine.settings}


def fingerprint_of(settings: dict[str, str]) -> Digest:
    return digest("settings", list(settings.items()))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if not has_uvloop():
        return None
    import uvloop

    return uvloop.new_event_loop


class Peer:
    """One peer's rooms, and the order in which they are opened and closed."""

    def __init__(
        self, run: RunConfig, site: SiteConfig, options: PeerOptions, folder: Path, make_engine: MakeEngine = torch_engine
    ) -> None:
        self.run, self.site, self.options, self.folder = run, site, options, folder
        self.name = site.site.name
        self.make_engine = make_engine
        self.board = StatusBoard(self.name, run.run.rounds, run_id=run.run.id)
        self.observers: list[Callable[[Any], None]] = [self.board]
        self.admission = Admission()
        self.control: ControlChannel | None = None
        self.session: Session | None = None
        self.stopping = ""
        self.failure: GeoMeshError | None = None
        self.signal: signal.Signals | None = None
        self.joined = False
        self.abandoned = False
        self._reaching: asyncio.Future[None] | None = None
        self._bugs_told: set[tuple[str, str, str]] = set()
        self._main: asyncio.Task[Any] | None = None

    def observe(self, event: Any) -> None:
        """Nothing that goes wrong in telling what happens ends a peer; each such bug is told once."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:
                bug = (type(observer).__name__, type(event).__name__, repr(error))
                if bug not in self._bugs_told and len(self._bugs_told) < MOST_BUGS_TOLD:
                    self._bugs_told.add(bug)
                    log.exception("%s cannot take %s: the peer goes on, please report this", *bug[:2])

    def _warn(self, reason: str, text: str) -> None:
        self.observe(obs.Warned(reason, text))

    # ---------------------------------------------------------------- from start to end

    async def main(self) -> int:
        """Raises GeoMeshError for what a user can mend. Nothing is left of a start that did not come into the run, except
        an identity that is not on the run's list: others may be about to allow it."""
        made = Made(self.folder)
        with DiskStore(self.folder) as store:
            self.joined = store.load_founding() is not None
            try:
                with ExitStack() as closing:
                    return await self._from_start_to_end(store, closing)
            except (GeoMeshError, OSError, asyncio.CancelledError) as error:
                if not self.joined:
                    made.undo(keep="identity.key" if isinstance(error, NotListedError) else "")
                    if isinstance(error, NotListedError):
                        stays = f"its identity stays in {self.folder}, so that net.allow can list it"
                        raise NotListedError(f"{error} ({stays})") from None
                if isinstance(error, OSError) and error.filename is None:
                    error.filename = str(self.folder)  # a failed write does not know of what
                if isinstance(error, asyncio.CancelledError) and self.failure is not None:
                    raise self.failure from None
                if not isinstance(error, asyncio.CancelledError) or not self.stopping:
                    raise
                return self._ended(0, f"stopped before the run was joined: {self.stopping}")

    async def _from_start_to_end(self, store: DiskStore, closing: ExitStack) -> int:
        logs.setup(self.options.log_format, self.name)
        if retired := retire_identity_without_state(store, self.folder):
            log.warning("%s", retired)
        self._listen(asyncio.current_task())
        await preflight(self.run, self.site, self.folder, with_model=self.make_engine is torch_engine)
        self.admission = self._admission()
        return await self._with_transport(store, closing)

    async def _with_transport(self, store: DiskStore, closing: ExitStack) -> int:
        front = FrontDoor()
        transport = Libp2pTransport(
            remembering_port(self.run.net, self.folder / "port"),
            self.folder / "identity.key",
            self.site.links,
            on_warning=self._warn,
            on_daemon_exit=self._daemon_died,
        )
        self._open_telemetry(transport.peer, closing)
        transport.seeds.files = SeedFiles(self.options.seed_files)
        transport.budgets.admitted, transport.on_other_version = front.admitted, front.other_version
        front.complaints = transport.budgets.complaints
        await transport.start(front.receive, front.answer)
        try:
            if self.in_the_run:
                self._tell_others_way_in(transport.addresses()[0])
            self._announce_address(transport.addresses())
            return await self._take_part(store, transport, front)
        finally:
            await transport.stop()

    async def _take_part(self, store: DiskStore, transport: Libp2pTransport, front: FrontDoor) -> int:
        engine = await self._beside(lambda: self.make_engine(self.run, self.site, self.observe))
        await self._calibrate(engine)
        common = words(self.run, engine)
        me = Self(transport.peer, self.name, self.site.site.trains, fingerprint_of(common), common)
        membership = Membership(me, self.admission, transport.send, self.run.net.heartbeat_limit_seconds, front.complain)
        membership.most_members = self.run.net.most_peers
        front.membership = membership
        host = Host(self.board.snapshot, self._leader, self._stop, self._stop_run, self._roll_back)
        front.visits = Visits(membership, transport, host)
        known = Acquaintances(self.folder / "acquaintances.json")
        for warning in known.warnings:
            log.warning("%s", warning)
        was_in = self.in_the_run
        founding = me.founding = await self._founding(store, engine, transport, membership)
        transport.run = founding.run
        if not was_in:
            self._tell_others_way_in(transport.addresses()[0])

        snapshots = Snapshots(self.folder, self.run.save.keep_snapshots, self.run.save.keep_bytes)
        settings = (engine.layout, self.run.codec, self.run.outer)
        resumed = await asyncio.to_thread(resume, store, snapshots, engine, founding, settings)
        for warning in resumed.warnings:
            log.warning("%s", warning)
        me.round, me.digest = resumed.log.round, resumed.log.digest
        self.observe(obs.LogStands(resumed.log.round, resumed.log.tokens))
        length, kept = self.run.model.sequence_length, self.folder / "profile.json"
        curve = await self._beside(lambda: step_times(engine, length, kept, log.info))
        profile = Profile(transport.peer, self.name, engine.device_label, curve)

        directory = Directory(transport, self.run.run.id, is_member=membership.admitted)
        await directory.start()
        meeting = asyncio.ensure_future(keep_meeting(transport, membership, self.run.net, directory, known))
        meeting.add_done_callback(self._met)
        clocks = asyncio.ensure_future(watch_clocks(transport, membership.sites, self._warn))
        filler: Filler | None = None
        try:
            local = (engine, resumed, founding)
            session = self.session = self._session(store, snapshots, transport, membership, profile, local)
            front.session = session
            filler = self._fill_windows(transport, front, engine.layout)
            reaching = front.reaching = Reaching(transport, membership, self.run.net, self.observe)
            self._reaching = asyncio.ensure_future(reaching.keep())
            self._reaching.add_done_callback(self._met)
            if self.stopping:
                session.leave(self.stopping, self._leave_code)
            model = LocalModel(
                transport.peer,
                self.name,
                engine,
                engine.layout,
                resumed.state,
                self.run.codec,
                self.run.outer,
                resumed.residual,
                resumed.log.round,
                max_skipped_steps=self.run.inner.max_skipped_steps,
            )
            await both(session.run(), train(session.bench, model))
            assert session.outcome is not None
            return self._ended(*session.outcome)
        finally:
            beside = [task for task in (meeting, clocks, self._reaching) if task is not None]
            for task in beside:
                task.remove_done_callback(self._met)
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            if filler is not None:
                filler.stop()
            await directory.stop()

    # ---------------------------------------------------------------- opening

    def _listen(self, main: asyncio.Task[Any] | None) -> None:
        loop = asyncio.get_running_loop()
        self._main = main
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if self.options.control_fd_in is not None and self.options.control_fd_out is not None:
            self.control = ControlChannel(self.options.control_fd_in, self.options.control_fd_out)
            self.control.start(lambda: self._stop("the mesh that started this peer is gone"))
            self.observers.append(self.control)

    async def _beside(self, work: Callable[[], T]) -> T:
        """`work` in a thread that is left to itself if this peer is stopped meanwhile: it may take minutes."""
        try:
            return await in_own_thread(work)
        except asyncio.CancelledError:
            self.abandoned = True
            raise

    def _save_config(self, parameters: int, settings: dict[str, str]) -> None:
        """The resolved configuration, and what was found out besides."""
        resolved = {
            "run": self.run.model_dump(mode="json"),
            "site": self.site.model_dump(mode="json"),
            "parameters": parameters,
            "settings": settings,
        }
        replace_text(self.folder / "config.json", json.dumps(resolved, indent=1))

    def _on_signal(self, number: signal.Signals) -> None:
        """The first time: leave in good order. The second time: at once."""
        if self.signal is not None:
            at_work = self.session is not None and self.session.outcome is None
            with suppress(OSError, ValueError):
                print(f"geomesh: {AT_ONCE}{ITS_ROUND if at_work else ''}", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.signal = number
        self._stop(f"signal {number.name}")

    @property
    def _leave_code(self) -> int:
        return 128 + signal.SIGINT if self.signal is signal.SIGINT else 0

    def _stop(self, reason: str) -> None:
        if self.stopping:
            return
        self.stopping = reason
        if self.session is not None:
            limit = f"{self.run.net.leave_seconds:g} s (net.leave_seconds)"
            log.info("%s: leaving after a round without this peer, at most %s; once more to stop at once", reason, limit)
            self.session.leave(reason, self._leave_code)
        elif self._main is not None:
            self._main.cancel()

    def _leader(self) -> PeerId:
        return self.session.replica.leader if self.session is not None else ""

    def _stop_run(self) -> None:
        if self.session is not None:
            self.session.stop_run()

    async def _roll_back(self, to_round: int) -> tuple[bool, str]:
        if self.session is None:
            return False, "this peer is still starting: try again"
        return await self.session.roll_back(to_round)

    def _open_telemetry(self, peer: str, closing: ExitStack) -> None:
        metrics = Metrics(
            self.name, self.run.outer.learning_rate, round_goal=self.run.run.rounds, folder=self.folder
        )
        server = MetricsServer(metrics, self.run.metrics)
        file = MetricsFile(self.folder / "metrics.jsonl", self.name)
        net = self.run.net
        console = ConsoleReporter(
            self.name, rounds=self.run.run.rounds, lease_seconds=net.heartbeat_limit_seconds + net.heartbeat_seconds
        )
        console.start()
        for part in (server, file, console):
            closing.callback(part.close)
        self.observers += [metrics, file, console]
        if server.instead:
            log.warning("%s", server.instead)
        log.info("peer %s; metrics on http://%s:%d/metrics", peer, self.run.metrics.host, server.port)

    def _announce_address(self, addresses: tuple[str, ...]) -> None:
        (self.folder / "port").write_text(str(parse(addresses[0], "net.announce").port))
        if self.options.address_file:
            replace_text(Path(self.options.address_file), addresses[0] + "\n")
        if self.control is not None:
            self.control.tell("address", address=addresses[0])

    @property
    def in_the_run(self) -> bool:
        """As its founder, or because it was admitted, now or at an earlier start: it may tell others how to join."""
        return self.options.first or self.joined

    def _tell_others_way_in(self, address: str) -> None:
        log.info("others join with: --bootstrap %s%s", address, self.admission.needs)
        if not self.admission.closed:
            log.info("this run is open: whoever reaches it may join (see net.allow and net.join_secret_file)")

    def _met(self, meeting: asyncio.Future[None]) -> None:
        error = None if meeting.cancelled() else meeting.exception()
        if error is not None and self.session is not None:
            self.session.fail(error)

    def _daemon_died(self, code: int, output: str) -> None:
        """For good: the transport has started it again several times."""
        why = f"ended with {code}" if code else "could not be started again"
        error = TemporaryError(f"the libp2p daemon {why}, too often in a short time ({output}): start this peer again")
        if self.session is not None:
            self.session.fail(error)
        elif self._main is not None:
            self.failure = error
            self._main.cancel()

    def _admission(self) -> Admission:
        net = self.run.net
        secret = read_secret(Path(net.join_secret_file)) if net.join_secret_file else b""
        return Admission(frozenset(net.allow), secret)

    async def _calibrate(self, engine: LocalEngine) -> None:
        """Under `geomesh mesh`, all emulated peers of the host run real steps at once; it answers with the time scale."""
        if self.control is None or self.site.emulation is None or engine.time_scale is not None:
            return
        if self.run.model.compile:
            await asyncio.to_thread(engine.measure_rate, 0.0)  # or some would compile while others are measured
        self.control.tell("ready_to_calibrate")
        if await self.control.answer("calibrate"):
            rate = await asyncio.to_thread(engine.measure_rate, CALIBRATION_SECONDS)
            self.control.tell("calibration", tokens_per_second=rate)
        engine.time_scale = float(await self.control.answer("time_scale"))

    # ---------------------------------------------------------------- the run

    async def _founding(
        self, store: DiskStore, engine: LocalEngine, transport: Libp2pTransport, membership: Membership
    ) -> Founding:
        """The run's founding record: from disk, made here (--first), or from the first peer that answers."""
        founding = store.load_founding()
        if founding is not None and founding.fingerprint != membership.me.fingerprint:
            differ = membership.differences(old_settings(self.folder))
            raise RefusedError(f"{self.folder} is of other settings: {differ}: choose another run.id, or pass --run.fresh")
        if founding is None:
            if self.options.first:
                founding = found(membership, self.run.run.seed, engine.weights_digest)
            else:
                founding = await join(transport, membership, self.run.net, engine.weights_digest)
        self._save_config(engine.parameters, membership.me.settings)
        if not self.joined:
            if store.load_durable() is None:
                store.save_durable(Durable(NO_TERM, False))
            store.save_founding(founding)
            self.joined = True
        return founding

    def _session(
        self,
        store: DiskStore,
        snapshots: Snapshots,
        transport: Libp2pTransport,
        membership: Membership,
        profile: Profile,
        local: tuple[LocalEngine, Resumed, Founding],
    ) -> Session:
        engine, resumed, founding = local
        held, durable = store.load_held(), store.load_durable()
        assert durable is not None, "kept since the run was joined"
        me, had, own = transport.peer, held[0] if held else None, self._replica_settings()
        replica = Replica(me, self.name, resumed.log, durable, had, own, resumed.newest_ever)
        history = HistoryWriter(self.folder / "history.jsonl", transport.peer, self.name)
        if resumed.log.round == 0:
            first = {"base": founding.base, "founder": founding.founder, "view": [founding.founder]}
            history.write("founding", first, founding.run)
        elif founding.fork is not None and founding.fork.round == resumed.log.round:
            begun = {"round": resumed.log.round, "digest": resumed.log.digest, "view": resumed.log.voters}
            history.write("adopt", begun, founding.run)
        settings = (engine.layout, self.run.codec, self.run.outer)
        around = Surroundings(
            transport=transport,
            store=store,
            snapshots=snapshots,
            membership=membership,
            links=transport.links,
            past=Rebuilder(store, snapshots, engine.initial_weights, founding, settings),
            observe=self.observe,
            history=lambda kind, fields: history.write(kind, fields, founding.run),
        )
        planner = LeadersPlanner(self.run, engine.layout)
        codec = ExchangeCodec(engine.layout, self.run.codec)
        return Session(
            around,
            replica,
            Planning(planner.make, self.run.run.validate_every_rounds, self.run.save),
            ExchangeSetup(
                codec,
                ExchangeLimits(chunk_bytes=self.run.net.chunk_bytes),
                4 * codec.payload_bytes + EARLY_BYTES,
                resumed.part_residual,
            ),
            profile,
        )

    def _fill_windows(self, transport: Libp2pTransport, front: FrontDoor, layout: Layout) -> Filler | None:
        """Have windows opened before each exchange from now on, if that is wanted."""
        if not self.run.net.filler:
            return None
        filler = front.filler = Filler(transport, payload_bytes(layout, self.run.codec), windows_close())
        self.observers.append(filler)
        return filler

    def _replica_settings(self) -> Settings:
        net = self.run.net
        timing = Timing(
            heartbeat_seconds=net.heartbeat_seconds,
            heartbeat_limit_seconds=net.heartbeat_limit_seconds,
            election_seconds=net.election_seconds,
            lease_seconds=net.heartbeat_limit_seconds + net.heartbeat_seconds,
            settle_seconds=net.settle_seconds,
            leave_seconds=net.leave_seconds,
        )
        return Settings(
            timing=timing,
            trains=self.site.site.trains,
            min_peers=self.run.run.min_peers,
            final_round=self.run.run.rounds,
            seed=secrets.randbits(32),
        )

    def _ended(self, exit_code: int, reason: str) -> int:
        """The exit code of an end in good order: 0 also for a peer that left the run because a supervisor asked it to
        (SIGTERM). Raises GeoMeshError for a halt that a user has to know of."""
        if exit_code == 0 and self.signal is not None and (self.signal is signal.SIGINT or self.session is None):
            exit_code = 128 + self.signal
        if self.control is not None:
            self.control.tell("exit", exit_code=exit_code, reason=reason)
        if exit_code != 0 and self.signal is None:
            error = GeoMeshError(reason)
            error.exit_code = exit_code
            raise error
        log.info("%s", reason)
        return exit_code


def old_settings(folder: Path) -> str:
    """The settings that config.json in `folder` was saved with, as JSON; "" if they cannot be read."""
    try:
        return json.dumps(json.loads((folder / "config.json").read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


async def both(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Run both to their end; what one raises ends the other, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(first)
            group.create_task(second)
    except BaseExceptionGroup as raised:
        raise raised.exceptions[0] from None
