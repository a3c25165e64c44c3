"""The training that a timeline asks for, with real gradients: the product's own inner steps, codec and outer step.

What a method trains depends on who does which steps on which data, not on how long they take. So a trajectory is kept under a
hash of all that it depends on, round by round, and serves every setting that leads to the same work. One that was stopped goes
on from where it was last saved; what is damaged is told, moved aside (KEY.damaged) and trained anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from geomesh_p2p import train
from geomesh_p2p.config import DeviceSection, RunConfig, SiteConfig, SiteSection
from geomesh_p2p.core import codec, outer
from geomesh_p2p.core.canonical import Digest, digest, digest_bytes
from geomesh_p2p.core.log import first_positions
from geomesh_p2p.core.ports import FoldUpdate, InnerResult, TrainRound, Vector
from geomesh_p2p.core.types import Contribution, Plan, Range, Update
from geomesh_p2p.engine.engine import TorchEngine
from geomesh_p2p.engine.evaluate import perplexity
from geomesh_p2p.engine.files import tensor_errors
from geomesh_p2p.engine.inner import InnerLoop
from geomesh_p2p.errors import DataError
from geomesh_p2p.lab.bench.stopping import GRACE_SECONDS, Stop, Stopped, to_stderr
from geomesh_p2p.lab.bench.timeline import Round
from geomesh_p2p.swarm.exchange_codec import ExchangeCodec
from geomesh_p2p.swarm.part_residual import PartResidual

SAVE_SECONDS = 120.0
LOCK_SECONDS = 0.2
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError, DataError, safetensors.SafetensorError)
"""What reading a file that is cut short, or of something else, may raise."""


@dataclass(frozen=True)
class Point:
    """The anchor after `rounds` rounds and `tokens` tokens; `val_ppl` is None where it was not validated."""

    rounds: int
    tokens: int
    val_ppl: float | None
    loss: float | None


@dataclass(frozen=True)
class Trajectory:
    key: str
    points: tuple[Point, ...]
    digest: str
    folder: Path

    def anchor(self) -> Vector:
        found: Vector = safetensors.numpy.load_file(self.folder / "anchor.safetensors")["anchor"]
        return found


class _Alone:
    """The other peers as far as the inner steps ask for them: closes a member after `steps` more steps. Raises Stopped between
    two steps if this round would not end soon."""

    def __init__(self, loop: InnerLoop, steps: int, stop: Stop) -> None:
        self._loop, self._last, self._stop = loop, loop.steps + steps, stop

    def should_close(self, plan: Plan) -> bool:
        return self.has_work()

    def has_work(self) -> bool:
        self._stop.check(GRACE_SECONDS)
        return self._loop.steps >= self._last


class Workers:
    """Every site's replica in one process. All of them fold every update: they must stay bit-identical."""

    def __init__(self, run: RunConfig, sites: Sequence[str], cache: Path | None = None, stop: Stop | None = None) -> None:
        self.run, self.stop = run, stop or Stop()
        self.models: dict[str, train.LocalModel] = {}
        self.engines: dict[str, TorchEngine] = {}
        self.part_residuals: dict[str, PartResidual] = {}
        for name in sites:
            config = SiteConfig(site=SiteSection(name=name), device=DeviceSection(name="cpu", threads=1))
            engine = TorchEngine(run, config, cache=cache)
            self.engines[name] = engine
            state = outer.OuterState.founded(np.array(engine.weights()))
            residual = np.zeros_like(state.anchor) if run.codec.residual else None
            self.models[name] = train.LocalModel(
                name, name, engine, engine.layout, state, run.codec, run.outer, residual,
                max_skipped_steps=run.inner.max_skipped_steps,
            )  # fmt: skip
            if run.codec.residual:
                self.part_residuals[name] = PartResidual(ExchangeCodec(engine.layout, run.codec))
        self.first = next(iter(self.models.values()))
        self.base = digest("bench", next(iter(self.engines.values())).weights_digest)

    @property
    def fingerprint(self) -> Digest:
        settings = next(iter(self.engines.values())).settings
        return digest("trajectory", *sorted(f"{key}={value}" for key, value in settings.items()))

    def validate(self) -> float:
        return perplexity(*train.validate_anchor(self.first, 0, 1))

    def round(self, played: Round) -> float:
        """Train, encode, exchange, fold. Returns the mean training loss in nats."""
        plan = played.plan
        contributions: list[tuple[Contribution, Any]] = []
        losses = []
        for member in plan.members:
            model = self.models[member.site]
            model.round = plan.round - 1
            work = TrainRound(plan, member, validate=False)
            early = model.ahead.steps if model.ahead is not None and train.begins(model.ahead, plan, member) else 0
            alone = _Alone(self.engines[member.site].loop, played.steps(member.site) - early, self.stop)
            local = train.inner_round(alone, model, work)
            if local.contribution.abstains or local.payload is None:
                raise DataError(f"round {plan.round}: {member.site} has nothing to give: {local.contribution.reason}")
            contributions.append((local.contribution, local.payload))
            losses.append((local.result.loss, local.result.tokens))
        # What each does of the next round while the update is on its way.
        for member in plan.members:
            if steps := played.ahead_steps(member.site):
                train.go_ahead(_Alone(self.engines[member.site].loop, steps, self.stop), self.models[member.site])
        update, body = self._exchange(plan, contributions)
        own = {c.site: payload for c, payload in contributions}
        for name, model in self.models.items():
            train.fold(model, FoldUpdate(update, body, own.get(name)))
        return sum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)

    def _exchange(self, plan: Plan, contributions: Sequence[tuple[Contribution, Any]]) -> tuple[Update, bytes]:
        payloads, tokens = [payload for _, payload in contributions], [c.tokens for c, _ in contributions]
        layout, settings = self.first.layout, self.run.codec
        if plan.topology == "gather":
            body = b"".join(bytes(payload) for payload in payloads)
        else:
            mean = codec.Mean(layout, settings, payloads, tokens)
            parts = []
            for reducer, share in zip(plan.peers, plan.shares, strict=True):
                if len(share):
                    values = mean.read(share.start, share.stop, np.empty(len(share), np.float32))
                    residual = self.part_residuals.get(reducer)
                    unsaid = None if residual is None else residual.of(share)
                    part = codec.encode_part(layout, settings, values, share.start, share.stop, unsaid, plan.round)
                    if isinstance(part, codec.NotFinite):
                        raise DataError(f"round {plan.round}: {part.tensor} of the mean is not finite")
                    parts.append(bytes(part))
                    if residual is not None:  # here each answer is committed, so its own hash stands for the update's
                        answer = digest_bytes(part)
                        residual.answered(answer, share, values, part)
                        residual.committed(answer)
            body = b"".join(parts)
        update = Update(
            plan.round, self.base, plan.topology, plan.shares, tuple(c for c, _ in contributions), plan.peers,
            digest_bytes(np.frombuffer(body, np.uint8)), len(body),
        )  # fmt: skip
        return update, body

    def digest(self) -> str:
        """Of the state that all sites have. Raises DataError if they have not the same."""
        found = {digest_bytes(model.state.anchor).hex() for model in self.models.values()}
        if len(found) > 1:
            raise DataError("replicas have parted")
        return found.pop()

    # ------------------------------------------------------------ on disk

    def save(self, folder: Path) -> None:
        for name, model in self.models.items():
            model.engine.save_inner(str(folder / f"inner-{name}.safetensors"))
            if model.residual is not None:
                _write(folder / f"residual-{name}.safetensors", {"residual": model.residual})
                if (part := self.part_residuals[name].committed_values()) is not None:
                    _write(folder / f"part-{name}.safetensors", {f"from {part[0].start}": part[1]})
            if model.ahead is not None and model.ahead.done is not None:
                weights, loss = np.array(model.engine.weights()), np.array([model.ahead.done.loss])
                _write(folder / f"ahead-{name}.safetensors", {"weights": weights, "loss": loss})
        _write(folder / "state.safetensors", {"anchor": self.first.state.anchor, "momentum": self.first.state.momentum})

    def load(self, folder: Path, last: Round) -> None:
        """`last` is the round that was saved."""
        state = safetensors.numpy.load_file(folder / "state.safetensors")
        for name, model in self.models.items():
            train.replace_state(model, state["anchor"], state["momentum"])
            model.engine.load_inner(str(folder / f"inner-{name}.safetensors"))
            if self.run.codec.residual:
                model.residual = safetensors.numpy.load_file(folder / f"residual-{name}.safetensors")["residual"]
                self._load_part(name, folder / f"part-{name}.safetensors")
            if last.ahead_steps(name):
                self._load_ahead(model, safetensors.numpy.load_file(folder / f"ahead-{name}.safetensors"), last)

    def _load_part(self, site: str, path: Path) -> None:
        if path.exists():
            ((key, values),) = safetensors.numpy.load_file(path).items()
            start = int(key.removeprefix("from "))
            exchange = ExchangeCodec(self.first.layout, self.run.codec)
            self.part_residuals[site] = PartResidual(exchange, (Range(start, start + values.size), values))

    def _load_ahead(self, model: train.LocalModel, saved: dict[str, Any], last: Round) -> None:
        mine, steps = last.plan.of(model.peer), last.ahead_steps(model.site)
        assert mine is not None
        sequences = steps * mine.batch
        done = InnerResult(
            tokens=sequences * self.run.model.sequence_length, ranges=first_positions(mine.ahead, sequences), steps=steps,
            loss=float(saved["loss"][0]), seconds=0.0, data_wait_seconds=0.0, step_seconds=(), skipped_steps=0,
            overrun_seconds=0.0, learning_rate=0.0,
        )  # fmt: skip
        model.ahead = train.Ahead(last.plan, mine, None, done=done)
        model.engine.set_weights(saved["weights"])


def _write(path: Path, tensors: dict[str, Any]) -> None:
    aside = path.with_suffix(".new")
    with tensor_errors(aside):
        safetensors.numpy.save_file(tensors, aside)
    os.replace(aside, path)


def key_of(fingerprint: Digest, played: Iterable[Round], validate_tokens: int) -> str:
    """A hash of everything that training depends on."""
    key = digest("rounds", fingerprint, validate_tokens)
    for one in played:
        plan = one.plan
        work = tuple((m.site, m.batch, m.inner_steps, m.last_batch, m.ranges, m.lr_scale) for m in plan.members)
        done = tuple(one.steps(m.site) for m in plan.members)
        key = digest("round", key, work, done, plan.topology, plan.shares, plan.committed_tokens, plan.planned_tokens)
        if any(m.ahead for m in plan.members):
            key = digest("ahead from what is expected", key, tuple((m.ahead, one.ahead_steps(m.site)) for m in plan.members))
    return key.hex()[:32]


def trained(
    run: RunConfig,
    sites: Sequence[str],
    played: Sequence[Round],
    store: Path,
    validate_tokens: int,
    tell: Callable[[Point], None] = lambda _point: None,
    stop: Stop | None = None,
) -> Trajectory:
    """The trajectory of `played`, from `store` if it is there. Validated after rounds that are `validate_tokens` or more apart,
    and after the last one. Raises Stopped, after a save, or within a round that would not end soon."""
    stop = stop or Stop()
    workers = Workers(run, sites, stop=stop)
    folder = store / key_of(workers.fingerprint, played, validate_tokens)
    with claimed(folder, stop) as done:
        if done:
            return done
        folder.mkdir(parents=True, exist_ok=True)
        try:
            points = _resumed(workers, folder, played)
        except UNREADABLE as error:
            _move_aside(folder, error)
            folder.mkdir()
            workers, points = Workers(run, sites, stop=stop), []
        return _train(workers, played, folder, validate_tokens, points, tell)


@contextmanager
def claimed(folder: Path, stop: Stop) -> Iterator[Trajectory | None]:
    """While a trajectory is trained nobody else does it: two methods, or two commands, may ask for the same one. Gives it if
    it is there by now. Raises Stopped."""
    locks = folder.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / folder.name).open("w") as lock:
        while not _locked(lock.fileno()):
            stop.check()
            time.sleep(LOCK_SECONDS)  # to wait in the kernel would be deaf to the wish to stop
        stop.check()
        yield _done(folder)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _done(folder: Path) -> Trajectory | None:
    """The trajectory, if it is there and sound."""
    if not (folder / "done.json").is_file():
        return None
    try:
        found = read(folder)
        if not found.points or digest_bytes(found.anchor()).hex() != found.digest:
            raise DataError("no points, or not the anchor of done.json")
    except UNREADABLE as error:
        _move_aside(folder, error)
        return None
    return found


def _move_aside(folder: Path, error: Exception) -> None:
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    to_stderr(f"{folder} is damaged ({type(error).__name__}: {error}): it is trained anew; what was there is in {aside.name}")


def _train(
    workers: Workers,
    played: Sequence[Round],
    folder: Path,
    validate_tokens: int,
    points: list[Point],
    tell: Callable[[Point], None],
) -> Trajectory:
    """Goes on after `points`, of which the last was saved."""
    kept = len(points)
    if not points:
        points = [Point(0, 0, workers.validate(), None)]
    saved, validated = time.monotonic(), max(p.tokens for p in points if p.val_ppl is not None)
    tokens = points[-1].tokens
    for one in played[points[-1].rounds :]:
        if workers.stop.asked:
            if len(points) > max(1, kept):
                _save(workers, folder, points)
            raise Stopped
        loss = workers.round(one)
        tokens += one.tokens
        last = one is played[-1]
        look = last or tokens - validated >= validate_tokens
        points.append(Point(one.number, tokens, workers.validate() if look else None, loss))
        validated = tokens if look else validated
        tell(points[-1])
        if not last and time.monotonic() - saved > SAVE_SECONDS:
            _save(workers, folder, points)
            saved, kept = time.monotonic(), len(points)
    return keep(folder, workers.first.state.anchor, workers.digest(), points)


def keep(folder: Path, anchor: Vector, digest: str, points: Sequence[Point]) -> Trajectory:
    """A trajectory that is done: from now on it is read, not trained. What it would have gone on from is deleted."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "anchor.safetensors", {"anchor": anchor})
    _replace(folder / "done.json", {"digest": digest, "points": [asdict(point) for point in points]})
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("anchor.safetensors", "done.json"):
            path.unlink()
    return read(folder)


def read(folder: Path) -> Trajectory:
    found = json.loads((folder / "done.json").read_text())
    return Trajectory(folder.name, tuple(Point(**point) for point in found["points"]), found["digest"], folder)


def _save(workers: Workers, folder: Path, points: Sequence[Point]) -> None:
    """Whole or not at all: the files of a save are in a folder of their own, which `points.json` names. Earlier ones, and what
    a crash left of such, go once it does."""
    target = folder / f"round-{points[-1].rounds}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    workers.save(target)
    _replace(folder / "points.json", {"saved": target.name, "points": [asdict(point) for point in points]})
    for path in folder.glob("round-*"):
        if path != target:
            shutil.rmtree(path)


def _resumed(workers: Workers, folder: Path, played: Sequence[Round]) -> list[Point]:
    """Puts `workers` where they were last saved; the points until there. Raises one of UNREADABLE, and then they are neither
    here nor there."""
    try:
        found = json.loads((folder / "points.json").read_text())
    except FileNotFoundError:
        return []
    points = [Point(**point) for point in found["points"]]
    workers.load(folder / found["saved"], played[points[-1].rounds - 1])
    return points


def _replace(path: Path, value: Any) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(value))
    os.replace(aside, path)
