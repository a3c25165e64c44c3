"""The rules that a model showed to be needed, one switch each: tests switch one off and must then find a fault.

`Rules.on(name)` guards each rule where it is applied; the three marked with the room that applies them are not the
replica's own.
"""

from __future__ import annotations

RULES: dict[str, str] = {
    "pair_terms": "A term is the pair (number, candidate), so that it has one leader by construction.",
    "saved_terms": "A term is on disk before it is used: before a vote for it, a plan or a report under it.",
    "found_once": "Round 0's view is its founder alone; everybody else is a joiner. (peer: who founds)",
    "higher_term": "A leader that hears of a higher term, from whomever, steps down and stands again above it.",
    "plan_has_quorum": "The members of every plan and every attempt contain a quorum of the view.",
    "parts_agree": "An update whose reduced parts list different contributions is held by nobody. (swarm: exchange)",
    "held_survives": "No vote, time-out, discard or restart deletes a held record.",
    "newest_attempt": "The leader commits only the newest attempt that it opened.",
    "count_view": "Held reports for round r count over the view of r-1; newcomers in the plan of r do not count for r.",
    "ranges_within": "Work is reused only if its ranges are within those that the new plan gives its owner.",
    "no_retrain": "A restarted member never trains again for a plan that it had accepted.",
    "held_again": "A new leader has its predecessor's held update held again under its own term before it commits it.",
    "stop_lower_terms": "On seeing a higher term a peer stops sending contributions, parts and held reports of lower ones.",
    "identity_unit": "If a peer's state is lost or old, it takes a new identity. (peer: opening its folder)",
    "elected_by_view": "Who commits a round that another may have committed before leads its voters only if they elect it.",
    "wait_quorum": "A leader needs the votes of a quorum of the whole newest view, however few are back.",
}
