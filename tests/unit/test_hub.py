import socket

import pytest

from geomesh_p2p.engine import hub
from geomesh_p2p.errors import DataError


def refuse(*_):
    raise OSError(113, "No route to host")


def test_what_is_here_is_loaded_from_here(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert hub.load(str(tmp_path), "model.path", lambda path: path) == str(tmp_path)


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch):
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(DataError, match=r"model\.path: 'an-org/a-model' is no folder.*cannot be reached \(No route to host\)"):
        hub.load("an-org/a-model", "model.path", lambda path: pytest.fail("must not be tried"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        hub.load("an-org/a-model", "model.path", lambda path: pytest.fail("must not be tried"))


def test_behind_a_proxy_it_is_the_proxy_that_must_be_reached(monkeypatch):
    dialled = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy.example:3128"})
    monkeypatch.setattr("urllib.request.proxy_bypass", lambda host: False)
    monkeypatch.setattr(socket, "create_connection", lambda address, _: dialled.append(address) or refuse())
    with pytest.raises(DataError, match=r"proxy\.example cannot be reached"):
        hub.load("an-org/a-model", "model.path", lambda path: pytest.fail("must not be tried"))
    assert dialled == [("proxy.example", 3128)]


def test_what_a_loader_says_becomes_one_line(tmp_path):
    def loader(path):
        raise RuntimeError("first line\nsecond line")

    with pytest.raises(DataError, match=r"cannot be used \(first line\)$"):
        hub.load(str(tmp_path), "model.path", loader)
