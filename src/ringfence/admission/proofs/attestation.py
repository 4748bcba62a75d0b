"""What proofs by a device or a service share: the worker has no key of its own there, so nothing endorses its entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Listing
from ringfence.admission.policy import Clock, Evidence, Prover, Verifier
from ringfence.admission.policy_file.policy_file import Rules
from ringfence.errors import AdmissionError

MEASURE: Final = "`ringfence evidence measure` prints the values for a policy"

R = TypeVar("R", bound=Rules)


def encode_lists(lists: Iterable[Sequence[bytes]]) -> bytes:
    """Encode lists of values, for `Rules.content`: independent of the order in each."""
    return b"".join(encoding.number(len(each), 4) + b"".join(map(encoding.blob, sorted(each))) for each in lists)


@dataclass(frozen=True, eq=False, repr=False)
class AttestationVerifier(Verifier, Generic[R]):
    """Verifies proofs of one kind by the rules of one table."""

    kind: int
    name: str
    rules: R
    clock: Clock
    check: Callable[[bytes, bytes, R, float], object]  # of a proof over a binding's digest. Raises AdmissionError
    sources: str = ""  # what makes the proofs, as a plural, for messages; default: the name
    roots: bytes = b""  # of the tests, as the policy digest covers them; a policy cannot set them

    def content(self) -> bytes:
        return self.rules.content() + self.roots

    def verify(self, evidence: Evidence) -> None:
        self.claims(evidence)

    def claims(self, evidence: Evidence) -> object:
        """Verify as `verify` does, and return what was found."""
        try:
            return self.check(evidence.proof, evidence.binding.digest, self.rules, evidence.moment(self.clock))
        except AdmissionError as error:
            rank = f"rank {evidence.entry.rank}: "
            raise error.with_prefix(rank if self.sources else f"{self.name} refuses {rank}") from None

    def verify_listing(self, listing: Listing) -> None:
        """Nothing endorses the entry: workers other than the parent rely on the parent until peer verification."""
        if listing.endorsement:
            none = f"{self.sources} have none" if self.sources else f"{self.name} has none"
            raise AdmissionError(f"the entry of rank {listing.entry.rank} has an endorsement, and {none}")


class AttestationProver(Prover):
    """Makes proofs of one kind with `collect`, which asks the device or the service for one over a binding's digest."""

    def __init__(self, kind: int, collect: Callable[[bytes], bytes]) -> None:
        self.kind = kind
        self._collect = collect

    def prove(self, binding: Binding) -> bytes:
        return self._collect(binding.digest)
