"""What a libp2p multiaddress says, and which may be listened on, announced and dialled. Text alone: nothing is looked up."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6")
EXAMPLE = "/ip4/203.0.113.5/tcp/31337"
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
LONGEST_PEER_ID = 128

Problem = tuple[tuple[str, ...], str]
"""Settings concerned, and what is wrong with them and what to do."""


@dataclass(frozen=True)
class Address:
    """/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/...][/p2p/PEER]. `host` is an IP address or a name, `peer` is empty if the address
    names none. `relay` is the peer through which a /p2p-circuit address leads, else empty."""

    text: str
    host: str
    port: int
    peer: str
    relay: str = ""

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def wildcard(self) -> bool:
        return self.ip is not None and self.ip.is_unspecified

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or (self.ip is not None and self.ip.is_loopback)

    @property
    def private(self) -> bool:
        """Of a network of its own, which the internet does not route: 10/8, 172.16/12, 192.168/16, link-local and the like."""
        return self.ip is not None and self.ip.is_private and not self.loopback and not self.wildcard


def parse_address(text: str) -> Address:
    """Raises ValueError with the reason."""
    parts = text.split("/")
    if len(parts) < 3 or parts[0] or parts[1] not in HOST_KINDS:
        raise ValueError(f"is not a multiaddress: write it like {EXAMPLE}")
    if len(parts) < 5 or parts[3] != "tcp":
        raise ValueError(f"has no TCP port: write it like {EXAMPLE}")
    kind, host, port = parts[1], parts[2], parts[4]
    if kind.startswith("ip"):
        try:
            (ipaddress.IPv4Address if kind == "ip4" else ipaddress.IPv6Address)(host)
        except ValueError as error:
            raise ValueError(f"is not a multiaddress ({error}): write it like {EXAMPLE}") from None
    elif not host:
        raise ValueError(f"has no host: write it like {EXAMPLE}")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"has no port number where it says {port!r}: write it like {EXAMPLE}")
    way, circuit, behind = "/".join(parts[5:]).partition("p2p-circuit")
    relay, peer = (_peer(way), _peer(behind)) if circuit else ("", _peer(way))
    return Address(text, host, int(port), peer, relay)


def parse_peer_address(text: str) -> Address:
    """An address that names a peer, as needed to dial it. Raises ValueError with the reason."""
    try:
        address = parse_address(text)
    except ValueError as error:
        bare, why = EXAMPLE, str(error).partition(": write it like")[0]
        if found := re.fullmatch(r"([\w.-]+):(\d{1,5})", text, re.ASCII):
            bare = f"/{'ip4' if found[1].replace('.', '').isdigit() else 'dns4'}/{found[1]}/tcp/{found[2]}"
        raise ValueError(f"{why}: write it like {bare}/p2p/PEER_ID, as that peer prints it") from None
    if not address.peer:
        raise ValueError("names no peer id: it must end in /p2p/PEER_ID, as that peer prints it")
    return address


def _peer(text: str) -> str:
    """The last peer id in this part of an address, "" if there is none."""
    parts = text.strip("/").split("/")
    name = next((parts[i + 1] for i in reversed(range(len(parts) - 1)) if parts[i] in ("p2p", "ipfs")), "")
    if name and not is_peer_id(name):
        raise ValueError(f"says {name!r} where a peer id must be: write it like {EXAMPLE}/p2p/12D3KooW...")
    return name


def is_peer_id(text: str) -> bool:
    """Whether `text` is a multihash in base58: of a key that it holds itself (12D3KooW...), or of its SHA-256 (Qm...)."""
    if not text or len(text) > LONGEST_PEER_ID or not set(text) <= set(BASE58):
        return False
    number = 0
    for letter in text:
        number = number * 58 + BASE58.index(letter)
    packed = bytes(len(text) - len(text.lstrip(BASE58[0]))) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    return len(packed) > 2 and packed[0] in (0x00, 0x12) and packed[1] == len(packed) - 2


def allow_problems(allow: Iterable[str]) -> Iterator[Problem]:
    """Entries of an allow list that are no peer's id, and would let nobody in."""
    for entry in allow:
        if not is_peer_id(entry):
            yield ("net.allow",), (
                f'net.allow: "{entry}" is not a peer id: write the one that the peer prints when it starts '
                "(12D3KooW..., also at the end of its address, behind /p2p/)"
            )


def address_problems(listen: str, announce: str, seeds: Iterable[str]) -> Iterator[Problem]:
    """What others could not dial, or this peer could not: each with its settings. Addresses that cannot be read come alone."""
    seeds = tuple(seeds)
    read: dict[str, list[Address]] = {"net.listen": [], "net.announce": [], "net.seeds": []}
    unread = False
    for key, texts in zip(read, ((listen,), (announce,) if announce else (), seeds), strict=True):
        for text in texts:
            try:
                read[key].append(parse_peer_address(text) if key == "net.seeds" else parse_address(text))
            except ValueError as error:
                unread = True
                yield (key,), f'{key}: "{text}" {error}'
    if unread:
        return
    setting = "net.announce" if announce else "net.listen"
    shown = read[setting][0]
    if shown.wildcard:
        yield (setting,), (
            f'{setting}: "{shown.text}" is a wildcard, which nobody can dial: '
            "set net.announce to the address that others dial"
        )
    if announce and shown.port == 0:
        yield ("net.announce",), (
            f'net.announce: "{announce}" has port 0: give the fixed port that others dial, and listen on it'
        )
    remote = next((seed for seed in read["net.seeds"] if not seed.loopback), None)
    if remote is not None and shown.loopback:
        yield (setting, "net.seeds"), (
            f'{setting}: "{shown.text}" is this host\'s loopback, but the seed {remote.text} is elsewhere: '
            "listen on /ip4/0.0.0.0/tcp/PORT and set net.announce to the address that others dial"
        )
