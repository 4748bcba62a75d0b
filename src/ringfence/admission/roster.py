"""The roster: all admitted workers of one session in the order of ranks, with one digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.entry import Entry, Listing, format_address
from ringfence.admission.policy import Admitted, Policy, verify
from ringfence.errors import AdmissionError


@dataclass(frozen=True)
class Worker:
    """An admitted worker, as reported to users of the library."""

    rank: int
    identity: str  #     the name in its certificate; "" where none was asked for
    address: str  #      "host:port" where its links are dialled
    admitted_by: str  #  the proof that admitted it: "shared secret", "certificate and Intel TDX quote"
    proof_digest: str  # of that proof and what it is bound to, as it stands in the roster
    public_key: str  #   X25519, for links in this session
    member: str = ""  #  of private sums: the one that the rule which admitted it names

    def __str__(self) -> str:
        return f"{self.identity or self.admitted_by}, {self.address}"


@dataclass(frozen=True)
class Roster:
    """Worker r is `entries[r]`. The digest covers the policy, every listing, the cipher suite and the schedule table."""

    admitted: tuple[Admitted, ...]
    proofs: tuple[tuple[int, bytes], ...]  # kind and digest of the proof that each presented to its parent
    digest: bytes

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """The workers of the run in the order of ranks."""
        return tuple(
            Worker(
                rank=entry.rank,
                identity=admitted.identity,
                address=format_address((entry.host, entry.port)),
                admitted_by=admitted.proof_name,
                proof_digest=digest.hex(),
                public_key=entry.public_key.hex(),
                member=admitted.member,
            )
            for entry, admitted, (_, digest) in zip(self.entries, self.admitted, self.proofs, strict=True)
        )

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(each.entry for each in self.admitted)

    def __repr__(self) -> str:
        return f"Roster({len(self.admitted)} workers, {self.digest[:4].hex()})"


def check_size(policy: Policy, own: Entry) -> None:
    """Raise AdmissionError if the world is smaller than the policy allows: a hostile store may have split the job."""
    if own.world_size < policy.min_workers:
        raise AdmissionError(
            f"rank {own.rank} was started in a run of {_workers(own.world_size)}; its policy asks for at least "
            f"{policy.min_workers} (min_workers). If the run is meant to be that small, lower min_workers on every worker; "
            "if not, the launcher or the store has split the run"
        )


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def seal(policy: Policy, own: Entry, listings: Sequence[Listing], suite: int, table: bytes) -> Roster:
    """Verify every listing of a complete world, and return its roster. Raises AdmissionError."""
    check_size(policy, own)
    if [listing.entry.rank for listing in listings] != list(range(own.world_size)):
        raise AdmissionError(f"the roster does not list ranks 0 to {own.world_size - 1}, each once and in order")
    for listing in listings:
        entry = listing.entry
        if (entry.run_id, entry.generation, entry.world_size) != (own.run_id, own.generation, own.world_size):
            raise AdmissionError(f"rank {entry.rank} in the roster belongs to another run, generation or world size")
    admitted = tuple(verify(policy, listing) for listing in listings)
    proofs = tuple((listing.kind, listing.proof_digest) for listing in listings)
    return Roster(admitted, proofs, roster_digest(policy.digest, listings, suite, table))


def roster_digest(policy_digest: bytes, listings: Sequence[Listing], suite: int, table: bytes) -> bytes:
    """Return a digest that is equal on two workers only if policy, listings, suite and table are equal."""
    encoded = (listing.encode() for listing in listings)
    return keys.digest(keys.ROSTER, policy_digest, encoding.number(suite, 1), table, *encoded)
