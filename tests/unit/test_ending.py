"""A peer's last line, and what its folder then holds."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from geomesh_p2p.config import RunConfig, SiteConfig
from geomesh_p2p.engine.checkpoint import DiskStore
from geomesh_p2p.errors import NotListedError, RefusedError
from geomesh_p2p.peer import Peer, PeerOptions
from geomesh_p2p.swarm.identity import load_identity


class RefusedPeer(Peer):
    """Meets the run, and is refused."""

    error: RefusedError

    async def _from_start_to_end(self, store: DiskStore, closing: ExitStack) -> int:
        load_identity(self.folder / "identity.key")
        raise self.error


def peer(folder: Path) -> RefusedPeer:
    run = RunConfig.model_validate({"run": {"id": "tiny"}})
    site = SiteConfig.model_validate({"site": {"name": "a"}})
    return RefusedPeer(run, site, PeerOptions(), folder)


async def test_an_identity_that_may_be_listed_yet_stays_and_the_last_line_says_so(tmp_path: Path) -> None:
    refused = peer(tmp_path / "tiny" / "a")
    refused.error = NotListedError("the run refuses this peer: it is not on the allow list (net.allow)")
    with pytest.raises(NotListedError, match=r"its identity stays in .*/tiny/a, so that net.allow can list it") as raised:
        await refused.main()
    assert raised.value.exit_code == 5
    assert {path.name for path in refused.folder.iterdir()} == {"identity.key"}


async def test_of_any_other_refusal_nothing_is_left(tmp_path: Path) -> None:
    refused = peer(tmp_path / "tiny" / "a")
    refused.error = RefusedError("the run refuses this peer: inner.learning_rate is 0.5, not 0.001")
    with pytest.raises(RefusedError, match=r"not 0\.001$"):
        await refused.main()
    assert not refused.folder.parent.exists()


@pytest.mark.parametrize(("outcome", "lost"), [(None, ", the round going on is lost here"), ((0, "left"), "")])
def test_the_second_signal_ends_at_once_with_a_line(
    outcome: object, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    stopped, session = peer(tmp_path), SimpleNamespace(outcome=outcome, leave=lambda *_: None)
    stopped.session = session  # type: ignore[assignment]
    stopped._on_signal(signal.SIGINT)
    assert not ended
    assert capsys.readouterr().err == ""
    stopped._on_signal(signal.SIGINT)
    assert ended == [130]
    assert capsys.readouterr().err == f"geomesh: ended at once: what was committed is saved{lost}\n"
