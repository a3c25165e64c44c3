"""The invariants, checked from the histories that the replicas recorded: for the simulator's own use, and small."""

from __future__ import annotations

from typing import Any

from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.log import Credited, is_quorum
from geomesh_p2p.core.types import NO_TERM, Founding, PeerId, Rules, Term

History = list[tuple[str, dict[str, Any]]]


class Violation(AssertionError):
    """Something that must never happen has happened."""


def check_histories(histories: dict[PeerId, History], founding: Founding, rules: Rules) -> None:
    """Raises Violation with the first broken invariant."""
    commits: dict[int, dict[str, Any]] = {}
    views: dict[int, tuple[PeerId, ...]] = {0: (founding.founder,)}
    leaders: dict[Term, PeerId] = {}
    holders: dict[tuple[int, Digest], set[PeerId]] = {}
    contributions: dict[tuple[PeerId, Digest], Digest] = {}
    accepts: list[tuple[PeerId, dict[str, Any]]] = []
    for peer, history in histories.items():
        seen_term, plans = NO_TERM, {}
        for kind, f in history:
            term = f.get("term")
            if kind in ("term", "accept", "leader") or (kind == "vote"):
                if term < seen_term:
                    raise Violation(f"{peer} went back from term {seen_term} to {term}")
                seen_term = term
            if kind == "leader" and leaders.setdefault(term, peer) != peer:
                raise Violation(f"{peer} and {leaders[term]} both lead term {term}")
            if kind == "accept":
                key = (f["round"], term, f["attempt"])
                if plans.setdefault(key, f["plan"]) != f["plan"]:
                    raise Violation(f"{peer} accepted two plans for {key}")
                accepts.append((peer, f))
            if kind == "contribute" and contributions.setdefault((peer, f["plan"]), f["payload"]) != f["payload"]:
                raise Violation(f"{peer} made two contributions for one plan of round {f['round']}")
            if kind == "held":
                holders.setdefault((f["round"], f["seal"]), set()).add(peer)
            if kind == "start" and f["held"] is not None:        # it ended between the save and the note
                holders.setdefault((f["held"]["round"], f["held"]["seal"]), set()).add(peer)
            if kind == "commit":
                known = commits.setdefault(f["round"], f)
                if known["seal"] != f["seal"]:
                    raise Violation(f"two updates were committed for round {f['round']}")
                views[f["round"]] = f["view"]
    credited = Credited()
    for round in sorted(commits):
        f = commits[round]
        for c in f["contributors"]:
            for r in c["ranges"]:
                try:
                    credited.add(r)
                except ValueError as error:
                    raise Violation(f"round {round}: {error}") from None
        if round - 1 in views and not is_quorum(holders.get((round, f["seal"]), ()), views[round - 1]):
            raise Violation(f"round {round} was committed, but no quorum of {views[round - 1]} held it")
    for peer, f in accepts:
        view = views.get(f["round"] - 1)
        if view is not None and not is_quorum(f["members"], view):
            raise Violation(f"{peer} accepted a plan for round {f['round']} whose members are no quorum of {view}")
