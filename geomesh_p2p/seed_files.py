"""Files that hold a peer's address (`--bootstrap @FILE`): whoever founds a run writes one with `--address-file FILE`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from geomesh_p2p.addresses import parse_address, parse_peer_address
from geomesh_p2p.errors import ConfigError, GeoMeshError, UnreachableError

MOST_BYTES = 4096
LOOK_SECONDS = 0.2


def is_file(text: str) -> bool:
    return text.startswith("@")


def read_address(text: str, limit_seconds: float) -> str:
    """An address as given, or the one in a file (`@FILE`), for which it waits: the founder writes it when it listens."""
    if not is_file(text):
        return text
    deadline = time.monotonic() + limit_seconds
    waited = f" after {limit_seconds:g} s (net.reach_seconds)" if limit_seconds else ""
    while True:
        try:
            if found := _address(text):
                return found
            why = "no whole line with an address in it"
        except FileNotFoundError:
            why = "there is no such file"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--bootstrap {text}: cannot be read ({error}): correct the path, or see to its rights") from None
        if time.monotonic() > deadline:
            step = f"start the peer that writes it (--address-file {text[1:]}), or correct the path"
            raise UnreachableError(f"--bootstrap {text}: {why}{waited}: {step}")
        time.sleep(LOOK_SECONDS)


def read_peer_address(text: str, name: str) -> str:
    """A peer's address as given as the argument `name`, or the one in a file (`@FILE`) that is there by now. Raises ConfigError
    if it is none that can be dialled."""
    try:
        found = read_address(text, 0.0) if is_file(text) else text
    except GeoMeshError as error:
        raise ConfigError(f"{name}{str(error).removeprefix('--bootstrap')}") from None
    try:
        parse_peer_address(found)
    except ValueError as error:
        raise ConfigError(f'{name}: "{text}" {error}') from None
    return found


class SeedFiles:
    """What is in such files by now. `files`: the address that each held at this peer's start, and the file as given (@FILE)."""

    def __init__(self, files: Mapping[str, str] | None = None) -> None:
        self._files = dict(files or {})
        self._newest = {address: address for address in self._files}

    def __bool__(self) -> bool:
        return bool(self._files)

    def newest(self, address: str) -> str:
        """The address in the file that `address` came from; the last one that was good while it has none, `address` itself if
        it is not from a file."""
        if (file := self._files.get(address)) is None:
            return address
        try:
            found = _address(file)
        except (ConfigError, OSError, UnicodeDecodeError):
            found = ""
        if found:
            self._newest[address] = found
        return self._newest[address]


def _address(text: str) -> str:
    """The address in the file `text` (@FILE), "" if it is not wholly written. Raises ConfigError if it is none that can be
    dialled, OSError or UnicodeDecodeError."""
    with Path(text[1:]).open(encoding="utf-8") as file:
        found = file.read(MOST_BYTES)
    if not found.endswith("\n"):
        return ""
    found = found.strip()
    try:
        peer = parse_address(found).peer
    except ValueError:
        peer = ""
    if not peer or len(found.split()) > 1:
        shown = " ".join(found.split())[:100]
        step = "name the file that a peer writes (--address-file)"
        raise ConfigError(f'--bootstrap {text}: no address of a peer is in it ("{shown}"): {step}')
    return found
