"""DSSE envelopes: a payload and one Ed25519 signature over its type and its bytes (spec/record.md, 1).

This module does not use securesystemslib, the library of in-toto: it would add a run-time dependency for one line of encoding,
accept duplicate and unknown names and several encodings of one envelope, and verify without `cryptography`, in Python, where
that is missing. Signatures are made and verified by `cryptography`; tests read the envelopes with securesystemslib.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ringfence.errors import RecordError
from ringfence.keys import RECORD_BYTES, RECORD_PAYLOAD
from ringfence.record import json_object
from ringfence.record.signing_key import key_id

SIGNATURE_BYTES: Final = 64
_ENVELOPE: Final = {"payload": str, "payloadType": str, "signatures": list}
_SIGNATURE: Final = {"keyid": str, "sig": str}


@dataclass(frozen=True)
class Envelope:
    """An envelope that was parsed, which says nothing of its signature, or that was signed."""

    payload: bytes
    key_id: str
    signature: bytes

    def encode(self) -> bytes:
        """Return the only encoding of this envelope, a line of JSON."""
        signature = {"keyid": self.key_id, "sig": base64.b64encode(self.signature).decode("ascii")}
        payload = base64.b64encode(self.payload).decode("ascii")
        document = {"payload": payload, "payloadType": RECORD_PAYLOAD, "signatures": [signature]}
        return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"


def signed_bytes(payload: bytes) -> bytes:
    """Return what a signature covers: DSSE's pre-authentication encoding of the type and the payload."""
    return b"DSSEv1 %d %b %d %b" % (len(RECORD_PAYLOAD), RECORD_PAYLOAD.encode("ascii"), len(payload), payload)


def sign(payload: bytes, key: Ed25519PrivateKey) -> bytes:
    """Return the encoded envelope of a payload. Raises RecordError if it would be too large to be read."""
    content = Envelope(payload, key_id(key.public_key()), key.sign(signed_bytes(payload))).encode()
    if len(content) > RECORD_BYTES:
        raise RecordError(f"a record of {len(content):,} bytes; at most {RECORD_BYTES:,} are read")
    return content


def parse(content: bytes) -> Envelope:
    """Parse an envelope without verifying it. Raises RecordError."""
    if len(content) > RECORD_BYTES:
        raise RecordError(f"the record has more than {RECORD_BYTES:,} bytes")
    document = json_object.fields(json_object.read(content, "the record"), _ENVELOPE, "the envelope")
    if document["payloadType"] != RECORD_PAYLOAD:
        raise RecordError(f"the envelope's payload type is not {RECORD_PAYLOAD}")
    if len(document["signatures"]) != 1:
        raise RecordError(f"the envelope has {len(document['signatures'])} signatures, and must have one")
    signature = json_object.fields(document["signatures"][0], _SIGNATURE, "the signature")
    if not json_object.SHA_256.fullmatch(signature["keyid"]):
        raise RecordError("the signature's keyid is not a SHA-256 digest in hexadecimal form")
    try:
        payload, made = (base64.b64decode(text, validate=True) for text in (document["payload"], signature["sig"]))
    except ValueError:
        raise RecordError("the payload or the signature is not base64") from None
    if len(made) != SIGNATURE_BYTES:
        raise RecordError(f"the signature has {len(made)} bytes; one of Ed25519 has {SIGNATURE_BYTES}")
    found = Envelope(payload, signature["keyid"], made)
    if found.encode() != content:
        raise RecordError(
            "the envelope is not written as ringfence writes it: take the file as it was before a tool formatted it"
        )
    return found


def verified_payload(content: bytes, key: Ed25519PublicKey) -> bytes:
    """Return the payload of an encoded envelope that this key signed. Raises RecordError."""
    found = parse(content)
    if found.key_id != key_id(key):
        raise RecordError(
            f"the record was signed with another key, {found.key_id}, and not with {key_id(key)}: "
            "if you trust its signer, ask for their public key"
        )
    try:
        key.verify(found.signature, signed_bytes(found.payload))
    except InvalidSignature:
        raise RecordError("the signature is wrong: the record was changed after it was signed, or is forged") from None
    return found.payload
