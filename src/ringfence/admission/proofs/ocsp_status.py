"""The status of an NVIDIA device's certificates: OCSP responses (RFC 6960) from files that the policy names.

NVIDIA answers for every certificate but the first, which the device itself issues at each start. A response is signed by the
certificate's issuer, or by a responder whom that issuer has certified for this. It comes from a file, so it answers no nonce:
the policy says how old it may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from ringfence.admission.proofs import freshness
from ringfence.admission.proofs.certificate_path import UNREADABLE, extension_of
from ringfence.admission.proofs.crl import identity
from ringfence.admission.proofs.freshness import Memory, Validity
from ringfence.errors import AdmissionError

RESPONSE_BYTES: Final = 64 << 10
KEY: Final = "ocsp_max_age"
FETCH: Final = "fetch a new one with `ringfence evidence ocsp`"
_MESSAGE_CHARACTERS: Final = 200
_SIGNED_WITH: Final = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
_NAMED_WITH: Final = (hashes.SHA1, *_SIGNED_WITH)  # of an issuer, which the verified chain contains
_CRITICAL: Final = (x509.BasicConstraints, x509.KeyUsage, x509.ExtendedKeyUsage, x509.OCSPNoCheck)


class Status(NamedTuple):
    """What a response says about one certificate."""

    hash: hashes.HashAlgorithm
    issuer_name: bytes  # digests
    issuer_key: bytes
    serial: int
    status: ocsp.OCSPCertStatus
    revoked_at: datetime | None
    validity: Validity

    def is_about(self, certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
        if self.serial != certificate.serial_number:
            return False
        wanted = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, self.hash).build()
        return (self.issuer_name, self.issuer_key) == (wanted.issuer_name_hash, wanted.issuer_key_hash)


@dataclass(frozen=True)
class Response:
    """One response, in DER. `name` is its file, for messages. Its signature is checked when a device is verified."""

    name: str
    raw: bytes

    @cached_property
    def response(self) -> ocsp.OCSPResponse:
        return ocsp.load_der_ocsp_response(self.raw)

    @cached_property
    def statuses(self) -> tuple[Status, ...]:
        return tuple(
            Status(
                hash=each.hash_algorithm,
                issuer_name=each.issuer_name_hash,
                issuer_key=each.issuer_key_hash,
                serial=each.serial_number,
                status=each.certificate_status,
                revoked_at=each.revocation_time_utc,
                validity=Validity(each.this_update_utc, each.next_update_utc),
            )
            for each in self.response.responses
        )


def read(name: str, content: bytes) -> Response:
    """Read a response in DER. Raises ValueError, which says what is wrong."""
    try:
        found = Response(name, content)
        _check_form(found)
    except UNREADABLE as error:
        text = error if type(error) is ValueError else "it is malformed"
        raise ValueError(f"{name} is not an OCSP response: {text}"[:_MESSAGE_CHARACTERS]) from None
    return found


def _check_form(found: Response) -> None:
    """Check what can be checked without the issuer. Raises ValueError."""
    answer = found.response.response_status
    if answer is not ocsp.OCSPResponseStatus.SUCCESSFUL:
        raise ValueError(f"the responder refused the request ({answer.name.lower()}): ask it again")
    algorithm = found.response.signature_hash_algorithm
    if not isinstance(algorithm, _SIGNED_WITH):
        raise ValueError("it is not signed with SHA-256, SHA-384 or SHA-512")
    _ = (found.response.responder_name, found.response.certificates)
    for extension in found.response.extensions:
        if extension.critical and not isinstance(extension.value, x509.OCSPNonce):
            raise ValueError(f"it has the unknown critical extension {extension.oid.dotted_string}")
    for each in found.statuses:
        if not isinstance(each.hash, _NAMED_WITH):
            raise ValueError(f"it names its certificate with {each.hash.name}")
        if each.validity.end is not None and each.validity.end < each.validity.start:
            raise ValueError("its nextUpdate is before its thisUpdate")


# -- checking -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OcspRule:
    """The revocation rule of one table, or of all tables of a policy. Only `max_age` is part of the policy's digest."""

    max_age: int  # seconds
    responses: tuple[Response, ...]
    memory: Memory = field(default=freshness.PROCESS, compare=False, repr=False)

    @classmethod
    def read(cls, files: Iterable[tuple[str, bytes]] | None, max_age: int | None) -> OcspRule | None:
        """Return the rule of a table, or None if it has none. Raises ValueError."""
        if (files is None) != (max_age is None):
            raise ValueError("ocsp and ocsp_max_age belong together: name the responses, and how old they may be")
        if files is None or max_age is None:
            return None
        return cls(max_age, tuple(read(name, content) for name, content in files))

    @classmethod
    def merge(cls, found: Iterable[OcspRule], memory: Memory) -> OcspRule | None:
        """Return the strictest: all responses and the smallest age. None: there are none."""
        rules = list(found)
        if not rules:
            return None
        responses = dict.fromkeys(each for rule in rules for each in rule.responses)
        return cls(min(rule.max_age for rule in rules), tuple(responses), memory)

    @cached_property
    def _by_serial(self) -> dict[int, list[tuple[Response, Status]]]:
        found: dict[int, list[tuple[Response, Status]]] = {}
        for response in self.responses:
            for status in response.statuses:
                found.setdefault(status.serial, []).append((response, status))
        return found

    @cached_property
    def _signed(self) -> set[tuple[Response, x509.Certificate]]:
        """Responses and the issuers for which their signatures were verified."""
        return set()

    def check(self, device: str, chain: Sequence[x509.Certificate], now: float) -> None:
        """Check every certificate of a verified chain but the first and the root, which is last. Raises AdmissionError."""
        for certificate, issuer in pairwise(chain[1:]):
            self._check_one(device, certificate, issuer, now)

    def _check_one(self, device: str, certificate: x509.Certificate, issuer: x509.Certificate, now: float) -> None:
        what = f"certificate {certificate.serial_number:X} of {device}"
        known = self._by_serial.get(certificate.serial_number, ())
        about = [(response, status) for response, status in known if status.is_about(certificate, issuer)]
        if not about:
            raise AdmissionError(
                f"there is no OCSP response for {what}: {FETCH}, and put it where the policy's ocsp points",
                to_peer=f"this worker has no OCSP response for {what}",
            )
        for response, _ in about:
            self._check_signed(response, issuer, what, now)
        response, newest = max(about, key=lambda each: each[1].validity.order)
        if newest.status is ocsp.OCSPCertStatus.REVOKED:
            date = "" if newest.revoked_at is None else f" on {newest.revoked_at:%Y-%m-%d}"
            raise AdmissionError(f"NVIDIA has revoked {what}{date}: use another GPU")
        if newest.status is not ocsp.OCSPCertStatus.GOOD:
            raise AdmissionError(f"the status of {what} is unknown to NVIDIA's responder")
        self.memory.check((identity(issuer), newest.serial), newest.validity, f"the OCSP response for {what}")
        if (objection := newest.validity.objection(self.max_age, now, KEY)) is not None:
            raise _unusable(f"the OCSP response for {what} in {response.name!a} {objection}: {FETCH}", what)

    def _check_signed(self, response: Response, issuer: x509.Certificate, what: str, now: float) -> None:
        if (response, issuer) in self._signed:
            return
        try:
            _verify_signature(response.response, _responder(response.response, issuer, now))
        except (InvalidSignature, *UNREADABLE) as error:
            reason = str(error) or "its signature is wrong"
            raise _unusable(
                f"the OCSP response for {what} in {response.name!a} is not from NVIDIA: {reason}; remove it, or {FETCH}",
                what,
            ) from None
        self._signed.add((response, issuer))


def authenticate(
    response: Response, device: str, certificate: x509.Certificate, issuer: x509.Certificate, now: float
) -> Status:
    """Return what a response says about a certificate, whatever its age. Raises AdmissionError if it is not from NVIDIA."""
    what = f"certificate {certificate.serial_number:X} of {device}"
    about = [each for each in response.statuses if each.is_about(certificate, issuer)]
    if not about:
        raise AdmissionError(f"the OCSP response in {response.name!a} is not for {what}")
    OcspRule(0, (response,))._check_signed(response, issuer, what, now)
    return max(about, key=lambda each: each.validity.order)


def _responder(response: ocsp.OCSPResponse, issuer: x509.Certificate, now: float) -> x509.Certificate:
    """Return the issuer, or the certificate with which it authorised a responder (RFC 6960, section 4.2.2.2).

    Raises ValueError or InvalidSignature.
    """
    signers = [each for each in (issuer, *response.certificates) if _is_named(response, each)]
    if not signers:
        raise ValueError("it does not contain the certificate of its signer")
    signer = signers[0]
    if signer == issuer:
        return issuer
    signer.verify_directly_issued_by(issuer)
    moment = datetime.fromtimestamp(now, UTC)
    if not signer.not_valid_before_utc <= moment <= signer.not_valid_after_utc:
        raise ValueError("the certificate of its signer is not valid now")
    unknown = [each for each in signer.extensions if each.critical and not isinstance(each.value, _CRITICAL)]
    purposes, usage = extension_of(signer, x509.ExtendedKeyUsage), extension_of(signer, x509.KeyUsage)
    if unknown or purposes is None or ExtendedKeyUsageOID.OCSP_SIGNING not in purposes:
        raise ValueError("its signer was not authorised to sign OCSP responses")
    if usage is not None and not usage.digital_signature:
        raise ValueError("the key of its signer may not sign data")
    return signer


def _is_named(response: ocsp.OCSPResponse, signer: x509.Certificate) -> bool:
    if response.responder_name is not None:
        return response.responder_name == signer.subject
    return response.responder_key_hash == x509.SubjectKeyIdentifier.from_public_key(signer.public_key()).digest


def _verify_signature(response: ocsp.OCSPResponse, signer: x509.Certificate) -> None:
    key, algorithm = signer.public_key(), response.signature_hash_algorithm
    assert algorithm is not None  # `_check_form`
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(response.signature, response.tbs_response_bytes, ec.ECDSA(algorithm))
    elif isinstance(key, rsa.RSAPublicKey):
        key.verify(response.signature, response.tbs_response_bytes, padding.PKCS1v15(), algorithm)
    else:
        raise ValueError("the key of its signer is neither on an elliptic curve nor of RSA")


def _unusable(text: str, what: str) -> AdmissionError:
    return AdmissionError(text, to_peer=f"this worker's OCSP response for {what} is not usable")
