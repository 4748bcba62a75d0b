"""The vectors of spec/admission.md: made by the code, and by a second reading of the spec with the standard library."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence import keys
from ringfence.admission.binding import Role, bind, proof_digest
from ringfence.admission.entry import Listing
from ringfence.admission.messages import (
    HANDSHAKE,
    HEADER_BYTES,
    TREE,
    Acknowledge,
    Admit,
    Entries,
    Failure,
    Go,
    Message,
    Proof,
    Reason,
    Refuse,
    Waiting,
    Welcome,
    decode,
    encode,
)
from ringfence.admission.peer_verification import Presentation
from ringfence.admission.renewal import Challenge, Renewal, bind_renewal
from ringfence.admission.roster import roster_digest
from ringfence.runtime.control import Abort, Bye
from ringfence.session.members import Members
from tests.unit.admission_samples import SECRET, Worker, fixed_bytes, worker

FILE = Path(__file__).parents[1] / "vectors" / "admission.json"
EXPORTER = fixed_bytes("exporter")
SESSION_SECRET = keys.Secret(fixed_bytes("session secret"))
TABLE = b"table"
PRESENTED_AT = 1_800_000_000
NONCE = fixed_bytes("challenge")


def from_code() -> dict[str, Any]:
    """What the implementation makes of two workers in a world of two."""
    parent, child = worker(0, 2), worker(1, 2)
    up = bind(Role.CHILD, child.hello, parent.hello, child.entry.tls_key_digest, parent.entry.tls_key_digest, EXPORTER)
    down = bind(
        Role.PARENT, parent.hello, child.hello, parent.entry.tls_key_digest, child.entry.tls_key_digest, EXPORTER
    )
    shown = proof_digest(1, up, child.shared.prove(up))
    listings = tuple(_listing(each, digest) for each, digest in ((parent, bytes(32)), (child, shown)))
    digest = roster_digest(child.policy.digest, listings, 1, TABLE)
    again = bind_renewal(child.entry, parent.entry, digest, EXPORTER, NONCE)
    again_down = bind_renewal(parent.entry, child.entry, digest, EXPORTER, NONCE)
    return {
        "secret": SECRET.reveal().hex(),
        "exporter": EXPORTER.hex(),
        "session secret": SESSION_SECRET.reveal().hex(),
        "table": TABLE.hex(),
        "admission key": keys.admission_key(SECRET, "run-7").reveal().hex(),
        "run of ranks 1 and 3": Members((1, 3), "2").run_name("run-7"),
        "policy digest": child.policy.digest.hex(),
        "policy digest with a fast inside": replace(child.policy, inside_machine=("nccl", "gloo")).digest.hex(),
        "policy digest with sealing inside a machine": replace(child.policy, same_host="sealed").digest.hex(),
        "policy digest with forwarded data authenticated by every hop": replace(
            child.policy, forwarded="every_hop"
        ).digest.hex(),
        "policy digest with a record": replace(child.policy, record="required").digest.hex(),
        "policy digest with verification again": replace(child.policy, verify_every=600).digest.hex(),
        "entries": [parent.entry.encode().hex(), child.entry.encode().hex()],
        "entry digests": [parent.entry.digest.hex(), child.entry.digest.hex()],
        "hello digests": [parent.hello.digest.hex(), child.hello.digest.hex()],
        "child's binding": {"preimage": up.preimage.hex(), "digest": up.digest.hex()},
        "parent's binding": {"preimage": down.preimage.hex(), "digest": down.digest.hex()},
        "child's proof": child.shared.prove(up).hex(),
        "parent's proof": parent.shared.prove(down).hex(),
        "child's proof digest": shown.hex(),
        "child's presentation": Presentation.of((Proof(1, child.shared.prove(up)), up), PRESENTED_AT).encode().hex(),
        "parent's presentation": Presentation.of((Proof(1, parent.shared.prove(down)), down), PRESENTED_AT)
        .encode()
        .hex(),
        "listings": [listing.encode().hex() for listing in listings],
        "roster digest": digest.hex(),
        "child's renewal binding": {"preimage": again.preimage.hex(), "digest": again.digest.hex()},
        "parent's renewal binding": {"preimage": again_down.preimage.hex(), "digest": again_down.digest.hex()},
        "session key": keys.session_key(SESSION_SECRET, digest).reveal().hex(),
        "frames": {type(each).__name__: encode(each).hex() for each in _messages(child, up.digest, listings, digest)},
    }


def _listing(one: Worker, digest: bytes) -> Listing:
    return Listing(one.entry, 1, digest, one.shared.endorse(one.entry, digest))


def _messages(child: Worker, binding: bytes, listings: tuple[Listing, ...], digest: bytes) -> list[Message]:
    return [
        child.hello,
        Proof(1, binding[:32]),
        Admit(),
        Refuse(Reason.GENERATION, "rank 0 is of generation 3, its peer of generation 2"),
        Entries(listings[1:]),
        Waiting(2, (5, 7)),
        Welcome(1, SESSION_SECRET, TABLE, listings),
        Acknowledge(digest),
        Go(digest, (b"signature of rank 0", b"signature of rank 1")),
        Failure(3, "no"),
        Abort(1, -1, 2, "all_reduce #7", "tag mismatch"),
        Bye(1),
        Challenge(NONCE),
        Renewal(2, b"proof"),
    ]


@pytest.fixture(scope="module")
def vectors() -> Any:
    return json.loads(FILE.read_text())


def test_the_code_makes_the_vectors(vectors: Any) -> None:
    assert from_code() == vectors


def test_every_frame_of_the_vectors_parses_and_comes_back(vectors: Any) -> None:
    types = {**HANDSHAKE, **TREE, Abort.TYPE: Abort, Bye.TYPE: Bye, Challenge.TYPE: Challenge, Renewal.TYPE: Renewal}
    assert {types[bytes.fromhex(frame)[0]].__name__ for frame in vectors["frames"].values()} == set(vectors["frames"])
    for frame in map(bytes.fromhex, vectors["frames"].values()):
        assert int.from_bytes(frame[1:HEADER_BYTES], "big") == len(frame) - HEADER_BYTES
        assert encode(decode(types, frame[0], frame[HEADER_BYTES:])) == frame


# -- the spec, read again -------------------------------------------------------------------------------------------


def label(name: str) -> bytes:
    return b"ringfence/1 " + name.encode() + b"\0"


def digest(name: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label(name) + b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def mac(key: bytes, name: str, *parts: bytes) -> bytes:
    return hmac.new(key, digest(name, *parts), "sha256").digest()


def hkdf(salt: bytes, key: bytes, info: bytes) -> bytes:
    extracted = hmac.new(salt, key, "sha256").digest()
    return hmac.new(extracted, info + b"\1", "sha256").digest()


def text(value: str) -> bytes:
    return len(value).to_bytes(2, "big") + value.encode()


def entry(rank: int) -> bytes:
    numbers = rank.to_bytes(4, "big") + (2).to_bytes(4, "big")
    public_keys = fixed_bytes(f"x25519 {rank}") + fixed_bytes(f"tls {rank}")
    return text("run-7") + text("3") + numbers + public_keys + text("10.0.0.7") + (20000 + rank).to_bytes(2, "big")


# Any number of workers, any age, hybrid key agreement.
POLICY = digest("policy", (1).to_bytes(4, "big"), bytes(8), b"\0\6hybrid", b"\1", b"shared secret")


def hello(rank: int) -> bytes:
    return b"RFA\1" + entry(rank) + POLICY + b"\1\1" + b"\1\1" + b"\0\0050.1.0"


def preimage(role: int, prover: int, verifier: int) -> bytes:
    return b"".join(
        (
            label("binding"),
            bytes([role]),
            prover.to_bytes(4, "big"),
            verifier.to_bytes(4, "big"),
            digest("entry", entry(prover)),
            fixed_bytes(f"tls {prover}"),
            fixed_bytes(f"tls {verifier}"),
            digest("hello digest", hello(prover)),
            digest("hello digest", hello(verifier)),
            hashlib.sha256(EXPORTER).digest(),
        )
    )


def renewal_preimage(role: int, prover: int, verifier: int, roster: bytes) -> bytes:
    return b"".join(
        (
            label("renewal binding"),
            bytes([role]),
            prover.to_bytes(4, "big"),
            verifier.to_bytes(4, "big"),
            digest("entry", entry(prover)),
            fixed_bytes(f"tls {prover}"),
            fixed_bytes(f"tls {verifier}"),
            roster,
            hashlib.sha256(EXPORTER).digest(),
            NONCE,
        )
    )


def test_an_independent_implementation_makes_the_same_vectors(vectors: Any) -> None:
    key = hkdf(b"run-7", SECRET.reveal(), label("admission key"))
    up, down = preimage(0, 1, 0), preimage(1, 0, 1)
    proof = mac(key, "secret proof", hashlib.sha512(up).digest())
    shown = digest("proof digest", b"\1", up, proof)
    listings = [
        entry(rank) + b"\1" + each + (32).to_bytes(4, "big") + mac(key, "entry proof", entry(rank), each)
        for rank, each in ((0, bytes(32)), (1, shown))
    ]
    roster = digest("roster", POLICY, b"\1", TABLE, *listings)
    expected = {
        "admission key": key,
        "policy digest": POLICY,
        "policy digest with a fast inside": digest(
            "policy", (1).to_bytes(4, "big"), bytes(8), b"\0\6hybrid", b"\0\4gloo\0\4nccl", b"\1", b"shared secret"
        ),
        "policy digest with sealing inside a machine": digest(
            "policy", (1).to_bytes(4, "big"), bytes(8), b"\0\6hybrid", b"same host\0\6sealed", b"\1", b"shared secret"
        ),
        "policy digest with forwarded data authenticated by every hop": digest(
            "policy",
            (1).to_bytes(4, "big"),
            bytes(8),
            b"\0\6hybrid",
            b"forwarded\0\x09every_hop",
            b"\1",
            b"shared secret",
        ),
        "policy digest with a record": digest(
            "policy", (1).to_bytes(4, "big"), bytes(8), b"\0\6hybrid", b"record\0\x08required", b"\1", b"shared secret"
        ),
        "policy digest with verification again": digest(
            "policy",
            (1).to_bytes(4, "big"),
            bytes(8),
            b"\0\6hybrid",
            b"verify every" + (600).to_bytes(8, "big"),
            b"\1",
            b"shared secret",
        ),
        "child's proof": proof,
        "parent's proof": mac(key, "secret proof", hashlib.sha512(down).digest()),
        "child's proof digest": shown,
        "roster digest": roster,
        "session key": hkdf(roster, SESSION_SECRET.reveal(), label("aes-256-gcm session key")),
    }
    for covered, name in ((up, "child"), (down, "parent")):
        made = mac(key, "secret proof", hashlib.sha512(covered).digest())
        expected[f"{name}'s presentation"] = (
            b"\1" + PRESENTED_AT.to_bytes(8, "big") + covered + (32).to_bytes(4, "big") + made
        )
    assert {name: value.hex() for name, value in expected.items()} == {name: vectors[name] for name in expected}
    members = digest("members", b"run-7", b"2", (1).to_bytes(4, "big") + (3).to_bytes(4, "big"))
    assert vectors["run of ranks 1 and 3"] == f"run-7 group {members[:16].hex()}"
    assert vectors["entries"] == [entry(0).hex(), entry(1).hex()]
    assert vectors["child's binding"]["preimage"] == up.hex()
    assert vectors["parent's binding"]["digest"] == hashlib.sha512(down).hexdigest()
    assert vectors["child's renewal binding"]["preimage"] == renewal_preimage(0, 1, 0, roster).hex()
    down_again = hashlib.sha512(renewal_preimage(1, 0, 1, roster)).hexdigest()
    assert vectors["parent's renewal binding"]["digest"] == down_again
    assert vectors["frames"]["Challenge"] == (b"\x22\0\0\0\x20" + NONCE).hex()
    assert vectors["frames"]["Renewal"] == (b"\x23\0\0\0\x0a\2\0\0\0\5proof").hex()
    assert vectors["listings"] == [each.hex() for each in listings]
    body = (
        b"\1"
        + SESSION_SECRET.reveal()
        + len(TABLE).to_bytes(4, "big")
        + TABLE
        + (2).to_bytes(4, "big")
        + b"".join(listings)
    )
    assert vectors["frames"]["Welcome"] == (b"\x12" + len(body).to_bytes(4, "big") + body).hex()
    signatures = b"".join(
        len(each).to_bytes(4, "big") + each for each in (b"signature of rank 0", b"signature of rank 1")
    )
    for kind, name, rest in ((b"\x13", "Acknowledge", bytes(4)), (b"\x14", "Go", (2).to_bytes(4, "big") + signatures)):
        assert vectors["frames"][name] == (kind + len(roster + rest).to_bytes(4, "big") + roster + rest).hex()
    assert vectors["frames"]["Hello"] == (b"\1" + len(hello(1)).to_bytes(4, "big") + hello(1)).hex()
