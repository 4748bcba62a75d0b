"""The vectors of spec/record.md: made a second time from the text, compared with the package, read by securesystemslib."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]

from ringfence.errors import RecordError
from ringfence.record import envelope, selftest, statement
from tests.unit import record_samples as samples

ROOT = Path(__file__).parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/record.json").read_text())
SPEC = (ROOT / "spec/record.md").read_text()
KEY = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS["private"]))
PAYLOAD = VECTORS["payload"].encode()


def by_the_text() -> dict[str, str]:
    """Make the vectors from the text."""
    public = KEY.public_key()
    encoded = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    kind = "application/vnd.in-toto+json"
    signed = f"DSSEv1 {len(kind)} {kind} {len(PAYLOAD)} ".encode() + PAYLOAD
    name = hashlib.sha256(encoded).hexdigest()
    signature = KEY.sign(signed)
    line = (
        f'{{"payload":"{base64.b64encode(PAYLOAD).decode()}","payloadType":"{kind}",'
        f'"signatures":[{{"keyid":"{name}","sig":"{base64.b64encode(signature).decode()}"}}]}}\n'
    )
    return {"keyid": name, "signed": signed.decode(), "signature": signature.hex(), "envelope": line}


def test_the_text_the_package_and_the_vectors_agree() -> None:
    expected = {name: VECTORS[name] for name in ("keyid", "signed", "signature", "envelope")}
    assert by_the_text() == expected
    assert envelope.sign(PAYLOAD, KEY).decode() == VECTORS["envelope"]
    assert envelope.signed_bytes(PAYLOAD).decode() == VECTORS["signed"]
    assert envelope.verified_payload(VECTORS["envelope"].encode(), KEY.public_key()) == PAYLOAD


def test_the_payload_is_what_the_package_writes() -> None:
    assert samples.statement().encode() == PAYLOAD
    assert selftest.parse(statement.parse(PAYLOAD)) == json.loads(PAYLOAD)["predicate"]


@pytest.mark.parametrize("name", VECTORS["refused"])
def test_refused_vectors_are_refused(name: str) -> None:
    with pytest.raises(RecordError):
        statement.parse(envelope.verified_payload(VECTORS["refused"][name].encode(), KEY.public_key()))


def test_the_text_names_every_field_of_the_predicate() -> None:
    section = SPEC.split("## 3.")[1].split("\n## ")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == list(samples.predicate())


def theirs(text: str) -> Envelope:
    return Envelope.from_dict(json.loads(text))


def test_securesystemslib_verifies_the_envelope() -> None:
    key = SSlibKey.from_crypto(KEY.public_key(), keyid=VECTORS["keyid"])
    found = theirs(VECTORS["envelope"])
    assert found.pae() == VECTORS["signed"].encode()
    assert list(found.verify([key], 1)) == [VECTORS["keyid"]]
    assert found.payload == PAYLOAD


def test_securesystemslib_refuses_what_ringfence_refuses() -> None:
    key = SSlibKey.from_crypto(KEY.public_key(), keyid=VECTORS["keyid"])
    for name in ("changed payload", "changed signature", "signed by another key"):
        with pytest.raises(VerificationError):
            theirs(VECTORS["refused"][name]).verify([key], 1)
