"""Requests to Azure's metadata service, at a link-local address of the host: the VCEK of this chip, and TDX quotes.

The host answers, so nothing of it is trusted: certificate and quote are verified by each peer.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ringfence.admission.proofs import jose
from ringfence.errors import ConfigurationError
from ringfence.evidence.guest import read_certificate

ADDRESS: Final = "http://169.254.169.254"
SECONDS: Final = 20.0
ANSWER_BYTES: Final = 64 * 1024

_VCEK_PATH: Final = "/metadata/THIM/amd/certification"
_QUOTE_PATH: Final = "/acc/tdquote"


@dataclass(frozen=True)
class Metadata:
    """The metadata service at an address."""

    address: str = ADDRESS
    seconds: float = SECONDS

    def vcek(self) -> bytes:
        """Return the VCEK of this chip, in DER. Raises ConfigurationError."""
        text = self._ask("GET", _VCEK_PATH, b"", {"Metadata": "true"}, "vcekCert")
        try:
            found = read_certificate(text.encode("ascii"))
        except ValueError:
            found = b""
        if not found:
            raise ConfigurationError("Azure's metadata service returned no certificate: try again")
        return found

    def tdx_quote(self, td_report: bytes) -> bytes:
        """Return the quote for a TD report (TDREPORT), with its padding. Raises ConfigurationError."""
        body = json.dumps({"report": base64.urlsafe_b64encode(td_report).decode("ascii")}).encode()
        text = self._ask("POST", _QUOTE_PATH, body, {"Content-Type": "application/json"}, "quote")
        try:
            return jose.decode_base64(text.rstrip("="))
        except ValueError:
            raise ConfigurationError("Azure's metadata service returned a quote that is not base64url") from None

    def _ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str], name: str) -> str:
        """Return one text of the JSON object that the service answers with."""
        deadline = time.monotonic() + self.seconds
        where = urlsplit(self.address)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=self.seconds)
        try:
            connection.request(method, path, body or None, dict(headers))
            response = connection.getresponse()
            content = _content(response, deadline)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigurationError(
                f"Azure's metadata service at {self.address} does not answer ({type(error).__name__}: {error}); "
                "the worker needs access to it, without a proxy"
            ) from error
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise ConfigurationError(
                f"Azure's metadata service answers {path} with status {response.status}: try again"
            )
        return text_of(content, name)


def text_of(content: bytes, name: str) -> str:
    """Return one text of a JSON object. Raises ConfigurationError."""
    try:
        found = jose.read_json(content)
    except ValueError:
        found = None
    value = found.get(name) if isinstance(found, dict) else None
    if not isinstance(value, str) or not value.isascii():
        raise ConfigurationError(f"Azure's metadata service returned no {name}")
    return value


def _content(response: http.client.HTTPResponse, deadline: float) -> bytes:
    content = b""
    while part := response.read1(ANSWER_BYTES):
        content += part
        if len(content) > ANSWER_BYTES:
            raise http.client.HTTPException(f"more than {ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("its answer takes too long")
    return content
