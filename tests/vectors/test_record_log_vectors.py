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
from ringfence.record import log

ROOT = Path(__file__).parents[2]
LOG = json.loads((ROOT / "tests/vectors/record.json").read_text())["log"]
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


def test_the_text_names_every_field_of_every_kind() -> None:
    """In the tables of sections 7 and 8, and in the order of the package."""
    section = SPEC.split("## 7.")[1].split("\n## 8.")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == list(log.KINDS["begin"])
    section = SPEC.split("## 8.")[1].split("\n## 9.")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {row[1].strip(" `"): re.findall(r"`(\w+)`", row[2]) for row in rows}
    assert found == {kind: list(form) for kind, form in log.KINDS.items() if kind not in ("begin", "signature")}
