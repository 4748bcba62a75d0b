"""Fetching OCSP responses: from a real HTTP server that signs for minted devices, and from ones that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest
from cryptography.x509 import ocsp

from ringfence.admission.proofs import nvidia, nvidia_chain, ocsp_status
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import ocsp_fetch
from tests.unit import nvidia_mint, ocsp_mint
from tests.unit.nvidia_mint import Device
from tests.unit.ocsp_mint import HOUR, NOW

TOP = nvidia_mint.root()
GPUS = [Device.under(TOP, number) for number in (1, 2)]
PROOF = nvidia.encode([each.gpu(bytes(32)) for each in GPUS])
Answer = Callable[[ocsp.OCSPRequest], bytes]


def known(request: ocsp.OCSPRequest, **wrong: object) -> bytes:
    """Answer as NVIDIA does."""
    for gpu in GPUS:
        path = ocsp_mint.path_of(gpu, TOP)
        for certificate, issuer in pairwise(path):
            if certificate.certificate.serial_number == request.serial_number:
                return ocsp_mint.response(certificate, issuer, **wrong)  # type: ignore[arg-type]
    raise AssertionError(request.serial_number)


@contextmanager
def service(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            content = answer(ocsp.load_der_ocsp_request(asked))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetch(answer: Answer) -> dict[str, tuple[ocsp_status.Response, ocsp_status.Status]]:
    with service(answer) as url:
        return ocsp_fetch.fetch(PROOF, url, nvidia_mint.NOW, root=TOP.certificate)


def test_fetched_responses_admit_the_gpus() -> None:
    found = fetch(known)
    assert len(found) == 6 and all(name.endswith(".der") for name in found)
    revocation = ocsp_status.OcspRule(86400, tuple(response for response, _ in found.values()))
    for gpu in GPUS:
        device = nvidia_chain.verify(gpu.chain, TOP.certificate, NOW)
        revocation.check(device.name, device.certificates, nvidia_mint.NOW)


def test_a_revoked_certificate_is_reported_and_not_an_error() -> None:
    found = fetch(lambda request: known(request, status=ocsp_mint.REVOKED))
    assert {status.status for _, status in found.values()} == {ocsp_mint.REVOKED}


def test_answers_that_are_not_from_nvidia_are_refused() -> None:
    other = ocsp_mint.responses(Device.under(TOP, 3), TOP)[0]
    with pytest.raises(AdmissionError, match="is not for certificate"):
        fetch(lambda request: other)
    rogue = ocsp_mint.responder(nvidia_mint.root())
    with pytest.raises(AdmissionError, match="is not from NVIDIA"):
        fetch(lambda request: known(request, signer=rogue))
    for content in (b"", b"x", bytes(ocsp_status.RESPONSE_BYTES + 1)):
        with pytest.raises(ConfigurationError, match="returned no OCSP response"):
            fetch(lambda request, content=content: content)  # type: ignore[misc]


def test_a_service_that_cannot_be_asked_is_named() -> None:
    with service(known) as url:
        pass
    with pytest.raises(ConfigurationError, match=f"{url} returned no OCSP response: .*refused"):
        ocsp_fetch.fetch(PROOF, url, nvidia_mint.NOW, root=TOP.certificate)
    with pytest.raises(ConfigurationError, match="is not the address of a service"):
        ocsp_fetch.fetch(PROOF, "file:///etc/passwd", nvidia_mint.NOW, root=TOP.certificate)


def test_an_older_response_replaces_no_file() -> None:
    (response, status), *_ = fetch(known).values()
    ocsp_fetch.check_refresh(status, response.raw, "x.der")
    (_, older), *_ = fetch(lambda request: known(request, start=NOW - 2 * HOUR)).values()
    with pytest.raises(ConfigurationError, match=r"older response than x\.der has; the file is unchanged"):
        ocsp_fetch.check_refresh(older, response.raw, "x.der")
    with pytest.raises(ConfigurationError, match="is not an OCSP response: name another folder"):
        ocsp_fetch.check_refresh(status, b"x", "x.der")
