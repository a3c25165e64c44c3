"""A peer's libp2p identity: the key file, the peer id it stands for, signatures that anybody can check against the id.

The file is libp2p's own form (the protobuf PrivateKey), which the daemon reads. New keys are Ed25519; RSA keys made by
other tools work too. A peer id is the multihash of the protobuf PublicKey: the key itself for Ed25519 (identity
multihash), its SHA-256 for RSA.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, padding, rsa
from hivemind.proto import crypto_pb2

from geomesh_p2p.core.types import PeerId
from geomesh_p2p.errors import ConfigError, DataError

MAX_INLINE_KEY_BYTES = 42   # up to this size a public key is its own multihash
MAX_PUBLIC_KEY_BYTES = 1024


@dataclass(frozen=True)
class Identity:
    key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
    public: bytes               # protobuf PublicKey

    @property
    def peer(self) -> PeerId:
        return peer_id(self.public)

    def sign(self, data: bytes) -> bytes:
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(data, padding.PKCS1v15(), hashes.SHA256())
        return self.key.sign(data)


def peer_id(public: bytes) -> PeerId:
    """The base58 peer id of a protobuf PublicKey."""
    if len(public) <= MAX_INLINE_KEY_BYTES:
        multihash = bytes((0x00, len(public))) + public
    else:
        multihash = b"\x12\x20" + hashlib.sha256(public).digest()
    return base58.b58encode(multihash).decode()


def verify(peer: PeerId, public: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made with the key that `peer` stands for."""
    if len(public) > MAX_PUBLIC_KEY_BYTES or peer_id(public) != peer:
        return False
    try:
        message = crypto_pb2.PublicKey.FromString(public)
        if message.key_type == crypto_pb2.Ed25519:
            ed25519.Ed25519PublicKey.from_public_bytes(message.data).verify(signature, data)
            return True
        if message.key_type == crypto_pb2.RSA:
            key = serialization.load_der_public_key(message.data)
            if isinstance(key, rsa.RSAPublicKey):
                key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
                return True
    except (InvalidSignature, ValueError):
        pass
    except Exception:  # protobuf and OpenSSL each have errors of their own for bytes that are no key
        pass
    return False


def load_identity(path: str | Path) -> Identity:
    """The identity in `path`; a new Ed25519 one is made (fsynced, readable by its owner alone) if there is none."""
    path = Path(path)
    try:
        packed = path.read_bytes()
    except FileNotFoundError:
        return _create(path)
    try:
        message = crypto_pb2.PrivateKey.FromString(packed)
        if message.key_type == crypto_pb2.Ed25519:
            identity = _ed25519(ed25519.Ed25519PrivateKey.from_private_bytes(message.data[:32]))
            if _public(crypto_pb2.Ed25519, message.data[32:64]) != identity.public:  # the daemon goes by this half
                raise ValueError("its two halves do not belong together")
            return identity
        key = serialization.load_der_private_key(message.data, password=None)
        if isinstance(key, rsa.RSAPrivateKey):
            return Identity(key, _public(crypto_pb2.RSA, key.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)))  # fmt: skip
    except Exception as error:
        raise DataError(f"{path} is not a libp2p key ({error}): move it away to get a new identity") from None
    raise DataError(f"{path} holds a key that is neither Ed25519 nor RSA: move it away to get a new identity")


def _create(path: Path) -> Identity:
    key = ed25519.Ed25519PrivateKey.generate()
    identity = _ed25519(key)
    seed = key.private_bytes(serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    packed = crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=seed + public).SerializeToString()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
        file.write(packed)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return identity


def _ed25519(key: ed25519.Ed25519PrivateKey) -> Identity:
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return Identity(key, _public(crypto_pb2.Ed25519, raw))


def _public(key_type: int, data: bytes) -> bytes:
    return bytes(crypto_pb2.PublicKey(key_type=key_type, data=data).SerializeToString())


def read_secret(path: Path, flag: str = "") -> bytes:
    """Raises ConfigError; an empty secret would open the run to everybody. `flag`: where the file was named, if
    not in the settings, by somebody who is to have the run's secret already."""
    setting = f"{flag} {path}" if flag else f"net.join_secret_file = {str(path)!r}"
    missing = "name the file that holds the run's secret" if flag else _secret_step(path)
    try:
        secret = path.read_bytes().strip()
    except FileNotFoundError as error:
        raise ConfigError(f"{setting} cannot be read ({error.strerror}): {missing}") from None
    except OSError as error:
        step = "name a file that this user can read, or mend its rights"
        raise ConfigError(f"{setting} cannot be read ({error.strerror}): {step}") from None
    if not secret:
        raise ConfigError(f"{setting} is empty: {missing}")
    return secret


def _secret_step(path: Path) -> str:
    return f"copy the run's secret there, or make one for a new run ({making_a_secret(path)})"


def making_a_secret(path: Path) -> str:
    """The command that makes a secret that cannot be guessed, readable by its owner alone."""
    file = shlex.quote(str(path))
    return f"head -c 32 /dev/urandom | base64 > {file} && chmod 600 {file}"
