"""A strict parser of TPM 2.0 quotes (TPMS_ATTEST) over all 24 PCRs of the SHA-256 bank, and the check of their signature.

    magic · type · signer · extra data · clock · firmware version · PCR selection · PCR digest        (big-endian)

The parser is our own: the structure has twelve fields, and TPM libraries for Python need native code (tpm2-tss).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from ringfence.admission.encoding import Reader
from ringfence.errors import AdmissionError, ProtocolError

QUOTE_BYTES: Final = 512
SIGNATURE_BYTES: Final = 512
PCRS: Final = 24
PCR_BYTES: Final = 32
EXTRA_BYTES: Final = 64
FIRMWARE_BYTES: Final = 8

_MAGIC: Final = b"\xffTCG"  # a TPM signs nothing else that begins like this with a restricted key
_ATTEST_QUOTE: Final = 0x8018
_NAME_BYTES: Final = 66  # of the signer: algorithm and digest
SELECTION: Final = bytes.fromhex("00000001 000b 03 ffffff")  # one bank, SHA-256, three bytes of PCRs: all


@dataclass(frozen=True)
class Quote:
    """The fields of a quote. Parsing verifies nothing: see `verify`."""

    extra_data: bytes  #       the nonce of the requester
    clock: int  #              milliseconds
    reset_count: int
    restart_count: int
    is_clock_safe: bool
    firmware_version: bytes
    pcr_digest: bytes


def read(data: bytes) -> Quote:
    """Parse a quote. Raises AdmissionError."""
    if len(data) > QUOTE_BYTES:
        raise AdmissionError(f"a TPM quote of {len(data)} bytes, where at most {QUOTE_BYTES} are allowed")
    try:
        return _read(Reader(data))
    except ProtocolError as error:
        raise AdmissionError(f"the TPM quote is malformed: {error}") from None


def _read(reader: Reader) -> Quote:
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise ProtocolError("a TPM did not make it")
    kind = reader.number(2)
    if kind != _ATTEST_QUOTE:
        raise ProtocolError(f"an attestation of type {kind:#06x}, not a quote")
    _sized(reader, _NAME_BYTES)
    extra_data = _sized(reader, EXTRA_BYTES)
    clock, resets, restarts, safe = (reader.number(width) for width in (8, 4, 4, 1))
    if safe > 1:
        raise ProtocolError(f"a flag of value {safe}")
    firmware_version = reader.take(FIRMWARE_BYTES)
    if reader.take(len(SELECTION)) != SELECTION:
        raise ProtocolError(f"it does not cover PCRs 0 to {PCRS - 1} of the SHA-256 bank")
    digest = _sized(reader, PCR_BYTES)
    if len(digest) != PCR_BYTES:
        raise ProtocolError(f"a PCR digest of {len(digest)} bytes")
    reader.end()
    return Quote(
        extra_data=extra_data,
        clock=clock,
        reset_count=resets,
        restart_count=restarts,
        is_clock_safe=bool(safe),
        firmware_version=firmware_version,
        pcr_digest=digest,
    )


def _sized(reader: Reader, limit: int) -> bytes:
    length = reader.number(2)
    if length > limit:
        raise ProtocolError(f"a field of {length} bytes, where at most {limit} are allowed")
    return reader.take(length)


def verify(data: bytes, signature: bytes, key: rsa.RSAPublicKey) -> None:
    """Verify the signature of an attestation key (RSASSA-PKCS1-v1_5 with SHA-256). Raises AdmissionError."""
    try:
        key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        raise AdmissionError("the TPM quote was not signed with the vTPM's attestation key") from None


def digest_of(pcrs: tuple[bytes, ...]) -> bytes:
    """Return the digest that a quote over these PCR values has."""
    return hashlib.sha256(b"".join(pcrs)).digest()
