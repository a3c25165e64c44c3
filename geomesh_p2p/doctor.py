"""All checks of a host before it takes part: those of `geomesh doctor`, and those that every peer makes at its start.

Each check ends with findings, never with an exception; all of them run at the same time, and what is not done in time says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import psutil

from geomesh_p2p import environment
from geomesh_p2p.addresses import address_problems
from geomesh_p2p.config import NetSection, RunConfig, SiteConfig
from geomesh_p2p.core.findings import Finding, fatal, fatals, ok, refused, warning
from geomesh_p2p.errors import ConfigError, GeoMeshError, TemporaryError, UnreachableError
from geomesh_p2p.loading import DEFAULT, SiteFile, inspect_run, inspect_site
from geomesh_p2p.seed_files import read_address
from geomesh_p2p.swarm import preflight as network
from geomesh_p2p.swarm.offload import in_own_thread

log = logging.getLogger("geomesh")
progress = logging.getLogger("geomesh.doctor")
LIMIT_SECONDS = 9.0
"""For all checks together, imports and the start of the interpreter included."""
LEAST_SECONDS = 7.0              # for the checks, however slow the start was
LEAST_GROUP = 8
"""Group size that is reckoned with if the run does not say that it needs more."""
TELL_SECONDS = 3.0               # then whoever waits hears for what
START_SECONDS = 60.0             # a peer's start may have to load a tokenizer from the hub
PORT_PATIENCE_SECONDS = 3.0      # a peer's former self may be about to go

PASSING = (UnreachableError.exit_code, TemporaryError.exit_code)

Check = Callable[[], Awaitable[list[Finding]]]
Tell = Callable[[list[Finding]], None]


# ---------------------------------------------------------------- geomesh doctor


def doctor(
    run_file: str | None,
    site_file: str | None,
    bootstrap: Sequence[str],
    overrides: Mapping[str, str],
    env: Mapping[str, str],
    tell: Tell = lambda found: None,
) -> list[Finding]:
    """Everything that can be found out without joining, within ten seconds. `bootstrap`: addresses, or @FILE. `tell` gets the
    findings of each group of checks as soon as it is done."""
    seeds, unread = _addresses(bootstrap)
    run, site, findings = _configuration(run_file, site_file, seeds, overrides, env)
    tell(findings + unread)
    return findings + unread + asyncio.run(_examine(run, site, run_file is not None, tell))


def report(findings: Sequence[Finding], as_json: bool) -> str:
    if as_json:
        fields = ("check", "level", "text", "next_step", "exit_code")
        return json.dumps([{name: getattr(finding, name) for name in fields} for finding in findings], indent=2)
    return "\n".join(f"{finding.level:<7}  {finding.check:<17}  {finding.line}" for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """That of the first fatal one, of those first that do not pass by themselves: a supervisor goes by it."""
    codes = [finding.exit_code for finding in fatals(findings)]
    return next((code for code in codes if code not in PASSING), next(iter(codes), 0))


def _addresses(bootstrap: Sequence[str]) -> tuple[list[str], list[Finding]]:
    """What is given, and what is in the files given; a finding for each file that has none."""
    seeds, unread = list[str](), list[Finding]()
    for text in bootstrap:
        try:
            seeds.append(read_address(text, 0.0))
        except GeoMeshError as error:
            unread.append(refused("seed", str(error), error.exit_code))
    return seeds, unread


def _configuration(
    run_file: str | None,
    site_file: str | None,
    bootstrap: Sequence[str],
    overrides: Mapping[str, str],
    env: Mapping[str, str],
) -> tuple[RunConfig | None, SiteConfig | None, list[Finding]]:
    """What could be read, and all that is wrong with it."""
    problems: list[str] = []
    site: SiteConfig | None = None
    if site_file is not None:
        try:
            site, wrong = inspect_site(site_file)
            problems += wrong
        except ConfigError as error:
            problems.append(str(error))
    run: RunConfig | None = None
    overrides = {**overrides, **({"net.seeds": json.dumps(list(bootstrap))} if bootstrap else {})}
    layer = SiteFile(Path(site_file), site) if site is not None and site_file is not None else None
    try:
        resolved, wrong = inspect_run(run_file, overrides, env, layer)
        if run_file is None and resolved is not None and resolved.origins["net.listen"] == DEFAULT:
            wrong = [text for text in wrong if "loopback" not in text]  # the run file may say where to listen
        problems += wrong
        run = resolved.config if resolved is not None else None
    except ConfigError as error:
        problems.append(str(error))
    problems = list(dict.fromkeys(problems))                      # a site's own tables are read with both files
    findings = [refused("configuration", problem, ConfigError.exit_code) for problem in problems]
    if not findings and (run_file or site_file):
        together = f"{run_file} and {site_file} fit together" if run_file and site_file else f"{run_file or site_file} is sound"
        findings = [ok("configuration", together)]
    return run, site, findings


def _dialable(net: NetSection) -> NetSection:
    """What of `net` can be tried although something is wrong with its addresses."""
    default = NetSection()
    seeds = tuple(seed for seed in net.seeds if not any(address_problems(default.listen, "", (seed,))) or _elsewhere(seed))
    listen = default.listen if any(address_problems(net.listen, "/ip4/203.0.113.5/tcp/1", ())) else net.listen
    return net.model_copy(update={"seeds": seeds, "listen": listen, "announce": ""})


def _elsewhere(seed: str) -> bool:
    return not any(address_problems("/ip4/203.0.113.5/tcp/1", "", (seed,)))


async def _examine(run: RunConfig | None, site: SiteConfig | None, with_model: bool, tell: Tell) -> list[Finding]:
    checks: list[tuple[str, Check]] = [("python", _blocking(_host))]
    scratch = tempfile.TemporaryDirectory(prefix="geomesh-doctor-")
    if run is not None:
        wrong = {key for keys, _ in address_problems(run.net.listen, run.net.announce, run.net.seeds) for key in keys}
        known = run.model_copy(update={"net": _dialable(run.net)}) if wrong else run
        place, peers = _folder(run, site), group_size(run)
        showable = not wrong & {"net.listen", "net.announce"}
        # Tried once, for both: a try takes the port for a moment, and so does the daemon that meets the seeds.
        port = asyncio.ensure_future(in_own_thread(lambda: network.listen_port(known.net)))

        async def addresses() -> list[Finding]:
            found = [await port] if known.net.listen == run.net.listen else []
            folder = place if with_model else None                # without a run's name it has none
            return found + await in_own_thread(lambda: _network(known, folder, peers, showable))

        async def seeds() -> list[Finding]:
            return await network.meet_seeds(known.net, Path(scratch.name), (await port).level == "ok", showable)

        checks.append(("ports and addresses", addresses))
        checks.append(("seeds", seeds))
        if with_model:
            who = site or SiteConfig.model_validate({"site": {"name": "none"}})
            checks.append(("data, memory, disk", _blocking(lambda: _engine(known, who, place, peers))))
    try:
        limit = max(LEAST_SECONDS, LIMIT_SECONDS - (time.time() - psutil.Process().create_time()))
        return await _all(checks, limit, tell)
    finally:
        scratch.cleanup()


# ---------------------------------------------------------------- a peer's start


async def preflight(run: RunConfig, site: SiteConfig, folder: Path, with_model: bool) -> None:
    """The same checks, less those that joining makes anyway. Warnings are logged; raises GeoMeshError, a line for each fatal
    finding, with the exit code that `exit_code` picks."""
    network.raise_open_files()
    peers = group_size(run)
    checks: list[tuple[str, Check]] = [
        ("python", _blocking(_host)),
        ("ports and addresses", _blocking(lambda: _at_start(run, folder, peers))),
    ]
    if with_model:
        checks.append(("data, memory, disk", _blocking(lambda: _engine(run, site, folder, peers))))
    findings = await _all(checks, START_SECONDS)
    for finding in findings:
        if finding.level == "warning" and finding.check != "save.keep_bytes":  # told once, with sizes that are measured then
            log.warning("%s", finding.line)
    if found := fatals(findings):
        error = GeoMeshError("\n".join(finding.line for finding in found))
        error.exit_code = exit_code(found)
        raise error


# ---------------------------------------------------------------- the checks, by what they need


def group_size(run: RunConfig) -> int:
    return max(LEAST_GROUP, run.run.min_peers, len(run.planner.fixed))


def _folder(run: RunConfig, site: SiteConfig | None) -> Path:
    return Path(run.run.folder) / run.run.id / (site.site.name if site is not None else "none")


def _host() -> list[Finding]:
    findings = [_python(), *_packages()]
    if environment.has_uvloop():
        findings.append(ok("event loop", "uvloop"))
    else:
        text = "uvloop is missing: asyncio's own event loop is used, which is slower"
        findings.append(warning("event loop", text, "pip install uvloop"))
    if not sys.platform.startswith(("linux", "darwin")):
        text = f"{sys.platform} is not supported: the libp2p daemon has no build for it"
        findings.append(fatal("system", text, "use Linux or macOS (on Windows: WSL 2)", ConfigError.exit_code))
    return findings


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if refusal := environment.python_refusal():
        return refused("python", refusal, ConfigError.exit_code)
    if sys.version_info[:2] > environment.NEWEST_TRIED_PYTHON:
        newest = ".".join(map(str, environment.NEWEST_TRIED_PYTHON))
        return warning("python", f"{version} is newer than this release knows", f"take {newest} if something fails to install")
    return ok("python", version)


def _packages() -> list[Finding]:
    try:
        found = environment.conflicts()
    except metadata.PackageNotFoundError:
        text = f"{environment.PACKAGE} is not installed here as a package, so its needs were not checked"
        return [warning("packages", text, "pip install it")]
    except ImportError:
        text = "the module packaging is missing, so versions were not compared"
        return [warning("packages", text, "pip install packaging")]
    advice = "install GeoMesh into a virtual environment of its own (make setup, or pip install -c constraints.txt)"
    if found:
        return [warning("packages", text, advice) for text in found]
    return [ok("packages", "all that is needed is there, in versions that go together")]


def _network(
    run: RunConfig, folder: Path | None, peers: int, showable: bool = True, patience_seconds: float = 0.0
) -> list[Finding]:
    """But for the port to listen on and the daemon. `showable`: the addresses to listen on and to announce are in order."""
    net = run.net
    return [
        network.metrics_port(run.metrics),
        *(network.announced(net) if showable else []),
        network.open_files(peers, net.streams),
        *network.join_secret(net.join_secret_file),
        *([network.identity(folder / "identity.key", patience_seconds)] if folder is not None else []),
    ]


def _at_start(run: RunConfig, folder: Path, peers: int) -> list[Finding]:
    port = network.listen_port(run.net, PORT_PATIENCE_SECONDS)
    return [port, network.daemon_binary(), *_network(run, folder, peers, patience_seconds=PORT_PATIENCE_SECONDS)]


def _engine(run: RunConfig, site: SiteConfig, folder: Path, peers: int) -> list[Finding]:
    from geomesh_p2p.engine.preflight import check_host

    return check_host(run, site, folder, peers)


# ---------------------------------------------------------------- running them


def _blocking(check: Callable[[], list[Finding]]) -> Check:
    async def run() -> list[Finding]:
        return await in_own_thread(check)

    return run


async def _all(
    checks: Sequence[tuple[str, Check]],
    limit_seconds: float,
    tell: Tell = lambda found: None,
    tell_seconds: float = TELL_SECONDS,
) -> list[Finding]:
    """The findings of all checks in their order; `tell` gets them as they come. One that takes too long is left to itself."""
    names = [name for name, _ in checks]
    tasks = {asyncio.ensure_future(check()): name for name, check in checks}
    found, open_tasks, began, told = dict[str, list[Finding]](), set(tasks), time.monotonic(), False
    while open_tasks and (left := limit_seconds - (time.monotonic() - began)) > 0:
        quiet = began + tell_seconds - time.monotonic()
        if not told and quiet <= 0:
            told = True
            names_left = "; ".join(tasks[task] for task in tasks if task in open_tasks)
            progress.info("still checking: %s (at most %.0f s more)", names_left, left)
        done, open_tasks = await asyncio.wait(
            open_tasks, timeout=left if told else min(left, max(quiet, 0.0)), return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            found[tasks[task]] = _came_to(tasks[task], task)
            tell(found[tasks[task]])
    for task in open_tasks:
        task.cancel()
        text = f"not done after {limit_seconds:g} s"
        advice = "try again when the host is less busy, or look into what it reads"
        found[tasks[task]] = [warning(tasks[task], text, advice)]
        tell(found[tasks[task]])
    await asyncio.gather(*tasks, return_exceptions=True)
    return [finding for name in names for finding in found[name]]


def _came_to(name: str, task: asyncio.Future[list[Finding]]) -> list[Finding]:
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, GeoMeshError):
        return [refused(name, str(error), error.exit_code)]
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or error}"
        return [fatal(name, text, "see to that file and its rights", ConfigError.exit_code)]
    raise error
