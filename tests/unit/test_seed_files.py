"""Seeds are tried again; files that a seed's address is in are waited for, and read again before each try."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from geomesh_p2p.config import NetSection
from geomesh_p2p.core.ports import Unreachable
from geomesh_p2p.errors import ConfigError, UnreachableError
from geomesh_p2p.seed_files import SeedFiles, read_address
from geomesh_p2p.swarm.addresses import Address
from geomesh_p2p.swarm.seeds import Seeds
from geomesh_p2p.swarm.virtual_time import run_virtual

PEER = "12D3KooWCKbmwgeyiasUcYmfksk87CnovRTmZVXoxuoNNBvUaPyq"
OLD, NEW = f"/ip4/127.0.0.1/tcp/4100/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4200/p2p/{PEER}"


def test_an_address_is_itself_and_a_file_is_what_is_in_it(tmp_path: Path) -> None:
    assert read_address(OLD, 0.0) == OLD
    file = tmp_path / "address"
    given = f"@{file}"
    with pytest.raises(UnreachableError, match=f"there is no such file: start the peer that writes it .--address-file {file}"):
        read_address(given, 0.0)
    file.write_text(OLD)
    with pytest.raises(UnreachableError, match=r"no whole line .* after 0.1 s \(net.reach_seconds\)"):
        read_address(given, 0.1)
    file.write_text(f"{OLD}\n")
    assert read_address(given, 0.0) == OLD
    for words in ("nonsense\n", "/ip4/127.0.0.1/tcp/4100\n", f"{OLD}\n{NEW}\n"):
        file.write_text(words)
        with pytest.raises(ConfigError, match=r"no address of a peer .*name the file that a peer writes"):
            read_address(given, 0.0)
    file.write_text("/ip4/127.0.0.1")
    timer = threading.Timer(0.05, file.write_text, (f"{NEW}\n",))
    timer.start()
    assert read_address(given, 30.0) == NEW, "it was waited for"
    timer.join()
    with pytest.raises(ConfigError, match="correct the path"):
        read_address(f"@{tmp_path}", 0.0)


def test_the_newest_address_of_a_file_is_kept_while_it_has_no_good_one(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text(f"{OLD}\n")
    files = SeedFiles({OLD: f"@{file}"})
    assert (files.newest(OLD), files.newest(NEW)) == (OLD, NEW)
    file.write_text(f"{NEW}\n")
    assert files.newest(OLD) == NEW
    for words in ("/ip4/127", "nonsense\n"):
        file.write_text(words)
        assert files.newest(OLD) == NEW
    file.unlink()
    assert files.newest(OLD) == NEW
    assert not SeedFiles()


@pytest.mark.case("C001")
def test_seeds_that_do_not_answer_are_tried_again_with_growing_pauses() -> None:
    tried: list[float] = []

    async def dial(target: Address) -> None:
        tried.append(asyncio.get_running_loop().time())
        raise Unreachable("connection refused")

    async def main() -> float:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(UnreachableError, match="connection refused: nothing listens there"):
            await Seeds(NetSection(reach_seconds=30), "me", dial, lambda *_: None).connect((OLD,))
        return asyncio.get_running_loop().time() - begun

    assert run_virtual(main()) == pytest.approx(30.0)
    assert [later - earlier for earlier, later in pairwise(tried)] == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 8.0])


async def test_a_seed_that_starts_anew_elsewhere_is_dialled_there_once_its_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text(f"{OLD}\n")
    dialled: list[str] = []

    async def dial(target: Address) -> None:
        dialled.append(target.text)
        if target.text == OLD:
            file.write_text(f"{NEW}\n")
            raise Unreachable("connection refused")

    seeds = Seeds(NetSection(seeds=(OLD,), reach_seconds=60), "me", dial, lambda reason, text: None)
    seeds.files = SeedFiles({OLD: f"@{file}"})
    assert await asyncio.wait_for(seeds.connect((OLD,)), 30.0) == (PEER,)
    assert dialled == [OLD, NEW]
