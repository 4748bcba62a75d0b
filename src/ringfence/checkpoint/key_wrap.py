"""Key-encryption keys: a key file, or any service that wraps keys."""

from __future__ import annotations

import os
import secrets
from typing import Final, Protocol, runtime_checkable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ringfence import keys
from ringfence.admission.encoding import is_printable
from ringfence.checkpoint.envelope import Envelope, EnvelopeKind, key_context
from ringfence.config.private_files import StrPath, load_secret
from ringfence.errors import CheckpointError

_NONCE: Final = bytes(keys.IV_BYTES)  # the wrapping key is used once


@runtime_checkable
class KeyWrapper(Protocol):
    """What wraps data keys. Implement it over a key management service, so that the key-encryption key never leaves it.

    `context` is the encryption context: a service must bind the wrapped key to it, and refuse to unwrap under another one.
    Both methods may raise anything; the save or load then fails on every rank. Only rank 0 calls them.
    """

    @property
    def name(self) -> str:
        """The name of the key-encryption key, at most 256 printable ASCII characters. It is stored in clear."""

    def wrap(self, key: bytes, context: bytes) -> bytes:
        """Return a data key of 32 bytes encrypted, at most 65,536 bytes."""

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """Return the data key again. Raises an exception if it was not wrapped with this key and context."""


class KeyFile:
    """A key-encryption key in a file that `ringfence secret new FILE` wrote. Only its owner may have access to the file.

    Use a file of its own, not the shared secret of a run. Anyone who has the file reads all checkpoints that it wraps.

    Args:
        path: The file. It is read and checked at once.

    Raises:
        ConfigurationError: The file does not exist, others can read it, or it is not a key file.
    """

    def __init__(self, path: StrPath) -> None:
        self._secret = load_secret(path)
        self._path = os.fspath(path)

    @property
    def name(self) -> str:
        """`file:` and a fingerprint of the key, which reveals nothing about it."""
        return f"file:{keys.digest(keys.CHECKPOINT_KEY_NAME, self._secret.reveal())[:8].hex()}"

    def wrap(self, key: bytes, context: bytes) -> bytes:
        salt = secrets.token_bytes(keys.STREAM_SALT_BYTES)
        return salt + self._aead(salt).encrypt(_NONCE, key, context)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        salt, sealed = wrapped[: keys.STREAM_SALT_BYTES], wrapped[keys.STREAM_SALT_BYTES :]
        try:
            return self._aead(salt).decrypt(_NONCE, sealed, context)
        except InvalidTag:
            raise CheckpointError(f"the wrapped data key does not authenticate under the key in {self._path}") from None

    def _aead(self, salt: bytes) -> AESGCM:
        return AESGCM(keys.derive(self._secret, salt, keys.CHECKPOINT_WRAP).reveal())

    def __repr__(self) -> str:
        return f"KeyFile({self._path!r})"


Key = KeyWrapper | str | os.PathLike[str]  # what functions take as `key`: a wrapper, or the path of a key file


def wrapper_of(key: Key) -> KeyWrapper:
    """Return the wrapper that an argument `key` stands for. Raises ConfigurationError or TypeError."""
    if isinstance(key, str | os.PathLike):
        return KeyFile(key)
    if isinstance(key, KeyWrapper):
        return key
    raise TypeError(f"key must be the path of a key file or a KeyWrapper, not {type(key).__name__}")


def new_data_key(wrapper: KeyWrapper, kind: EnvelopeKind) -> tuple[keys.Secret, Envelope]:
    """Draw a data key and an id, and wrap the key. Raises CheckpointError."""
    data_key = keys.Secret(secrets.token_bytes(keys.KEY_BYTES))
    return data_key, wrap(wrapper, data_key, kind, secrets.token_bytes(keys.CHECKPOINT_ID_BYTES))


def wrap(wrapper: KeyWrapper, data_key: keys.Secret, kind: EnvelopeKind, identifier: bytes) -> Envelope:
    """Wrap a data key. Raises CheckpointError."""
    name = wrapper.name
    if not name or len(name) > keys.CHECKPOINT_NAME_BYTES or not is_printable(name):
        raise CheckpointError(
            f"the name {name!r} of a key must have 1 to {keys.CHECKPOINT_NAME_BYTES} printable ASCII characters"
        )
    try:
        wrapped = wrapper.wrap(data_key.reveal(), key_context(kind, identifier))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the key {name} does not wrap a data key: {error}") from error
    if not isinstance(wrapped, bytes) or not 0 < len(wrapped) <= keys.CHECKPOINT_WRAPPED_BYTES:
        raise CheckpointError(f"the key {name} did not wrap to 1 to {keys.CHECKPOINT_WRAPPED_BYTES} bytes")
    if data_key.reveal() in wrapped:
        raise CheckpointError(f"the key {name} does not encrypt: the data key is in what it returned")
    return Envelope(kind, identifier, name, wrapped)


def unwrap(wrapper: KeyWrapper, envelope: Envelope) -> keys.Secret:
    """Return the data key of an envelope. Raises CheckpointError."""
    if wrapper.name != envelope.key_name:
        raise CheckpointError(f"its data key is wrapped with the key {envelope.key_name}, and {wrapper.name} was given")
    try:
        material = wrapper.unwrap(envelope.wrapped, envelope.context)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the key {wrapper.name} does not unwrap its data key: {error}") from error
    if not isinstance(material, bytes) or len(material) != keys.KEY_BYTES:
        raise CheckpointError(f"the key {wrapper.name} did not unwrap to a key of {keys.KEY_BYTES} bytes")
    return keys.Secret(material)
