"""The dashboards, as Python: writes dashboards/*.json, which Grafana reads. Run it after a change here (needs the `dev` extra).

    python deploy/grafana/build.py            # writes the files
    python deploy/grafana/build.py --check    # exit 1 if a file is not what this would write

The builders are those of Grafana's own SDK for the version that docker-compose.yml pins, so that a field it does not know
cannot be written. Every panel has a description of one sentence, which Grafana shows behind the panel's (i).
"""

from __future__ import annotations

import sys
from pathlib import Path

from panels import ACTIVITIES, BAD, GOOD, PHASES, PLAIN, WARN, Bars, Dashboard, Lines, Matrix, Number, Phases, Query, Row, Table

FOLDER = Path(__file__).parent / "dashboards"
THIS = 'site=~"$site"'                    # one site, or those chosen
SITE = f"{{{THIS}}}"


def share_of(phase: str, by: str = "") -> str:
    """The share of `phase` in the time of committed rounds, over all peers or, of the chosen sites, by a label."""
    per, chosen = (f" by ({by}) ", THIS) if by else ("", "")
    part = f'{{phase="{phase}"{"," if chosen else ""}{chosen}}}'
    whole = f"{{{chosen}}}"
    return f"sum{per}(rate(geomesh_seconds_total{part}[$window])) / sum{per}(rate(geomesh_seconds_total{whole}[$window]))"


def sent(window: str, function: str = "rate") -> str:
    """Bytes of both kinds that the chosen sites sent."""
    kinds = (f'geomesh_{kind}_bytes_total{{direction="sent",{THIS}}}' for kind in ("payload", "overhead"))
    return " + ".join(f"{function}({series}[{window}])" for series in kinds)


def a_round(phase: str, labels: str = "") -> str:
    """Seconds of `phase` in a round, averaged over the peers that `labels` choose."""
    chosen = f'{{phase="{phase}"{"," if labels else ""}{labels}}}'
    return (
        f"sum(rate(geomesh_seconds_total{chosen}[$window])) / "
        f"sum(rate(geomesh_rounds_committed_total{{{labels}}}[$window]))"
    )


def of_process(metric: str) -> str:
    """A metric of the process, which has no label `site`, with that of the peer in it."""
    return f"{metric} * on (instance) group_left (site) (geomesh_is_leader{SITE} * 0 + 1)"


def or_none(expression: str) -> str:
    """Zero, where nothing of the kind has happened yet: an empty panel would look broken."""
    return f"{expression} or vector(0)"


ACTIVITY = " or ".join(
    f'{place} * (geomesh_phase{{phase="{name}",{THIS}}} == 1)' for place, name in enumerate(ACTIVITIES, 1)
)
NO_REASON = 'label_replace(vector(0), "reason", "none", "", "")'
IDLE_STRAGGLER = ((None, GOOD), (0.02, WARN), (0.10, BAD))
IDLE_WAN = ((None, GOOD), (0.12, WARN), (0.30, BAD))

RUN = Dashboard(
    "geomesh-run",
    "GeoMesh: run",
    "Is it training, how fast, and what does it wait for?",
    (
        Row("Is it training?", (
            Number("Round", "The newest round that any peer has committed.", (Query("max(geomesh_round)", "round"),)),
            Number("Members", "Sites that are known and heard now, by the peer that knows most.",
                   (Query("max(geomesh_members)", "members"),), limits=((None, BAD), (2, GOOD))),
            Number("Since the last commit", "How long ago the peer that is furthest committed a round.",
                   (Query("min(geomesh_round_age_seconds)", "age"),), unit="s", decimals=0),
            Number("Digests", "Whether every peer has the same bits: one digest that differs is one too many.",
                   (Query("sum(geomesh_digest_mismatches_total)", "mismatches"),), limits=((None, GOOD), (1, BAD)),
                   texts=(("0", "equal", GOOD),)),
            Number("Straggler idle", "Share of all peers' time that is spent waiting for slower peers.",
                   (Query(share_of("straggler_idle"), "share"),), unit="percentunit", decimals=1, limits=IDLE_STRAGGLER),
            Number("WAN idle", "Share of all peers' time that is spent waiting for bytes.",
                   (Query(share_of("wan_idle"), "share"),), unit="percentunit", decimals=1, limits=IDLE_WAN),
            Number("Tokens", "Tokens trained by all peers since the run was founded.",
                   (Query("max(geomesh_run_tokens)", "tokens"),), decimals=2),
            Number("Tokens a second", "Tokens that all peers together add to the log each second.",
                   (Query("sum(rate(geomesh_tokens_total[$window]))", "tokens/s"),), graph=True),
            Number("Round time", "Wall time of the last round, the slowest peer's.",
                   (Query("max(geomesh_round_seconds)", "seconds"),), unit="s", decimals=1),
            Number("Perplexity", "Validation perplexity of the newest anchor that was validated.",
                   (Query("min(geomesh_validation_perplexity)", "perplexity"),), decimals=2),
            Number("To the end", "Rounds left times what a round took lately; nothing if the run has no last round.",
                   (Query("(max(geomesh_round_goal > 0) - max(geomesh_round)) * avg(geomesh_round_seconds)", "left"),),
                   unit="s", decimals=0),
            Number("Leader", "Whether exactly one peer leads.", (Query("sum(geomesh_is_leader)", "leaders"),),
                   limits=((None, BAD), (1, GOOD), (2, BAD)), texts=(("1", "one", GOOD), ("0", "none", BAD))),
        )),
        Row("What it learns", (
            Lines("Validation perplexity", "Of the anchor, which all peers share.",
                  (Query("min(geomesh_validation_perplexity)", "perplexity"),), logarithmic=True),
            Lines("Training loss", "Mean loss of each peer's inner steps in its last round, in nats a token.",
                  (Query(f"geomesh_loss{SITE}"),), decimals=3),
            Lines("Speed of the inner loops", "Tokens a second while a peer trains; waiting does not count.",
                  (Query(f"geomesh_tokens_per_second{SITE}"),)),
            Lines("Tokens in the log", "How far the run has come, over restarts too.",
                  (Query("max(geomesh_run_tokens)", "tokens"),)),
        )),
        Row("Where the time goes", (
            Lines("Round time by phase", "Seconds that a peer spends on each phase of a round, averaged over the peers.",
                  tuple(Query(a_round(phase), phase) for phase in PHASES),
                  unit="s", stacked=True),
            Lines("Idle shares", "Shares of all peers' time that go to stragglers and to the WAN.",
                  (Query(share_of("straggler_idle"), "straggler idle"), Query(share_of("wan_idle"), "WAN idle")),
                  unit="percentunit", least=0.0),
            Lines("Straggler idle by site", "Who waits for others: the fastest sites, if the plan does not fit.",
                  (Query(share_of("straggler_idle", "site")),), unit="percentunit", least=0.0),
            Lines("Planned and real finish", "From the plan to the last inner step: a site above its plan is the straggler.",
                  (Query(f"geomesh_finish_seconds{SITE}", "{{site}}"),
                   Query(f"geomesh_finish_planned_seconds{SITE}", "{{site}} planned")), unit="s"),
        )),
        Row("Who does what", (
            Table("Plan and pace by site", "What each site was given in the last round, and how fast it is.", (
                Query("geomesh_batch", "batch"), Query("geomesh_inner_steps", "inner steps"),
                Query("geomesh_step_seconds", "a step|s"), Query("geomesh_tokens_per_second", "tokens/s"),
                Query("geomesh_finish_seconds", "finish|s"), Query("geomesh_finish_planned_seconds", "as planned|s"),
                Query(share_of("straggler_idle", "site"), "straggler idle|percentunit"),
                Query(share_of("wan_idle", "site"), "WAN idle|percentunit"), Query("geomesh_round", "round"),
            ), height=7),
            Phases("What each site does", "The phase each site is in.", (Query(ACTIVITY),), height=7),
        )),
        Row("What has changed", (
            Lines("Members as each sees them", "Sites known and heard, as each peer sees it: differences are a partition.",
                  (Query(f"geomesh_members{SITE}"),), decimals=0, width=8),
            Lines("Joins, losses, elections", "How often peers came, went, and chose another leader.",
                  (Query("max(increase(geomesh_joins_total[$window]))", "joins"),
                   Query("max(increase(geomesh_losses_total[$window]))", "losses"),
                   Query("max(increase(geomesh_elections_total[$window]))", "elections")), width=8),
            Lines("Attempts given up", "Attempts of a round that were not committed, by reason.",
                  (Query("max by (reason) (increase(geomesh_rounds_discarded_total[$window]))", "{{reason}}"),), width=8),
            Lines("New plans", "Plans that differ from the one before, by what changed first.",
                  (Query("max by (reason) (increase(geomesh_replans_total[$window]))", "{{reason}}"),), width=8),
            Lines("Abstentions and skipped steps", "Rounds and inner steps that brought nothing.",
                  (Query(f"increase(geomesh_abstentions_total{SITE}[$window])", "{{site}} abstentions"),
                   Query(f"increase(geomesh_skipped_steps_total{SITE}[$window])", "{{site}} skipped steps")), width=8),
            Lines("Warnings", "What peers warn of, by reason: their logs have the words.",
                  (Query(or_none(f"increase(geomesh_warnings_total{SITE}[$window])"), "{{site}} {{reason}}"),), width=8),
        )),
    ),
)  # fmt: skip


LINKS = Dashboard(
    "geomesh-links",
    "GeoMesh: links",
    "Which link is slow, what goes over it, and what it costs.",
    (
        Row("From site to site", (
            Matrix("Rate", "What a transfer from the row's site to the column's has reached lately.",
                   (Query("geomesh_link_bytes_per_second"),), unit="Bps", limits=((None, BAD), (1e6, WARN), (1e7, GOOD))),
            Matrix("Round trip", "Time there and back, between the row's site and the column's.",
                   (Query("geomesh_link_rtt_seconds"),), unit="s", limits=((None, GOOD), (0.15, WARN), (0.4, BAD))),
        )),
        Row("Over time", (
            Lines("Rate by pair", "Measured rate of transfers, by pair.",
                  (Query(f"geomesh_link_bytes_per_second{SITE}", "{{site}} to {{remote}}"),), unit="Bps"),
            Lines("Round trip by pair", "Measured time there and back, by pair.",
                  (Query(f"geomesh_link_rtt_seconds{SITE}", "{{site}} to {{remote}}"),), unit="s"),
            Lines("Sent by pair", "Bytes a second that each site sends to each other one, averaged.",
                  (Query(sent("$window"), "{{site}} to {{remote}}"),), unit="Bps"),
            Lines("Exchange against the plan", "How long the last exchange took, and how long the plan said it would.",
                  (Query(f"geomesh_exchange_seconds{SITE}"),
                   Query(f"geomesh_exchange_planned_seconds{SITE}", "{{site}} planned")), unit="s"),
        )),
        Row("What it costs", (
            Bars("Egress in a day", "Bytes that each site sent within the last 24 hours: what a cloud bills.",
                 (Query(f'sum by (site) ({sent("1d", "increase")})'),), unit="bytes"),
            Lines("Overhead", "Share of all bytes sent that are not contributions or updates.",
                  (Query(f'sum by (site) (rate(geomesh_overhead_bytes_total{{direction="sent",{THIS}}}[$window])) / '
                         f'sum by (site) ({sent("$window")})'),),
                  unit="percentunit", least=0.0),
            Lines("Through relays", "Bytes a second that went through a relay, both ways, by pair.",
                  (Query(or_none(f"sum by (site, remote) (rate(geomesh_relayed_bytes_total{SITE}[$window]))"),
                         "{{site}} and {{remote}}"),), unit="Bps"),
            Lines("Given to joiners", "Bytes a second of state that a site gave to others, by kind.",
                  (Query(f"rate(geomesh_given_bytes_total{SITE}[$window])", "{{site}} {{what}}"),), unit="Bps"),
        )),
    ),
)  # fmt: skip

PEER = Dashboard(
    "geomesh-peer",
    "GeoMesh: peer",
    "One site: its device, its data, its disk, its errors.",
    (
        Row("Now", (
            Number("Phase", "What this peer does now.", (Query(ACTIVITY, "phase"),),
                   texts=tuple((str(place), name.replace("_", " "), PLAIN) for place, name in enumerate(ACTIVITIES, 1))),
            Number("Round", "Its last committed round.", (Query(f"geomesh_round{SITE}", "round"),)),
            Number("Batch", "Sequences a step in its last round.", (Query(f"geomesh_batch{SITE}", "batch"),)),
            Number("Inner steps", "Inner steps in its last round.", (Query(f"geomesh_inner_steps{SITE}", "steps"),)),
            Number("Last snapshot", "How long ago its state was last saved as a snapshot.",
                   (Query(f"geomesh_checkpoint_age_seconds{SITE}", "age"),), unit="s", decimals=0),
            Number("Disk", "Bytes that are free where its run folder is.",
                   (Query(f"geomesh_disk_free_bytes{SITE}", "free"),), unit="bytes",
                   limits=((None, BAD), (2e9, WARN), (1e10, GOOD))),
        )),
        Row("Its time", (
            Lines("Step time", "Median inner step of each round.", (Query(f"geomesh_step_seconds{SITE}"),), unit="s"),
            Lines("Seconds of a round by phase", "Where this peer's time goes, in seconds of a round.",
                  tuple(Query(a_round(phase, THIS), phase) for phase in PHASES),
                  unit="s", stacked=True),
            Lines("Data wait", "Share of its time in which a step waited for a batch: above zero, the data are too slow.",
                  (Query(share_of("data_wait", "site")),), unit="percentunit", least=0.0),
            Lines("Codec and control", "Seconds of a round for encoding and decoding, and for plans, votes and saving.",
                  tuple(Query(a_round(phase, THIS), phase) for phase in ("codec", "control")), unit="s"),
        )),
        Row("Its host", (
            Lines("Memory", "Resident memory of the peer's process.",
                  (Query(of_process("geomesh_process_resident_memory_bytes")),), unit="bytes"),
            Lines("Processor", "Processors that the peer's process keeps busy.",
                  (Query(of_process("rate(geomesh_process_cpu_seconds_total[$window])")),)),
            Lines("GPU", "How busy each GPU is, where the driver tells.",
                  (Query(f"geomesh_gpu_utilization_ratio{SITE}", "{{site}} GPU {{gpu}}"),),
                  unit="percentunit", least=0.0, most=1.0),
            Lines("GPU memory", "Memory in use on each GPU, by whatever process.",
                  (Query(f"geomesh_gpu_memory_used_bytes{SITE}", "{{site}} GPU {{gpu}}"),), unit="bytes"),
            Lines("Disk, and what is kept", "Bytes free where its run folder is, and those of its snapshots and of its log.",
                  (Query(f"geomesh_disk_free_bytes{SITE}", "free"), Query(f"geomesh_kept_bytes{SITE}", "{{what}}")),
                  unit="bytes"),
            Lines("Snapshots", "How long the last save took.", (Query(f"geomesh_checkpoint_seconds{SITE}"),), unit="s"),
        )),
        Row("What went wrong", (
            Lines("Warnings", "What it warned of, by reason: its log has the words.",
                  (Query(f"increase(geomesh_warnings_total{SITE}[$window]) or {NO_REASON}", "{{reason}}"),)),
            Lines("Skipped steps and abstentions", "Inner steps that were not finite, and rounds without its contribution.",
                  (Query(f"increase(geomesh_skipped_steps_total{SITE}[$window])", "skipped steps"),
                   Query(f"increase(geomesh_abstentions_total{SITE}[$window])", "abstentions"))),
            Lines("Agreement", "Share of this peer's signs that agree with the updates, as the others see it.",
                  (Query('geomesh_agreement_share{remote=~"$site"}', "as {{site}} sees it"),), unit="percentunit"),
            Lines("Caught up", "Rounds that it took from others instead of training them.",
                  (Query(f"increase(geomesh_catch_up_rounds_total{SITE}[$window])", "rounds"),)),
        )),
    ),
    one_site=True,
)  # fmt: skip


def main() -> int:
    check, stale = "--check" in sys.argv[1:], []
    for board in (RUN, LINKS, PEER):
        path, text = FOLDER / f"{board.uid}.json", board.build()
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not check:
            path.write_text(text)
    if stale:
        print(f"not what build.py writes: {', '.join(stale)}: run it", file=sys.stderr)
    return len(stale) > 0


if __name__ == "__main__":
    sys.exit(main())
