"""The rules over the histories of all peers of one run, taken together: the other half of the checker."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgpack

from geomesh_p2p.lab.histories import History, Line, TermPair
from geomesh_p2p.lab.verify_peer import Violation, as_ranges, held_rank, short, within

ANCHOR_PARTS = 16
HASHES = ("payload", "anchor_part", "state")

Entry = tuple[History, Line]
Rank = tuple[TermPair, int]


def is_quorum(present: Iterable[str], view: Iterable[str]) -> bool:
    """A majority of the view; exactly half counts when it holds the view's lowest peer id."""
    voters = set(view)
    there = voters & set(present)
    return 2 * len(there) > len(voters) or (2 * len(there) == len(voters) and bool(voters) and min(voters) in there)


class Run:
    """The histories of one run, by what the global rules ask for."""

    def __init__(self, run: str, histories: Sequence[History]) -> None:
        self.run = run
        self.histories = {history.peer: history for history in histories}
        self.of_kind: dict[str, list[Entry]] = defaultdict(list)
        for history in histories:
            for line in history.lines:
                self.of_kind[line.kind].append((history, line))
        self.commits: dict[int, list[Entry]] = {}  # no round without an entry
        for history, line in self.of_kind["commit"]:
            self.commits.setdefault(line.round, []).append((history, line))
        self.views: dict[int, tuple[str, ...]] = {}
        for _, line in self.of_kind["founding"]:
            self.views.setdefault(0, tuple(line["view"]))
        for _, line in self.of_kind["commit"] + self.of_kind["adopt"]:
            self.views.setdefault(line.round, tuple(line["view"]))
        self.accepts: dict[str, Line] = {}
        for _, line in self.of_kind["accept"]:
            self.accepts.setdefault(line["plan"], line)
        self.attempts: dict[tuple[str, int, TermPair], list[Line]] = defaultdict(list)  # (peer, round, term): plans accepted
        for history, line in self.of_kind["accept"]:
            self.attempts[(history.peer, line.round, line.term)].append(line)
        self.held_plans: dict[tuple[int, str], set[str]] = defaultdict(set)  # (round, seal): plans it was held under
        for _, line in self.of_kind["held"]:
            self.held_plans[(line.round, line["seal"])].add(line["plan"])
        self.held: dict[int, list[tuple[str, Rank, str]]] = defaultdict(list)  # round: (peer, rank, seal)
        for history, line in self.of_kind["held"]:
            self.held[line.round].append((history.peer, line.rank, line["seal"]))
        for history, line in self.of_kind["start"] + self.of_kind["vote"]:
            shown = line["held"]  # durable although the note may have been lost in a crash
            rank = held_rank(shown)
            if rank is not None:
                self.held[int(shown["round"])].append((history.peer, rank, shown["seal"]))

    def site(self, peer: str) -> str:
        history = self.histories.get(peer)
        return history.site if history else peer[-6:]

    def names(self, peers: Iterable[str]) -> str:
        return ", ".join(self.sites(peers)) or "nobody"

    def sites(self, peers: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({self.site(peer) for peer in peers}))

    def unseen(self, peers: Iterable[str]) -> set[str]:
        """Those whose history is not here, or is damaged."""
        return {peer for peer in peers if peer not in self.histories or not self.histories[peer].complete}


Check = Callable[[Run, list[str]], Iterator[Violation]]


# ---------------------------------------------------------------- 1 and 5: one digest, one seal, one anchor a round


def check_digests(run: Run, remarks: list[str]) -> Iterator[Violation]:
    shown: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for history, line in run.of_kind["commit"] + run.of_kind["start"] + run.of_kind["adopt"]:
        if line["digest"]:
            shown[line.round][line["digest"]].append(history.peer)
    for _, line in run.of_kind["founding"]:
        shown[0][line["base"]].append(line["founder"])
    for number, digests in sorted(shown.items()):
        if len(digests) > 1:
            who = "; ".join(f"{short(digest)} by {run.names(peers)}" for digest, peers in sorted(digests.items()))
            yield Violation(5, f"different digests for one round: {who}", run.sites(chain(*digests.values())), number)


def check_seals(run: Run, remarks: list[str]) -> Iterator[Violation]:
    for number, entries in sorted(run.commits.items()):
        seals: dict[str, list[str]] = defaultdict(list)
        for history, line in entries:
            seals[line["seal"]].append(history.peer)
        if len(seals) > 1 and len({line["digest"] for _, line in entries}) == 1:
            who = "; ".join(f"{short(seal)} by {run.names(peers)}" for seal, peers in sorted(seals.items()))
            yield Violation(5, f"one digest committed with different voters: {who}", run.sites(chain(*seals.values())), number)
        for peer in sorted({history.peer for history, _ in entries}):
            own = {line["seal"] for history, line in entries if history.peer == peer}
            if len(own) > 1:
                yield Violation(4, f"{run.site(peer)} committed two updates for one round", (run.site(peer),), number)
        by_seal: dict[str, Entry] = {}
        for history, line in entries:
            first = by_seal.setdefault(line["seal"], (history, line))
            same = all(first[1][key] == line[key] for key in ("digest", "base", "view", "contributors"))
            if not same:
                text = f"{first[0].site} and {history.site} record different contents under one seal {short(line['seal'])}"
                yield Violation(4, text, tuple(sorted({first[0].site, history.site})), number)


def check_chain(run: Run, remarks: list[str]) -> Iterator[Violation]:
    digests = {line.round: line["digest"] for _, line in run.of_kind["adopt"] + run.of_kind["commit"]}
    for _, founding in run.of_kind["founding"]:
        digests[0] = founding["base"]
    for number, entries in sorted(run.commits.items()):
        for history, line in entries:
            if number - 1 in digests and line["base"] != digests[number - 1]:
                before = short(digests[number - 1])
                text = f"the chain is broken: base {short(line['base'])}, but round {number - 1} is {before}"
                yield Violation(2, text, (history.site,), number)
                break


def check_anchors(run: Run, remarks: list[str]) -> Iterator[Violation]:
    """Every hash of one thing after one digest is the same: as recorded, and as contributors said of the base of a round. What
    the peers themselves found and repaired is remarked."""
    seen: dict[tuple[int, str, str], dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))  # peer -> site
    for history, line in run.of_kind["anchor"]:
        seen[(line.round, line["digest"], f"part {line['part']}")][line["hash"]][history.peer] = history.site
    for number, entries in run.commits.items():
        line = entries[0][1]
        for item in line["contributors"]:
            for key, name in (("anchor_part", f"part {(number - 1) % ANCHOR_PARTS}"), ("state", "snapshot")):
                if item.get(key):
                    seen[(number - 1, line["base"], name)][item[key]][item["peer"]] = item["site"]
    for (number, _, name), hashes in sorted(seen.items()):
        if len(hashes) == 1:
            continue
        odd = sorted(hashes.values(), key=lambda peers: (_all_repaired(run, peers, number), -len(peers)))[1:]
        sites = tuple(sorted({site for peers in hashes.values() for site in peers.values()}))
        if all(_all_repaired(run, peers, number) for peers in odd):
            repaired = ", ".join(sorted(site for peers in odd for site in peers.values()))
            remarks.append(f"round {number}: {repaired} had another anchor ({name}), found it out and made it anew")
            continue
        yield Violation(1, f"{' and '.join(sites)} have different anchors after one digest ({name})", sites, number)


def _all_repaired(run: Run, peers: Iterable[str], since: int) -> bool:
    checked = ((history, line) for history, line in run.of_kind["checked"] if line.round >= since)
    return set(peers) <= {history.peer for history, line in checked if line["outcome"] == "repaired"}


# ---------------------------------------------------------------- 3: plans, leaders, votes


def check_plans(run: Run, remarks: list[str]) -> Iterator[Violation]:
    by_rank: dict[tuple[int, TermPair, int], Entry] = {}
    by_plan: dict[str, Entry] = {}
    for history, line in run.of_kind["accept"]:
        first = by_rank.setdefault((line.round, *line.rank), (history, line))
        sites = tuple(sorted({first[0].site, history.site}))
        if first[0].peer != history.peer and first[1]["plan"] != line["plan"]:
            text = f"two plans for attempt {line['attempt']}: {short(first[1]['plan'])} and {short(line['plan'])}"
            yield Violation(3, text, sites, line.round, line.term)
        first = by_plan.setdefault(line["plan"], (history, line))
        if any(first[1][key] != line[key] for key in ("round", "base", "members", "ranges")):
            yield Violation(3, f"plan {short(line['plan'])} is recorded with different contents", sites, line.round, line.term)


def check_leaders(run: Run, remarks: list[str]) -> Iterator[Violation]:
    led = {(history.peer, line.term) for history, line in run.of_kind["leader"]}
    voted = {(history.peer, line.term) for history, line in run.of_kind["vote"]}
    for history, line in run.of_kind["leader"]:
        view = run.views.get(line.round)
        if view is not None and not is_quorum(line["voters"], view):
            text = f"{history.site} led with the votes of {run.names(line['voters'])}, no quorum of {run.names(view)}"
            yield Violation(3, text, (history.site,), line.round, line.term)
        for voter in sorted(set(line["voters"]) - {history.peer} - run.unseen(line["voters"])):
            if (voter, line.term) not in voted:
                text = f"{history.site} counted a vote of {run.site(voter)}, which recorded none"
                yield Violation(3, text, (history.site,), line.round, line.term)
    missing: set[TermPair] = set()
    for history, line in run.of_kind["accept"]:
        candidate = line.term[1]
        if (candidate, line.term) not in led and not run.unseen([candidate]) and line.term not in missing:
            missing.add(line.term)
            text = f"{history.site} accepted a plan of {run.site(candidate)}, which never became leader of that term"
            yield Violation(3, text, (history.site,), line.round, line.term)


# ---------------------------------------------------------------- 4: contributions


def check_contributions(run: Run, remarks: list[str]) -> Iterator[Violation]:
    made: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for history, line in run.of_kind["contribute"]:
        made[(line.round, history.peer)].append(line)
    for number, entries in sorted(run.commits.items()):
        history, line = entries[0]
        expected = recompute_digest(line)
        if expected is not None and expected != line["digest"]:
            text = f"digest {short(line['digest'])} is not that of the contents recorded ({short(expected)})"
            yield Violation(4, text, (history.site,), number)
        names = [item["site"] for item in line["contributors"]]
        if names != sorted(set(names)):
            yield Violation(4, f"contributors are not in site order, each once: {names}", (history.site,), number)
        for item in line["contributors"]:
            own = made.get((number, item["peer"]), [])
            if not own and not run.unseen([item["peer"]]):
                yield Violation(4, f"{item['site']} is credited but recorded no contribution", (item["site"],), number)
            wrong = {key for key in ("payload", "tokens", "ranges") if own and all(one[key] != item[key] for one in own)}
            if own and not any(all(one[key] == item[key] for key in ("payload", "tokens", "ranges")) for one in own):
                what = ", ".join(sorted(wrong)) or "combination of payload, tokens and ranges"
                yield Violation(4, f"{item['site']} is credited with other {what} than it recorded", (item["site"],), number)
        yield from _within_plan(run, line, number)
        for peer in sorted(run.unseen([item["peer"] for item in line["contributors"]])):
            remarks.append(f"round {number}: the history of contributor {run.site(peer)} is not here or damaged")


def _within_plan(run: Run, line: Line, number: int) -> Iterator[Violation]:
    """Contributors are members of the plan under which the update was held, with no more than the ranges it gave them."""
    for plan in sorted(run.held_plans[(number, line["seal"])]):
        accepted = run.accepts.get(plan)
        if accepted is None:
            continue
        for item in line["contributors"]:
            if item["peer"] not in accepted["members"]:
                yield Violation(4, f"{item['site']} is credited but no member of plan {short(plan)}", (item["site"],), number)
            elif not within(as_ranges(item["ranges"]), as_ranges(accepted["ranges"].get(item["site"], ()))):
                yield Violation(6, f"{item['site']} is credited with ranges its plan did not give it", (item["site"],), number)


def recompute_digest(line: Line) -> str | None:
    """The digest of a committed update from the fields that it covers; None if they are not all recorded."""
    if any(key not in line.fields for key in ("topology", "shares", "body")):
        return None
    contributors = [
        [item["site"], item["tokens"], item["ranges"], *(bytes.fromhex(item.get(key, "")) for key in HASHES)]
        for item in line["contributors"]
    ]
    base, body = bytes.fromhex(line["base"]), bytes.fromhex(line["body"])
    content: list[Any] = ["round", base, line.round, line["topology"], line["shares"], contributors, body]
    if (rollback := line.get("rollback")) is not None:
        content = ["rollback", base, line.round, [rollback["to_round"], rollback["tokens"]]]
    return hashlib.blake2b(msgpack.packb(content, use_bin_type=True), digest_size=32).hexdigest()


# ---------------------------------------------------------------- 5: quorums and views


def check_commit_quorums(run: Run, remarks: list[str]) -> Iterator[Violation]:
    for number, entries in sorted(run.commits.items()):
        view = run.views.get(number - 1)
        if view is None:
            remarks.append(f"round {number}: the view before it is not recorded here, its quorum cannot be counted")
            continue
        unseen = run.unseen(view)
        for seal in sorted({line["seal"] for _, line in entries}):
            holders: dict[Rank, set[str]] = defaultdict(set)
            for peer, rank, held in run.held[number]:
                if held == seal:
                    holders[rank].add(peer)
            led = [entry for entry in entries if entry[1].get("committed_by") == "leader" and entry[1]["seal"] == seal]
            for term, attempt in sorted(newest_attempt(run, *entry) for entry in led) or [((0, ""), 0)]:
                counted = [rank for rank in holders if not led or (rank[0] == term and rank[1] >= attempt)]
                groups = [set[str](), *(holders[rank] for rank in counted)]
                if any(is_quorum(peers, view) for peers in groups):
                    continue
                if any(is_quorum(peers | unseen, view) for peers in groups):
                    remarks.append(f"round {number}: its quorum needs {run.names(unseen)}, whose histories are not here")
                    continue
                best = max(groups, key=lambda peers: len(peers))
                text = f"committed {short(seal)} with held records of {run.names(best)}: no quorum of {run.names(view)}"
                yield Violation(5, text, run.sites(history.peer for history, _ in entries), number, term if led else None)


def newest_attempt(run: Run, leader: History, commit: Line) -> Rank:
    """A leader counts the reports of its own term alone, and of the newest attempt that it had opened: (term, attempt)."""
    accepted = run.attempts[(leader.peer, commit.round, commit.term)]
    return commit.term, max((int(line["attempt"]) for line in accepted if line.number < commit.number), default=0)


def check_held_again(run: Run, remarks: list[str]) -> Iterator[Violation]:
    """A leader whose votes carried held records of the next round has nothing else held for that round in its term."""
    votes: dict[TermPair, list[Entry]] = defaultdict(list)
    for history, line in run.of_kind["vote"]:
        votes[line.term].append((history, line))
    for history, line in run.of_kind["leader"]:
        following = line.round + 1
        shown = [
            (rank, vote["held"]["seal"])
            for voter, vote in votes[line.term]
            if voter.peer in line["voters"] and (rank := held_rank(vote["held"])) and int(vote["held"]["round"]) == following
        ]
        if not shown:
            continue
        newest = max(rank for rank, _ in shown)
        allowed = {seal for rank, seal in shown if rank == newest}
        for peer, rank, seal in run.held[following]:
            if rank[0] == line.term and seal not in allowed:
                carried = short(sorted(allowed)[0])
                text = f"{run.site(peer)} held {short(seal)} in the term of {history.site}, whose votes carried {carried}"
                yield Violation(5, text, run.sites([peer, history.peer]), following, line.term)


def check_views(run: Run, remarks: list[str]) -> Iterator[Violation]:
    for number, entries in sorted(run.commits.items()):
        history, line = entries[0]
        before, now = run.views.get(number - 1), list(line["view"])
        if not now or len(set(now)) != len(now):
            yield Violation(5, f"the view is empty or names a voter twice: {now}", (history.site,), number)
        if before is None:
            continue
        newcomers = set(now) - set(before)
        strangers = newcomers - {item["peer"] for item in line["contributors"]}
        if strangers:
            yield Violation(5, "became voters without contributing", run.sites(strangers), number)
        if number > 1 and len(newcomers) > len(before):
            yield Violation(5, f"{len(newcomers)} newcomers became voters beside {len(before)}", run.sites(newcomers), number)


def check_plan_quorums(run: Run, remarks: list[str]) -> Iterator[Violation]:
    for plan, line in sorted(run.accepts.items(), key=lambda item: (item[1].round, item[0])):
        view = run.views.get(line.round - 1)
        if view is not None and not is_quorum(line["members"], view):
            text = f"the members of plan {short(plan)}, {run.names(line['members'])}, hold no quorum of {run.names(view)}"
            yield Violation(5, text, run.sites(line["members"]), line.round, line.term)


# ---------------------------------------------------------------- 6: ranges and tokens


class Credited:
    """Disjoint half-open ranges, merged, with the round that credited each position found by overlap alone."""

    def __init__(self) -> None:
        self.merged: list[tuple[int, int]] = []

    def overlap(self, ranges: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
        for start, stop in ranges:
            for low, high in self.merged:
                if start < high and low < stop:
                    return (max(start, low), min(stop, high))
        return None

    def add(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.merged, *ranges]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
            else:
                merged.append((start, stop))
        self.merged = merged


def check_ranges(run: Run, remarks: list[str]) -> Iterator[Violation]:
    credited = Credited()
    plans: dict[int, list[tuple[str, Line]]] = defaultdict(list)
    for plan, line in run.accepts.items():
        plans[line.round].append((plan, line))
    for number in sorted(set(run.commits) | set(plans)):
        for plan, line in sorted(plans[number]):
            given = Credited()
            for site, value in sorted(line["ranges"].items()):
                ranges = as_ranges(value)
                again, twice = credited.overlap(ranges), given.overlap(ranges)
                if again is not None:
                    text = f"plan {short(plan)} gave {site} positions {again} that the log had credited"
                    yield Violation(6, text, (site,), number, line.term)
                if twice is not None:
                    text = f"plan {short(plan)} gave positions {twice} to {site} and to another"
                    yield Violation(6, text, (site,), number, line.term)
                given.add(ranges)
        for _, line in run.commits.get(number, [])[:1]:
            for item in line["contributors"]:
                ranges = as_ranges(item["ranges"])
                lap = credited.overlap(ranges)
                if lap is not None:
                    yield Violation(6, f"positions {lap} are credited again, to {item['site']}", (item["site"],), number)
                credited.add(ranges)
    if credited.merged and len(credited.merged) > 1:
        gaps = sum(after[0] - before[1] for before, after in zip(credited.merged, credited.merged[1:], strict=False))
        remarks.append(f"{gaps} positions before {credited.merged[-1][1]} are not credited (lost and not yet handed out again)")


def check_tokens(run: Run, remarks: list[str]) -> Iterator[Violation]:
    lengths = {history.sequence_length for history in run.histories.values() if history.sequence_length}
    if len(lengths) > 1:
        yield Violation(6, f"the peers name different sequence lengths: {sorted(lengths)}")
        return
    length = lengths.pop() if lengths else None
    for number, entries in sorted(run.commits.items()):
        for item in entries[0][1]["contributors"]:
            ranges, tokens = as_ranges(item["ranges"]), int(item["tokens"])
            sequences = sum(stop - start for start, stop in ranges)
            if tokens <= 0 or any(stop <= start for start, stop in ranges):
                text = f"{item['site']} is credited with {tokens} tokens on ranges {ranges}"
                yield Violation(6, text, (item["site"],), number)
                continue
            if length is None and tokens % sequences == 0:
                length = tokens // sequences  # not recorded: the first contribution sets what the others must fit
            if length is None or tokens != sequences * length:
                text = f"{item['site']} is credited with {tokens} tokens for {sequences} sequences of {length} tokens"
                yield Violation(6, text, (item["site"],), number)


def check_rollbacks(run: Run, remarks: list[str]) -> Iterator[Violation]:
    """A rollback says what the model had been trained on after the round that it goes back to."""
    tokens = {0: 0}
    for number, entries in sorted(run.commits.items()):
        line = entries[0][1]
        if (rollback := line.get("rollback")) is None:
            if number - 1 in tokens:
                tokens[number] = tokens[number - 1] + sum(int(item["tokens"]) for item in line["contributors"])
            continue
        to_round, said = int(rollback["to_round"]), int(rollback["tokens"])
        if not 0 <= to_round < number - 1 or line["contributors"]:
            yield Violation(4, f"goes back to round {to_round} with {len(line['contributors'])} contributors", (), number)
        if tokens.get(to_round, said) != said:
            yield Violation(6, f"goes back to round {to_round} with {said} tokens, which had {tokens[to_round]}", (), number)
        tokens[number] = said
        remarks.append(f"round {number} went back to the state after round {to_round}")


CHECKS: tuple[Check, ...] = (
    check_digests,
    check_seals,
    check_chain,
    check_anchors,
    check_plans,
    check_leaders,
    check_contributions,
    check_commit_quorums,
    check_held_again,
    check_views,
    check_plan_quorums,
    check_ranges,
    check_tokens,
    check_rollbacks,
)
