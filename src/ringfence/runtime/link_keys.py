"""The keys of a session that links are made from (spec/link.md): hellos, link secrets, sealers, openers and origin keys."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import Secret
from ringfence.link.hello import Confirm, LinkHandshake, LinkHello, LinkSecrets, Reply, read_hello, write_hello
from ringfence.link.seal import Opener, OriginKeys, Sealer
from ringfence.link.tag_chain import TagChains
from ringfence.transport.fork import ALIVE


class LinkKeys:
    """The session key, this worker's private keys and the public keys of all workers.

    `alive` is the canary that reads 0 in a forked child; sealers check it before every use of a key. `covers`: whether the tags
    of links cover the ciphertext of forwarded frames, which is a version of its own in hellos.
    """

    def __init__(
        self,
        session_key: Secret,
        private_key: X25519PrivateKey,
        public_keys: Sequence[bytes],
        alive: Sequence[int] = ALIVE,
        covers: bool = False,
    ) -> None:
        self.session_key = session_key
        self.alive = alive
        self._covers = covers
        self._version = keys.LINK_VERSIONS[covers]
        self._private_key: X25519PrivateKey | None = private_key
        self._public_keys = public_keys
        self._shared: dict[int, bytes] = {}  # by worker
        self._kem: tuple[MLKEM768PrivateKey, bytes] | None = None  # with its public key
        self.chains: TagChains | None = None  # if the session is recorded

    def hello_bytes(self, hello: LinkHello) -> bytes:
        """Return a hello with its MAC."""
        return write_hello(self.session_key, hello, self._version)

    def read_hello(self, data: bytes) -> LinkHello:
        """Return a received hello; raise AuthenticationError if its MAC is wrong, or it has another version."""
        return read_hello(self.session_key, data, self._version)

    def reply(self, hello: LinkHello, nonce: bytes) -> bytes:
        """Return the answer to a hello, which any peer can replay. It costs no computation with ML-KEM.

        Raises AuthenticationError if the dialler's public key has low order, and ProtocolError after `forget`.
        """
        handshake = self._handshake(hello.sender, hello, nonce)
        public = self._kem_public()
        return nonce + public + handshake.acceptor_confirms(public)

    def confirm(self, hello: LinkHello, received: bytes) -> tuple[bytes, LinkSecrets]:
        """Verify a reply, and return the confirm to send and the secrets of the connection.

        Raises AuthenticationError if the peer does not hold the key of the dialled worker, and as `reply` does.
        """
        reply = Reply.read(received)
        handshake = self._handshake(hello.receiver, hello, reply.nonce)
        if not keys.same(reply.confirmation, handshake.acceptor_confirms(reply.kem_key)):
            raise AuthenticationError(f"the peer that answered for worker {hello.receiver} does not hold its key")
        try:
            secret, ciphertext = MLKEM768PublicKey.from_public_bytes(reply.kem_key).encapsulate()
        except ValueError:  # it is not reduced: no worker sends such a key
            raise AuthenticationError(f"worker {hello.receiver} sent an invalid ML-KEM key") from None
        confirmation = handshake.dialler_confirms(reply.kem_key, ciphertext)
        return ciphertext + confirmation, handshake.secrets(secret, reply.kem_key, ciphertext)

    def accept(self, hello: LinkHello, nonce: bytes, received: bytes) -> LinkSecrets:
        """Verify the confirm that answers a `reply` with this nonce, and return the secrets of the connection.

        Raises AuthenticationError if the dialler does not hold the key of the worker that it claims to be.
        """
        confirm = Confirm.read(received)
        handshake, public = self._handshake(hello.sender, hello, nonce), self._kem_public()
        if not keys.same(confirm.confirmation, handshake.dialler_confirms(public, confirm.ciphertext)):
            raise AuthenticationError("a dialler does not hold the key it claims")
        assert self._kem is not None
        return handshake.secrets(self._kem[0].decapsulate(confirm.ciphertext), public, confirm.ciphertext)

    def _handshake(self, worker: int, hello: LinkHello, acceptor_nonce: bytes) -> LinkHandshake:
        shared = self._shared.get(worker)
        if shared is None:
            shared = self._shared[worker] = self._agree(worker)
        return LinkHandshake(self.session_key, shared, hello, acceptor_nonce)

    def _kem_public(self) -> bytes:
        """Return this worker's ML-KEM key of the session, made when the first link is accepted."""
        if self._kem is None:
            if self._private_key is None:
                raise ProtocolError("the keys of this session are forgotten")
            private = MLKEM768PrivateKey.generate()
            self._kem = private, private.public_key().public_bytes_raw()
        return self._kem[1]

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
        return Sealer(secret, self.alive, self._covers)

    def opener(self, secret: Secret) -> Opener:
        """Return the opener of one direction of a connection."""
        return Opener(secret, self._covers)

    def record_tags(self) -> TagChains:
        """Chain the tags on all connections that are made from now on, and return the chains."""
        self.chains = TagChains()
        return self.chains

    def origin_keys(self, instance: Secret, rank: int) -> OriginKeys:
        """Return the keys for segments that are sealed once and forwarded, from a group's instance secret."""
        return OriginKeys(instance, rank, self.alive)

    def group_secret(self, drawn: bytes, digest: bytes, channel: int) -> Secret:
        """Return the instance secret of a channel of a group from the XOR of what its members drew."""
        return keys.group_secret(self.session_key, drawn, digest, channel)

    def private_sum_seed(self, draws: bytes, layout: bytes, pair: tuple[int, int]) -> Secret:
        """Return the seed of a pair of workers, from what both drew, the lower rank first."""
        return keys.private_sum_seed(self.session_key, draws, layout, pair)

    def machine_socket(self, digest: bytes, worker: int) -> bytes:
        """Return the abstract address at which a worker proves to the members of a group that it is on this machine."""
        return keys.machine_socket(self.session_key, digest, worker)

    def machine_hint(self, digest: bytes, place: bytes) -> bytes:
        """Return what members of a group compare before they prove that they are on one machine."""
        return keys.machine_hint(self.session_key, digest, place)

    def forget(self) -> None:
        """Drop the keys. Other objects may refer to this one, so it is emptied in place."""
        self.session_key = Secret(b"")
        self._private_key = self._kem = None
        self._shared.clear()
