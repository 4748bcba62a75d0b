"""How agents prove themselves to each other: the policy and the credentials of their workers, and a hello of their own.

An agent outlives sessions and its certificate. So for new connections, files about revoked certificates and the certificate are
read again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry
from ringfence.admission.messages import Hello
from ringfence.admission.policy import Policy, Prover
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError, ConfigurationError, PolicyError
from ringfence.session.join.connections import Connections
from ringfence.session.join.credentials import JoinCredentials
from ringfence.session.join.handshakes import HandshakeEvents, Handshakes
from ringfence.transport.tls import Credentials

_log = logging.getLogger(__name__)

_POLICY_SECONDS: Final = 1.0  # between two readings: unauthenticated peers must not cause many
_CERTIFICATE_SECONDS: Final = 10.0  # as well, and a Workload API takes a moment
# In the place of a worker's generation: agents outlive generations.
_GENERATION = "agents"


class CurrentPolicy:
    """Returns the policy with the files of now. Used by one thread at a time."""

    def __init__(self, credentials: JoinCredentials, policy: Policy) -> None:
        self._credentials = credentials
        self._policy = policy
        self._digest = policy.digest
        self._read_at = time.monotonic()
        self._refusal: tuple[str, str] | None = None  # why peers are refused: for this agent's log, and for the peer
        self._is_changed = False  # the policy itself, not only the lists; that is final

    def __call__(self) -> Policy:
        """Return the policy. Raises AdmissionError if it cannot be read, or has once been another."""
        now = time.monotonic()
        if now - self._read_at >= _POLICY_SECONDS and not self._is_changed:
            self._read_at = now
            self._refusal = self._read_again()
        if self._refusal is not None:
            text, to_peer = self._refusal
            raise AdmissionError(text, to_peer=to_peer)
        return self._policy

    def _read_again(self) -> tuple[str, str] | None:
        try:
            policy = self._credentials.read_policy_again(self._policy)
        except PolicyError as error:
            return f"the policy cannot be read again: {error}", "the other agent cannot read its policy"
        if policy.digest != self._digest:
            self._is_changed = True
            return (
                "the policy file was changed while this agent ran: start the run again",
                "the policy of the other agent was changed while it ran",
            )
        if policy is not self._policy:
            self._policy = policy.for_agents()
        return None


class CurrentProver(Prover):
    """Proves with the certificate of now, if the policy asks for one. Used by one thread at a time."""

    def __init__(self, credentials: JoinCredentials, prover: Prover) -> None:
        self.kind = prover.kind
        self._credentials = credentials
        self._prover = prover
        self._read_at = time.monotonic()

    def prove(self, binding: Binding) -> bytes:
        now = time.monotonic()
        if now - self._read_at >= _CERTIFICATE_SECONDS:
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


@dataclass(frozen=True)
class AgentAdmission:
    """What an agent needs for handshakes: its hello, its TLS key, its policy and its prover."""

    hello: Hello
    credentials: Credentials
    policy: Policy
    prover: Prover
    current: Callable[[], Policy] | None = None  # with the lists of revoked certificates of now

    @classmethod
    def of(
        cls, settings: Settings, *, rank: int, nodes: int, endpoint: tuple[str, int], seconds: float
    ) -> AgentAdmission:
        """Return the admission of the agent of node `rank`. Node 0 hosts the store at `endpoint`.

        Raises ConfigurationError if this machine has no credential that its policy admits, and TimeoutError if it has not
        told what evidence it can provide within `seconds`.
        """
        own = JoinCredentials(settings)
        policy, prover = own.admission(timeout=seconds, warn_after=seconds, warn=lambda: None)
        policy = policy.for_agents()  # an agent's rank is that of its node
        credentials = Credentials(
            hybrid=policy.key_agreement == keys.KEY_AGREEMENTS[0], exporter=keys.TLS_LAUNCH_EXPORTER
        )
        entry = Entry(
            run_id=settings.run_id,
            generation=_GENERATION,
            rank=rank,
            world_size=nodes,
            public_key=bytes(keys.KEY_BYTES),  # agents have no links
            tls_key_digest=credentials.key_digest,
            host=endpoint[0],
            port=endpoint[1],
        )
        hello = Hello(entry=entry, policy_digest=policy.digest, suites=keys.SUITES, kinds=policy.kinds)
        current = CurrentPolicy(own, policy) if own.reads_lists else None
        return cls(hello, credentials, policy, CurrentProver(own, prover), current)

    def handshakes(self, connections: Connections, events: HandshakeEvents) -> Handshakes:
        return Handshakes(self.hello, self.credentials, self.policy, self.prover, connections, events, self.current)
