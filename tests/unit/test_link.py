"""Sealing and opening of frames in memory: a sealed frame opens once, at its position; anything else is refused and wiped."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import COUNTER_LIMIT, KEY_PHASE_SHIFT, SEGMENT_BYTES, TAG_BYTES, Secret
from ringfence.link.frames import HEADER_BYTES
from ringfence.link.hello import Lane, LinkHandshake, LinkHello
from ringfence.link.seal import Opener, OriginKeys, Sealer, instance_identifier
from ringfence.transport import fork
from tests.unit.flips import flips

SESSION_KEY = Secret(bytes(range(32)))
SECRET = Secret(bytes(range(32, 64)))
OTHER = Secret(bytes(range(64, 96)))
PHASE_1 = 1 << KEY_PHASE_SHIFT  # the first counter of key phase 1


# -- one direction of a connection -------------------------------------------------------------------------------------


def seal(sealer: Sealer, header: bytes, plaintext: bytes) -> bytes:
    target = bytearray(len(plaintext) + TAG_BYTES)
    sealer.seal_into(header, plaintext, memoryview(target))
    return bytes(target)


def opened(opener: Opener, header: bytes, sealed: bytes) -> bytes:
    target = bytearray(b"\xaa" * (len(sealed) - TAG_BYTES))
    opener.open_into(header, sealed, memoryview(target))
    return bytes(target)


def refused(opener: Opener, header: bytes, sealed: bytes) -> None:
    """Check that a frame does not open and that its target is wiped."""
    target = bytearray(b"\xaa" * (len(sealed) - TAG_BYTES))
    with pytest.raises(AuthenticationError):
        opener.open_into(header, sealed, memoryview(target))
    assert target == bytes(len(target))


def sealer_at(counter: int) -> Sealer:
    """Return a sealer at this counter, which is at most the first of key phase 1. Its tags cover all that is given."""
    sealer = Sealer(SECRET, covers=True)
    sealer.counter = counter
    return sealer


def opener_at(counter: int) -> Opener:
    opener = Opener(SECRET)
    opener.counter = counter
    return opener


@given(st.lists(st.tuples(st.binary(max_size=99), st.binary(max_size=300), st.booleans()), max_size=20))
def test_frames_open_in_the_order_in_which_they_were_sealed(frames: list[tuple[bytes, bytes, bool]]) -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET)
    for header, plaintext, only_tag in frames:
        if only_tag:
            opener.check(header, sealer.tag(header))
        else:
            assert opened(opener, header, seal(sealer, header, plaintext)) == plaintext
    assert sealer.counter == opener.counter == len(frames)


def test_full_segment_is_sealed_in_place() -> None:
    plaintext = os.urandom(SEGMENT_BYTES)
    memory = memoryview(bytearray(plaintext) + bytearray(TAG_BYTES))
    Sealer(SECRET).seal_into(b"header", memory[:SEGMENT_BYTES], memory)
    assert bytes(memory[:64]) != plaintext[:64]
    Opener(SECRET).open_into(b"header", memory, memory[:SEGMENT_BYTES])
    assert bytes(memory[:SEGMENT_BYTES]) == plaintext


@pytest.mark.promise("A frame with any single bit flipped is rejected, and its plaintext is wiped.")
@pytest.mark.parametrize("plaintext", [b"", b"x", bytes(range(40))], ids=len)
def test_every_flipped_bit_of_a_sealed_frame_is_refused(plaintext: bytes) -> None:
    header = bytes(range(HEADER_BYTES))
    sealed = seal(Sealer(SECRET), header, plaintext)
    for changed in flips(header + sealed):
        refused(Opener(SECRET), changed[:HEADER_BYTES], changed[HEADER_BYTES:])
    assert opened(Opener(SECRET), header, sealed) == plaintext


@pytest.mark.parametrize("covers", [False, True])
def test_flipped_bit_in_tag_or_covered_bytes_is_refused(covers: bool) -> None:
    """Without the cover, a change of the ciphertext passes on this hop: only the origin's tag protects it."""
    frame, ciphertext = bytes(range(HEADER_BYTES + 40 + TAG_BYTES)), range(HEADER_BYTES, HEADER_BYTES + 40)
    tag = Sealer(SECRET, covers=covers).tag(memoryview(frame))
    accepted = set()
    for bit, changed in enumerate(flips(frame + tag)):
        try:
            Opener(SECRET, covers).check(memoryview(changed)[: len(frame)], changed[len(frame) :])
        except AuthenticationError:
            continue
        accepted.add(bit // 8)
    assert accepted == (set() if covers else set(ciphertext))


def test_both_ends_of_a_link_need_the_same_cover() -> None:
    frame = bytes(range(HEADER_BYTES + 40 + TAG_BYTES))
    for covers in (False, True):
        with pytest.raises(AuthenticationError):
            Opener(SECRET, not covers).check(frame, Sealer(SECRET, covers=covers).tag(frame))


@pytest.mark.parametrize("cut", range(TAG_BYTES + 4))
def test_truncated_frame_is_refused(cut: int) -> None:
    sealed = seal(Sealer(SECRET), b"header", b"text")[:cut]
    target = memoryview(bytearray(max(0, cut - TAG_BYTES)))
    with pytest.raises(AuthenticationError):
        Opener(SECRET).open_into(b"header", sealed, target)


@pytest.mark.promise("A frame opens only at its own position, in its own direction and on its own connection.")
@given(st.integers(0, 5), st.integers(0, 5))
def test_frame_opens_only_at_its_own_position(sealed_at: int, opened_at: int) -> None:
    """Dropped, repeated and reordered frames all have a counter that is not the next one."""
    sealed = seal(sealer_at(sealed_at), b"header", b"text")
    opener = opener_at(opened_at)
    if sealed_at == opened_at:
        assert opened(opener, b"header", sealed) == b"text"
    else:
        refused(opener, b"header", sealed)


@pytest.mark.promise("A frame opens only at its own position, in its own direction and on its own connection.")
def test_frame_does_not_open_in_another_direction_or_connection() -> None:
    hello = LinkHello(0, 1, Lane.COLLECTIVE, bytes(32), bytes(32))
    first = LinkHandshake(SESSION_KEY, bytes(32), hello, bytes(32)).secrets(bytes(32), b"", b"")
    again = LinkHandshake(SESSION_KEY, bytes(32), hello, bytes([1] * 32)).secrets(bytes(32), b"", b"")
    sealed = seal(Sealer(first.forth), b"header", b"text")
    for secret in (first.back, again.forth, again.back):
        refused(Opener(secret), b"header", sealed)
    assert opened(Opener(first.forth), b"header", sealed) == b"text"


# -- nonces, counters, key phases -------------------------------------------------------------------------------------


def nonce_and_key(secret: Secret, counter: int) -> tuple[bytes, bytes]:
    """Compute key and nonce by the specification."""
    for _ in range(counter >> KEY_PHASE_SHIFT):
        secret = keys.expand(secret, keys.RATCHET)
    material = keys.expand(secret, keys.SEGMENT_KEY, 44).reveal()
    return (int.from_bytes(material[32:], "big") ^ counter).to_bytes(12, "big"), material[:32]


@pytest.mark.promise("A link uses a fresh nonce for every frame, also across a key phase.")
@pytest.mark.parametrize("start", [0, PHASE_1 - 4], ids=["at first", "across a key phase"])
def test_no_nonce_is_reused_under_a_key(start: int) -> None:
    sealer = sealer_at(start)
    used = set()
    for counter in range(start, start + 12):
        nonce, key = nonce_and_key(SECRET, counter)
        used.add((nonce, key))
        if counter % 3:
            sealed = seal(sealer, b"header", b"text")
            assert AESGCM(key).decrypt(nonce, sealed, b"header") == b"text"
        else:
            assert AESGCM(key).decrypt(nonce, sealer.tag(b"header"), b"header") == b""
        assert sealer.counter == counter + 1
    assert len(used) == 12


def test_failed_seal_or_open_consumes_a_counter() -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET)
    with pytest.raises(ValueError, match="buffer"):
        sealer.seal_into(b"header", b"text", memoryview(bytearray(3)))
    assert sealer.counter == 1
    refused(opener, b"header", bytes(20))
    assert opener.counter == 1
    assert opened(opener, b"header", seal(sealer, b"header", b"text")) == b"text"


def test_both_ends_ratchet_together_and_announce_the_key_phase() -> None:
    sealer, opener = sealer_at(PHASE_1 - 2), opener_at(PHASE_1 - 2)
    key_phases = []
    for number in range(5):
        assert sealer.upcoming_key_phase() == opener.upcoming_key_phase()
        key_phases.append(sealer.upcoming_key_phase())
        text = bytes([number]) * 10
        assert opened(opener, b"header", seal(sealer, b"header", text)) == text
    assert key_phases == [0, 0, 1, 1, 1]
    assert sealer.counter == PHASE_1 + 3


def test_ratchet_is_one_way() -> None:
    """The keys in memory after a ratchet cannot open frames sealed before it."""
    sealer = sealer_at(PHASE_1 - 1)
    before = seal(sealer, b"header", b"early")
    after = seal(sealer, b"header", b"late")
    held = sealer._secret
    assert held == keys.expand(SECRET, keys.RATCHET)
    nonce, _ = nonce_and_key(SECRET, PHASE_1 - 1)
    with pytest.raises(InvalidTag):
        AESGCM(keys.expand(held, keys.SEGMENT_KEY, 44).reveal()[:32]).decrypt(nonce, before, b"header")
    nonce, key = nonce_and_key(SECRET, PHASE_1)
    assert AESGCM(key).decrypt(nonce, after, b"header") == b"late"


def test_new_key_phase_does_not_open_under_the_old_key() -> None:
    sealed = seal(sealer_at(PHASE_1), b"header", b"text")
    _, old = nonce_and_key(SECRET, 0)
    new_nonce, new = nonce_and_key(SECRET, PHASE_1)
    with pytest.raises(InvalidTag):
        AESGCM(old).decrypt(new_nonce, sealed, b"header")
    assert AESGCM(new).decrypt(new_nonce, sealed, b"header") == b"text"


def test_exhausted_counters_raise() -> None:
    sealer = sealer_at(COUNTER_LIMIT)
    with pytest.raises(ProtocolError, match="used all"):
        sealer.tag(b"header")
    origin = OriginKeys(SECRET, 0)
    origin.counter = COUNTER_LIMIT
    with pytest.raises(ProtocolError, match="used all"):
        origin.take()


# -- segments sealed once and forwarded --------------------------------------------------------------------------------


def forwarded(origin: OriginKeys, text: bytes = b"forwarded") -> tuple[int, bytes]:
    counter, sealed = origin.take(), bytearray(len(text) + TAG_BYTES)
    origin.seal_into(counter, b"header", text, memoryview(sealed))
    return counter, bytes(sealed)


def test_every_rank_opens_a_segment_of_its_origin() -> None:
    origin = OriginKeys(SECRET, 3)
    for counter, text in enumerate([b"", b"one", bytes(100)]):
        taken, sealed = forwarded(origin, text)
        assert taken == counter
        for reader in range(4):
            target = bytearray(len(text))
            OriginKeys(SECRET, reader).open_into(3, counter, b"header", sealed, memoryview(target))
            assert target == text


@pytest.mark.parametrize(
    ("secret", "rank", "counter", "header"),
    [(OTHER, 3, 0, b"header"), (SECRET, 2, 0, b"header"), (SECRET, 3, 1, b"header"), (SECRET, 3, 0, b"Header")],
    ids=["instance", "origin", "counter", "header"],
)
def test_forwarded_segment_opens_only_at_its_own_position(
    secret: Secret, rank: int, counter: int, header: bytes
) -> None:
    _, sealed = forwarded(OriginKeys(SECRET, 3))
    target = bytearray(b"\xaa" * 9)
    with pytest.raises(AuthenticationError):
        OriginKeys(secret, 0).open_into(rank, counter, header, sealed, memoryview(target))
    assert target == bytes(9)


@pytest.mark.promise("A frame with any single bit flipped is rejected, and its plaintext is wiped.")
def test_flipped_bit_in_forwarded_segment_is_refused_and_wiped() -> None:
    reader = OriginKeys(SECRET, 0)
    counter, sealed = forwarded(OriginKeys(SECRET, 3))
    for changed in flips(sealed):
        target = bytearray(b"\xaa" * 9)
        with pytest.raises(AuthenticationError):
            reader.open_into(3, counter, b"header", changed, memoryview(target))
        assert target == bytes(9)


def test_origin_keys_change_with_the_key_phase() -> None:
    origin, reader = OriginKeys(SECRET, 3), OriginKeys(SECRET, 0)
    origin.counter = PHASE_1 - 1
    for _ in range(2):
        counter, sealed = forwarded(origin)
        info = keys.ORIGIN + (3).to_bytes(4, "big") + (counter >> KEY_PHASE_SHIFT).to_bytes(8, "big")
        nonce, key = nonce_and_key(keys.expand(SECRET, info), counter % PHASE_1)
        nonce = (int.from_bytes(nonce, "big") ^ (counter - counter % PHASE_1)).to_bytes(12, "big")
        assert AESGCM(key).decrypt(nonce, sealed, b"header") == b"forwarded"
        target = bytearray(9)
        reader.open_into(3, counter, b"header", sealed, memoryview(target))
        assert target == b"forwarded"


def test_origin_counters_are_unique() -> None:
    origin = OriginKeys(SECRET, 0)
    assert [origin.take() for _ in range(100)] == list(range(100))


def test_instances_of_one_group_have_different_identifiers() -> None:
    group = bytes(32)
    named = {instance_identifier(Secret(bytes([n] * 32)), group) for n in range(50)}
    assert len(named) == 50 and all(len(name) == 16 for name in named)
    assert instance_identifier(SECRET, bytes(32)) != instance_identifier(SECRET, bytes([1] * 32))


# -- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["seal_into", "tag", "origin"])
def test_copy_in_a_forked_child_does_not_seal(use: str) -> None:
    alive = bytearray(b"\1")
    sealer, origin, target = Sealer(SECRET, alive), OriginKeys(SECRET, 0, alive), memoryview(bytearray(20))
    attempts: dict[str, Callable[[], object]] = {
        "seal_into": lambda: sealer.seal_into(b"header", b"text", target),
        "tag": lambda: sealer.tag(b"header"),
        "origin": lambda: origin.seal_into(0, b"header", b"text", target),
    }
    attempts[use]()
    spent = sealer.counter
    alive[0] = 0
    target[:] = bytes(20)
    with pytest.raises(ProtocolError, match="forked child"):
        attempts[use]()
    assert sealer.counter == spent and bytes(target) == bytes(20)


@pytest.mark.processes
def test_canary_is_zero_in_a_real_child() -> None:
    sealer = Sealer(SECRET, fork.ALIVE)
    sealer.tag(b"header")
    child = os.fork()
    if child == 0:
        try:
            sealer.tag(b"header")
        except ProtocolError:
            os._exit(7 if fork.in_child() else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert not fork.in_child() and sealer.tag(b"header")
