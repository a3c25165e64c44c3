"""`geomesh status`, `drain`, `stop`, `rollback`: a run as its peers tell it, and orders to it, from the machine of whoever may
join it.

The peer that is asked knows all the others; those that can be dialled are then asked themselves, as only they know where their
own time goes. What the others say is told of the rest.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from geomesh_p2p.errors import GeoMeshError, TemporaryError
from geomesh_p2p.lab.table import number, percent, size
from geomesh_p2p.swarm.identity import read_secret
from geomesh_p2p.swarm.visitor import Visitor

LOOK_SECONDS = 2.0
WARNINGS_SHOWN = 5
STANDS_SECONDS = 60.0            # and five rounds: a run that commits nothing for so long has a trouble of its own
GONE = ("lost", "left")
LONGEST_WAITING = 24              # that is told within the table
NO_TERMINAL_COLUMNS = 1000
ROUNDS_TO_ROLL_BACK = 3          # the round going on is committed first, and one more may be while the order is on its way


@dataclass(frozen=True)
class Call:
    """Whom a visitor calls on, and as whom."""

    address: str
    identity: Path | None = None
    join_secret_file: Path | None = None
    given: str = ""                  # the address as it was given, which may be @FILE

    def again(self, verb: str, *words: str) -> str:
        """The command line for another call like this one."""
        options = (("--join-secret-file", self.join_secret_file), ("--identity", self.identity))
        flags = [word for flag, path in options if path is not None for word in (flag, str(path))]
        return shlex.join(["geomesh", verb, self.given or self.address, *words, *flags])

    def visitor(self) -> Visitor:
        secret = read_secret(self.join_secret_file, "--join-secret-file") if self.join_secret_file else b""
        return Visitor(self.identity, secret)


def status(call: Call, as_json: bool, watch: bool) -> int:
    """0; raises GeoMeshError if the peer at the address cannot be reached (3) or refuses (5)."""
    return asyncio.run(_status(call, as_json, watch))


def order(call: Call, verb: str, site: str = "") -> int:
    """0 once the run has taken the order; raises as status()."""

    async def give() -> str:
        async with call.visitor() as visitor:
            return await visitor.order(call.address, verb, site)

    print(asyncio.run(give()))
    return 0


def rollback(call: Call, to_round: int) -> int:
    """0 once the run stands at the state after `to_round` again; raises as status(), TemporaryError if there was nobody to give
    the order to, or it was lost. What it undoes is said before, how to undo it afterwards."""

    async def give() -> str:
        async with call.visitor() as visitor:
            asked = await visitor.status(call.address)
            before = asked["round"]
            if to_round < before:
                print(undoing(asked, to_round), flush=True)
            print(await visitor.order(call.address, "rollback", round=to_round), flush=True)
            round, moved_at = before, time.monotonic()
            while True:
                now = await visitor.status(call.address)
                if now["round"] != round:
                    round, moved_at = now["round"], time.monotonic()
                limit = STANDS_SECONDS + 5 * (now["round_seconds"] or 0.0)
                if time.monotonic() - moved_at > limit:
                    waits = f" ({now['waiting_for']})" if now["waiting_for"] else ""
                    raise TemporaryError(
                        f"nothing was committed for {limit:.0f} s{waits}; the order stands for as long as the leader does: "
                        "see geomesh status, and give it again if the leader has changed"
                    )
                done = now["rolled_back"]
                if done is not None and done["round"] > before and done["to_round"] == to_round:
                    last = done["round"] - 1
                    undo = call.again("rollback", "--to-round", str(last))
                    return (
                        f"round {done['round']} is committed: the model is that after round {to_round} again\n"
                        f"undo: {undo}, while the snapshot of round {last} is kept"
                    )
                if now["round"] > before + ROUNDS_TO_ROLL_BACK:
                    raise TemporaryError(f"at round {now['round']} the run has not gone back: its leader was lost, try again")
                await asyncio.sleep(LOOK_SECONDS / 4)

    print(asyncio.run(give()))
    return 0


def undoing(asked: dict[str, Any], to_round: int) -> str:
    """What going back to `to_round` undoes, as far as the peer that was asked knows."""
    rounds, now = asked["round"] - to_round, asked["perplexity"]
    many = f"{rounds} rounds ({to_round + 1} to {asked['round']})" if rounds > 1 else f"round {asked['round']}"
    parts = [f"undoes {many}, and the round going on"]
    if now is not None:
        parts.append(f"perplexity {now:.2f} after round {asked['perplexity_round']}")
        measured = [one for one in asked.get("perplexities", ()) if one["round"] <= to_round]
        then = max(measured, key=lambda one: int(one["round"]), default=None)
        unknown = f"that of round {to_round} is not known"
        parts.append("{perplexity:.2f} after round {round}".format_map(then) if then else unknown)
    return "; ".join(parts)


async def _status(call: Call, as_json: bool, watch: bool) -> int:
    async with call.visitor() as visitor:
        if watch and not as_json:
            return await _watch(visitor, call.address)
        while True:
            run = await look(visitor, call.address)
            if as_json:
                print(json.dumps(run), flush=True)
            else:
                _console().print(shown(run))
            if not watch:
                return 0
            await asyncio.sleep(LOOK_SECONDS)


async def _watch(visitor: Visitor, address: str) -> int:
    """Until Ctrl-C. A peer that does not answer any more is said; it may be back at the next look."""
    run, trouble = await look(visitor, address), ""
    with Live(console=_console(), auto_refresh=False) as live:
        while True:
            live.update(Group(shown(run), Text(trouble, style="red")) if trouble else shown(run), refresh=True)
            await asyncio.sleep(LOOK_SECONDS)
            try:
                run, trouble = await look(visitor, address), ""
            except GeoMeshError as error:
                trouble = str(error)


def _console() -> Console:
    """A table is cut to the width of a terminal, and to none where there is no terminal."""
    return Console(file=sys.stdout, soft_wrap=True, width=None if sys.stdout.isatty() else NO_TERMINAL_COLUMNS)


async def look(visitor: Visitor, address: str) -> dict[str, Any]:
    """`asked` as it answered, and `peers`: every peer of the run by site, with `told_by` (itself, or the peer asked)."""
    asked = await visitor.status(address)
    others = [other for other in asked["others"] if other["phase"] is not None]
    answers = await asyncio.gather(*(_ask_directly(visitor, other) for other in others))
    limit = float(asked.get("heartbeat_limit_seconds", math.inf))
    peers = [{**_seen_by_others(asked, (asked["site"], asked["peer"]), answers), **_own(asked), "lost": False}]
    for other, answer in zip(others, answers, strict=True):
        seen = {key: value for key, value in other.items() if key != "addresses"}
        if answer:
            peers.append({**seen, **_own(answer), "lost": False})
        else:
            peers.append({**seen, **_silent(seen, limit), "told_by": asked["site"]})
    return {"asked": asked, "peers": sorted(peers, key=lambda peer: str(peer["site"]))}


async def _ask_directly(visitor: Visitor, other: dict[str, Any]) -> dict[str, Any] | None:
    for address in other["addresses"]:
        if "/p2p-circuit" not in address:
            try:
                return await visitor.status(address if "/p2p/" in address else f"{address}/p2p/{other['peer']}")
            except GeoMeshError:
                continue
    return None


def _silent(seen: dict[str, Any], limit_seconds: float) -> dict[str, Any]:
    """What is to be said of a peer instead of what it said last, once it was not heard for longer than the limit."""
    if seen["heard_seconds_ago"] <= limit_seconds:
        return {"lost": False}
    lost = not seen["leaving"]
    return {"lost": lost, "phase": GONE[0 if lost else 1], "ready": False}


def _own(answer: dict[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in answer.items() if key not in ("others", "plan", "warnings")}
    return {**told, "told_by": answer["site"]}


def _seen_by_others(asked: dict[str, Any], who: tuple[str, str], answers: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """What any other peer knows of the one that was asked: its device, its pace."""
    for answer in answers:
        for other in answer["others"] if answer else ():
            if (other["site"], other["peer"]) == who:
                kept = ("device", "trains", "ready", "leaving", "step_batch", "step_seconds")
                return {key: other[key] for key in kept}
    return {}


# ---------------------------------------------------------------- as text


def shown(run: dict[str, Any]) -> Group:
    asked = run["asked"]
    parts: list[Any] = [Text(headline(asked)), _peers(run["peers"], asked)]
    long = [peer for peer in run["peers"] if len(peer.get("waiting_for") or "") > LONGEST_WAITING and peer["phase"] not in GONE]
    parts += [Text(f"{peer['site']} waits for {peer['waiting_for']}") for peer in long]
    if asked["others"]:
        parts.append(_links(asked))
    warnings = asked["warnings"][-WARNINGS_SHOWN:]
    parts += [Text(f"{asked['site']}, {one['seconds_ago']:.0f} s ago: {one['text']}") for one in warnings]
    return Group(*parts)


def headline(asked: dict[str, Any]) -> str:
    """The run in a line: round, pace, quality, leader, end."""
    parts = [
        f"run {asked.get('run_id', '')} ({(asked['run'] or '?')[:12]})",
        f"round {asked['round']} of {asked['goal']}",
        f"{asked['tokens']:,} tokens",
        f"leader {asked['leader'] or 'none'} (term {asked['term']})",
    ]
    if asked["perplexity"] is not None:
        parts.append(f"perplexity {asked['perplexity']:.2f} after round {asked['perplexity_round']}")
    if asked["round_seconds"] is not None:
        parts.append(f"{asked['round_seconds']:.1f} s a round")
    if asked["committed_seconds_ago"] is not None:
        parts.append(f"last commit {asked['committed_seconds_ago']:.0f} s ago")
    if asked["rolled_back"] is not None:
        parts.append("round {round} has the state of round {to_round}".format_map(asked["rolled_back"]))
    if asked["eta_seconds"]:
        parts.append(f"the end in about {asked['eta_seconds'] / 60:.0f} min")
    return "; ".join(parts)


def _peers(peers: list[dict[str, Any]], asked: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("site", "phase", "round", "batch", "steps", "a step", "straggler idle", "WAN idle", "device", "told by"):
        justify: Any = "left" if name in ("site", "phase", "device", "told by") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    members = {member["site"]: member for member in (asked["plan"] or {}).get("members", ())}
    for peer in peers:
        gone = peer["phase"] in GONE
        mine = {} if gone else members.get(peer["site"], {})
        table.add_row(
            f"{peer['site']}{' *' if peer['site'] == asked['leader'] else ''}",
            phase_in_words(peer),
            str(peer["round"]),
            str(mine.get("batch", "-")),
            str(mine.get("inner_steps", "-")),
            "-" if gone or not peer.get("step_seconds") else f"{peer['step_seconds']:.2f} s",
            percent(peer.get("straggler_idle_share")),
            percent(peer.get("wan_idle_share")),
            str(peer.get("device") or "-"),
            str(peer["told_by"]),
        )
    return table


def phase_in_words(peer: dict[str, Any]) -> str:
    phase = str(peer["phase"])
    if phase in GONE:
        return f"{phase} (not heard for {peer['heard_seconds_ago']:.0f} s)"
    waiting = peer.get("waiting_for") or ""
    leaving = ", leaving" if peer.get("leaving") and phase != "leaving" else ""
    return f"{phase.replace('_', ' ')}{f' ({waiting})' if 0 < len(waiting) <= LONGEST_WAITING else ''}{leaving}"


def _links(asked: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in (f"from {asked['site']} to", "round trip", "rate", "heard"):
        table.add_column(name, justify="left" if name.startswith("from") else "right")
    for other in asked["others"]:
        rate = other["bytes_per_second"]
        table.add_row(
            f"{other['site']}{' (relayed)' if other['relayed'] else ''}",
            f"{number(1000 * other['rtt_seconds'], '.1f')} ms",
            "-" if not rate else f"{size(rate)}/s",
            f"{other['heard_seconds_ago']:.1f} s ago",
        )
    return table
