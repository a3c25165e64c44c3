"""Drives the protocol of one peer over a transport: events in, actions out, one at a time and in order.

The replica (core/replica.py) decides. The session carries its actions out, keeps bodies at hand, lets the planner
compute, feeds heartbeats and deadlines, and hands the algorithm its work. Nothing here blocks the event loop: disk and
planning run in threads; while a save is under way no other event is handled (heartbeats still go out).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from geomesh_p2p.config import SaveSection
from geomesh_p2p.core import events as ev
from geomesh_p2p.core import messages as msg
from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.log import LogState, next_voters
from geomesh_p2p.core.ports import (
    AdoptState,
    Clock,
    FoldUpdate,
    InnerResult,
    LocalRound,
    Made,
    MakeAnew,
    Observer,
    Past,
    RollBack,
    SaveState,
    SnapshotStore,
    Store,
    Transport,
    ValidateAll,
)
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.types import Held, PeerId, Plan, Profile, Update
from geomesh_p2p.swarm.catching_up import CatchingUp
from geomesh_p2p.swarm.donor import Donor, DonorView
from geomesh_p2p.swarm.exchange import Assembly
from geomesh_p2p.swarm.exchanging import DeskListeners, ExchangeDesk, ExchangeSetup
from geomesh_p2p.swarm.fetching import Fetcher
from geomesh_p2p.swarm.going_back import REACHES, GoingBack
from geomesh_p2p.swarm.links import LinkTable
from geomesh_p2p.swarm.membership import Membership
from geomesh_p2p.swarm.retaining import Retaining
from geomesh_p2p.swarm.rounds import RoundBook
from geomesh_p2p.swarm.telling import Teller
from geomesh_p2p.swarm.work import Bench, Job, Listeners

EXCHANGE_MESSAGES = (msg.Chunk, msg.ChunkAck, msg.PartHeader, msg.ChunkWanted, msg.ChunkMissing)
LINGER_SECONDS = 20.0
TICK_SECONDS = 1.0
SHOW_SECONDS = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What a session works with."""

    transport: Transport
    store: Store
    snapshots: SnapshotStore
    membership: Membership
    links: LinkTable
    past: Past
    observe: Observer
    history: Callable[[str, dict[str, Any]], None]
    clock: Clock = time.monotonic


@dataclass(frozen=True)
class Planning:
    """`make` computes a plan from what is asked and what is known; it runs in a thread."""

    make: Callable[[ev.NeedPlan, tuple[msg.Heartbeat, ...], LogState], Plan]
    validate_every_rounds: int
    save: SaveSection


class Session:
    """One peer's part in a run, from `run()` until it ends by itself, is halted, or has left.

    `outcome` is then (exit code, reason)."""

    def __init__(
        self, around: Surroundings, replica: Replica, planning: Planning, exchange: ExchangeSetup, profile: Profile
    ) -> None:
        self.around = around
        self.replica = replica
        self.planning = planning
        self.profile = profile
        self.bench = Bench(Listeners(self._contributed, self._trained_ahead, self._folded, self._validated, self._made_anew))
        self._teller = Teller(replica, around.membership, around.links, around.observe)
        self.book = RoundBook(profile.peer, around.membership, around.transport, around.observe, around.clock())
        self.outcome: tuple[int, str] | None = None
        self.crash: BaseException | None = None
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        ears = DeskListeners(self._assembled, self._lost, self._refused, self.fail)
        self.desk = ExchangeDesk(profile.peer, around.transport, around.store, exchange, ears)
        view = DonorView(lambda: self.desk.sending, self._equals, self._uplink)
        self.donor = Donor(around.store, around.snapshots, view, clock=around.clock, on_given=self._gave)
        self._fetcher = Fetcher(around.transport, alive=self._is_heard, fault=self._bad_donor, donors=self._equals)
        self._catching_up = CatchingUp(self._fetcher, around.store, around.snapshots, self._committed, self._adopt)
        self._going_back = GoingBack(around.transport, around.past, replica, self._put, around.clock)
        self._retaining = Retaining(around.store, around.snapshots, planning.save, around.observe)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beat_now, self._woken, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        around.links.on_news = self._beat_now.set  # the next plan may be made before the next heartbeat
        self._began = around.clock()
        self._anchor_at = replica.log.state  # once the bench has done its work; ahead of the replica while this peer catches up
        self._ends = False
        self._good_ends = {0}
        self._remade: Made | None = None  # what this peer's anchor came to, until the replica has heard it
        self._unsaved = False
        self._seen_plan: Plan | None = None

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Takes part until the end. The transport must hand its messages to `receive` and its requests to `answer`."""
        self.around.observe(obs.LogStands(self.replica.round, self.replica.log.tokens))
        self._put(ev.Ready(self.profile))
        self._end_if_over(self.replica.round)
        loops = [self._spawn(loop) for loop in (self._drive(), self._tick(), self._beat(), self._watch_exchange())]
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait([over, *loops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            if self.replica.s.leaving:  # the others hear at once that this peer leads no more
                self._beat_to_all()
            await self.desk.stop("shutdown")
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.desk.stop("shutdown")  # what was about to begin meanwhile
            self.bench.drop()
            ended_well = self.outcome is not None and self.outcome[0] in self._good_ends
            if ended_well and self._anchor_at.round not in self.around.snapshots.rounds():
                self._save_snapshot(self._anchor_at)
            self.bench.put(None)
        if self.crash is not None:
            raise self.crash

    def leave(self, reason: str, exit_code: int = 0) -> None:
        """Ask to be left out of the next view; `run` ends, with this exit code, when that is done or its deadline passes."""
        self._good_ends.add(exit_code)
        self._put(ev.LeaveWanted(reason, exit_code))

    def stop_run(self) -> None:
        """Ask for the end of the whole run, soon and after the same round everywhere."""
        self._put(ev.StopWanted())

    async def roll_back(self, to_round: int) -> tuple[bool, str]:
        """Ask for the state of an earlier round, for the whole run: whether it will come, in words."""
        return await self._going_back.order(to_round)

    async def answer(self, sender: PeerId, fetch: msg.Request) -> msg.Fetched:
        """State is for members only: a stranger learns nothing."""
        if isinstance(fetch, msg.Order) or not self.around.membership.admitted(sender):
            return msg.Fetched(False, b"", 0, 0, b"", 0)
        if fetch.what == REACHES:
            return await self._going_back.answer(fetch.round)
        return await self.donor.answer(sender, fetch)

    def receive(self, sender: PeerId, message: msg.Message) -> None:
        """Every message of the transport; called in the event loop."""
        members, now = self.around.membership, self.around.clock()
        match message:
            case msg.Hello():
                if members.on_hello(sender, message, now):
                    self._beat_now.set()
            case msg.Refused():
                if members.on_refused(sender, message):
                    self.around.observe(obs.Warned("refused", f"{members.site_of(sender)} refuses this peer: {message.reason}"))
            case msg.Heartbeat():
                if members.on_heartbeat(sender, message, now) and (beat := members.known[sender].heartbeat) is not None:
                    self.around.transport.send(sender, msg.HeartbeatEcho(message.sent_at))
                    self._put(ev.Received(sender, beat))
            case msg.HeartbeatEcho():
                if members.heard(sender, now):
                    self.around.links.round_trip(sender, now - message.sent_at)
            case _ if not members.heard(sender, now):
                members.greet(sender, now)
            case _ if isinstance(message, EXCHANGE_MESSAGES):
                self.desk.receive(sender, message)
            case _:
                if isinstance(message, msg.Finished):
                    self.book.member_finished(message, now, self.around.links.rtt_seconds(sender))
                self._put(ev.Received(sender, message))

    # ---------------------------------------------------------------- loops

    async def _drive(self) -> None:
        while True:
            event = await self._events.get()
            pending = deque(self.replica.handle(event, self.around.clock()))
            while pending:
                action = pending.popleft()
                try:
                    await self._do(action)
                except OSError as error:
                    self.around.observe(obs.Warned("save_failed", f"cannot save to disk: {error}"))
                    pending = deque(self.replica.handle(ev.SaveFailed(str(error)), self.around.clock()))
            if isinstance(event, ev.StateChecked):
                self._remade = None
            self._end_if_over(self.replica.round)
            self._woken.set()
            self._teller.phase()

    async def _tick(self) -> None:
        """At the replica's next deadline, and at least each TICK_SECONDS: who has fallen silent is seen however busy it is."""
        latest = self.around.clock()
        while True:
            self._woken.clear()
            wait = min(self.replica.next_deadline(), latest + TICK_SECONDS) - self.around.clock()
            if wait > 0:
                try:
                    async with asyncio.timeout(wait):  # wait_for would lose a cancellation that meets the event
                        await self._woken.wait()
                    continue
                except TimeoutError:
                    pass
            if self._events.empty():
                self._put(ev.Tick())
                latest = self.around.clock()
            await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        """Heartbeats go to every acquaintance by this loop alone: training and saving cannot hold it up."""
        while True:
            self._beat_now.clear()
            self._beat_to_all()
            self._teller.members(self.around.clock())
            self._forget_gone()
            try:
                async with asyncio.timeout(self.replica.s.timing.heartbeat_seconds):
                    await self._beat_now.wait()
                await asyncio.sleep(0.005)  # several reasons to beat at once are one
            except TimeoutError:
                pass

    def _beat_to_all(self) -> None:
        for acquaintance in list(self.around.membership.known.values()):
            self.around.transport.send(acquaintance.peer, self._heartbeat())

    def _forget_gone(self) -> None:
        """Peers that come and go leave nothing behind."""
        members, seconds = self.around.membership, self.replica.s.timing.forget_seconds
        for peer in members.forget_gone(self.around.clock(), seconds, self.replica.view):
            self.around.transport.forget(peer)

    async def _watch_exchange(self) -> None:
        """Says how far an exchange is, for as long as it lasts, and whether it goes on."""
        before: tuple[Digest, int] | None = None
        while True:
            await asyncio.sleep(min(SHOW_SECONDS, self.replica.s.timing.heartbeat_limit_seconds / 4))
            if self.replica.phase in ("straggler_idle", "exchange") and (current := self.desk.progress()) is not None:
                plan, p = current
                said = obs.ExchangeProgress(plan.round, p.done_bytes, p.total_bytes, p.sent_bytes, p.remaining_seconds)
                self.around.observe(said)
                if p.moved and before != (plan.digest, p.moved):
                    before = plan.digest, p.moved
                    self._put(ev.ExchangeMoved(plan.digest))

    def _heartbeat(self) -> msg.Heartbeat:
        step = self.book.last_step_report
        return msg.Heartbeat(
            **self.replica.heartbeat_fields(),
            step_batch=step.batch if step else 0,
            step_seconds=step.seconds if step else 0.0,
            links=self.around.links.round_trips_from(self.profile.peer),
            sent_at=self.around.clock(),
        )

    # ---------------------------------------------------------------- actions

    async def _do(self, action: ev.Action) -> None:
        store = self.around.store
        match action:
            case ev.Send(to, message):
                self.around.transport.send(to, message)
            case ev.Note(kind, fields):
                self.around.history(kind, fields)
                self._teller.note(kind, fields)
            case ev.SaveDurable(durable):
                await asyncio.to_thread(store.save_durable, durable)
            case ev.SaveHeld(held):
                await asyncio.to_thread(store.save_held, held, self.desk.body_of(held.update))
            case ev.AppendCommit(update):
                await self._append(update)
            case ev.NeedPlan():
                self._spawn(self._plan(action))
            case ev.Train(plan, reuse):
                self._train(plan, reuse)
            case ev.CloseTraining(plan_digest):
                self.bench.close(plan_digest)
            case ev.Rewind():
                self.bench.drop()
            case ev.StartExchange(plan):
                await self.desk.start(plan, self._rates(), max(map(self.around.links.rtt_seconds, plan.peers)))
                self._spawn(self.desk.serve_out())
            case ev.MemberFinished(plan_digest, contribution):
                self.desk.member_finished(plan_digest, contribution)
            case ev.StopExchange(plan_digest, reason):
                await self.desk.stop(reason, plan_digest)
            case ev.FetchHeld(held, sources):
                self._spawn(self._fetch_held(held, sources))
            case ev.ProveClaim():
                self._spawn(self._prove(action))
            case ev.CatchUp():
                self._spawn(self._catch_up(action))
            case ev.CheckState():
                self.bench.put(MakeAnew(self.around.past))
            case ev.Halt(exit_code, reason):
                self._finish(exit_code, reason)

    async def _append(self, update: Update) -> None:
        body = self.desk.body_of(update)
        await asyncio.to_thread(self.around.store.append, update, body)
        self._committed(update, body, self.replica.log.state)

    def _committed(self, update: Update, body: list[Any], state: LogState) -> None:
        """`update` is in the log on disk, which then stands at `state`: fold it when the worker comes to it."""
        job = self.bench.job
        own = None
        if job is not None and job.plan.round <= update.round:
            if job.local is not None and any(c.payload == job.local.contribution.payload for c in update.contributors):
                own = job.local.payload
            self.bench.drop()
        self.desk.committed(update)
        self._teller.committed(update)
        leader = self.around.membership.site_of(self.replica.leader)
        self.book.committed(update, self.replica.term, leader, state.tokens)
        self.around.membership.me.round, self.around.membership.me.digest = update.round, update.digest
        if update.rollback is None:
            self.bench.put(FoldUpdate(update, body, own))
        else:
            self._going_back.went_back(update.rollback.to_round)
            self.bench.put(RollBack(update, partial(self.around.past, trusting=True)))
            self.around.observe(obs.RolledBack(update.round, update.rollback.to_round))
        self._anchor_at = state
        final = update.round >= self.replica.s.last_round
        if final or self._saved_by_all(update.round):
            self._save_snapshot(state)
        self._end_if_over(update.round)
        self._beat_now.set()

    def _saved_by_all(self, round: int) -> bool:
        """Whether every peer that was there has a snapshot of `round`, of which contributions then speak: known from the run
        and its log alone, for a digest must not depend on who was started again."""
        if round % self.planning.save.snapshot_every_rounds == 0:
            return True
        founding, update = self.around.membership.me.founding, self.around.store.read_header(round)
        forked_here = founding is not None and founding.fork is not None and founding.fork.round == round
        return forked_here or (update is not None and update.rollback is not None)

    def _adopt(self, state: LogState, work: AdoptState) -> None:
        self.bench.put(work)
        self._anchor_at = state

    def _end_if_over(self, round: int) -> None:
        """With the last round here nothing is left to train: validate, stay a while for those who lack it, and end."""
        if round >= self.replica.s.last_round and not self._ends:
            self._ends = True
            self.bench.put(ValidateAll(round))

    def _doubted(self) -> bool:
        """Whether this peer's anchor was found to be another than the most have, and is not made anew yet."""
        return self.replica.s.checking and self._remade not in ("sound", "repaired", "rolled_back")

    def _save_snapshot(self, state: LogState) -> None:
        loop, part_residual = asyncio.get_running_loop(), self.desk.part_residual()

        def write(anchor: Any, momentum: Any, residual: Any, save_inner: Callable[[str], None]) -> None:
            if self._doubted():
                self._unsaved = True
                said = f"the anchor after round {state.round} is not saved: it is not known to be right, and not made anew yet"
                self.around.observe(obs.Warned("not_saved", said))
                return
            begun = time.perf_counter()
            try:
                manifest = self.around.snapshots.write(state, anchor, momentum, residual, save_inner, part_residual)
            except OSError as error:
                self.around.observe(obs.Warned("save_failed", f"snapshot of round {state.round} not saved: {error}"))
            else:
                self.around.observe(obs.Saved("snapshot", state.round, time.perf_counter() - begun, manifest.size_bytes))
                loop.call_soon_threadsafe(self._put, ev.Hashed(state.round, "state", manifest.content))
                with self._going_back.may_delete() as may:
                    if may:
                        self._retaining.saved(state.round)

        self.bench.put(SaveState(state.round, write))

    async def _plan(self, need: ev.NeedPlan) -> None:
        beats = [a.heartbeat for a in self.around.membership.known.values() if a.peer in need.members and a.heartbeat]
        if self.profile.peer in need.members:
            beats.append(self._heartbeat())
        try:
            planned = ev.Planned(await asyncio.to_thread(self.planning.make, need, tuple(beats), self.replica.log.state))
        except ValueError as error:
            planned = ev.Planned(None, str(error))
        self._put(planned)

    def _train(self, plan: Plan, reuse: bool) -> None:
        self.around.observe(obs.PlanAdopted(plan))
        if self._seen_plan is None:
            self._teller.first_plan(plan)
        self._seen_plan = plan
        self.book.plan_adopted(plan, self.around.clock())
        job, mine = self.bench.job, plan.of(self.profile.peer)
        if reuse and job is not None:
            job.wanted = plan
            if job.local is not None:
                self._hand_in(job)
        elif mine is not None:
            base, content = self.replica.log.state, None
            if self._saved_by_all(base.round):
                content = partial(self.around.snapshots.content, base)
            self.bench.train(plan, mine, (plan.round - 1) % self.planning.validate_every_rounds == 0, content)

    async def _fetch_held(self, held: Held, sources: tuple[PeerId, ...]) -> None:
        body = await self._fetcher.held(held, sources)
        if body is None:
            self._put(ev.FetchFailed("held", sources[0] if sources else ""))
            return
        self.desk.keep_body(held.update.body, [body])
        self._put(ev.FetchedHeld(held))

    async def _prove(self, claim: ev.ProveClaim) -> None:
        proof = await self._catching_up.proof_of(claim)
        self._put(ev.ClaimAnswered(claim.peer, claim.base.round, proof))

    async def _catch_up(self, wanted: ev.CatchUp) -> None:
        begun, log = self.around.clock(), self.replica.log
        try:
            adopted, updates = await self._catching_up.run(log.state, wanted)
        except OSError as error:
            self._put(ev.SaveFailed(str(error)))
            return
        if adopted is None and not updates:
            self._put(ev.FetchFailed("catch_up", wanted.sources[0] if wanted.sources else ""))
            return
        reached = updates[-1].round if updates else adopted.round if adopted else log.round
        self.around.observe(obs.CaughtUpTo(reached, reached - log.round, self.around.clock() - begun))
        self._put(ev.CaughtUp(tuple(updates), adopted))
        self._end_if_over(reached)

    def _is_heard(self, peer: PeerId) -> bool:
        return any(acquaintance.peer == peer for acquaintance in self.around.membership.live(self.around.clock()))

    def _equals(self) -> tuple[PeerId, ...]:
        """Those who have at least what this peer has: a joiner may ask them too."""
        s = self.replica.s
        return tuple(sorted(peer for peer, seen in s.peers.items() if seen.beat.round >= s.round and s.alive(peer)))

    def _uplink(self) -> float | None:
        """Bytes a second that this peer can send, as far as its links show: several that were busy at once shared it."""
        return max(self._rates().values(), default=self.around.links.upload_bytes_per_second)

    def _gave(self, what: str, size: int) -> None:
        self.around.observe(obs.Given(what, size))

    def _bad_donor(self, peer: PeerId, what: str) -> None:
        said = f"{self.around.membership.site_of(peer)}: {what}; it is left out as a donor"
        self.around.observe(obs.Warned("bad_donor", said))

    # ---------------------------------------------------------------- the exchange

    def _assembled(self, assembly: Assembly) -> None:
        """The exchange is complete here: name the update that it makes."""
        plan = assembly.plan
        update = Update(
            round=plan.round,
            base=plan.base,
            topology=plan.topology,
            shares=plan.shares,
            contributors=assembly.contributors,
            voters=next_voters(self.replica.log.voters, plan.peers, (c.peer for c in assembly.contributors), plan.round),
            body=assembly.body_digest,
            body_bytes=assembly.body_bytes,
        )
        self.desk.keep_assembly(assembly)
        self._teller.assembled(assembly)
        self._put(ev.Assembled(plan.digest, update))

    def _lost(self, plan: Plan, peers: tuple[PeerId, ...], why: str) -> None:
        sites = ", ".join(self.around.membership.site_of(peer) for peer in peers)
        self.around.observe(obs.Warned("exchange_late", f"round {plan.round}, attempt {plan.attempt}: {sites}: {why}"))
        self._put(ev.ExchangeLost(plan.digest, peers))

    def _refused(self, plan: Plan, peer: PeerId, reason: str) -> None:
        site = self.around.membership.site_of(peer)
        self.around.observe(obs.Warned("refused_bytes", f"{site} sent {reason}"))
        self.around.history("blame", {"peer_id": peer, "peer_site": site, "round": plan.round, "reason": reason})

    # ---------------------------------------------------------------- what the algorithm says

    def _contributed(self, job: Job, local: LocalRound) -> None:
        self.book.trained(local, self.around.clock())
        if local.contribution.abstains:
            self.around.observe(obs.Warned("abstained", f"round {job.plan.round}: abstains, {local.contribution.reason}"))
        self._beat_now.set()  # the leader plans the next round with this round's step time
        self._hand_in(job)

    def _trained_ahead(self, result: InnerResult) -> None:
        self.book.trained_ahead(result, self.around.clock())

    def _hand_in(self, job: Job) -> None:
        assert job.local is not None
        self.desk.contribute(job.wanted.digest, job.local)
        self._put(ev.Trained(job.wanted.digest, job.local.contribution, job.local.result.seconds))

    def _folded(self, update: Update, part: int, part_hash: Digest, codec_seconds: float) -> None:
        self.around.history("anchor", {"round": update.round, "digest": update.digest, "part": part, "hash": part_hash})
        self._put(ev.Hashed(update.round, "anchor_part", part_hash))
        self.book.folded(update, codec_seconds, self.around.clock())
        self._teller.links()

    def _made_anew(self, round: int, outcome: Made) -> None:
        self._remade = outcome
        if outcome == "lost":
            if not self._over.is_set():
                self._spawn(self._get_sound_snapshot())
            return
        if self._unsaved:
            self._unsaved = False
            if self._anchor_at.round % self.planning.save.snapshot_every_rounds == 0:
                self._save_snapshot(self._anchor_at)
        if outcome == "repaired":
            said = f"this peer's anchor after round {round} was wrong; it was made anew from its snapshot and the log"
            self.around.observe(obs.Warned("anchor_repaired", said))
        self._put(ev.StateChecked(round, outcome))

    async def _get_sound_snapshot(self) -> None:
        """Nothing on this peer's disk can be trusted: until another peer has a snapshot that the log agrees with."""
        said = "no snapshot on disk is one that the log agrees with: this peer asks the others for theirs, and trains nothing"
        self.around.observe(obs.Warned("anchor_lost", said))
        while True:
            sources = [peer for peer, seen in self.replica.s.peers.items() if self.replica.s.alive(peer) and not seen.silent]
            try:
                if await self._catching_up.sound_snapshot(self.replica.log.state, sources):
                    break
            except OSError as error:
                self.around.observe(obs.Warned("save_failed", f"a snapshot could not be saved: {error}"))
            await asyncio.sleep(2 * self.replica.s.timing.retry_seconds)
        self.bench.put(MakeAnew(self.around.past))

    def _validated(self, round: int, nats: float, tokens: int) -> None:
        self.book.validated(round, nats, tokens)
        self._spawn(self._linger())

    # ---------------------------------------------------------------- small things

    def _rates(self) -> dict[PeerId, float]:
        return {link.target: link.bytes_per_second for link in self.around.links.links_from(self.profile.peer)}

    async def _linger(self) -> None:
        """Stay for those who still need the last commit, with a limit; right after a start also for those who may come."""
        until = self.around.clock() + LINGER_SECONDS
        alone = self.replica.view == (self.profile.peer,)
        earliest = self._began if alone else self._began + self.around.membership.limit_seconds
        while (now := self.around.clock()) < until:
            others = [a for a in self.around.membership.live(now) if a.trains and a.heartbeat is not None]
            last = [a.heartbeat.round >= self.replica.s.last_round for a in others if a.heartbeat is not None]
            if now >= earliest and all(last):
                break
            await asyncio.sleep(0.1)
        by_order = self.replica.s.stop_after is not None
        self._finish(0, f"the run {'was stopped after' if by_order else 'has reached'} round {self.replica.round}")

    def _finish(self, exit_code: int, reason: str) -> None:
        if self.outcome is None:
            self.outcome = (exit_code, reason)
            self._over.set()

    def _put(self, event: ev.Event) -> None:
        self._events.put_nowait(event)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """A bug: end, and let `run` raise it."""
        self.crash = error
        self._finish(1, f"{type(error).__name__}: {error}")
