"""Fetches OCSP responses for the certificates of GPUs, from a service that the user names: NVIDIA's own, or a cache of it.

Responses are signed and verified like any other, so the service need not be trusted; but it learns the devices.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp

from ringfence.admission.proofs import nvidia, nvidia_chain, ocsp_status
from ringfence.admission.proofs.ocsp_status import Response, Status
from ringfence.errors import ConfigurationError

NVIDIA: Final = "https://ocsp.ndis.nvidia.com"
SECONDS: Final = 20.0  # for one response


def fetch(
    proof: bytes, service: str, now: float, *, root: x509.Certificate | None = None
) -> dict[str, tuple[Response, Status]]:
    """Return a response for each certificate of the GPUs in a proof, by the name for its file. `root` is for tests.

    Raises ConfigurationError if the service does not answer, and AdmissionError if its answer is not from NVIDIA.
    """
    if not service.startswith(("https://", "http://")):
        raise ConfigurationError(f"{service!a} is not the address of a service, such as {NVIDIA}")
    found: dict[str, tuple[Response, Status]] = {}
    for gpu in nvidia.decode(proof):
        device = nvidia_chain.verify(gpu.chain, root or nvidia.pinned_root(), datetime.fromtimestamp(now, UTC))
        for certificate, issuer in pairwise(device.certificates[1:]):
            request = ocsp.OCSPRequestBuilder().add_certificate(certificate, issuer, hashes.SHA384()).build()
            name = f"{request.issuer_key_hash.hex()[:16]}-{certificate.serial_number:x}.der"
            if name not in found:
                response = _read(service, _post(service, request.public_bytes(Encoding.DER)))
                found[name] = response, ocsp_status.authenticate(response, device.name, certificate, issuer, now)
    return found


def check_refresh(found: Status, content: bytes, name: str) -> None:
    """Check that a fetched response may replace a file's content. Raises ConfigurationError."""
    try:
        held = ocsp_status.read(name, content)
    except ValueError:
        raise ConfigurationError(f"{name} exists and is not an OCSP response: name another folder") from None
    if any(each.serial == found.serial and each.validity.start > found.validity.start for each in held.statuses):
        raise ConfigurationError(
            f"the service returned an older response than {name} has; the file is unchanged: ask another service"
        )


def _post(service: str, request: bytes) -> bytes:
    headers = {"Content-Type": "application/ocsp-request"}
    try:
        asked = urllib.request.Request(service, request, headers)  # noqa: S310 (checked by `fetch`)
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read(ocsp_status.RESPONSE_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigurationError(f"{service} returned no OCSP response: {reason}") from error
    return content


def _read(service: str, content: bytes) -> Response:
    try:
        if len(content) > ocsp_status.RESPONSE_BYTES:
            raise ValueError(f"it has more than {ocsp_status.RESPONSE_BYTES} bytes")
        return ocsp_status.read("its answer", content)
    except ValueError as error:
        raise ConfigurationError(f"{service} returned no OCSP response: {error}") from None
