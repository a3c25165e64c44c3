"""Where faults happen: four light peers behind proxies, and what happens to them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.injection.process import TELL_SIZES, Faults, wake
from tests.injection.proof import fired
from tests.injection.proxy import Network
from tests.injection.script import At, Fault
from tests.process.sites import LIGHT, Site, Sites, complaints, until

LEASE_SECONDS = 3.3  # net.heartbeat_limit_seconds + net.heartbeat_seconds of these meshes


@dataclass
class Ground:
    mesh: Sites
    network: Network
    faults: Faults

    def others(self, *victims: Site) -> list[Site]:
        return [site for site in self.mesh if site not in victims]

    def in_good_order(self) -> list[str]:
        """The mesh is stopped as an operator does it; what was wrong with that, or with anything in the histories."""
        for site in self.mesh:
            if site.alive:
                wake(site)  # a test that failed may have left one stopped
        self.mesh.terminate()
        wrong = [f"exit code {code}" for code in self.mesh.exit_codes() if code != 0]
        digests = self.mesh.digests()
        if len(digests) != len({round for round, _ in digests}):
            wrong.append("two digests of one round")
        # A full disk takes the log of metrics too, which is said as the error that it is.
        wrong += [line for line in complaints(self.mesh) if "cannot be written" not in line]
        return wrong


@contextmanager
def ground_of(folder: Path, names: str = "abcd", *extra: str) -> Iterator[Ground]:
    with Network() as network:
        mesh = Sites(folder, list(names), rounds=100_000, command=LIGHT, network=network)
        mesh.environment |= {"LIGHT_TRAIN_SECONDS": "0.2", TELL_SIZES: "1"}
        for site in mesh:
            site.extra = list(extra)
        faults = Faults(mesh)
        try:
            mesh.start()
            mesh.together()
            yield Ground(mesh, network, faults)
        finally:
            mesh.stop()


def struck_down(ground: Ground, at: At) -> tuple[str, int]:
    """Whoever reaches `at` is killed there and started again: (its name, the round), once the others have gone on without it
    and all are together again."""
    mesh, row = ground.mesh, ground.faults.arm(at, Fault("kill"))
    victim = ground.faults.victim(row, until)
    fired(victim is not None and victim.process is not None and victim.process.wait(120) == -signal.SIGKILL, f"kill: {at}")
    assert victim is not None
    victim.process = None
    claim = ground.faults.claim(row)
    assert claim is not None
    others = ground.others(victim)
    mesh.advance(2, others)
    assert any(victim.peer not in note["view"] for note in others[0].history("commit")[-3:]), "the kill went unnoticed"
    victim.start()
    mesh.together()
    return victim.name, int(claim["round"])
