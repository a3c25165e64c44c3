"""The checker passes a good run with trouble in it, and names each of the faults planted into it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geomesh_p2p.errors import ConfigError
from geomesh_p2p.lab import verify
from geomesh_p2p.lab.histories import Reading, read_histories
from geomesh_p2p.lab.verify import main
from geomesh_p2p.lab.verify_run import is_quorum
from tests.histories import SITES, Story, good_story, peer_of
from tests.planted import PLANTED, check

ALDER, BIRCH, CEDAR, DOGWOOD, ELM = SITES
Fault = Callable[[Story], None]


@pytest.fixture(scope="module")
def story() -> Story:
    return good_story()


def verdict(story: Story, folder: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    return main([story.write(folder)], said.append), said


def test_a_good_run_has_no_violation(story: Story, tmp_path: Path) -> None:
    code, said = verdict(story, tmp_path)
    assert said[-1] == "5 peers, 8 committed rounds: no violation of the invariants"
    assert code == 0
    assert not [line for line in said if line.startswith("violation")]


FAULTS: dict[str, tuple[int, str, Fault]] = {}


def plants(invariant: int, words: str) -> Callable[[Fault], Fault]:
    """Registers a fault: the invariant that must be named, and words of the message."""

    def register(fault: Fault) -> Fault:
        FAULTS[fault.__name__] = (invariant, words, fault)
        return fault

    return register


# ---------------------------------------------------------------- 1


@plants(1, "different anchors after one digest")
def flipped_bit(story: Story) -> None:
    story.find(CEDAR, "anchor", round=4)["hash"] = "ff" * 32


# ---------------------------------------------------------------- 2


@plants(2, "accepted a plan on base")
def accepts_on_a_foreign_base(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "accept", round=2)["base"] = "ab" * 32


@plants(2, "contributed on base")
def contributes_on_an_old_base(story: Story) -> None:
    story.find(CEDAR, "contribute", round=4)["base"] = story.digest(2)


@plants(2, "the chain is broken")
def broken_chain(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=2)["base"] = "cd" * 32


@plants(2, "straight after round 2")
def skips_a_round(story: Story) -> None:
    story.lines[DOGWOOD].remove(story.find(DOGWOOD, "commit", round=3))


@plants(2, "which it had not accepted")
def contributes_without_a_plan(story: Story) -> None:
    story.lines[BIRCH].remove(story.find(BIRCH, "accept", round=6))


# ---------------------------------------------------------------- 3


@plants(3, "two plans for attempt 1")
def two_plans_in_one_attempt(story: Story) -> None:
    story.find(CEDAR, "accept", round=2)["plan"] = "ee" * 32
    story.find(CEDAR, "contribute", round=2)["plan"] = "ee" * 32


@plants(3, "accepted two plans for attempt 1")
def accepts_twice(story: Story) -> None:
    lines = story.lines[BIRCH]
    at = lines.index(story.find(BIRCH, "accept", round=2))
    lines.insert(at + 1, {**lines[at], "plan": "ee" * 32})


@plants(3, "of a later rank")
def goes_back_to_an_older_attempt(story: Story) -> None:
    lines = story.lines[BIRCH]
    at = lines.index(story.find(BIRCH, "accept", round=3, attempt=2))
    lines.insert(at + 1, story.find(BIRCH, "accept", round=3, attempt=1))


@plants(3, "is recorded with different contents")
def one_plan_with_two_contents(story: Story) -> None:
    story.find(CEDAR, "accept", round=2)["ranges"][ALDER] = [[1000, 1040]]


@plants(3, "accepted a plan of a lower term")
def term_goes_down(story: Story) -> None:
    lines = story.lines[CEDAR]
    at = lines.index(story.find(CEDAR, "accept", round=2))
    lines.insert(at, {**lines[at], "kind": "term", "term": [1, "z"], "leader": ""})


@plants(3, "another candidate's")
def leads_in_a_foreign_term(story: Story) -> None:
    lines = story.lines[CEDAR]
    at = lines.index(story.find(CEDAR, "term", term=[2, peer_of(BIRCH)]))
    lines.insert(at + 1, {**story.find(BIRCH, "leader"), "peer": peer_of(CEDAR), "site": CEDAR})


@plants(3, "gave a vote to")
def votes_for_two(story: Story) -> None:
    lines = story.lines[CEDAR]
    at = lines.index(story.find(CEDAR, "vote"))
    lines.insert(at + 1, {**lines[at], "to": peer_of(DOGWOOD)})


@plants(3, "voted downwards")
def votes_downwards(story: Story) -> None:
    lines = story.lines[DOGWOOD]
    at = lines.index(story.find(DOGWOOD, "vote"))
    lines.insert(at + 1, {**lines[at], "term": [1, peer_of(CEDAR)], "to": peer_of(CEDAR)})


@plants(3, "no quorum")
def leads_without_a_quorum(story: Story) -> None:
    story.find(BIRCH, "leader")["voters"] = [peer_of(BIRCH)]


@plants(3, "which recorded none")
def leads_with_an_invented_vote(story: Story) -> None:
    story.lines[DOGWOOD].remove(story.find(DOGWOOD, "vote"))


@plants(3, "which never became leader")
def plans_without_an_election(story: Story) -> None:
    story.lines[BIRCH].remove(story.find(BIRCH, "leader"))


@plants(3, "which it had accepted before its restart")
def trains_again_after_a_restart(story: Story) -> None:
    lines = story.lines[DOGWOOD]
    restart = [line for line in lines if line["kind"] == "start"][1]
    accepted = story.find(DOGWOOD, "accept", round=3)
    made = {**story.find(ALDER, "contribute", round=3), "peer": peer_of(DOGWOOD), "site": DOGWOOD, "plan": accepted["plan"]}
    lines.insert(lines.index(restart) + 1, {**made, "ranges": [[232, 240]], "tokens": 256})


@plants(3, "came back in a lower term")
def forgets_its_term(story: Story) -> None:
    [line for line in story.lines[ALDER] if line["kind"] == "start"][1]["term"] = [0, ""]


# ---------------------------------------------------------------- 4


@plants(4, "recorded no contribution")
def credits_an_invented_contribution(story: Story) -> None:
    story.lines[CEDAR].remove(story.find(CEDAR, "contribute", round=2))


@plants(4, "credited with other payload")
def mixes_two_attempts(story: Story) -> None:
    story.find(BIRCH, "contribute", round=4)["payload"] = "77" * 32


@plants(4, "is not that of the contents recorded")
def digest_of_other_contents(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=4)["contributors"].pop()


@plants(4, "two different payloads")
def contribution_changes(story: Story) -> None:
    lines = story.lines[BIRCH]
    at = lines.index(story.find(BIRCH, "contribute", round=4))
    lines.insert(at + 1, {**lines[at], "payload": "77" * 32})


@plants(4, "no member of plan")
def credits_an_outsider(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        line = story.find(site, "accept", round=2)
        line["members"] = [peer for peer in line["members"] if peer != peer_of(DOGWOOD)]


@plants(4, "committed two updates for one round")
def commits_twice(story: Story) -> None:
    lines = story.lines[CEDAR]
    at = lines.index(story.find(CEDAR, "commit", round=4))
    lines.insert(at + 1, {**lines[at], "digest": "11" * 32, "seal": "22" * 32})


@plants(4, "different contents under one seal")
def one_seal_for_two_contents(story: Story) -> None:
    story.find(CEDAR, "commit", round=4)["view"] = []


@plants(4, "went back from its committed round")
def cuts_its_log(story: Story) -> None:
    lines = story.lines[DOGWOOD]
    at = lines.index(story.find(DOGWOOD, "commit", round=4))
    adopted = {**story.find(ELM, "adopt"), "peer": peer_of(DOGWOOD), "site": DOGWOOD}
    lines.insert(at + 1, {**adopted, "round": 3, "digest": story.digest(3)})


# ---------------------------------------------------------------- 5


@plants(5, "different digests for one round")
def two_updates_for_a_round(story: Story) -> None:
    story.find(CEDAR, "commit", round=8).update(digest="11" * 32, seal="22" * 32)


@plants(5, "committed with different voters")
def one_digest_with_two_views(story: Story) -> None:
    line = story.find(CEDAR, "commit", round=8)
    line.update(seal="22" * 32, view=line["view"][:3])


@plants(5, "no quorum of")
def commits_without_a_quorum(story: Story) -> None:
    for site in (BIRCH, CEDAR, DOGWOOD):
        story.lines[site].remove(story.find(site, "held", round=4))


@plants(5, "no quorum of")
def commits_what_was_held_in_an_older_term(story: Story) -> None:
    """Raft's figure 8: three held it in term 1, but the leader of term 2 needs it held again."""
    for site in (CEDAR, DOGWOOD):
        story.lines[site].remove(story.find(site, "held", round=5, term=[2, peer_of(BIRCH)]))


@plants(5, "no quorum of")
def commits_an_older_attempt(story: Story) -> None:
    """The leader had opened attempt 2; what was held in attempt 1 no longer counts."""
    for site in (BIRCH, CEDAR):
        story.find(site, "held", round=3)["attempt"] = 1


@plants(5, "whose votes carried")
def exchanges_a_held_round_anew(story: Story) -> None:
    for site in (BIRCH, CEDAR, DOGWOOD):
        story.find(site, "held", round=5, term=[2, peer_of(BIRCH)])["seal"] = "33" * 32


@plants(5, "voted without its held record")
def vote_forgets_a_held_record(story: Story) -> None:
    story.find(CEDAR, "vote")["held"] = None


@plants(5, "came back without its held record")
def restart_deletes_a_held_record(story: Story) -> None:
    [line for line in story.lines[ALDER] if line["kind"] == "start"][1]["held"] = None


@plants(5, "by one of a lower rank")
def held_goes_down(story: Story) -> None:
    lines = story.lines[BIRCH]
    at = lines.index(story.find(BIRCH, "held", round=3))
    lines.insert(at + 1, {**lines[at], "attempt": 1, "seal": "44" * 32})


@plants(5, "held two updates in one attempt")
def holds_two_updates(story: Story) -> None:
    lines = story.lines[BIRCH]
    at = lines.index(story.find(BIRCH, "held", round=3))
    lines.insert(at + 1, {**lines[at], "seal": "44" * 32})


@plants(5, "became voters without contributing")
def stranger_becomes_a_voter(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=4)["view"].append(peer_of(ELM))


@plants(5, "newcomers became voters beside 1")
def crowd_becomes_voters(story: Story) -> None:
    """Round 1's view is the founder alone; only the first round may take in more newcomers than there were voters."""
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=1)["view"] = [peer_of(ALDER)]


@plants(5, "names a voter twice")
def one_voter_twice(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=4)["view"].append(peer_of(ALDER))


@plants(5, "hold no quorum of")
def plan_without_a_quorum(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "accept", round=4)["members"] = [peer_of(DOGWOOD), peer_of(CEDAR)]


# ---------------------------------------------------------------- 6


@plants(6, "are credited again")
def credits_a_range_twice(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=4)["contributors"][3]["ranges"] = [[152, 160]]


@plants(6, "that the log had credited")
def plans_a_credited_range(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "accept", round=4)["ranges"][DOGWOOD] = [[152, 160]]


@plants(6, "to another")
def plans_a_range_for_two(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "accept", round=4)["ranges"][CEDAR] = [[299, 312]]


@plants(6, "tokens for 20 sequences of 32 tokens")
def credits_tokens_not_trained(story: Story) -> None:
    for site in (ALDER, BIRCH, CEDAR, DOGWOOD):
        story.find(site, "commit", round=4)["contributors"][1]["tokens"] += 32


@plants(6, "different sequence lengths")
def two_sequence_lengths(story: Story) -> None:
    story.find(CEDAR, "start")["sequence_length"] = 64


@plants(6, "outside those given by its plan")
def trains_elsewhere(story: Story) -> None:
    story.find(BIRCH, "contribute", round=4)["ranges"] = [[1280, 1300]]


# ---------------------------------------------------------------- 7


@plants(7, "without holding, committing or discarding")
def waits_without_a_deadline(story: Story) -> None:
    """Round 5 is assembled by three; dogwood, which never held it in term 1, goes on being told of terms for an hour."""
    lines = story.lines[DOGWOOD]
    for line in lines:
        line.pop("uptime_seconds", None)
    at = lines.index(story.find(DOGWOOD, "accept", round=5))
    same = {key: lines[at][key] for key in ("peer", "site", "run")}
    for minutes in range(1, 60):
        lost = {"kind": "lost", "peer_id": peer_of(ALDER), "peer_site": ALDER, "seconds": 60.0 * minutes}
        lines.insert(at + minutes, {"time": lines[at]["time"] + 60 * minutes, **same, **lost})
    for line in lines[at + 60 :]:
        line["time"] += 3600.0


def test_a_clock_that_jumps_is_no_wait(story: Story, tmp_path: Path) -> None:
    """The time of day goes an hour ahead, twice, while a plan is open; the process's own clock knows better."""
    lines = story.lines[DOGWOOD]
    begun = lines[0]["time"]
    for line in lines:
        line["uptime_seconds"] = line["time"] - begun
    at = lines.index(story.find(DOGWOOD, "accept", round=5))
    for line in lines[at + 1 :]:
        line["time"] += 3600.0
    for line in lines[at + 2 :]:
        line["time"] += 3600.0
    assert verdict(story, tmp_path)[0] == 0


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_named(name: str, story: Story, tmp_path: Path) -> None:
    invariant, words, fault = FAULTS[name]
    planted = story.copy()
    fault(planted)
    code, said = verdict(planted, tmp_path)
    assert code == 1
    assert any(line.startswith(f"violation: invariant {invariant}:") and words in line for line in said), said


def test_every_invariant_has_a_planted_fault() -> None:
    assert {invariant for invariant, _, _ in FAULTS.values()} == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("invariant", list(PLANTED))
def test_one_planted_violation_of_each_invariant_in_recorded_files(invariant: int, story: Story, tmp_path: Path) -> None:
    """The same faults that `python -m tests.planted` plants into the folder of a real run."""
    code, said = check(story.write(tmp_path / "run"), invariant, tmp_path)
    assert code == 1
    assert any(line.startswith(f"violation: invariant {invariant}:") for line in said), said


# ---------------------------------------------------------------- what is not a violation


def test_a_violation_names_peers_round_and_term(story: Story, tmp_path: Path) -> None:
    planted = story.copy()
    two_plans_in_one_attempt(planted)
    _, said = verdict(planted, tmp_path)
    line = next(line for line in said if line.startswith("violation: invariant 3"))
    assert "round 2" in line
    assert "term 1/" in line
    assert "alder, cedar" in line


def test_a_line_cut_off_by_a_kill_is_tolerated(story: Story, tmp_path: Path) -> None:
    story.write(tmp_path)
    path = tmp_path / BIRCH / "history.jsonl"
    path.write_text(path.read_text() + '{"time": 1234.5, "peer": "12D3K')
    said: list[str] = []
    assert main([tmp_path], said.append) == 0
    assert any("cut off in the middle" in line for line in said)


def test_a_line_glued_to_a_half_written_one_is_read(story: Story, tmp_path: Path) -> None:
    """A killed process left half a line; its successor's first line follows without a break."""
    story.write(tmp_path)
    path = tmp_path / DOGWOOD / "history.jsonl"
    lines = path.read_text().splitlines()
    restart = [number for number, line in enumerate(lines) if json.loads(line)["kind"] == "start"][1]
    lines[restart] = '{"time": 1234.5, "pee' + lines[restart]
    path.write_text("\n".join(lines) + "\n")
    said: list[str] = []
    assert main([tmp_path], said.append) == 0, said


@pytest.mark.parametrize("site", SITES)
def test_a_peer_that_writes_while_it_is_read_breaks_nothing(
    site: str, story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it noted last was not there yet when it was read, and what others made of it was, read a moment later."""
    folder = story.write(tmp_path)
    path = folder / site / "history.jsonl"
    whole = path.read_text().splitlines(keepends=True)

    def reads_and_then_it_writes(folders: Any) -> Reading:
        reading = read_histories(folders)
        path.write_text("".join(whole))
        return reading

    lacked = 0
    for known in range(1, len(whole)):
        path.write_text("".join(whole[:known]))
        lacked += main([folder], str)
        with monkeypatch.context() as patched:
            patched.setattr(verify, "read_histories", reads_and_then_it_writes)
            said: list[str] = []
            assert main([folder], said.append) == 0, (known, said)
    assert lacked > 0, "some of its lines are evidence for lines of others"


def test_a_missing_history_is_a_remark(story: Story, tmp_path: Path) -> None:
    story.write(tmp_path)
    for site in (BIRCH, CEDAR):
        (tmp_path / site / "history.jsonl").unlink()
    said: list[str] = []
    assert main([tmp_path], said.append) == 0, said
    assert any("its quorum needs" in line for line in said)
    assert any("the history of contributor" in line for line in said)


def test_a_damaged_history_proves_nothing_by_absence(story: Story, tmp_path: Path) -> None:
    planted = story.copy()
    credits_an_invented_contribution(planted)
    planted.write(tmp_path)
    path = tmp_path / CEDAR / "history.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(5, "\x00\x00\x00")
    path.write_text("\n".join(lines) + "\n")
    said: list[str] = []
    assert main([tmp_path], said.append) == 0, said
    assert any("not readable" in line for line in said)


def test_a_line_without_its_fields_is_named(story: Story, tmp_path: Path) -> None:
    planted = story.copy()
    del planted.find(BIRCH, "accept", round=2)["base"]
    code, said = verdict(planted, tmp_path)
    assert code == 1
    assert any("'accept' without base" in line for line in said)


def test_two_runs_are_checked_apart(story: Story, tmp_path: Path) -> None:
    """The same rounds under another run id, with other digests, contradict nothing."""
    story.write(tmp_path / "one")
    other = story.copy()
    for lines in other.lines.values():
        for line in lines:
            line["run"] = "99" * 32
            for key in ("time",):
                line[key] += 1.0
    other.write(tmp_path / "two")
    said: list[str] = []
    assert main([tmp_path], said.append) == 0
    assert "of 2 runs" in said[-1]


@pytest.mark.parametrize("repaired", [True, False])
def test_another_anchor_that_was_found_and_made_anew_is_a_remark(repaired: bool, story: Story, tmp_path: Path) -> None:
    planted = story.copy()
    planted.find(CEDAR, "anchor", round=4)["hash"] = "ff" * 32
    lines = planted.lines[CEDAR]
    at = lines.index(planted.find(CEDAR, "anchor", round=5))
    outcome = "repaired" if repaired else "sound"
    head = {key: lines[at][key] for key in ("time", "peer", "site", "run")}
    lines.insert(at + 1, {**head, "kind": "checked", "round": 5, "outcome": outcome})
    code, said = verdict(planted, tmp_path)
    assert code == int(not repaired)
    assert any("made it anew" in line for line in said) == repaired


def test_contributors_that_name_different_bases_are_a_violation(story: Story, tmp_path: Path) -> None:
    planted = story.copy()
    for site in planted.lines:
        for line in planted.lines[site]:
            if line["kind"] == "commit" and line["round"] == 5:
                for hashed, item in zip(("aa", "bb", "aa", "aa"), line["contributors"], strict=False):
                    item["state"] = hashed * 32
    code, said = verdict(planted, tmp_path)
    assert code == 1
    assert any("different anchors after one digest (snapshot)" in line for line in said)


@pytest.mark.parametrize("make", [True, False])
def test_a_folder_without_histories_is_an_error(make: bool, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    if make:
        folder.mkdir()
    with pytest.raises(ConfigError, match="give the folder of a run"):
        main([folder])


@pytest.mark.parametrize(
    ("present", "view", "expected"),
    [("ab", "abc", True), ("a", "abc", False), ("ab", "abcd", True), ("cd", "abcd", False), ("a", "a", True), ("", "a", False),
     ("", "", False), ("axy", "abc", False)],
)  # fmt: skip
def test_quorum(present: str, view: str, expected: bool) -> None:
    assert is_quorum(present, view) is expected


def test_the_checker_imports_nothing_that_it_checks() -> None:
    code = (
        "import sys, geomesh_p2p.lab.verify\n"
        "print([m for m in sys.modules if m.startswith(('geomesh_p2p.core', 'geomesh_p2p.swarm', 'torch', 'hivemind'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
