"""The keys of a session that links are made from (spec/link.md): hellos, link secrets, sealers, openers and origin keys."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import Secret
from ringfence.link.hello import Hello, LinkSecrets, link_secrets, read_hello, write_hello
from ringfence.link.seal import Opener, OriginKeys, Sealer
from ringfence.transport.fork import ALIVE


class LinkKeys:
    """The session key, this worker's private key and the public keys of all workers.

    `alive` is the canary that reads 0 in a forked child; sealers check it before every use of a key.
    """

    def __init__(
        self,
        session_key: Secret,
        private_key: X25519PrivateKey,
        public_keys: Sequence[bytes],
        alive: Sequence[int] = ALIVE,
    ) -> None:
        self.session_key = session_key
        self.alive = alive
        self._private_key: X25519PrivateKey | None = private_key
        self._public_keys = public_keys
        self._shared: dict[int, bytes] = {}  # by worker

    def hello_bytes(self, hello: Hello) -> bytes:
        """Return a hello with its MAC."""
        return write_hello(self.session_key, hello)

    def read_hello(self, data: bytes) -> Hello:
        """Return a received hello; raise AuthenticationError if its MAC is wrong."""
        return read_hello(self.session_key, data)

    def link_secrets(self, worker: int, hello: Hello, acceptor_nonce: bytes) -> LinkSecrets:
        """Return the secrets of one connection with a worker.

        Raises AuthenticationError if the worker's public key has low order, and ProtocolError after `forget`.
        """
        shared = self._shared.get(worker)
        if shared is None:
            shared = self._shared[worker] = self._agree(worker)
        return link_secrets(self.session_key, shared, hello, acceptor_nonce)

    def _agree(self, worker: int) -> bytes:
        if self._private_key is None:
            raise ProtocolError("the keys of this session are forgotten")
        try:
            return self._private_key.exchange(X25519PublicKey.from_public_bytes(self._public_keys[worker]))
        except ValueError:  # the shared secret would be zero
            raise AuthenticationError(
                f"worker {worker} has a key of low order, which agrees on nothing secret: find out what runs there"
            ) from None

    def sealer(self, secret: Secret) -> Sealer:
        """Return the sealer of one direction of a connection."""
        return Sealer(secret, self.alive)

    def opener(self, secret: Secret) -> Opener:
        """Return the opener of one direction of a connection."""
        return Opener(secret)

    def origin_keys(self, instance: Secret, rank: int) -> OriginKeys:
        """Return the keys for segments that are sealed once and forwarded, from a group's instance secret."""
        return OriginKeys(instance, rank, self.alive)

    def group_secret(self, drawn: bytes, digest: bytes) -> Secret:
        """Return the instance secret of a group from the XOR of what its members drew."""
        return keys.group_secret(self.session_key, drawn, digest)

    def machine_socket(self, digest: bytes, worker: int) -> bytes:
        """Return the abstract address at which a worker proves to the members of a group that it is on this machine."""
        return keys.machine_socket(self.session_key, digest, worker)

    def machine_hint(self, digest: bytes, place: bytes) -> bytes:
        """Return what members of a group compare before they prove that they are on one machine."""
        return keys.machine_hint(self.session_key, digest, place)

    def forget(self) -> None:
        """Drop the keys. Other objects may refer to this one, so it is emptied in place."""
        self.session_key = Secret(b"")
        self._private_key = None
        self._shared.clear()
