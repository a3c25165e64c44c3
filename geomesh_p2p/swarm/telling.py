"""What a session tells its observers: the replica's notes, and whatever of members, phases and leaders has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geomesh_p2p.core import observations as obs
from geomesh_p2p.core.agreement import Agreement, AgreementBook
from geomesh_p2p.core.canonical import Digest
from geomesh_p2p.core.replica import Replica
from geomesh_p2p.core.types import PeerId, Plan, Term, Update
from geomesh_p2p.swarm.assembly import Assembly
from geomesh_p2p.swarm.links import LinkTable
from geomesh_p2p.swarm.membership import Membership


class Teller:
    """Says each thing once. `observe` takes one observation."""

    def __init__(self, replica: Replica, membership: Membership, links: LinkTable, observe: Callable[[Any], None]) -> None:
        self._replica, self._membership, self._links, self._observe = replica, membership, links, observe
        self._agreement: tuple[Digest, tuple[tuple[PeerId, Agreement], ...]] = (b"", ())
        self._agreement_book = AgreementBook()
        self._seen_members: tuple[tuple[str, ...], str] = ((), "")
        self._seen_phase: obs.PhaseChanged | None = None
        self._seen_leader: tuple[Term, PeerId] | None = None

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "discard":
                self._observe(obs.RoundDiscarded(fields["round"], fields["attempt"], fields["reason"]))
            case "blame":
                text = f"{fields['peer_site']} sent {fields['reason']}: refused by rule, it is left out for a while"
                self._observe(obs.Warned("refused_by_rule", text))
            case "unproved":
                self._observe(obs.Warned("unproved_claim", _unproved_in_words(fields)))
            case "join":
                self._observe(obs.PeerJoined(fields["peer_id"], fields["peer_site"]))
            case "mismatch":
                self._observe(obs.Warned("digest_mismatch", self._mismatch_in_words(fields)))
            case "lost":
                self._observe(obs.PeerLost(*(fields[name] for name in ("peer_id", "peer_site", "seconds", "left"))))

    def _mismatch_in_words(self, fields: dict[str, Any]) -> str:
        sites = ", ".join(sorted(self._membership.site_of(peer) for peer in fields["odd"]))
        what = f"part {fields['part']} of the anchor" if fields["of"] == "anchor_part" else "anchor or outer momentum"
        what += f" after round {fields['round']}"
        if fields["tied"]:
            return f"{sites}: they differ in {what}; each makes its own anew before it trains again"
        return f"{sites}: another {what} than the most; made anew before it trains again"

    def assembled(self, assembly: Assembly) -> None:
        """What this peer saw of the contributions counts once their update is committed."""
        self._agreement = assembly.body_digest, assembly.agreement

    def committed(self, update: Update) -> None:
        """Who agreed with the update, as far as this peer saw the contributions."""
        body, scores = self._agreement
        if body != update.body or not scores:
            return
        site_of, book = self._membership.site_of, self._agreement_book
        flagged = book.add({site_of(peer): score for peer, score in scores})
        book.keep({site_of(peer) for peer in (*update.voters, *(c.peer for c in update.contributors))})
        shares = {site: (s.with_update, s.with_others) for site, s in sorted(book.scores.items())}
        self._observe(
            obs.Agreed(update.round, {k: v[0] for k, v in shares.items()}, {k: v[1] for k, v in shares.items()})
        )
        for site, score in flagged.items():
            self._observe(
                obs.Warned(
                    "disagrees",
                    f"{site} sends signs that agree with the others' in {score.with_others:.1%} of all places (chance is 50%) "
                    "while theirs agree more: its data or device may be at fault, or it lies",
                )
            )

    def first_plan(self, plan: Plan) -> None:
        """A run that goes on with other peers than those who had it says so."""
        view, sites = self._replica.view, self._replica.s.sites
        gone = sites(peer for peer in view if peer not in plan.peers)
        if gone and plan.round > 1:
            new = sites(peer for peer in plan.peers if peer not in view)
            text = f"the run goes on without {gone}{' and with ' + new if new else ''}: what they had begun is read by others"
            self._observe(obs.Warned("other_members", text))

    def members(self, now: float) -> None:
        members = self._membership
        sites = tuple(sorted([members.me.site, *(a.site for a in members.live(now))]))
        leader = members.site_of(self._replica.leader) if self._replica.leader else ""
        if (sites, leader) != self._seen_members:
            self._seen_members = (sites, leader)
            self._observe(obs.MembersChanged(sites, leader, self._replica.term.number))

    def links(self) -> None:
        for link in self._links.links_from(self._membership.me.peer):
            site = self._membership.site_of(link.target)
            self._observe(obs.LinkMeasured(site, link.rtt_seconds, link.bytes_per_second))

    def phase(self) -> None:
        replica = self._replica
        seen = obs.PhaseChanged(replica.phase, replica.round, replica.waiting_for, lacking=replica.lacking)
        if seen != self._seen_phase:
            self._seen_phase = seen
            self._observe(seen)
        leads = (replica.term, replica.leader)
        if leads != self._seen_leader:
            self._seen_leader = leads
            site = self._membership.site_of(replica.leader) if replica.leader else ""
            self._observe(obs.LeaderChanged(replica.term.number, site, replica.is_leader))


def _unproved_in_words(fields: dict[str, Any]) -> str:
    return (
        f"{fields['peer_site']} claims round {fields['claimed']} and shows nothing that follows round {fields['round']} "
        "of this peer's log: what it says of rounds is not believed until it does"
    )
