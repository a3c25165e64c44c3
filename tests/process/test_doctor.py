"""`geomesh doctor` and a peer's own checks against real ports, seeds, clocks and processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.injection.proof import fired, inject, injecting
from tests.process.sites import Site, Sites, until

pytestmark = pytest.mark.timeout(240)
GEOMESH = (sys.executable, "-m", "geomesh_p2p.cli")

# Shifts time.time() of any Python that starts with this on its path, by the seconds in the file CLOCK_SHIFT.
SHIFTED_CLOCK = """
import os, threading, time
real, shift = time.time, [0.0]
def look():
    while True:
        try:
            shift[0] = float(open(os.environ["CLOCK_SHIFT"]).read())
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
time.time = lambda: real() + shift[0]
try:
    shift[0] = float(open(os.environ["CLOCK_SHIFT"]).read())
except (OSError, ValueError):
    pass
threading.Thread(target=look, daemon=True).start()
"""


def doctor(folder: Path, *words: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """(exit code, findings by check)."""
    command = [*GEOMESH, "doctor", *words, "--json"]
    done = subprocess.run(command, cwd=folder, env=env or dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout):
        found.setdefault(finding["check"], []).append(finding)
    return done.returncode, found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """A founder that waits for a second trainer."""
    sites = Sites(tmp_path_factory.mktemp("doctor"), ["a", "b"], rounds=1000)
    try:
        sites.sites[0].start(first=True)
        until(lambda: sites.sites[0].history("term"), "the founder to lead")
        yield sites
    finally:
        sites.stop()


class Listener:
    """A port that takes connections and answers with `words`, or with nothing."""

    def __init__(self, words: bytes = b"") -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.words = words
        self.taken: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.taken.append(connection)
            if self.words:
                connection.sendall(self.words)

    def close(self) -> None:
        self.socket.close()
        for connection in self.taken:
            connection.close()


@pytest.mark.case("C001")
def test_each_seed_gets_a_line_with_the_reason_why_it_does_not_answer(run: Sites) -> None:
    good = run.sites[0].address_file.read_text().strip()
    at, peer = good.rsplit("/p2p/", 1)
    other = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
    silent, web = Listener(), Listener(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    try:
        seeds = {
            "refused": f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",
            "though connections are taken": f"/ip4/127.0.0.1/tcp/{silent.port}/p2p/{peer}",
            "what answers there is no peer": f"/ip4/127.0.0.1/tcp/{web.port}/p2p/{peer}",
            "peer id differs": f"{at}/p2p/{other}",
        }
        code, found = doctor(run.folder, "--bootstrap", *seeds.values(), good)
        texts = {finding["text"]: finding["level"] for finding in found["seed"]}
        for reason, seed in seeds.items():
            (level,) = (level for text, level in texts.items() if seed in text and reason in text)
            assert level == "warning", "one seed that answers is enough"
        assert (code, texts[f"net.seeds: {good} answers"]) == (0, "ok")
        assert [clock["level"] for clock in found["clock"]] == ["ok"]
        code, found = doctor(run.folder, "--bootstrap", *seeds.values())
        assert (code, {finding["level"] for finding in found["seed"]}) == (3, {"fatal"})
    finally:
        silent.close()
        web.close()


@pytest.mark.case("C001")
@pytest.mark.case("C011")
@pytest.mark.fault
def test_everything_wrong_is_found_at_once_and_the_clock_is_compared_with_the_seed(run: Sites, tmp_path: Path) -> None:
    good = run.sites[0].address_file.read_text().strip()
    port = good.split("/")[4]
    (tmp_path / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    (tmp_path / "shift").write_text("0")
    inject(lambda: (tmp_path / "shift").write_text("10"))
    env = {**os.environ, "CLOCK_SHIFT": str(tmp_path / "shift"), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = ["run.toml", "--site", "a.toml", "--bootstrap", good, "--net.listen", f"/ip4/127.0.0.1/tcp/{port}"]
    code, found = doctor(run.folder, *words, "--dataset.paths", "none*.txt", "--net.join_secret_file", "none", env=env)
    fired([finding for finding in found["clock"] if finding["level"] == "warning"], "the clock is off")
    assert code == 2, "the port that is taken (75) may be free later, the rest stays wrong"
    fatal = {check for check, findings in found.items() for finding in findings if finding["level"] == "fatal"}
    assert fatal == {"listen port", "join secret", "identity", "data files", "folder"}
    assert f"port {port}" in found["listen port"][0]["text"]
    assert "(p2pd)" in found["listen port"][0]["text"]
    assert "in use by process" in found["folder"][0]["text"]
    assert all(finding["next_step"] for findings in found.values() for finding in findings if finding["level"] != "ok")
    (clock,) = found["clock"]
    assert clock["text"].startswith("this host's clock is 10.0 s")
    assert f"ahead of that of {good}" in clock["text"]
    assert run.sites[0].process is not None
    assert run.sites[0].process.poll() is None


# ---------------------------------------------------------------- a peer that starts where much is missing

# Hides uvloop, and gives /dev/shm 8 MB in a mount namespace of its own.
WITHOUT_UVLOOP = 'raise ImportError("hidden by the test")\n'
SMALL_SHM = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"'


@pytest.mark.case("C102")
@pytest.mark.case("C103")
@pytest.mark.case("C126")
@pytest.mark.case("C012")
@pytest.mark.fault
def test_a_peer_trains_without_uvloop_shared_memory_and_its_metrics_port(tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "uvloop.py").write_text(WITHOUT_UVLOOP)
    sites = Sites(tmp_path, ["a"], rounds=2, command=())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        inject(taken.listen)
        port = taken.getsockname()[1]
        namespace = ["unshare", "-Urm", "sh", "-c", SMALL_SHM, "sh"] if injecting() else []
        sites.command = [*namespace, *GEOMESH]
        path = [str(tmp_path / "hide")] if injecting() else []
        sites.environment["PYTHONPATH"] = ":".join([*path, os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))])
        if not injecting():
            taken.close()
        site = sites.sites[0]
        site.extra = ["--run.min_peers", "1", "--metrics.port", str(port)]
        try:
            site.start(first=True)
            until(lambda: "metrics on" in site.log() or site.ended(), "the peer's start")
            fired("uvloop is missing" in site.log(), "uvloop cannot be imported")
            fired(f"metrics.port = {port} on 127.0.0.1 cannot be had" in site.log(), "the metrics port is taken")
            until(lambda: site.round >= 1, "a round")
            assert site.process is not None
            mounts = Path(f"/proc/{site.process.pid}/mounts").read_text()
            fired("/dev/shm tmpfs rw" in mounts and "size=8192k" in mounts, "/dev/shm has 8 MB")
            shared = [line for line in Path(f"/proc/{site.process.pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
            assert all("/dev/shm/sem." in line for line in shared), "locks, of a page each, and no data"
            assert sites.exit_codes() == [0]
        finally:
            sites.stop()
    assert site.round == 2
    assert "Traceback" not in site.log()


@pytest.mark.case("C103")
def test_peers_on_one_host_serve_their_own_metrics_on_ports_of_their_own(run: Sites) -> None:
    founder, second = run.sites
    second.start()
    until(lambda: second.round >= 1, "a round of both")
    served = [metrics_of(site) for site in (founder, second)]
    assert ['site="a"' in served[0], 'site="b"' in served[1]] == [True, True]
    assert 'geomesh_round{site="b"}' not in served[0]
    second.kill()


def metrics_of(site: Site) -> str:
    at = next(line for line in site.log().splitlines() if "metrics on http" in line).split("metrics on ")[1].split()[0]
    with urllib.request.urlopen(at, timeout=10) as answer:
        return str(answer.read().decode())


# ---------------------------------------------------------------- clocks


@pytest.mark.case("C011")
@pytest.mark.case("C076")
@pytest.mark.fault
@pytest.mark.long
@pytest.mark.timeout(600)
def test_peers_whose_clocks_differ_and_jump_keep_leader_and_members_and_say_by_how_much(tmp_path: Path) -> None:
    sites = Sites(tmp_path, ["a", "b", "c"], rounds=6, sequence_seconds=0.05)
    shifts = {"a": 0.0, "b": 3600.0, "c": -10.0}
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    usual = sites.environment
    try:
        for site in sites:
            site.extra = ["--run.min_peers", "3"]
            shift = tmp_path / f"{site.name}.shift"
            shift.write_text("0")
            inject(lambda shift=shift, site=site: shift.write_text(str(shifts[site.name])))  # type: ignore[misc]
            path = f"{tmp_path / 'path'}:{os.environ.get('PYTHONPATH', str(Path(__file__).parents[2]))}"
            sites.environment = {**usual, "CLOCK_SHIFT": str(shift), "PYTHONPATH": path}
            site.start(first=site.name == "a")
            until(lambda site=site: site.address_file.exists(), "its address")  # type: ignore[misc]
        a, b, c = sites
        until(lambda: a.history("commit") and b.history("commit"), "a round of both")
        ahead = b.history("commit")[0]["time"] - a.history("commit")[0]["time"]
        fired(3000 < ahead < 4000, "b's clock is an hour ahead")
        until(lambda: a.round >= 3, "three rounds")
        inject(lambda: (tmp_path / "c.shift").write_text("600"))
        assert sites.exit_codes() == [0, 0, 0]
    finally:
        sites.stop()
    last = {site.name: site.commits()[6] for site in sites}
    assert len({note["digest"] for note in last.values()}) == 1
    assert {len(note["contributors"]) for note in a.commits().values()} == {3}, "nobody was lost"
    assert len(a.history("term")) == 1, "one leader from the first round to the last"
    assert "behind that of b" in a.log()
    assert "ahead of that of a" in b.log()
    assert "3600" in b.log()
    assert "Traceback" not in a.log() + b.log() + c.log()


# ---------------------------------------------------------------- one folder


RACER = """
import sys
from pathlib import Path
from geomesh_p2p.engine.checkpoint import DiskStore
from geomesh_p2p.errors import TemporaryError
for line in sys.stdin:
    try:
        store = DiskStore(Path(sys.argv[1]))
    except TemporaryError as error:
        print("refused", error, flush=True)
    else:
        print("has it", flush=True)
        sys.stdin.readline()
        store.close()
        print("gone", flush=True)
"""


@pytest.mark.case("C094")
def test_of_four_processes_that_start_in_one_folder_at_once_one_has_it_twenty_times(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x" / "north"
    words = [sys.executable, "-c", RACER, str(folder)]
    racers = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=dict(os.environ))
        for _ in range(4)
    ]
    try:
        for _ in range(20):
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write("go\n")
            said = [(racer, racer.stdout.readline()) for racer in racers if racer.stdout is not None]
            (winner,) = (racer for racer, line in said if line == "has it\n")
            refused = [line for racer, line in said if racer is not winner]
            assert all(f"{folder} is in use by process" in line for line in refused), refused
            assert winner.stdin is not None
            assert winner.stdout is not None
            winner.stdin.write("leave\n")
            assert winner.stdout.readline() == "gone\n"
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


# ---------------------------------------------------------------- tokenizers and child processes

# A tokenizer that has used its threads, then the start and end of the only child process that a peer has, twenty times.
STARTS = """
import asyncio, sys
from pathlib import Path
import tokenizers
from geomesh_p2p.config import NetSection
from geomesh_p2p.engine.tokenizer import load_tokenizer
from geomesh_p2p.swarm.transport import Libp2pTransport

words = {f"w{i}": i for i in range(100)}
fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
fast.save(sys.argv[1] + "/tokenizer.json")
fast.encode_batch(["w1 w2 w3"] * 1000)
tokenizer = load_tokenizer(sys.argv[1] + "/tokenizer.json")

async def answer(sender, fetch):
    raise AssertionError

async def main():
    for start in range(20):
        before = tokenizer.encode("w5 w6 w7 " * 1000).sum()
        transport = Libp2pTransport(NetSection(), Path(sys.argv[1]) / "identity.key")
        await transport.start(lambda sender, message: None, answer)
        fast.encode_batch(["w1 w2 w3"] * 1000)
        assert tokenizer.encode("w5 w6 w7 " * 1000).sum() == before
        await transport.stop()
    print("started", start + 1)

asyncio.run(main())
"""


@pytest.mark.case("C088")
def test_a_tokenizer_that_was_used_before_a_child_process_starts_neither_stalls_nor_warns(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key not in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(tmp_path)], env=env, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "started 20\n"), done.stderr
    assert "fork" not in done.stderr
    assert "TOKENIZERS_PARALLELISM" not in done.stderr


def test_a_joiner_says_that_its_seed_is_still_starting(run: Sites) -> None:
    """The seed's process is stopped in time: its port answers (the daemon's), the peer behind it does not."""
    founder = run.sites[0]
    assert founder.process is not None
    founder.process.send_signal(signal.SIGSTOP)
    try:
        words = [*GEOMESH, "peer", str(run.run_file), "--site", "b.toml", "--run.folder", "waiting", "--net.reach_seconds", "6"]
        words += ["--bootstrap", founder.address_file.read_text().strip()]
        done = subprocess.run(words, cwd=run.folder, env=run.environment, capture_output=True, text=True, timeout=120)
    finally:
        founder.process.send_signal(signal.SIGCONT)
    assert done.returncode == 3
    assert "it is still starting" in done.stderr
    assert "net.reach_seconds" in done.stderr


@pytest.mark.case("C005")
def test_the_announced_address_is_dialled_while_the_doctor_listens_there(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    (tmp_path / "run.toml").write_text('[run]\nid = "x"\n')
    listen = ["run.toml", "--net.listen", f"/ip4/0.0.0.0/tcp/{port}", "--net.announce"]
    code, found = doctor(tmp_path, *listen, f"/ip4/127.0.0.2/tcp/{port}")
    assert (code, [one["level"] for one in found["reachable"]]) == (0, ["ok"])
    code, found = doctor(tmp_path, *listen, "/ip4/127.0.0.2/tcp/1")
    (unreachable,) = found["reachable"]
    assert (code, unreachable["level"], "connection refused" in unreachable["text"]) == (0, "warning", True)
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"], "nothing is left behind"
