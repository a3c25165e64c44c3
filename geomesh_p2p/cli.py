"""The command `geomesh`: verbs, configuration, exit codes. Imports nothing heavy until a verb runs.

Results go to stdout, logs to stderr. Every key of a run file is also a flag: `--section.key value`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from geomesh_p2p import __version__, environment
from geomesh_p2p.errors import ConfigError, GeoMeshError, Interrupted, of_os_error

if TYPE_CHECKING:
    from geomesh_p2p.core.findings import Finding
    from geomesh_p2p.loading import Resolved, SiteFile

KEY_FLAG = re.compile(r"--([a-z0-9_]+\.[a-z0-9_.]+)(?:=(.*))?", re.DOTALL)
Verb = Callable[[argparse.Namespace], int]
CHOICE_ITEMS = 2000
BOOLEANS = ("true", "false", "yes", "no", "1", "0")


def main(argv: Sequence[str] | None = None, make_engine: Any = None) -> int:
    """Runs one verb and returns its exit code. `make_engine` (a peer.MakeEngine) gives `peer` another engine than torch's."""
    try:
        if refusal := environment.python_refusal():
            raise ConfigError(refusal)
        words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
        args, unknown = _parser().parse_known_args(words)
        if unknown:
            near = _similar_flag(unknown[0], args.parser)
            raise ConfigError(f"unknown argument {unknown[0]}{near}: see {args.parser.prog} --help")
        args.overrides, args.make_engine = overrides, make_engine
        verb: Verb = args.run_verb
        code = verb(args)
        sys.stdout.flush()
        return code
    except GeoMeshError as error:
        for line in str(error).splitlines():                      # several: what is found before a start is said all at once
            print(f"geomesh: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        return stopped.exit_code if isinstance(stopped, Interrupted) else 130
    except BrokenPipeError:                                       # the reader of our results has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if (known := of_os_error(error)) is None:
            traceback.print_exc()
            return 1
        print(f"geomesh: {known}", file=sys.stderr)
        return known.exit_code
    except Exception:
        traceback.print_exc()
        return 1


def run(make_engine: Any = None) -> NoReturn:
    """`main` as a process of its own. It ends with the verb: taking the libraries down piece by piece, as the interpreter does
    at its own end, can take many seconds on a busy host, and nothing is left to be done in them."""
    code = main(make_engine=make_engine)
    atexit._run_exitfuncs()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--section.key value` (or =value; a boolean needs none) out of `argv`: what is left, and key to text."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        match = KEY_FLAG.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        key, value = match.groups()
        if value is None:
            boolean = _is_boolean(key)
            if words and (words[0].lower() in BOOLEANS if boolean else not words[0].startswith("--")):
                value = words.pop(0)
            elif boolean:
                value = "true"
            else:
                raise ConfigError(f"--{key} needs a value")
        overrides[key] = value
    return rest, overrides


def _is_boolean(key: str) -> bool:
    from geomesh_p2p.loading import run_keys

    field = run_keys().get(key)
    return field is not None and field.annotation is bool


# ---------------------------------------------------------------- verbs


def _mesh(args: argparse.Namespace) -> int:
    from geomesh_p2p.loading import check_sites, load_sites

    resolved, sites = _resolve(args), load_sites(*args.sites)
    for warning in check_sites(resolved.config, sites):
        print(f"geomesh: {warning}", file=sys.stderr)
    from geomesh_p2p.engine.documents import files

    if resolved.config.dataset.paths:
        files(resolved.config.dataset)
    if any(site.config.device.name.startswith("cuda") for site in sites):
        from geomesh_p2p.engine.device import choose_device

        for site in sites:
            choose_device(site.config.device.name, str(site.path))
    from geomesh_p2p.lab.mesh import run_mesh

    return run_mesh(Path(args.run), resolved.config, sites, args.overrides, args.log_format)


def _peer(args: argparse.Namespace) -> int:
    from geomesh_p2p.loading import SiteFile, load_site
    from geomesh_p2p.seed_files import is_file, read_address

    site = SiteFile(Path(args.site), load_site(args.site))
    seeds: dict[str, str] = {}
    if args.bootstrap:
        reach_seconds = _resolve(args, site).config.net.reach_seconds
        seeds = {read_address(text, reach_seconds): text for text in args.bootstrap}
        args.overrides["net.seeds"] = json.dumps(list(seeds))
    config = _resolve(args, site).config
    folder = Path(config.run.folder) / config.run.id / site.name
    if (args.first or args.fork_from is not None) and not site.config.site.trains:
        raise ConfigError(f"{site.path}: site.trains = false: an observer cannot found a run: start it with --bootstrap")
    if args.fork_from is not None:
        from geomesh_p2p.engine.forking import finish

        if config.run.fresh:
            raise ConfigError("--fork-from goes on from this site's folder, and --run.fresh moves it aside: give one of them")
        if args.first:
            raise ConfigError("--fork-from goes on from the run in this site's folder, --first begins anew: give one of them")
        finish(folder)
    holds_a_run = (folder / "founding.record").exists()
    if args.fork_from is not None and not holds_a_run:
        raise ConfigError(f"--fork-from {args.fork_from}: {folder} holds no run: start this where a peer of the old run was")
    if not args.first and not config.net.seeds and not holds_a_run:
        raise ConfigError("net.seeds is empty: give an address with --bootstrap, or pass --first to start a new run")
    from geomesh_p2p.peer import PeerOptions, run_peer, torch_engine

    options = PeerOptions(
        first=args.first,
        fork_from=args.fork_from,
        control_fd_in=args.control_fd_in,
        control_fd_out=args.control_fd_out,
        log_format=args.log_format,
        address_file=args.address_file,
        seed_files={address: text for address, text in seeds.items() if is_file(text)},
    )
    return run_peer(config, site.config, options, args.make_engine or torch_engine)


def _plan(args: argparse.Namespace) -> int:
    _check_plan(args)
    if args.what_if is not None:
        from geomesh_p2p.lab.bench.whatif import Question, answer

        question = Question(args.what_if, args.tokens, args.parameters, args.egress_usd_per_gb)
        print(answer(_resolve(args).config, question, as_json=args.json))
        return 0
    from geomesh_p2p.lab.whatif import what_if
    from geomesh_p2p.loading import check_sites, load_sites

    config, sites = _resolve(args).config, load_sites(*args.sites)
    for warning in check_sites(config, sites):
        print(f"geomesh: {warning}", file=sys.stderr)
    print(what_if(config, sites, as_json=args.json))
    return 0


def _check_plan(args: argparse.Namespace) -> None:
    if (args.what_if is None) == (args.sites is None):
        raise ConfigError("plan: give either --sites (site files) or --what-if (a setting): whose devices and links are they?")
    extras = {"tokens": args.tokens, "parameters": args.parameters, "egress-usd-per-gb": args.egress_usd_per_gb}
    for flag, value in extras.items():
        if value is not None and args.what_if is None:
            raise ConfigError(f"--{flag} {value:g}: goes with --what-if SETTING only")


def _profile(args: argparse.Namespace) -> int:
    config = _resolve(args).config
    from geomesh_p2p.lab.artifacts import profile

    for point in profile(config, args.device, args.out):
        rate = point.batch * config.model.sequence_length / point.seconds
        print(f"batch {point.batch:>5}  {point.seconds:10.4f} s a step  {rate:12,.0f} tokens/s")
    print(f"geomesh: profile in {args.out}: name it in a site file as device.profile", file=sys.stderr)
    return 0


def _eval(args: argparse.Namespace) -> int:
    from geomesh_p2p.lab.artifacts import evaluate

    if args.lm_eval_task is not None and not args.choice:
        raise ConfigError("--lm-eval-task: writes the items of --choice: give --choice as well")
    found = evaluate(args.folder, args.device, args.choice, args.lm_eval_task)
    if args.json:
        print(json.dumps(found))
        return 0
    print("round {round}: perplexity {perplexity:.3f} on {tokens:,} tokens, digest {digest}".format(**found))
    text = "{accuracy:.1%} +- {stderr:.1%} of {items:,} items"
    if choice := found.get("choice"):
        print(f"continuation choice: {text.format(**choice)} (25% by chance)")
        if written := choice.get("task"):
            print(f"{written['folder']}: a task for lm-evaluation-harness; expect {text.format(**written)}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from geomesh_p2p.lab.artifacts import export

    found = export(args.folder, args.out)
    print("{folder}: round {round}, {parameters:,} parameters, digest {digest}".format(**found))
    return 0


def _bench(args: argparse.Namespace) -> int:
    names = ("setting", "methods", "seeds", "tokens", "vary", "engine", "choice", "out", "store", "processes")
    asked: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.report_only and (given := [*(asked.keys() - {"out"}), *args.overrides]):
        flags = ", ".join(f"--{name}" for name in sorted(given))
        raise ConfigError(f"--report-only goes with --out and --check alone: leave out {flags}")
    from geomesh_p2p.lab.bench.claims import checked
    from geomesh_p2p.lab.bench.command import Request, bench, table
    from geomesh_p2p.lab.bench.report.pages import again

    request = Request(**asked)
    report = again(request.out) if args.report_only else bench(_resolve(args).config, request)
    print(table(report))
    failures = () if args.report_only else report.get("failed", ())
    holds = True
    if args.check:
        said, holds = checked(report)
        print("", *said, sep="\n")
    if failures:
        return int(failures[0]["exit_code"])
    return 0 if holds else 1


def _history_verify(args: argparse.Namespace) -> int:
    from geomesh_p2p.lab.verify import main as verify

    return verify(args.folder)


def _doctor(args: argparse.Namespace) -> int:
    from geomesh_p2p.doctor import doctor, exit_code, report

    def tell(found: list[Finding]) -> None:
        if found and not args.json:
            print(report(found, False), flush=True)

    logging.basicConfig(format="geomesh: %(message)s", level=logging.WARNING)
    logging.getLogger("geomesh.doctor").setLevel(logging.INFO)
    findings = doctor(args.run, args.site, args.bootstrap or (), args.overrides, os.environ, tell)
    if args.json:
        print(report(findings, True))
    return exit_code(findings)


def _status(args: argparse.Namespace) -> int:
    from geomesh_p2p.lab.status import status

    try:
        return status(_call(args), args.json, args.watch)
    except KeyboardInterrupt:
        return 0 if args.watch else 130


def _drain(args: argparse.Namespace) -> int:
    from geomesh_p2p.lab.status import order

    return order(_call(args), "drain", args.site)


def _stop(args: argparse.Namespace) -> int:
    from geomesh_p2p.lab.status import order

    return order(_call(args), "stop")


def _rollback(args: argparse.Namespace) -> int:
    if not 0 <= args.to_round < 2**63:
        raise ConfigError(f"--to-round {args.to_round}: no run has such a round; 0 is the state that it began with")
    if args.to_round == 0 and not args.yes:
        raise ConfigError("--to-round 0 undoes everything that this run was trained: add --yes if you mean it")
    from geomesh_p2p.lab.status import rollback

    return rollback(_call(args), args.to_round)


def _call(args: argparse.Namespace) -> Any:
    from geomesh_p2p.lab.status import Call
    from geomesh_p2p.seed_files import read_peer_address

    return Call(read_peer_address(args.address, "ADDR"), args.identity, args.join_secret_file, args.address)


def _config_show(args: argparse.Namespace) -> int:
    from geomesh_p2p.loading import SiteFile, load_site

    resolved = _resolve(args, SiteFile(Path(args.site), load_site(args.site)) if args.site else None)
    values = resolved.config.model_dump(mode="json")
    if args.json:
        print(json.dumps({"config": values, "origins": resolved.origins}, indent=2))
        return 0
    for section, table in values.items():
        print(f"[{section}]")
        for key, value in table.items():
            text = "# not set" if value is None else json.dumps(value)
            print(f"{f'{key} = {text}':<44} # {resolved.origins[f'{section}.{key}']}")
        print()
    return 0


def _resolve(args: argparse.Namespace, site: SiteFile | None = None) -> Resolved:
    from geomesh_p2p.loading import resolve_run

    return resolve_run(args.run, args.overrides, os.environ, site)


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    """One plain line on an error; the help ends with texts that are made only then, such as a run file's keys."""

    more_help: Sequence[Callable[[], str]] = ()

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see {self.prog} --help")

    def format_help(self) -> str:
        return super().format_help() + "".join(f"\n{text()}\n" for text in self.more_help)


def _methods_help() -> str:
    from geomesh_p2p.lab.bench.methods import help_text

    return help_text()


def _keys_help() -> str:
    from pydantic_core import PydanticUndefined

    from geomesh_p2p.loading import run_keys

    lines = ["keys of the run file (flag > GEOMESH_SECTION__KEY > file > default):"]
    for key, field in run_keys().items():
        default = "" if field.default is PydanticUndefined else f" [{json.dumps(field.default)}]"
        lines.append(f"  --{key}{default}")
        if field.description:
            lines.append(f"      {field.description}")
    return "\n".join(lines)


def _parser() -> _Parser:
    parser = _Parser(prog="geomesh", description="Train one language model on GPUs in many places, over the internet.")
    parser.add_argument("--version", action="version", version=f"geomesh {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def add(name: str, run_verb: Verb, text: str, group: Any = verbs, keys: bool = True) -> _Parser:
        verb: _Parser = group.add_parser(name, help=text, description=text)
        verb.set_defaults(run_verb=run_verb, parser=verb)
        verb.more_help = (_keys_help,) if keys else ()
        if keys:
            verb.add_argument("run", metavar="RUN.toml", help="run file: what is trained, and how")
        return verb

    mesh = add("mesh", _mesh, "Run all sites on this machine, one process each, and report.")
    _add_sites(mesh)
    _add_log_format(mesh)

    peer = add("peer", _peer, "Run one peer in the foreground.")
    peer.add_argument("--site", required=True, metavar="FILE", help="site file: where this peer runs")
    start = peer.add_mutually_exclusive_group()
    start.add_argument("--first", action="store_true", help="found the run")
    about_fork = "found a new run from the state after ROUND of the run in this site's folder, which is moved aside"
    peer.add_argument("--fork-from", type=int, metavar="ROUND", help=about_fork)
    about_seeds = "peers of the run (also by giving the option several times); @FILE: waits for that file, and reads it again"
    start.add_argument("--bootstrap", nargs="+", action="extend", metavar="ADDR", help=about_seeds)
    peer.add_argument("--address-file", default="", metavar="FILE", help="write this peer's address there once it listens")
    peer.add_argument("--control-fd-in", type=int, metavar="N", help=argparse.SUPPRESS)
    peer.add_argument("--control-fd-out", type=int, metavar="N", help=argparse.SUPPRESS)
    _add_log_format(peer)

    plan = add("plan", _plan, "Print what each site would be assigned, and why; trains nothing.")
    _add_sites(plan, required=False)
    about_setting = "instead of --sites: the sites and links of a setting that ships (paper, azure8, ...) or of a .toml file"
    plan.add_argument("--what-if", metavar="SETTING", help=about_setting)
    about_tokens = "with --what-if: how long so many tokens take (default: inner.total_tokens; with --parameters 20 each)"
    plan.add_argument("--tokens", type=_count, metavar="N", help=about_tokens)
    about_parameters = "with --what-if: a model of this size, under the setting's rates as written"
    plan.add_argument("--parameters", type=_count, metavar="P", help=about_parameters)
    about_price = "with --what-if: price of what leaves a site's region"
    plan.add_argument("--egress-usd-per-gb", type=_price, metavar="X", help=about_price)
    plan.add_argument("--json", action="store_true")

    benchmark = add("bench", _bench, "Train with GeoMesh and with the methods it is measured against, and compare.")
    benchmark.more_help = (_methods_help, _keys_help)
    benchmark.add_argument("--setting", metavar="NAME", help="one that ships, or a .toml file (default: paper)")
    benchmark.add_argument("--methods", nargs="+", action="extend", metavar="NAME", help="what is compared: see below")
    benchmark.add_argument("--seeds", nargs="+", type=int, action="extend", metavar="N", help="default: 1")
    benchmark.add_argument("--tokens", type=_count, metavar="N", help="of each training (default: 5,000,000)")
    about_vary = "section.key=value,value,...: each method with each of them"
    benchmark.add_argument("--vary", nargs="+", action="extend", metavar="KEY=VALUES", help=about_vary)
    about_choice = "also ask each model N items of continuation choice on held-out text"
    benchmark.add_argument("--choice", type=_none_or_more, metavar="N", help=about_choice)
    about_engine = "virtual: real gradients, simulated clock (default); real: processes and sockets, emulated devices and links"
    benchmark.add_argument("--engine", choices=("virtual", "real"), help=about_engine)
    benchmark.add_argument("--processes", type=_count, metavar="N", help="trainings at a time (default: one a core)")
    benchmark.add_argument("--out", type=Path, metavar="DIR", help="default: runs/bench")
    about_store = "where what is trained is kept, for several comparisons (default: DIR/trajectories)"
    benchmark.add_argument("--store", type=Path, metavar="FOLDER", help=about_store)
    about_check = "exit code 1 unless GeoMesh keeps what it claims against diloco (time, idle shares, perplexity)"
    benchmark.add_argument("--check", action="store_true", help=about_check)
    about_report = "train nothing: report.md and report.html anew from DIR/report.json; with --out and --check alone"
    benchmark.add_argument("--report-only", action="store_true", help=about_report)

    profile = add("profile", _profile, "Measure this device on the run's model; writes a profile for a site file.")
    profile.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    profile.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE")

    evaluation = add("eval", _eval, "Validation perplexity of a run's model.", keys=False)
    evaluation.add_argument("folder", type=Path, metavar="DIR", help="a run's folder, or a peer's folder")
    evaluation.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    evaluation.add_argument("--json", action="store_true")
    about_choice = f"continuation choice over N items of held-out text as well (without N: {CHOICE_ITEMS:,}); docs/quality.md"
    evaluation.add_argument("--choice", type=_count, nargs="?", const=CHOICE_ITEMS, default=0, metavar="N", help=about_choice)
    about_task = "write the items there as a task for lm-evaluation-harness"
    evaluation.add_argument("--lm-eval-task", type=Path, metavar="FOLDER", help=about_task)

    export = add("export", _export, "Write a run's model as a Hugging Face folder.", keys=False)
    export.add_argument("folder", type=Path, metavar="DIR", help="a run's folder, or a peer's folder")
    export.add_argument("--out", type=Path, required=True, metavar="DIR")

    history = verbs.add_parser("history", help="Work on recorded histories.").add_subparsers(metavar="VERB", required=True)
    verify = add("verify", _history_verify, "Check the protocol's invariants from recorded histories.", history, keys=False)
    verify.add_argument("folder", nargs="+", type=Path, metavar="DIR", help="a run's folder, or its peers' folders")

    doctor = add("doctor", _doctor, "Check this host, and what a peer would meet here; joins nothing.", keys=False)
    doctor.add_argument("run", nargs="?", metavar="RUN.toml", help="run file: checks data, memory and disk for its model too")
    doctor.add_argument("--site", metavar="FILE", help="site file: where the peer would run")
    doctor.add_argument("--bootstrap", nargs="+", action="extend", metavar="ADDR", help="peers of the run, or @FILE with one")
    doctor.add_argument("--json", action="store_true")

    status = add("status", _status, "What a run's peers do now; from any machine that may join it.", keys=False)
    _add_call(status)
    status.add_argument("--json", action="store_true", help="one JSON object (with --watch: one a line, for ever)")
    status.add_argument("--watch", action="store_true", help="look again every two seconds, until Ctrl-C")

    drain = add("drain", _drain, "Let one site leave its run in good order, from any machine that may join it.", keys=False)
    _add_call(drain)
    drain.add_argument("site", metavar="SITE", help="its name")

    stop = add("stop", _stop, "Stop a run, everywhere after the same round and with all saved.", keys=False)
    _add_call(stop)

    back = add("rollback", _rollback, "Take a whole run back to the state after an earlier round, on purpose.", keys=False)
    _add_call(back)
    back.add_argument("--to-round", type=int, required=True, metavar="ROUND", help="0: the weights it began with")
    back.add_argument("--yes", action="store_true", help="needed for round 0, which undoes everything")

    config = verbs.add_parser("config", help="Work on configuration.").add_subparsers(metavar="VERB", required=True)
    show = add("show", _config_show, "Print the resolved configuration with the origin of each value.", config)
    show.add_argument("--site", metavar="FILE", help="with the overrides of this site file")
    show.add_argument("--json", action="store_true")
    return parser


def _add_call(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("address", metavar="ADDR", help="any peer of the run, as it prints it; or @FILE with its address")
    verb.add_argument("--join-secret-file", type=Path, metavar="FILE", help="the run's secret, if it has one")
    verb.add_argument("--identity", type=Path, metavar="FILE", help="a key of your own, made if missing, that net.allow lists")


def _count(text: str) -> int:
    """300000000, 300_000_000 or 3e8."""
    try:
        value = Decimal(text)
        if 1 <= value < 10**18 and value % 1 == 0:
            return int(value)
    except InvalidOperation:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 on")


def _none_or_more(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0 on")
    return int(text)


def _price(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: give US dollars for 1e9 bytes, 0 or more")
    return value


def _add_sites(verb: argparse.ArgumentParser, required: bool = True) -> None:
    help = "site files, or a folder of them"
    verb.add_argument("--sites", nargs="+", action="extend", required=required, metavar="PATH", help=help)


def _add_log_format(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--log-format", choices=("console", "json"), default="console", help="form of the log on stderr")


def _similar_flag(word: str, parser: argparse.ArgumentParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    match = difflib.get_close_matches(word, flags, n=1)
    return f" (did you mean {match[0]}?)" if match else ""


if __name__ == "__main__":
    run()
