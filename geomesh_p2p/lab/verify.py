"""`geomesh history verify`: the protocol's invariants, checked from the peers' recorded histories alone.

Nothing of the code under check is used: the rules for quorums, views, ranges and digests are written out again here, and
the only input is history.jsonl. Invariants, by number:

1  the same (round, digest) has the same anchor everywhere
2  a peer accepts, contributes and commits only on the digest of its own last commit
3  one plan per (round, term, attempt); terms and votes only rise; one leader a term, elected by a quorum of the view
4  an update is the mean of exactly the contributions it lists, each of which its owner recorded
5  no two updates for a round, by anyone; a commit stands on a quorum's held records; views change only as the rule says
6  ranges are credited once; tokens are ranges times sequence length
7  no accepted plan stays open beyond its deadline

A rule that needs a history which is not there is not held against anybody: a remark says what could not be seen.

Peers may write while they are read. A peer's note is on disk before anything follows from it, so what one history lacks for
a line in another, as it was first read, is there when all are read again: a violation counts if both readings have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab.histories import HISTORY_FILE, History, Reading, read_histories
from geomesh_p2p.lab.verify_peer import Violation, Walker
from geomesh_p2p.lab.verify_run import CHECKS, Run

MAX_PRINTED = 20


@dataclass
class Report:
    """What was found, and what could not be seen."""

    violations: list[Violation] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: int = 0
    peers: int = 0
    rounds: int = 0


def check(reading: Reading) -> Report:
    """All checks over all runs found in `reading`. Violations are ordered by round, then invariant."""
    report = Report(remarks=list(reading.remarks))
    report.violations += [Violation(0, text) for text in reading.malformed]
    runs: dict[str, list[History]] = defaultdict(list)
    for history in _joined(reading.histories):
        runs[history.run].append(history)
    found: list[Violation] = []
    for name, histories in sorted(runs.items()):
        run = Run(name, histories)
        seals = {line["seal"] for _, line in run.of_kind["commit"]}
        for history in histories:
            found += Walker(history, seals).run()
        for rule in CHECKS:
            found += rule(run, report.remarks)
        report.rounds += len(run.commits)
    found.sort(key=lambda violation: (violation.round is None, violation.round or 0, violation.invariant))
    report.violations += dict.fromkeys(found)
    report.remarks = list(dict.fromkeys(report.remarks))
    report.runs, report.peers = len(runs), sum(map(len, runs.values()))
    return report


def _joined(histories: Iterable[History]) -> list[History]:
    """One history for each (run, peer id), in case an identity's lines are spread over files."""
    joined: dict[tuple[str, str], History] = {}
    for history in histories:
        known = joined.setdefault((history.run, history.peer), history)
        if known is not history:
            lines = sorted([*known.lines, *history.lines], key=lambda line: line.time)
            length = known.sequence_length or history.sequence_length
            merged = History(known.run, known.peer, known.site, lines, known.complete and history.complete, length)
            joined[(history.run, history.peer)] = merged
    return list(joined.values())


def check_folders(folders: Sequence[str | Path]) -> Report:
    """All checks over the histories below `folders`, whose peers may still be running."""
    report = check(read_histories(folders))
    if not report.violations:
        return report
    first = {violation.place for violation in report.violations}
    again = check(read_histories(folders))
    again.violations = [violation for violation in again.violations if violation.place in first]
    return again


def main(folders: Sequence[str | Path], say: Callable[[str], object] = print) -> int:
    """Check the histories below `folders` and say what was found: 0 if nothing is broken, else 1.

    Raises ConfigError if a folder does not exist or no history is there.
    """
    for folder in folders:
        if not Path(folder).exists():
            raise ConfigError(f"{folder} does not exist: give the folder of a run or of a peer")
    report = check_folders(folders)
    if not report.peers and not report.violations:
        named = ", ".join(map(str, folders))
        raise ConfigError(f"no {HISTORY_FILE} with lines of a run below {named}: give the folder of a run or of a peer")
    for remark in report.remarks:
        say(f"remark: {remark}")
    for violation in report.violations[:MAX_PRINTED]:
        say(f"violation: {violation}")
    if len(report.violations) > MAX_PRINTED:
        say(f"... and {len(report.violations) - MAX_PRINTED} more")
    said = f"{report.peers} peers, {report.rounds} committed rounds" + (f" of {report.runs} runs" if report.runs > 1 else "")
    say(f"{said}: " + (f"{len(report.violations)} violations" if report.violations else "no violation of the invariants"))
    return 1 if report.violations else 0
