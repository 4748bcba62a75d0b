"""The prover of an agent, which outlives its certificate: the certificate is read again for new connections."""

from __future__ import annotations

import logging
import time
from typing import Final

from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry
from ringfence.admission.policy import Prover
from ringfence.errors import ConfigurationError
from ringfence.session.join.credentials import JoinCredentials

_log = logging.getLogger(__name__)

_SECONDS: Final = 10.0  # between two readings: peers must not cause many, and a Workload API takes a moment


class CurrentProver:
    """Proves with the certificate of now, if the policy asks for one. Used by one thread at a time."""

    def __init__(self, credentials: JoinCredentials, prover: Prover) -> None:
        self.kind = prover.kind
        self._credentials = credentials
        self._prover = prover
        self._read_at = time.monotonic()

    def prove(self, binding: Binding) -> bytes:
        now = time.monotonic()
        if now - self._read_at >= _SECONDS:
            self._read_at = now
            self._read_again()
        return self._prover.prove(binding)

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return self._prover.endorse(entry, proof_digest)

    def _read_again(self) -> None:
        try:
            found = self._credentials.read_certificate_again(self.kind)
        except ConfigurationError as error:
            _log.warning("this agent goes on with the certificate that it has: %s", error)
            return
        if found is not None:
            self._prover = found
