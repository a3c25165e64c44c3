"""Names of models and tokenizers: a local path, or the id of a Hugging Face repository."""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from geomesh_p2p.errors import DataError

CONNECT_SECONDS = 5.0
_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
T = TypeVar("T")


def load(name: str, key: str, loader: Callable[[str], T]) -> T:
    """`loader(local path or hub id)`. Raises DataError in one line that begins with `key`, the setting that has `name`."""
    path = os.path.expanduser(name)
    here = os.path.exists(path)
    if not here:
        if path.startswith((".", "/")) or path.endswith(".json") or not _HUB_ID.match(path):
            raise DataError(f"{key}: no such file or folder: {name!r}; give an existing one, or a hub id like org/name")
        if reason := _no_way_to_hub(path):
            raise DataError(
                f"{key}: {name!r} is no folder here and is not cached, and {reason}; give a folder, or load it first"
            )
    try:
        return loader(path)
    except DataError:
        raise
    except Exception as error:  # OSError, ValueError, ImportError, the hub's and the tokenizers' own (bare Exception)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = "cannot be used" if here else "is no folder here, and the hub did not give it"
        raise DataError(f"{key}: {name!r} {where} ({lines[0]})") from error


def _no_way_to_hub(name: str) -> str:
    """Why the hub cannot be asked (the hub's own client retries for half a minute before it says so), or nothing."""
    from huggingface_hub import constants, try_to_load_from_cache

    cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "tokenizer.json"))
    if cached:
        return ""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all", "")
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error.strerror or error})"
    return ""
