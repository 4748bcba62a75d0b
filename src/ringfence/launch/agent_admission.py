"""How agents prove themselves to each other: the policy and the credentials of their workers, and a hello of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringfence import keys
from ringfence.admission.entry import Entry
from ringfence.admission.messages import Hello
from ringfence.admission.policy import Policy, Prover
from ringfence.config.settings import Settings
from ringfence.launch.current_policy import CurrentPolicy
from ringfence.launch.current_prover import CurrentProver
from ringfence.session.join.connections import Connections
from ringfence.session.join.credentials import JoinCredentials
from ringfence.session.join.handshakes import HandshakeEvents, Handshakes
from ringfence.transport.tls import Credentials

# In the place of a worker's generation: agents outlive generations.
_GENERATION = "agents"
_SUITES = (keys.SUITE_AES_256_GCM,)


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
        hello = Hello(entry=entry, policy_digest=policy.digest, suites=_SUITES, kinds=policy.kinds)
        current = CurrentPolicy(own, policy) if own.reads_lists else None
        return cls(hello, credentials, policy, CurrentProver(own, prover), current)

    def handshakes(self, connections: Connections, events: HandshakeEvents) -> Handshakes:
        return Handshakes(self.hello, self.credentials, self.policy, self.prover, connections, events, self.current)
