"""What a worker comes back with from a join."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission.peer_verification import PeerVerifier
from ringfence.admission.roster import Roster
from ringfence.control import Abort, ControlEdge


@dataclass(frozen=True, eq=False)
class Membership:
    """A worker's place in one session. Nothing else opens the runtime's door."""

    rank: int
    world_size: int
    roster: Roster  #                   worker r is roster.entries[r]
    session_key: keys.Secret
    link_private_key: X25519PrivateKey = field(repr=False)
    suite: int
    table: bytes = field(repr=False)  # rank 0's schedule table
    key_agreement: str  #               for people: the groups by which it agreed on keys with its neighbours
    edges: tuple[ControlEdge, ...] = field(repr=False)  # the parent first, then the children
    peer_verifier: PeerVerifier | None = field(repr=False)  # who is verified at peer verification, if anybody is
    max_session_age: int | None = None  # seconds, from the policy: who was verified then must be verified again
    verified_at: float = 0.0  #           boot_seconds() of the first verification, which is the oldest

    @property
    def admitted_by(self) -> str:
        """The proof that admitted this worker, for people: "shared secret"."""
        return self.roster.admitted[self.rank].how

    def give_up(self, reason: str) -> None:
        """This worker cannot go on after its join: tell the neighbours why, so that the session ends on every worker."""
        for edge in self.edges:  # nothing is sent on one that is closed
            edge.send(Abort(self.rank, -1, 0, "", f"it failed to start: {reason}"))
            edge.close()

    def forget(self) -> None:
        """Hold no key and no connection any more, whoever still has this object."""
        for edge in self.edges:
            edge.abandon()
        self.session_key.forget()
        object.__setattr__(self, "link_private_key", None)
        object.__setattr__(self, "peer_verifier", None)
