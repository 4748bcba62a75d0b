"""OCSP responses for tests, valid and not, under the issuers of `nvidia_mint`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.unit import nvidia_mint
from tests.unit.nvidia_mint import Device, Extensions, Issuer

NOW = datetime.fromtimestamp(nvidia_mint.NOW, UTC)
HOUR = timedelta(hours=1)
GOOD, REVOKED, UNKNOWN = ocsp.OCSPCertStatus.GOOD, ocsp.OCSPCertStatus.REVOKED, ocsp.OCSPCertStatus.UNKNOWN


def responder(issuer: Issuer, *purposes: x509.ObjectIdentifier, **wrong: object) -> Issuer:
    """A responder that `issuer` authorises, with OCSPSigning unless other purposes are given."""
    usages = x509.ExtendedKeyUsage(purposes or [ExtendedKeyUsageOID.OCSP_SIGNING])
    extensions: Extensions = [(nvidia_mint.usage(signs=True), True), (usages, False)]
    return issuer.issue("Test OCSP responder", extensions, **wrong)  # type: ignore[arg-type]


def response(
    certificate: Issuer,
    issuer: Issuer,
    status: ocsp.OCSPCertStatus = GOOD,
    *,
    start: datetime = NOW - HOUR,
    end: datetime | None = NOW + HOUR,
    signer: Issuer | None = None,
    algorithm: hashes.HashAlgorithm | None = None,
    signed_with: hashes.HashAlgorithm | None = None,
    certificates: Sequence[Issuer] | None = None,
    by_key: bool = False,
    extra: Sequence[tuple[x509.ExtensionType, bool]] = (),
) -> bytes:
    """Return a response in DER. `signer`: the responder; the issuer itself by default."""
    signer = signer or issuer
    certificates = ([] if signer is issuer else [signer]) if certificates is None else certificates
    revoked = status is REVOKED
    builder = (
        ocsp.OCSPResponseBuilder()
        .add_response(
            cert=certificate.certificate,
            issuer=issuer.certificate,
            algorithm=algorithm or hashes.SHA384(),
            cert_status=status,
            this_update=start,
            next_update=end,
            revocation_time=start if revoked else None,
            revocation_reason=x509.ReasonFlags.key_compromise if revoked else None,
        )
        .responder_id(
            ocsp.OCSPResponderEncoding.HASH if by_key else ocsp.OCSPResponderEncoding.NAME, signer.certificate
        )
    )
    if certificates:
        builder = builder.certificates([each.certificate for each in certificates])
    for extension, critical in extra:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer.key, signed_with or hashes.SHA384()).public_bytes(Encoding.DER)


def path_of(device: Device, top: Issuer) -> list[Issuer]:
    """Return the issuers of a device's chain, from its boot ROM to the root."""
    assert device.rom is not None
    return [device.rom, *device.above, top]


def responses(device: Device, top: Issuer, **wrong: object) -> list[bytes]:
    """Return a response for each certificate of a device that NVIDIA answers for."""
    path = path_of(device, top)
    return [response(*pair, **wrong) for pair in pairwise(path)]  # type: ignore[arg-type]
