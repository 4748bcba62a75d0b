"""Presentations at peer verification: only the proof made for the worker's own entry is accepted."""

from __future__ import annotations

from functools import cache

from ringfence import keys
from ringfence.admission.binding import PREIMAGE_BYTES
from ringfence.admission.peer_verification import PeerVerifier, Presentation
from ringfence.errors import AdmissionError
from tests.fuzz.target import Target
from tests.unit.admission_samples import fixed_bytes
from tests.unit.peer_verification_samples import Circle, circle

SIZE = 6
_AT = slice(1, 9)  # when it was shown, which a worker may choose within the time in which the run formed


@cache
def _circle() -> Circle:
    return circle([fixed_bytes(f"key {rank}") for rank in range(SIZE)])


@cache
def _verify() -> tuple[PeerVerifier, PeerVerifier]:
    return _circle().peer_verifier(4), _circle().peer_verifier(5)


def _seeds() -> list[bytes]:
    return [bytes([rank]) + _circle().presentations[rank].encode() for rank in (0, 4, 5)]


def _peer_verification(data: bytes) -> None:
    """One byte selects the worker (rank 5 to rank 4, or rank 0 to rank 5); the presentation follows."""
    rank = 5 if data and data[0] & 1 else 0
    own, shown = _verify()[rank == 0], data[1:]
    own._verified.clear()
    own.verify(rank, shown)
    assert Presentation.decode(shown).encode() == shown
    genuine = _circle().presentations[rank].encode()
    end = 9 + PREIMAGE_BYTES if rank == 0 else len(genuine)  # the roster lists the digest of all proofs but rank 0's
    assert shown[0] == genuine[0] and shown[_AT.stop : end] == genuine[_AT.stop : end]
    assert len(shown) <= keys.PRESENTATION_BYTES


TARGETS = (Target("peer-verification", _seeds, _peer_verification, (AdmissionError,), bounded=500),)
