"""The log in the vectors of spec/record.md, verified a second time from the text alone."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence.errors import RecordError
from ringfence.link.hello import Lane
from ringfence.link.tag_chain import TagChain
from ringfence.record import log
from tests.vectors.make import connect

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests/vectors/record.json").read_text())
LINK = json.loads((ROOT / "tests/vectors/link.json").read_text())
LOG = RECORD["log"]
SPEC = (ROOT / "spec/record.md").read_text()


def chained(line: bytes) -> bytes:
    label = b"ringfence/1 record line\0"
    return hashlib.sha256(label + len(line).to_bytes(8, "big") + line).digest()


def follows(text: str, key: Ed25519PublicKey) -> str | None:
    """Verify a log by the text alone, and return the digest of its last line, or None."""
    head = chained(b"")
    lines = text.encode("ascii").split(b"\n")
    for number, line in enumerate(lines[:-1]):
        document = json.loads(line)
        if (document["number"], document["previous"]) != (number, head.hex()):
            return None
        if document["kind"] == "signature":
            made = bytes.fromhex(document.pop("signature"))
            signed = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
            try:
                key.verify(made, b"ringfence/1 record signature\0" + signed)
            except InvalidSignature:
                return None
        head = chained(line)
    return head.hex()


def test_a_log_follows_the_text() -> None:
    begins = json.loads(LOG["file"].split("\n")[0])
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(LOG["record_private"])).public_key()
    assert begins["key"] == key.public_bytes_raw().hex()
    assert follows(LOG["file"], key) == LOG["head"]
    found = log.read(io.BytesIO(LOG["file"].encode()))
    assert found.head.hex() == LOG["head"]
    assert found.is_complete and not found.tail


def test_the_first_line_follows_the_text() -> None:
    begins = json.loads(LOG["file"].split("\n")[0])
    entry, listings = bytes.fromhex(LOG["entry"]), bytes.fromhex(LOG["listings"])
    assert listings[:4] == (2).to_bytes(4, "big") and listings[4:].startswith(entry)
    assert begins["listings"] == hashlib.sha256(listings).hexdigest()
    assert begins["table"] == hashlib.sha256(bytes.fromhex(LOG["table"])).hexdigest()
    label = b"ringfence/1 entry\0"
    digest = hashlib.sha256(label + len(entry).to_bytes(8, "big") + entry).digest()
    signed = b"ringfence/1 record key\0" + digest + bytes.fromhex(begins["roster"] + begins["key"])
    assert signed.hex() == LOG["certified_bytes"]
    tls_key = ec.derive_private_key(int(LOG["tls_private"], 16), ec.SECP256R1()).public_key()
    encoded = tls_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert begins["tls_key"] == encoded.hex()
    assert hashlib.sha256(encoded).digest() in entry
    tls_key.verify(bytes.fromhex(begins["certified"]), signed, ec.ECDSA(hashes.SHA256()))


@pytest.mark.parametrize("name", LOG["refused"])
def test_refused_logs_are_refused(name: str) -> None:
    with pytest.raises(RecordError):
        log.read(io.BytesIO(LOG["refused"][name].encode()))


def test_what_passed_follows_the_text() -> None:
    """On the first connection of link.json its first four frames, and a BYE, which does not count."""
    first = LINK["connections"][0]
    hello, nonces = bytes.fromhex(first["hello"]), bytes.fromhex(first["dialler_nonce"] + first["acceptor_nonce"])
    place = bytes([first["lane"], first["channel"]]) + bytes(3) + b"\0" + bytes(3) + b"\1" + hello[16:48]
    named = b"ringfence/1 record connection\0"
    for part in (place, nonces):
        named += len(part).to_bytes(8, "big") + part
    connection = hashlib.sha256(named).digest()
    assert connection.hex() == RECORD["passed"]["connection"]
    assert connect(0, 1, Lane.COLLECTIVE).secrets.connection == connection
    frames = [bytes.fromhex(each["frame"]) for each in LINK["hop_frames"]]
    chain = TagChain(1, connection, 0, 0)
    for frame in frames:
        chain.add(frame[0], frame[-16:])
    chain.end()
    covered = [b"".join(frame[-16:] for frame in frames[:count]) for count in (1, 2, 4)]
    label = b"ringfence/1 record frames\0"
    digests = [hashlib.sha256(label + connection + each).hexdigest() for each in covered]
    expected = list(zip((1, 2, 4), digests, strict=True))
    assert list(chain.points) == expected == [tuple(each) for each in RECORD["passed"]["points"]]


def test_the_text_names_every_field_of_every_kind() -> None:
    """In the tables of sections 7 and 8, and in the order of the package."""
    section = SPEC.split("## 7.")[1].split("\n## 8.")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == list(log.KINDS["begin"])
    section = SPEC.split("## 8.")[1].split("\n## 9.")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {row[1].strip(" `"): re.findall(r"`(\w+)`", row[2]) for row in rows}
    assert found == {kind: list(form) for kind, form in log.KINDS.items() if kind not in ("begin", "signature")}
