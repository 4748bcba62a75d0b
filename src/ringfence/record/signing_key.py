"""The Ed25519 key that signs records: a private file in PKCS #8, and its public half for verifiers. Both are PEM.

`openssl genpkey -algorithm ed25519` makes such a key as well.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from ringfence.config.private_files import read_private, write_new
from ringfence.errors import ConfigurationError


def key_id(public: Ed25519PublicKey) -> str:
    """Return the name of a key in records: SHA-256 of its SubjectPublicKeyInfo in DER, in hexadecimal form."""
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def load_or_make(path: Path) -> tuple[Ed25519PrivateKey, bool]:
    """Return the key in a private file, and whether it was made because there was no file. Raises ConfigurationError."""
    try:
        key = load_pem_private_key(read_private(path, "key"), None)
    except FileNotFoundError:
        made = Ed25519PrivateKey.generate()
        write_new(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600, "a key")
        return made, True
    except OSError as error:
        raise ConfigurationError(f"cannot read the key {path}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigurationError(f"{path} is not a private key in PEM form without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path} is not an Ed25519 key: name a file that does not exist, and one is made")
    return key, False


def public_pem(public: Ed25519PublicKey) -> bytes:
    """Return the public half as a file holds it."""
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def read_public(content: bytes, where: str) -> Ed25519PublicKey:
    """Read the public half of a key. `where` names it in messages. Raises ConfigurationError."""
    if b"PRIVATE KEY" in content:
        raise ConfigurationError(f"{where} is a private key, which only its owner needs: give the public one")
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigurationError(f"{where} is not a public key in PEM form") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigurationError(f"{where} is not an Ed25519 key, and records are signed with no other")
    return key
