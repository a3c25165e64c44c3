"""Nothing that a peer sends, or that lies in a file, is ever run as code (C114)."""

from __future__ import annotations

import ast
import contextlib
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hivemind.dht.protocol import DHTProtocol
from hivemind.utils.serializer import MSGPackSerializer

import geomesh_p2p
from geomesh_p2p.core import messages as m
from geomesh_p2p.core.canonical import RecordError, unpack
from geomesh_p2p.core.types import Founding, Held, Update
from geomesh_p2p.errors import DataError
from geomesh_p2p.swarm import wire
from geomesh_p2p.swarm.directory import open_record
from tests.fuzz.frames import KINDS, Values

TREE = Path(geomesh_p2p.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "jsonpickle", "code"}
NAMES = {"eval", "exec", "compile", "__import__"}


def bad_calls(path: Path) -> Iterator[str]:
    """Imports and calls by which bytes could become code."""
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (f"{where} imports {a.name}" for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES:
            yield f"{where} imports from {node.module}"
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in NAMES:
                yield f"{where} calls {function.id}"
            if isinstance(function, ast.Attribute) and function.attr == "load" and isinstance(function.value, ast.Name):
                arguments = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                if function.value.id == "torch" and arguments.get("weights_only") is not True:
                    yield f"{where} calls torch.load without weights_only=True"
                if function.value.id in ("np", "numpy") and arguments.get("allow_pickle") is not False:
                    yield f"{where} calls numpy.load without allow_pickle=False"
            if any(k.arg == "trust_remote_code" and getattr(k.value, "value", None) is not False for k in node.keywords):
                yield f"{where} trusts remote code"


@pytest.mark.case("C114")
def test_the_tree_has_no_way_from_bytes_to_code() -> None:
    files = sorted(TREE.rglob("*.py"))
    assert len(files) > 80
    assert [fault for path in files for fault in bad_calls(path)] == []


def test_the_scan_finds_what_it_is_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle, os\nfrom yaml import load\neval('1')\nexec('')\nimport torch, numpy as np\n"
        "torch.load('f')\ntorch.load('f', weights_only=False)\nnp.load('f', allow_pickle=True)\nnp.load('f')\n"
        "f(trust_remote_code=True)\n"
    )
    assert len(list(bad_calls(bad))) == 9
    good = tmp_path / "good.py"
    good.write_text("import torch\ntorch.load('f', weights_only=True)\nmodel.eval()\nf(trust_remote_code=False)\n")
    assert list(bad_calls(good)) == []


@pytest.mark.case("C114")
def test_what_the_daemon_serves_of_hivemind_unpickles_nothing() -> None:
    """Its peers may call the three functions of the DHT, whose values are msgpack with extension types of a closed list."""
    DHTProtocol._collect_rpc_handlers()
    assert DHTProtocol._rpc_handlers is not None
    assert {handler.method_name for handler in DHTProtocol._rpc_handlers} == {"rpc_ping", "rpc_store", "rpc_find"}
    served = ("hivemind.dht", "hivemind.p2p", "hivemind.proto", "hivemind.utils.serializer", "hivemind.utils.timed_storage")
    looked_at = 0
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith(served) and file and file.endswith(".py"):
            looked_at += 1
            assert [f for f in bad_calls(Path(file)) if "import" not in f or "pickle" in f] == []
    assert looked_at > 10
    for kind in MSGPackSerializer._ext_type_codes.values():
        source = Path(sys.modules[kind.__module__].__file__ or "")
        assert [f for f in bad_calls(source) if "pickle" in f or "load" in f] == [], f"{kind} is made from bytes by code"


# ---------------------------------------------------------------- a pickle that would leave a trace


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[tuple[Path, list[bytes]]]:
    file = tmp_path / "sprung"
    pickles = [pickle.dumps(Trap(file), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    pickle.loads(pickles[-1])
    assert file.exists(), "the trap works"
    file.unlink()
    yield file, pickles
    assert not file.exists(), "something was unpickled"


@pytest.mark.case("C114")
def test_a_pickle_in_any_field_of_any_message_stays_bytes(trap: tuple[Path, list[bytes]]) -> None:
    from random import Random

    _, pickles = trap
    for data in pickles:
        texts = (data.decode("latin-1"),)
        values = Values(Random(1), texts, (data,))
        for kind in KINDS:
            for _ in range(5):
                try:
                    body = wire.encode_bytes(values.message(kind), bytes(32))[wire.LENGTH_BYTES :]
                    wire.decode(body)
                except wire.FrameError:
                    pass
        for body in (data, b"\x95" + data, b"\x95\x01\xc4\x00" + data):
            with pytest.raises(wire.FrameError):
                wire.decode(body)
        for record in (Update, Held, Founding, m.Commit):
            with pytest.raises(RecordError):
                unpack(record, data)


@pytest.mark.case("C114")
def test_a_pickle_in_the_directory_stays_bytes(trap: tuple[Path, list[bytes]]) -> None:
    _, pickles = trap
    for data in pickles:
        for code in range(128):
            for crafted in (msgpack.ExtType(code, data), [msgpack.ExtType(code, data)], {"x": msgpack.ExtType(code, data)}):
                with contextlib.suppress(Exception):  # a dozen kinds; what counts is the trap
                    MSGPackSerializer.loads(msgpack.packb(crafted))
        for value in (data, msgpack.packb([data, data, data]), msgpack.packb(data)):
            with pytest.raises(RecordError):
                open_record(bytes(20), "peer", value)


@pytest.mark.case("C114")
def test_a_checkpoint_with_code_in_it_is_not_run(trap: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    from geomesh_p2p.engine import engine as engines

    file, pickles = trap
    zipped = tmp_path / "zipped.pt"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickles[2])
        archive.writestr("archive/version", "3")
        archive.writestr("archive/byteorder", "little")
    saved = tmp_path / "saved.pt"
    torch.save({"exp_avg": Trap(file)}, saved)
    arrays = tmp_path / "arrays.npy"
    np.save(arrays, np.array([Trap(file)], dtype=object), allow_pickle=True)
    for index, data in enumerate(pickles):
        (tmp_path / f"{index}.pt").write_bytes(data)
    engine = object.__new__(engines.TorchEngine)
    engine.loop = None  # type: ignore[assignment]  # nothing comes so far
    for path in (zipped, saved, arrays, *(tmp_path / f"{index}.pt" for index in range(len(pickles)))):
        with pytest.raises(DataError, match="no usable inner state"):
            engine.load_inner(str(path))
