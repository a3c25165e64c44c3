"""The file of peers met before: bounded, newest first, whole or not at all, and no obstacle when it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from geomesh_p2p.swarm.acquaintances import MOST_PEERS, Acquaintances


def address(peer: str, port: int = 4100) -> str:
    return f"/ip4/203.0.113.5/tcp/{port}/p2p/{peer}"


@pytest.mark.case("C003")
def test_what_was_met_is_there_after_a_restart_newest_first(tmp_path: Path) -> None:
    path = tmp_path / "acquaintances.json"
    known = Acquaintances(path)
    assert not known.save(), "nothing to be saved"
    for peer in ("a", "b", "c"):
        known.met(peer, [address(peer)])
    known.met("a", [address("a", 4200), address("a", 4100)])
    assert known.save()
    assert not known.save()
    again = Acquaintances(path)
    assert again.addresses() == (address("a", 4200), address("c"), address("b"))
    assert again.addresses(but=["c"], most=1) == (address("a", 4200),)
    assert not again.save()
    assert [entry.name for entry in tmp_path.iterdir()] == ["acquaintances.json"]


def test_it_is_bounded(tmp_path: Path) -> None:
    known = Acquaintances(tmp_path / "known.json")
    for number in range(3 * MOST_PEERS):
        known.met(f"p{number}", [address(f"p{number}", port) for port in range(1, 50)])
    assert len(known) == MOST_PEERS
    assert known.addresses(most=1) == (address(f"p{3 * MOST_PEERS - 1}", 1),)
    known.save()
    assert (tmp_path / "known.json").stat().st_size < MOST_PEERS * 1000


def test_only_addresses_that_name_the_peer_are_kept(tmp_path: Path) -> None:
    known = Acquaintances(tmp_path / "known.json")
    known.met("a", [address("b"), "/ip4/203.0.113.5/tcp/1", "x" * 1000 + "/p2p/a"])
    assert len(known) == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"peer": 1}', '[{"peer": "a"}]', "[[]]", '[{"peer": "a", "addresses": 7}]'])
def test_a_damaged_file_is_a_warning_and_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "known.json"
    path.write_text(text)
    known = Acquaintances(path)
    assert str(path) in known.warnings[0]
    known.met("a", [address("a")])
    assert known.save()
    assert json.loads(path.read_text())[0]["peer"] == "a"
