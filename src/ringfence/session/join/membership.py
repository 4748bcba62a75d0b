"""The result of a join."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission.entry import Entry
from ringfence.admission.peer_verification import PeerVerifier, Presentation
from ringfence.admission.policy import Policy, PolicyTerms
from ringfence.admission.roster import Roster
from ringfence.admission.tree import AgreedSession
from ringfence.record.begin import JoinRecord, certified_bytes
from ringfence.runtime.control import Abort, ControlEdge
from ringfence.transport.tls import Credentials
from ringfence.transport.unix import LocalNetwork


@dataclass(frozen=True, eq=False)
class Membership:
    """A worker's membership in one session: the roster, its keys and its control connections. The runtime starts from it."""

    rank: int
    world_size: int
    roster: Roster  #                   worker r is roster.entries[r]
    session_key: keys.Secret
    link_private_key: X25519PrivateKey = field(repr=False)
    suite: int
    table: bytes = field(repr=False)  # rank 0's schedule table
    key_agreement: str  #               the TLS groups used with its neighbours, for messages
    edges: tuple[ControlEdge, ...] = field(repr=False)  # the parent first, then the children
    peer_verifier: PeerVerifier | None = field(repr=False)  # None: the roster's endorsements have verified every worker
    policy_digest: bytes
    terms: PolicyTerms  #               of the policy; same_host may be stricter, by RINGFENCE_SAME_HOST on all workers
    verified_at: float  #               boot_seconds() of the first, and so the oldest, verification
    local: LocalNetwork | None = field(default=None, repr=False)  # for links inside this machine
    record: JoinRecord | None = field(default=None, repr=False)  # if this worker writes a record

    def give_up(self, reason: str) -> None:
        """Abort the session on every worker: this worker failed between its join and its start."""
        for edge in self.edges:  # nothing is sent on one that is closed
            edge.send(Abort(self.rank, -1, 0, "", f"it failed to start: {reason}"))
            edge.close()

    def forget(self) -> None:
        """Drop all keys and connections, even if references to this object remain."""
        for edge in self.edges:
            edge.abandon()
        if self.local is not None:
            self.local.close()
        self.session_key.forget()
        object.__setattr__(self, "link_private_key", None)
        object.__setattr__(self, "peer_verifier", None)


def record_of(
    session: AgreedSession, own: Entry, policy: Policy, presentation: Presentation | None, credentials: Credentials
) -> JoinRecord | None:
    """Return what a record keeps of a join, with the TLS key's signature of the record's key; None without a record."""
    if credentials.record_key is None:
        return None
    signed = certified_bytes(own.digest, session.roster.digest, credentials.record_key)
    return JoinRecord(
        listings=session.listings,
        policy_digest=policy.digest,
        same_host=policy.same_host,
        suite=session.suite,
        table=session.table,
        roster_digest=session.roster.digest,
        presentation=presentation,
        tls_key=credentials.public_key,
        certified=credentials.sign_once(signed),
    )
