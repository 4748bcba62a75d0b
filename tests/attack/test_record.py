"""Somebody without the signer's key changes a record, makes one, or passes one off as another."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from ringfence.errors import RecordError
from ringfence.keys import RECORD_BYTES, RECORD_PAYLOAD
from ringfence.record import envelope, statement
from ringfence.record.envelope import Envelope
from tests.unit import record_samples as samples
from tests.unit.flips import flips

RECORD = samples.record()
PUBLIC = samples.KEY.public_key()
Document = dict[str, Any]


def refused(content: bytes) -> str:
    with pytest.raises(RecordError) as error:
        statement.parse(envelope.verified_payload(content, PUBLIC))
    return str(error.value)


def test_the_record_itself_is_accepted() -> None:
    assert statement.parse(envelope.verified_payload(RECORD, PUBLIC)) == samples.statement()


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
def test_every_changed_bit_is_refused(exhaustive: bool) -> None:
    for changed in flips(RECORD, exhaustive):
        refused(changed)


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
def test_every_truncated_record_is_refused() -> None:
    for length in range(len(RECORD)):
        refused(RECORD[:length])


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
def test_the_signature_of_a_stranger_is_refused() -> None:
    forged = envelope.sign(samples.statement().encode(), samples.OTHER_KEY)
    assert "signed with another key" in refused(forged)
    named = envelope.parse(forged)
    assert "signature is wrong" in refused(
        Envelope(named.payload, envelope.parse(RECORD).key_id, named.signature).encode()
    )


def test_a_signature_is_not_one_of_another_payload() -> None:
    """Neither of the bare payload, nor of another type's, nor of another record."""
    found, payload = envelope.parse(RECORD), samples.statement().encode()
    other = b"DSSEv1 %d %b %d %b" % (10, b"text/plain", len(payload), payload)
    for signed in (payload, other, envelope.signed_bytes(samples.statement(workers=4).encode())):
        forged = Envelope(found.payload, found.key_id, samples.KEY.sign(signed))
        assert "signature is wrong" in refused(forged.encode())


def spliced(document: Document, name: str, value: Any) -> bytes:
    return json.dumps({**document, name: value}, separators=(",", ":")).encode() + b"\n"


ATTACKS: dict[str, tuple[Callable[[Document], bytes], str]] = {
    "other payload type": (lambda found: spliced(found, "payloadType", "text/plain"), f"not {RECORD_PAYLOAD}"),
    "no signature": (lambda found: spliced(found, "signatures", []), "has 0 signatures"),
    "two signatures": (lambda found: spliced(found, "signatures", found["signatures"] * 2), "has 2 signatures"),
    "signatures are no list": (lambda found: spliced(found, "signatures", {}), "not a list"),
    "unknown field": (lambda found: spliced(found, "note", ""), "unknown field 'note'"),
    "duplicate name": (lambda found: RECORD.replace(b"{", b'{"payload":"e30=",', 1), "duplicate name"),
    "duplicate name in the signature": (lambda found: RECORD.replace(b'[{"', b'[{"sig":"","', 1), "duplicate name"),
    "white space": (lambda found: json.dumps(found).encode(), "not written as ringfence writes it"),
    "trailing bytes": (lambda found: RECORD + b"{}", "not valid JSON"),
    "trailing line": (lambda found: RECORD + b"\n", "not written as ringfence writes it"),
    "escaped letters": (lambda found: RECORD.replace(b'"sig"', b'"\\u0073ig"'), "not written as ringfence writes it"),
    "padding": (lambda found: spliced(found, "payload", found["payload"].rstrip("=") + "===="), "base64|not written"),
    "a payload that is no text": (lambda found: spliced(found, "payload", 1), "payload is not a text"),
    "deep nesting": (lambda found: b"[" * 100_000, "nested too deeply"),
    "not UTF-8": (lambda found: b"\xff" + RECORD, "not valid JSON"),
    "oversized": (lambda found: RECORD + b" " * RECORD_BYTES, "more than 1,048,576 bytes"),
    "empty": (lambda found: b"", "not valid JSON"),
}


@pytest.mark.promise("A record that was changed, or that the given key did not sign, is refused.")
@pytest.mark.parametrize("name", ATTACKS)
def test_other_envelopes_are_refused(name: str) -> None:
    attack, said = ATTACKS[name]
    text = refused(attack(json.loads(RECORD)))
    assert any(each in text for each in said.split("|")), text


def test_duplicate_names_in_a_signed_payload_are_refused() -> None:
    """The signer could otherwise show one value to one reader and another to the next."""
    payload = samples.statement().encode().replace(b'"passed":true', b'"passed":false,"passed":true')
    assert "duplicate name" in refused(envelope.sign(payload, samples.KEY))


def test_base64_has_one_form_only() -> None:
    """Bits of the last letter that stand for nothing could carry something."""
    found = json.loads(RECORD)
    signature = found["signatures"][0]["sig"]
    assert signature.endswith("==")
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".decode()
    other = signature[:-3] + letters[letters.index(signature[-3]) ^ 1] + "=="
    assert base64.b64decode(other) == base64.b64decode(signature)
    assert "not written as ringfence writes it" in refused(RECORD.replace(signature.encode(), other.encode()))
