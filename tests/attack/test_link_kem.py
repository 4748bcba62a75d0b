"""ML-KEM in the handshake of a link: it cannot be removed or altered, and no unauthenticated peer causes work with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import Secret
from ringfence.link.hello import CONFIRM_BYTES, REPLY_BYTES, Confirm, Lane, LinkHandshake, LinkHello, Reply
from ringfence.runtime import link_keys
from ringfence.runtime.link_keys import LinkKeys

PRIVATE = [X25519PrivateKey.generate() for _ in range(2)]
PUBLIC = [each.public_key().public_bytes_raw() for each in PRIVATE]
SESSION_KEY = bytes(range(32))
HELLO = LinkHello(0, 1, Lane.COLLECTIVE, bytes(32), bytes([7] * 32))
NONCE = bytes([9] * 32)


def link_keys_of(rank: int) -> LinkKeys:
    return LinkKeys(Secret(SESSION_KEY), PRIVATE[rank], PUBLIC)


@pytest.fixture
def dialler() -> LinkKeys:
    return link_keys_of(0)


@pytest.fixture
def acceptor() -> LinkKeys:
    return link_keys_of(1)


def test_both_sides_derive_the_same_secrets(dialler: LinkKeys, acceptor: LinkKeys) -> None:
    reply = acceptor.reply(HELLO, NONCE)
    confirm, secrets = dialler.confirm(HELLO, reply)
    assert (len(reply), len(confirm)) == (REPLY_BYTES, CONFIRM_BYTES) == (1248, 1120)
    assert acceptor.accept(HELLO, NONCE, confirm) == secrets
    assert Reply.read(acceptor.reply(HELLO, bytes(32))).kem_key == Reply.read(reply).kem_key, "one key for the session"
    assert Reply.read(link_keys_of(1).reply(HELLO, NONCE)).kem_key != Reply.read(reply).kem_key, (
        "and another for the next"
    )
    again, others = dialler.confirm(HELLO, reply)
    assert again != confirm and others != secrets, "every connection encapsulates anew"


def altered(data: bytes) -> list[bytes]:
    """Every part of a message changed: a bit in each of many places, zeros, another length."""
    places = [*range(0, len(data), 37), len(data) - 1]
    return [data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] for place in places]


@pytest.mark.promise("Nobody can remove or alter the post-quantum part of a link's handshake.")
def test_an_altered_key_or_ciphertext_is_refused(dialler: LinkKeys, acceptor: LinkKeys) -> None:
    reply = acceptor.reply(HELLO, NONCE)
    for changed in (*altered(reply), bytes(len(reply)), reply[:32] + bytes(keys.KEM_PUBLIC_BYTES) + reply[-32:]):
        with pytest.raises(AuthenticationError, match="the peer that answered for worker 1 does not hold its key"):
            dialler.confirm(HELLO, changed)
    confirm, _ = dialler.confirm(HELLO, reply)
    for changed in (*altered(confirm), bytes(len(confirm)), bytes(keys.KEM_CIPHERTEXT_BYTES) + confirm[-32:]):
        with pytest.raises(AuthenticationError, match="a dialler does not hold the key it claims"):
            acceptor.accept(HELLO, NONCE, changed)


@pytest.mark.promise("Nobody can remove or alter the post-quantum part of a link's handshake.")
def test_a_key_or_ciphertext_of_the_attacker_is_refused(dialler: LinkKeys, acceptor: LinkKeys) -> None:
    """A man in the middle puts its own key into the reply, or its own ciphertext into the confirm."""
    own = MLKEM768PrivateKey.generate().public_key().public_bytes_raw()
    reply = acceptor.reply(HELLO, NONCE)
    with pytest.raises(AuthenticationError, match="does not hold its key"):
        dialler.confirm(HELLO, reply[:32] + own + reply[-32:])
    confirm, _ = dialler.confirm(HELLO, reply)
    _, ciphertext = MLKEM768PublicKey.from_public_bytes(Reply.read(reply).kem_key).encapsulate()
    with pytest.raises(AuthenticationError, match="does not hold the key"):
        acceptor.accept(HELLO, NONCE, ciphertext + confirm[-32:])


@pytest.mark.promise("Nobody can remove or alter the post-quantum part of a link's handshake.")
def test_messages_without_ml_kem_are_refused(dialler: LinkKeys, acceptor: LinkKeys) -> None:
    """There is no version, flag or length that leaves ML-KEM out: even a peer with all classical keys is refused."""
    shared = PRIVATE[1].exchange(PRIVATE[0].public_key())
    handshake = LinkHandshake(Secret(SESSION_KEY), shared, HELLO, NONCE)
    bare = NONCE + handshake.acceptor_confirms(b"")
    for reply in (
        bare,
        bare.ljust(REPLY_BYTES, b"\0"),
        NONCE + bytes(REPLY_BYTES - 64) + handshake.acceptor_confirms(b""),
    ):
        with pytest.raises(AuthenticationError):
            dialler.confirm(HELLO, reply)
    public = Reply.read(acceptor.reply(HELLO, NONCE)).kem_key
    bare = handshake.dialler_confirms(public, b"")
    for confirm in (bare, bare.rjust(CONFIRM_BYTES, b"\0"), bare.ljust(CONFIRM_BYTES, b"\0")):
        with pytest.raises(AuthenticationError):
            acceptor.accept(HELLO, NONCE, confirm)


def test_an_invalid_key_of_an_admitted_worker_is_refused(dialler: LinkKeys) -> None:
    """Coefficients that are not reduced, with a right confirmation: FIPS 203 asks for this check."""
    shared = PRIVATE[1].exchange(PRIVATE[0].public_key())
    handshake = LinkHandshake(Secret(SESSION_KEY), shared, HELLO, NONCE)
    key = b"\xff" * keys.KEM_PUBLIC_BYTES
    with pytest.raises(AuthenticationError, match="worker 1 sent an invalid ML-KEM key"):
        dialler.confirm(HELLO, NONCE + key + handshake.acceptor_confirms(key))


class Counted:
    """Counts the computations with ML-KEM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        counted = self

        class Private:
            def __init__(self) -> None:
                self._key = MLKEM768PrivateKey.generate()
                counted.made.append("generate")

            generate = classmethod(lambda cls: cls())

            def public_key(self) -> MLKEM768PublicKey:
                return self._key.public_key()

            def decapsulate(self, ciphertext: bytes) -> bytes:
                counted.made.append("decapsulate")
                return self._key.decapsulate(ciphertext)

        class Public:
            @staticmethod
            def from_public_bytes(data: bytes) -> MLKEM768PublicKey:
                counted.made.append("encapsulate")
                return MLKEM768PublicKey.from_public_bytes(data)

        monkeypatch.setattr(link_keys, "MLKEM768PrivateKey", Private)
        monkeypatch.setattr(link_keys, "MLKEM768PublicKey", Public)


@pytest.mark.promise("An unauthenticated peer causes no computation with ML-KEM on a link.")
def test_no_work_before_the_peer_is_authenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    dialler, acceptor = link_keys_of(0), link_keys_of(1)
    replies = [acceptor.reply(HELLO, bytes([number]) * 32) for number in range(20)]  # replayed hellos
    assert counted.made == ["generate"], "one key for the session"
    for reply in replies:
        with pytest.raises(AuthenticationError):
            dialler.confirm(HELLO, reply[:-1] + bytes([reply[-1] ^ 1]))
        with pytest.raises(AuthenticationError):
            acceptor.accept(HELLO, reply[:32], bytes(CONFIRM_BYTES))
    assert counted.made == ["generate"]
    confirm, secrets = dialler.confirm(HELLO, replies[3])
    assert acceptor.accept(HELLO, replies[3][:32], confirm) == secrets
    assert counted.made == ["generate", "encapsulate", "decapsulate"]


@pytest.mark.promise("An attacker that breaks X25519 later, and knows the session key, does not have a link's keys.")
def test_x25519_and_the_session_key_do_not_give_the_secrets(dialler: LinkKeys, acceptor: LinkKeys) -> None:
    """All that an admitted worker has that recorded a link of two others and computes their X25519 secret."""
    reply = acceptor.reply(HELLO, NONCE)
    confirm, secrets = dialler.confirm(HELLO, reply)
    recorded, sent = Reply.read(reply), Confirm.read(confirm)
    known = LinkHandshake(Secret(SESSION_KEY), PRIVATE[0].exchange(PRIVATE[1].public_key()), HELLO, recorded.nonce)
    assert known.dialler_confirms(recorded.kem_key, sent.ciphertext) == sent.confirmation, (
        "it has all classical secrets"
    )
    guesses: list[Callable[[], bytes]] = [
        lambda: bytes(32),
        lambda: MLKEM768PublicKey.from_public_bytes(recorded.kem_key).encapsulate()[0],
        lambda: MLKEM768PrivateKey.generate().decapsulate(sent.ciphertext),
    ]
    for guess in guesses:
        found = known.secrets(guess(), recorded.kem_key, sent.ciphertext)
        assert found.forth != secrets.forth and found.back != secrets.back


def test_the_key_is_forgotten_with_the_session(dialler: LinkKeys, acceptor: LinkKeys) -> None:
    confirm, _ = dialler.confirm(HELLO, acceptor.reply(HELLO, NONCE))
    acceptor.forget()
    assert acceptor._kem is None
    with pytest.raises(ProtocolError):
        acceptor.accept(HELLO, NONCE, confirm)
    with pytest.raises(ProtocolError):
        acceptor.reply(HELLO, NONCE)
