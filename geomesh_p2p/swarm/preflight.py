"""What may keep this host from meeting others, found before it tries: ports, addresses, descriptors, secret, key, seeds."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from geomesh_p2p.addresses import Address, parse_address
from geomesh_p2p.config import MetricsSection, NetSection
from geomesh_p2p.core.findings import Finding, fatal, ok, refused, warning
from geomesh_p2p.core.messages import Fetched, Message, Request
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import ConfigError, DataError, GeoMeshError, TemporaryError, UnreachableError
from geomesh_p2p.swarm.addresses import answering, check_port_free, port_owner
from geomesh_p2p.swarm.budgets import MEMBER
from geomesh_p2p.swarm.clocks import ADVICE, TOLERATED_SECONDS, answer_clock, measure
from geomesh_p2p.swarm.identity import load_identity, making_a_secret, read_secret
from geomesh_p2p.swarm.seeds import dial_reason
from geomesh_p2p.swarm.transport import Libp2pTransport

SEED_SECONDS = 4.0
OWN_FILES = 128                  # of a peer alone: libraries, logs, sockets, the daemon's pipes
LEAST_SECRET_BYTES = 16
TEMPORARY = TemporaryError.exit_code


# ---------------------------------------------------------------- ports and addresses


def listen_port(net: NetSection, patience_seconds: float = 0.0) -> Finding:
    address = parse_address(net.listen)
    if address.port == 0:
        return ok("listen port", f"net.listen: any free port will be taken ({net.listen}), and kept for later starts")
    try:
        check_port_free(address, patience_seconds)
    except GeoMeshError as error:
        return refused("listen port", str(error), error.exit_code)
    return ok("listen port", f"net.listen: port {address.port} is free")


def metrics_port(settings: MetricsSection) -> Finding:
    where = f"metrics.port = {settings.port} on {settings.host}"
    if settings.port == 0:
        return ok("metrics port", "metrics.port = 0: a free one will be taken, and printed")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, settings.port))
            probe.listen(1)
    except OSError as error:
        text = f"{where} cannot be had: {error.strerror or error}{port_owner(settings.port)}"
        return warning("metrics port", text, "choose another, else a free one is taken and printed at start")
    return ok("metrics port", f"{where} is free")


def announced(net: NetSection, addresses: Iterable[str] | None = None, in_container: bool | None = None) -> list[Finding]:
    """Whether the address that others are told can be theirs to dial. Its form was checked with the configuration.
    `addresses` are this host's own."""
    shown = parse_address(net.announce or net.listen)
    setting = "net.announce" if net.announce else "net.listen"
    seeds = [parse_address(seed) for seed in net.seeds]
    public = next((seed for seed in seeds if not seed.private and not seed.loopback and seed.ip is not None), None)
    if shown.wildcard:
        return []                                                 # refused with the configuration
    if net.relay:
        return [ok("announced address", f"{setting}: {shown.text}, and relays (net.relay)")]
    if shown.loopback:
        return [ok("announced address", f"{setting}: {shown.text}: only peers on this host can dial it")]
    if shown.ip is None:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(shown.host, shown.port, type=socket.SOCK_STREAM)}
        except OSError as error:
            text = f"{setting}: the name {shown.host} cannot be resolved here ({error.strerror})"
            return [warning("announced address", text, "make sure that it can be where the other peers are")]
        return [ok("announced address", f"{setting}: {shown.text} ({', '.join(sorted(found))})")]
    if shown.private and public is not None:
        text = f"{setting}: {shown.host} is of a private network, but the seed {public.text} is on the internet"
        return [warning("announced address", text, "set net.announce to the address that others dial, or net.relay = true")]
    contained = Path("/.dockerenv").exists() if in_container is None else in_container
    if shown.private and not net.announce and contained:
        text = f"net.listen: {shown.host} is this container's own address, which only its network can dial"
        return [warning("announced address", text, "set net.announce to the host's address if other hosts take part")]
    own = set(own_addresses() if addresses is None else addresses)
    if shown.host not in own:
        text = f"{setting}: {shown.host} is none of this host's addresses ({', '.join(sorted(own)) or 'none found'})"
        return [warning("announced address", text, f"see that TCP port {shown.port} there is forwarded to this host")]
    return [ok("announced address", f"{setting}: {shown.text}")]


def own_addresses() -> list[str]:
    kinds = (socket.AF_INET, socket.AF_INET6)
    return [a.address.split("%")[0] for found in psutil.net_if_addrs().values() for a in found if a.family in kinds]


# ---------------------------------------------------------------- limits and files


def files_needed(peers: int, streams: int) -> int:
    """Descriptors of the larger of the two processes: to each other peer the streams that this one opens and those that it
    lets the other open (both control, bulk and requests), and the daemon's connections."""
    return OWN_FILES + (peers - 1) * (min(streams + 2 + 8, MEMBER.streams) + streams + 2)


def open_files(peers: int, streams: int, limit: int | None = None, hard: int | None = None) -> Finding:
    """For a group of `peers`; the limits are this process's unless given."""
    soft_now, hard_now = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, hard = soft_now if limit is None else limit, hard_now if hard is None else hard
    most = max(limit, hard)                                       # a peer raises its own limit to what it may
    need = files_needed(peers, streams)
    largest = 1
    while files_needed(largest + 1, streams) <= most and largest < 10_000:
        largest += 1
    text = f"at most {most} open files are allowed, {need} are needed for {peers} peers of {streams} streams (net.streams)"
    advice = "raise it (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of docker) or lower net.streams"
    if most < need:
        return fatal("open files", text, advice, TEMPORARY)
    if largest < 2 * peers:
        return warning("open files", f"{text}; more than {largest} would not do", advice)
    return ok("open files", f"{text}; enough for {largest} peers" if largest < 10_000 else text)


def raise_open_files() -> None:
    """As many as this process may have. The daemon inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and soft != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def daemon_binary(path: Path | None = None) -> Finding:
    path = _daemon_path() if path is None else path
    if not path.is_file():
        return fatal("libp2p daemon", f"{path} is missing", "install hivemind from its wheel: pip install hivemind", 2)
    if not os.access(path, os.X_OK):
        return fatal("libp2p daemon", f"{path} may not be executed", f"chmod +x {path}, and see how that place is mounted", 2)
    return ok("libp2p daemon", f"{path}")


def _daemon_path() -> Path:
    import hivemind.hivemind_cli as package

    return Path(str(package.__file__)).parent / "p2pd"


def join_secret(file: str) -> list[Finding]:
    if not file:
        return []
    path = Path(file)
    try:
        length = len(read_secret(path))
        state = path.stat()
        # A group with the number of this user is this user's own, as containers and most systems make it.
        others = 0o007 if state.st_gid == os.getuid() else 0o077
        mode = stat.S_IMODE(state.st_mode)
    except ConfigError as error:
        return [refused("join secret", str(error), error.exit_code)]
    except OSError as error:
        return [fatal("join secret", f"{path}: {error.strerror}", "see to its rights", ConfigError.exit_code)]
    found = []
    if mode & others:
        text = f"net.join_secret_file: {path} can be read by other users (mode {mode:03o})"
        found.append(warning("join secret", text, f"chmod 600 {path}"))
    if length < LEAST_SECRET_BYTES:
        text = f"net.join_secret_file: the secret in {path} can be guessed ({length} bytes, not {LEAST_SECRET_BYTES})"
        found.append(warning("join secret", text, f"make another one for all peers of the run ({making_a_secret(path)})"))
    return found or [ok("join secret", f"net.join_secret_file: {path} is there, and this user's alone")]


def identity(path: Path, patience_seconds: float = 0.0) -> Finding:
    """Whether a running daemon goes by this key already, for longer than one that has lost its peer takes to go."""
    if not path.exists():
        return ok("identity", f"{path}: a new one will be made")
    try:
        peer, key = load_identity(path).peer, path.read_bytes()
    except DataError as error:
        return refused("identity", str(error), error.exit_code)
    except OSError as error:
        return fatal("identity", f"{path}: {error.strerror}", "see to its rights", ConfigError.exit_code)
    deadline = time.monotonic() + patience_seconds
    while (process := _daemon_of(key)) is not None:
        if time.monotonic() >= deadline:
            text = f"{path}: process {process} runs under this identity ({peer})"
            return fatal("identity", text, "stop that one; a peer's folder is never copied with its key", TEMPORARY)
        time.sleep(0.05)
    return ok("identity", f"{path}: peer {peer}")


def _daemon_of(key: bytes) -> int | None:
    for process, path in _running_daemons():
        with suppress(OSError):
            if path.read_bytes() == key:
                return process
    return None


def _running_daemons() -> list[tuple[int, Path]]:
    """libp2p daemons on this host and the key files that they were started with, as far as this user may see them."""
    found: list[tuple[int, Path]] = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        words: Sequence[str] = process.info["cmdline"] or ()
        if not words or not words[0].endswith("p2pd"):
            continue
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, _, value = word.lstrip("-").partition("=")
            if name == "id" and (value or following):
                found.append((process.info["pid"], Path(process.info["cwd"] or "/") / (value or following)))
    return found


# ---------------------------------------------------------------- the seeds


async def meet_seeds(net: NetSection, folder: Path, port_free: bool, reach: bool = True) -> list[Finding]:
    """Start a daemon on a key of its own in `folder`, where the peer would listen if that is free; dial the address that the
    peer would announce if `reach`, and ask each seed: is it there, is it who it should be, what time has it. One finding an
    address."""
    binary = daemon_binary()
    if binary.level != "ok":
        return [binary]
    listen = parse_address(net.listen)
    open_to_others = listen.port != 0 and not listen.loopback and port_free
    alone = net.model_copy(
        update={
            "listen": net.listen if open_to_others else "/ip4/127.0.0.1/tcp/0",
            "announce": "/ip4/127.0.0.1/tcp/1" if open_to_others else "",
            "seeds": (), "relay": False, "port_mapping": False,
        }
    )  # fmt: skip
    try:
        transport = Libp2pTransport(alone, folder / "identity.key")
        await transport.start(_ignore, _answer)
    except GeoMeshError as error:
        return [refused("libp2p daemon", str(error), error.exit_code)]
    try:
        started = ok("libp2p daemon", f"{_daemon_path()} starts")
        own = [_reach_oneself(parse_address(net.announce or net.listen))] if open_to_others and reach else []
        met = asyncio.gather(*(_meet(transport, seed) for seed in net.seeds))
        reachable, per_seed = await asyncio.gather(*own), await met
    finally:
        await transport.stop()
    findings = [started, *reachable]
    reached = any(reached for reached, _ in per_seed)
    for _, found in per_seed:
        findings += found if reached else [_final(one) for one in found]
    return findings


async def _reach_oneself(shown: Address) -> Finding:
    """What can be said from here; whether others reach it they are asked once the peer has joined."""
    why = await answering((shown.text,), SEED_SECONDS / 2)
    if not why:
        return ok("reachable", f"{shown.text} answers from this host; others are asked to dial it once the peer has joined")
    text = f"{shown.text} does not answer when dialled from this host ({why})"
    step = f"see that TCP port {shown.port} is open and forwarded here (some routers only refuse it from within)"
    return warning("reachable", text, step)


def _final(finding: Finding) -> Finding:
    """With not one seed there, none of them is a mere warning."""
    if finding.level != "warning" or finding.check != "seed":
        return finding
    return fatal("seed", finding.text, finding.next_step, UnreachableError.exit_code)


async def _meet(transport: Libp2pTransport, text: str) -> tuple[bool, list[Finding]]:
    """Whether the seed answered, and what was found."""
    seed = parse_address(text)
    reason = await _dial(transport, seed)
    if reason:
        advice = "check that a peer of the run is up there, and that its port is open"
        if "peer id differs" in reason:
            advice = "take the address anew from what that peer prints"
        return False, [warning("seed", f"net.seeds: {text}: {reason}", advice)]
    findings = [ok("seed", f"net.seeds: {text} answers")]
    offset = await measure(transport, seed.peer)
    if offset is None:
        findings.append(warning("clock", f"{text} does not say what time it has", "see that it runs this release"))
    elif offset.notable:
        findings.append(warning("clock", offset.of(text), ADVICE))
    else:
        findings.append(ok("clock", f"within {TOLERATED_SECONDS:g} s of {text} ({offset.seconds:+.3f} s)"))
    return True, findings


async def _dial(transport: Libp2pTransport, seed: Address) -> str:
    """Empty once it has answered, else why not, in a few words."""
    assert transport.daemon is not None
    if why := await answering((seed.text,), SEED_SECONDS / 2):
        return why
    try:
        async with asyncio.timeout(SEED_SECONDS):
            await transport.daemon.connect(seed.peer, (seed.text,))
    except TimeoutError:
        return f"no answer within {SEED_SECONDS:g} s"
    except Unreachable as error:
        return dial_reason(str(error), seed.text)
    return ""


def _ignore(sender: PeerId, message: Message) -> None:
    pass


async def _answer(sender: PeerId, fetch: Request) -> Fetched:
    return answer_clock(fetch) or Fetched(False, b"", 0, 0, b"", 0)


