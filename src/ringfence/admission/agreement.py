"""The agreed roster: workers that a certificate admitted sign the digest of the roster that they hold (spec/admission.md).

A worker in the tree can pass another roster to the workers below it. It cannot sign for them, so every worker that verifies the
signatures of all others learns that they hold the same roster. Other kinds of proof have no key that only one worker holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ringfence import keys
from ringfence.admission.entry import ENDORSEMENT_BYTES, Listing
from ringfence.admission.proofs import bundle, certificate, certificate_signature
from ringfence.admission.roster import Roster
from ringfence.errors import AdmissionError

_NAMED: Final = 4  # workers in an error message


@dataclass(frozen=True)
class Signers:
    """The workers of a verified roster that sign it, and the certificates with whose keys they do."""

    chains: Mapping[int, tuple[bytes, ...]]  # by rank; DER, the worker's own first

    @classmethod
    def of(cls, listings: Sequence[Listing]) -> Signers:
        """Return the signers of these listings, which were verified."""
        found = ((listing.entry.rank, _chain(listing)) for listing in listings)
        return cls({rank: chain for rank, chain in found if chain is not None})

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(self.chains)

    def verify(self, own: int, roster: Roster, signatures: Mapping[int, bytes]) -> None:
        """Verify the signature of every other signer. Raises AdmissionError, which names those that hold another roster."""
        others = [
            rank
            for rank, chain in self.chains.items()
            if rank != own and not certificate.has_signed_roster(chain, rank, roster.digest, signatures[rank])
        ]
        if others:
            raise AdmissionError(_refusal(own, roster, others))


def _chain(listing: Listing) -> tuple[bytes, ...] | None:
    """Return the certificates of the key that signs for this listing, or None."""
    parts = {listing.kind: listing.endorsement}
    if listing.kind == bundle.KIND:
        parts = dict(bundle.decode(listing.endorsement, ENDORSEMENT_BYTES))
    endorsement = parts.get(certificate.CertificateVerifier.kind)
    return None if endorsement is None else certificate_signature.decode(endorsement)[0]


def _refusal(own: int, roster: Roster, others: Sequence[int]) -> str:
    named = ", ".join(f"rank {rank} ({roster.admitted[rank].identity})" for rank in others[:_NAMED])
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    suspects = sorted(set.intersection(*(_path(own, rank) for rank in others)))
    liars = " or ".join(f"rank {rank}" for rank in suspects[:_NAMED]) if suspects else "more than one worker"
    return (
        f"the roster that rank {own} holds was not signed by {named}{more}. In the admission tree, {liars} passed on or signed "
        "another roster: find out what runs there"
    )


def _path(own: int, rank: int) -> set[int]:
    """Return the ranks on the path from a worker to another in the tree, without the first."""
    path, one, two = {rank}, own, rank
    while one != two:
        one, two = min(one, two), (max(one, two) - 1) // keys.TREE_FANOUT
        path |= {one, two}
    return path - {own}
