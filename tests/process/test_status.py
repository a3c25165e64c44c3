"""`geomesh status`, `drain` and `stop` of a real mesh, by somebody who takes no part in it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.process.sites import GEOMESH, LIGHT, Sites

SECRET = "a secret that nobody guesses, of 40 bytes"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "secret").write_text(SECRET)
    mesh = Sites(folder, ["a", "b", "c"], rounds=100_000, command=LIGHT)
    mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.3"}
    for site in mesh:
        site.extra = ["--net.join_secret_file", str(folder / "secret"), "--save.keep_snapshots", "40"]
    try:
        mesh.start()
        mesh.together()
        mesh.advance(3)
        yield mesh
    finally:
        mesh.stop()


def call(mesh: Sites, verb: str, *arguments: str, address: str = "") -> subprocess.CompletedProcess[str]:
    """A visitor's call on b, or whoever is at `address`."""
    asked = address or mesh["b"].address_file.read_text().strip()
    command = [*GEOMESH, verb, asked, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=mesh.environment, cwd=mesh.folder, timeout=120)


def status(mesh: Sites, *arguments: str, address: str = "") -> subprocess.CompletedProcess[str]:
    return call(mesh, "status", *arguments, address=address)


def told(mesh: Sites) -> dict[str, Any]:
    done = status(mesh, "--json", "--join-secret-file", "secret")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_peer_tells_of_itself_and_of_the_others(mesh: Sites) -> None:
    before = max(site.round for site in mesh)
    run = told(mesh)
    asked, peers = run["asked"], {peer["site"]: peer for peer in run["peers"]}
    assert asked["site"] == "b"
    assert asked["round"] >= before
    assert set(peers) == {"a", "b", "c"}
    assert {peer["told_by"] for peer in peers.values()} == {"a", "b", "c"}, "each was asked itself"
    assert asked["leader"] in peers
    assert len({peer["run"] for peer in peers.values()}) == 1
    for name, peer in peers.items():
        assert peer["peer"] == mesh[name].peer
        assert peer["round"] >= before
        assert 0 <= peer["straggler_idle_share"] < 1
        assert peer["step_seconds"] > 0, "by the others"
    assert {member["site"] for member in asked["plan"]["members"]} == {"a", "b", "c"}
    assert [other["site"] for other in asked["others"]] == ["a", "c"]
    assert all(other["rtt_seconds"] > 0 and other["heard_seconds_ago"] < 3 for other in asked["others"])


def test_a_person_reads_a_table(mesh: Sites) -> None:
    done = status(mesh, "--join-secret-file", "secret")
    assert done.returncode == 0, done.stderr
    assert "round " in done.stdout
    assert all(f"\n{site}" in done.stdout for site in "abc")
    assert "Traceback" not in done.stderr


def test_who_may_not_join_learns_nothing(mesh: Sites) -> None:
    done = status(mesh, "--json")
    assert (done.returncode, done.stdout) == (5, "")
    assert "the join secret was not proved" in done.stderr
    assert "--join-secret-file" in done.stderr


def test_a_peer_that_is_gone_is_told_as_the_others_see_it(mesh: Sites) -> None:
    mesh["c"].kill()
    try:
        peers = {peer["site"]: peer for peer in told(mesh)["peers"]}
        assert peers["c"]["told_by"] == "b"
        limit = time.monotonic() + 60
        while not peers["c"]["lost"] and time.monotonic() < limit:
            peers = {peer["site"]: peer for peer in told(mesh)["peers"]}
        assert (peers["c"]["phase"], peers["c"]["ready"]) == ("lost", False)
        assert any(one["text"].startswith("c is lost") for one in told(mesh)["asked"]["warnings"])
        assert peers["a"]["told_by"] == "a"
    finally:
        mesh["c"].start()
        mesh.together()


def test_nobody_at_the_address_is_exit_code_3_with_a_reason(mesh: Sites) -> None:
    address = mesh["b"].address_file.read_text().strip()
    host, _, peer = address.rpartition("/p2p/")
    done = status(mesh, address=f"{host.rpartition('/')[0]}/1/p2p/{peer}")
    assert done.returncode == 3
    assert "refused" in done.stderr
    assert status(mesh, address="/ip4/127.0.0.1/tcp/4101").returncode == 2, "an address without a peer id"


def test_watching_costs_the_run_nothing_and_ends_with_ctrl_c(mesh: Sites) -> None:
    asked = mesh["b"].address_file.read_text().strip()
    # Whoever runs the tests may ignore SIGINT, and so would its children.
    command = ["env", "--default-signal=INT", *GEOMESH, "status", asked, "--json", "--watch", "--join-secret-file", "secret"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=mesh.environment, cwd=mesh.folder) as watching:
        assert watching.stdout is not None
        rounds = [json.loads(watching.stdout.readline())["asked"]["round"] for _ in range(3)]
        watching.send_signal(2)
        assert watching.wait(60) == 0
    assert rounds == sorted(rounds)
    assert rounds[-1] > rounds[0]
    members = mesh["b"].history("commit")[-1]["view"]
    assert sorted(members) == sorted(site.peer for site in mesh), "a visitor is no member"


def test_a_site_that_another_peer_is_asked_to_drain_leaves_in_good_order(mesh: Sites) -> None:
    drained, others = mesh["c"], [mesh["a"], mesh["b"]]
    done = call(mesh, "drain", "c", "--join-secret-file", "secret")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("c leaves after its round")
    assert drained.process is not None
    assert drained.process.wait(120) == 0
    assert "drained by a visitor, passed on by b" in drained.log()
    mesh.advance(2, others)
    assert drained.peer not in others[0].history("commit")[-1]["view"]
    drained.start()
    mesh.together()


def test_the_whole_run_goes_back_to_an_earlier_round_by_order(mesh: Sites) -> None:
    mesh.advance(2)
    there = max(site.round for site in mesh)
    target = there - 1
    done = call(mesh, "rollback", "--to-round", str(target), "--join-secret-file", "secret")
    assert done.returncode == 0, done.stderr
    assert f"the model is that after round {target} again" in done.stdout
    assert done.stdout.startswith("undoes ")
    assert f"({target + 1} to " in done.stdout
    assert "\nundo: geomesh rollback " in done.stdout
    mesh.advance(3)
    went = {site.name: [one for one in site.history("commit") if "rollback" in one] for site in mesh}
    rounds = {one["round"] for commits in went.values() for one in commits}
    assert all(len(commits) == 1 for commits in went.values())
    assert len(rounds) == 1
    assert rounds.pop() > there
    assert told(mesh)["asked"]["rolled_back"]["to_round"] == target
    folders = [str(site.folder) for site in mesh]
    verify = subprocess.run([*GEOMESH, "history", "verify", *folders], capture_output=True, text=True, timeout=120)
    assert verify.returncode == 0, verify.stdout
    assert f"went back to the state after round {target}" in verify.stdout


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["rollback", "--to-round", "99999", "--join-secret-file", "secret"], 5, "--to-round takes an earlier one"),
    (["rollback", "--to-round", "-1", "--join-secret-file", "secret"], 2, "no run has such a round"),
    (["rollback", "--to-round", "1"], 5, "the join secret was not proved"),
    (["drain", "nowhere", "--join-secret-file", "secret"], 5, "no site 'nowhere' here: there are b, a, c"),
    (["drain", "c"], 5, "the join secret was not proved"),
    (["stop"], 5, "the join secret was not proved"),
])  # fmt: skip
def test_orders_that_are_refused(mesh: Sites, arguments: list[str], code: int, said: str) -> None:
    done = call(mesh, *arguments)
    assert done.returncode == code
    assert said in done.stderr
    mesh.advance(1)
    assert all(site.alive for site in mesh)


def test_a_run_that_is_stopped_ends_everywhere_after_the_same_round_and_goes_on_later(mesh: Sites) -> None:
    done = call(mesh, "stop", "--join-secret-file", "secret")
    assert done.returncode == 0, done.stderr
    assert mesh.exit_codes() == [0, 0, 0]
    last = {site.round for site in mesh}
    assert len(last) == 1
    told = min((note["time"], site.name, note["round"]) for site in mesh for note in site.history("stop_after"))
    before = [note["round"] for note in mesh[told[1]].history("commit") if note["time"] <= told[0]]
    assert last == {told[2]} == {before[-1] + 1}, "the round that was going on where the order was taken"
    for site in mesh:
        assert f"the run was stopped after round {site.round}" in site.log()
        assert (site.folder / f"snapshot-{site.round}").is_dir(), "saved"
    assert len(mesh.digests()) == len({round for round, _ in mesh.digests()})
    for site in mesh:
        site.start()
    mesh.together()
