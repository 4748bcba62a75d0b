"""An independent implementation of spec/link.md that computes its vectors; it uses no code of the package."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.limits import HANG

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "link.json"
VECTORS: dict[str, Any] = json.loads(FILE.read_text())
NONE = 0xFFFFFFFF


# -- section 1, primitives: HKDF by hand, from RFC 5869 ----------------------------------------------------------------


def hmac_sha256(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def label(purpose: str) -> bytes:
    return b"ringfence/1 " + purpose.encode() + b"\x00"


def expand(prk: bytes, info: bytes, length: int = 32) -> bytes:
    block, made = b"", b""
    for number in range(1, 1 + -(-length // 32)):
        block = hmac_sha256(prk, block + info + bytes([number]))
        made += block
    return made[:length]


def hkdf(ikm: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    return expand(hmac_sha256(salt, ikm), info, length)


def digest(purpose: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label(purpose) + b"".join(pack(">Q", len(part)) + part for part in parts)).digest()


# -- sections 2 to 6 ---------------------------------------------------------------------------------------------------


def session_key() -> bytes:
    session = VECTORS["session"]
    secret, roster = bytes.fromhex(session["session_secret"]), bytes.fromhex(session["roster_digest"])
    return hkdf(secret, roster, label("aes-256-gcm session key"))


def group_digest() -> bytes:
    group = VECTORS["group"]
    return digest("group", group["name"].encode(), b"".join(pack(">I", rank) for rank in group["ranks"]))


def draws() -> bytes:
    """The XOR of the members' contributions."""
    return bytes(a ^ b ^ c for a, b, c in zip(*map(bytes.fromhex, VECTORS["group"]["draws"]), strict=True))


def instance_secret(channel: int = 0) -> bytes:
    info = label("aes-256-gcm group instance secret") + group_digest() + bytes([channel])
    return hkdf(draws(), session_key(), info)


def instance(channel: int = 0) -> bytes:
    secret = instance_secret(channel)
    return digest("aes-256-gcm group instance id", secret, group_digest())[:16]


def group_of(link: dict[str, Any]) -> bytes:
    return bytes(32) if link["lane"] == 2 else group_digest()


def x25519(link: dict[str, Any]) -> bytes:
    private = X25519PrivateKey.from_private_bytes(bytes.fromhex(link["dialler_private_key"]))
    return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(link["acceptor_public_key"])))


def kem(link: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """The shared secret, the encapsulation key and the ciphertext."""
    private = MLKEM768PrivateKey.from_seed_bytes(bytes.fromhex(link["acceptor_kem_seed"]))
    ciphertext = bytes.fromhex(link["confirm"])[:1088]
    return private.decapsulate(ciphertext), private.public_key().public_bytes_raw(), ciphertext


def place_of(link: dict[str, Any]) -> bytes:
    return pack(">BBII", link["lane"], link["channel"], link["dialler"], link["acceptor"]) + group_of(link)


def handshake_secret(link: dict[str, Any]) -> bytes:
    salt = bytes.fromhex(link["dialler_nonce"] + link["acceptor_nonce"])
    return hkdf(x25519(link) + session_key(), salt, label("aes-256-gcm link handshake secret") + place_of(link))


def link_secret(link: dict[str, Any]) -> bytes:
    salt = bytes.fromhex(link["dialler_nonce"] + link["acceptor_nonce"])
    shared, key, ciphertext = kem(link)
    info = label("aes-256-gcm link secret") + place_of(link) + digest("aes-256-gcm link kem", key, ciphertext)
    return hkdf(x25519(link) + shared + session_key(), salt, info)


def direction(link: int, way: str) -> bytes:
    purpose = {"forth": "sender to receiver", "back": "receiver to sender"}[way]
    return expand(link_secret(VECTORS["connections"][link]), label(f"aes-256-gcm link {purpose}"))


def key_and_iv(secret: bytes) -> tuple[bytes, bytes]:
    material = expand(secret, label("aes-256-gcm key and iv"), 44)
    return material[:32], material[32:]


def seal(secret: bytes, counter: int, plaintext: bytes, authenticated: bytes) -> bytes:
    for _ in range(counter >> 20):
        secret = expand(secret, label("aes-256-gcm ratchet"))
    return seal_in_key_phase(secret, counter, plaintext, authenticated)


def seal_in_key_phase(secret: bytes, counter: int, plaintext: bytes, authenticated: bytes) -> bytes:
    key, iv = key_and_iv(secret)
    nonce = bytes(a ^ b for a, b in zip(iv, counter.to_bytes(12, "big"), strict=True))
    return AESGCM(key).encrypt(nonce, plaintext, authenticated)


def origin_secret(rank: int, key_phase: int) -> bytes:
    return expand(instance_secret(), label("aes-256-gcm origin") + pack(">IQ", rank, key_phase))


def header(
    kind: int, key_phase: int, step: int, length: int, tag: int, segment: int, origin: int, *rest: int | bytes
) -> bytes:
    sequence, counter, where, call = rest
    hop = pack(">BBBBIII", kind, 0, 0, 0, key_phase, step, 0)
    return hop + pack(">IIIIQQ16s24s", length, tag, segment, origin, sequence, counter, where, call)


def call(operation: int, dtype: int = 0, schedule: int = 0, elements: int = 0, tag: int = 0) -> bytes:
    return pack(">BBBBIQq", operation, 0, dtype, schedule, 0, elements, tag)


# -- the file ----------------------------------------------------------------------------------------------------------
@pytest.mark.processes
def test_vectors_file_matches_the_package() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "tests.vectors.make"], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert printed.stdout == FILE.read_text()


def test_session_and_group() -> None:
    assert session_key().hex() == VECTORS["session"]["session_key"]
    assert group_digest().hex() == VECTORS["group"]["digest"]
    assert instance_secret().hex() == VECTORS["group"]["instance_secret"]
    assert instance().hex() == VECTORS["group"]["instance"]


@pytest.mark.parametrize("number", range(8))
def test_connections(number: int) -> None:
    link = VECTORS["connections"][number]
    body = pack(">4sBBBBII", b"RFL1", 1, 1, link["lane"], link["channel"], link["dialler"], link["acceptor"])
    body += group_of(link) + bytes.fromhex(link["dialler_nonce"])
    hello_key = expand(session_key(), label("aes-256-gcm link hello"))
    hello = body + hmac_sha256(hello_key, digest("aes-256-gcm link hello", body))
    assert len(hello) == 112 and hello.hex() == link["hello"]
    shared, key, ciphertext = kem(link)
    assert link["ml_kem_768"] == shared.hex()
    for side, sent, covered in (
        ("acceptor", bytes.fromhex(link["acceptor_nonce"]) + key, (key,)),
        ("dialler", ciphertext, (key, ciphertext)),
    ):
        purpose = f"aes-256-gcm link confirm {side}"
        proof = hmac_sha256(expand(handshake_secret(link), label(purpose)), digest(purpose, *covered))
        assert bytes.fromhex(link["reply" if side == "acceptor" else "confirm"]) == sent + proof
    assert (len(link["reply"]), len(link["confirm"])) == (2 * 1248, 2 * 1120)
    assert link["forth"] == direction(number, "forth").hex()
    assert link["back"] == direction(number, "back").hex()
    for key_phase in range(2):
        forth = direction(number, "forth")
        if key_phase:
            forth = expand(forth, label("aes-256-gcm ratchet"))
        key, iv = key_and_iv(forth)
        assert link[f"forth_key_phase_{key_phase}"] == {"key": key.hex(), "iv": iv.hex()}


def test_names_and_hints_of_one_machine() -> None:
    found = VECTORS["same_machine"]
    place = bytes.fromhex(found["place"])
    assert found["hint"] == hmac_sha256(session_key(), digest("aes-256-gcm machine hint", group_digest(), place)).hex()
    for rank, name in enumerate(found["sockets"]):
        info = label("aes-256-gcm machine socket") + group_digest() + pack(">I", rank)
        assert bytes.fromhex(name) == b"\0ringfence/1 " + expand(session_key(), info)[:16].hex().encode()


def test_links_inside_a_machine() -> None:
    found = VECTORS["local"]
    assert [link["lane"] for link in VECTORS["connections"][5:7]] == [4, 5]
    for rank, name in enumerate(found["sockets"]):
        info = label("aes-256-gcm local socket") + pack(">I", rank)
        assert bytes.fromhex(name) == b"\0ringfence/1 " + expand(session_key(), info)[:16].hex().encode()
    all_reduce, early, no_tag = call(0, dtype=7, schedule=22, elements=24), group_digest()[:16], bytes(16)
    plaintext = bytes(range(32))
    first = header(1, 0, 0, 32, 1, 0, NONE, 0, 0, early, call(9, schedule=21))
    assert bytes.fromhex(found["opening"]) == first + draws() + no_tag
    hop = header(1, 0, 0, 32, 2, 0, NONE, 1, 0, instance(), all_reduce)
    assert bytes.fromhex(found["hop"]) == hop + plaintext + no_tag
    shared = header(8, 0, 1, 262_144, 2, 3, NONE, 4, 5, instance(), all_reduce)
    assert bytes.fromhex(found["shared"]) == shared and len(shared) == 88
    returned = header(9, 0, 0, 0, 0, 0, NONE, 0, 6, bytes(16), bytes(24)) + no_tag
    assert bytes.fromhex(found["return_of_6"]) == returned and len(returned) == 104
    payload = header(5, 0, 0, 16, 0, 0, NONE, 2, 0, early, call(64, dtype=7, elements=4, tag=-7))
    assert bytes.fromhex(found["payload"]) == payload + plaintext[:16] + no_tag
    bye = header(6, 0, 0, 0, 0, 0, NONE, 0, 0, early, bytes(24))
    assert bytes.fromhex(found["bye"]) == bye + no_tag


def test_a_further_channel() -> None:
    found = VECTORS["channel"]
    assert found["instance_secret"] == instance_secret(1).hex() != VECTORS["group"]["instance_secret"]
    assert found["instance"] == instance(1).hex()
    all_reduce, plaintext = call(0, dtype=7, schedule=1, elements=24), bytes(range(32))
    opening = header(1, 0, 0, 32, 1, 0, NONE, 0, 0, group_digest()[:16], call(9, schedule=21))
    hop = header(1, 0, 0, 32, 2, 16, NONE, 1, 0, instance(1), all_reduce)
    assert found["opening"] == (opening + seal(direction(7, "forth"), 0, draws(), opening)).hex()
    assert found["hop"] == (hop + seal(direction(7, "forth"), 1, plaintext, hop)).hex()


def test_frames_sealed_for_a_hop() -> None:
    plaintext = bytes.fromhex(VECTORS["hop_plaintext"])
    all_reduce = call(0, dtype=7, schedule=1, elements=24)
    early = group_digest()[:16]
    expected = [
        (0, header(1, 0, 0, 32, 1, 0, NONE, 0, 0, early, call(9, schedule=21)), draws()),
        (1, header(1, 0, 0, 32, 2, 0, NONE, 1, 0, instance(), all_reduce), plaintext),
        (2**20 - 1, header(1, 0, 1, 32, 2, 6, NONE, 1, 0, instance(), all_reduce), plaintext),
        (2**20, header(1, 1, 1, 32, 2, 7, NONE, 1, 0, instance(), all_reduce), plaintext),
        (2**20 + 1, header(6, 1, 0, 0, 0, 0, NONE, 0, 0, early, bytes(24)), b""),
    ]
    computed = [
        {"counter": counter, "frame": (head + seal(direction(0, "forth"), counter, payload, head)).hex()}
        for counter, head, payload in expected
    ]
    assert computed == VECTORS["hop_frames"]
    nop = header(7, 0, 0, 0, 0, 0, NONE, 0, 0, early, bytes(24))
    assert (nop + seal(direction(0, "back"), 0, b"", nop)).hex() == VECTORS["acceptor_nop"]


def test_a_frame_forwarded_over_two_hops() -> None:
    found = VECTORS["forwarded"]
    key, iv = key_and_iv(origin_secret(0, 0))
    assert found["origin_key_phase_0"] == {"key": key.hex(), "iv": iv.hex()}
    common = (32, 0, 0, 0, 2, 3, instance(), call(3, dtype=7, schedule=6, elements=24))
    first, second = header(2, 0, 0, *common), header(2, 0, 1, *common)
    assert first[16:] == second[16:]
    sealed = seal_in_key_phase(origin_secret(0, 0), 3, bytes.fromhex(found["plaintext"]), first[16:])
    for hop, link, head, counter in (("first_hop", 0, first, 5), ("second_hop", 1, second, 9)):
        for tags, covered in ((found, head + sealed[-16:]), (found["every_hop"], head + sealed)):
            tag = seal(direction(link, "forth"), counter, b"", covered)
            assert tags[hop] == {"counter": counter, "frame": (head + sealed + tag).hex()}
    body = bytes.fromhex(VECTORS["connections"][0]["hello"])[:80]
    body = body[:4] + b"\2" + body[5:]
    hello_key = expand(session_key(), label("aes-256-gcm link hello"))
    hello = body + hmac_sha256(hello_key, digest("aes-256-gcm link hello", body))
    assert found["every_hop"]["hello"] == hello.hex()


def test_point_to_point() -> None:
    found, where = VECTORS["point_to_point"], group_digest()[:16]
    plaintext, transfer = bytes.fromhex(found["plaintext"]), call(64, dtype=7, elements=4, tag=-7)
    forth, back = direction(2, "forth"), direction(2, "back")

    def made(secret: bytes, counter: int, kind: int, payload: bytes = b"") -> str:
        head = header(kind, 0, 0, len(payload), 0, 0, NONE, 2, 0, where, transfer)
        return (head + seal(secret, counter, payload, head)).hex()

    assert found["offer"] == made(forth, 0, 3)
    assert found["want"] == made(back, 0, 4)
    assert found["payload"] == made(forth, 1, 5, plaintext)
    bye = header(6, 0, 0, 0, 0, 0, NONE, 0, 0, where, bytes(24))
    assert found["acceptor_bye"] == (bye + seal(back, 1, b"", bye)).hex()


def test_peer_verification() -> None:
    found = VECTORS["peer_verification"]
    for way, who in (("forth", "dialler"), ("back", "acceptor")):
        shown = bytes.fromhex(found[f"{who}_shows"])
        head = header(5, 0, 0, len(shown), 0, 0, NONE, 0, 0, bytes(16), bytes(24))
        assert found[f"{who}_frame"] == (head + seal(direction(3, way), 0, shown, head)).hex()
