"""Peer verification: workers admitted by evidence verify each other's proofs when they first connect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.admission.binding import PREIMAGE_BYTES, Binding
from ringfence.admission.entry import Listing
from ringfence.admission.peer_verification import PeerVerifier, Presentation
from ringfence.admission.policy import Policy
from ringfence.admission.proofs import snp
from ringfence.admission.roster import seal
from ringfence.admission.tree import parent_of
from ringfence.errors import AdmissionError, ProtocolError
from tests.unit import snp_mint
from tests.unit.admission_samples import fixed_bytes, worker
from tests.unit.peer_verification_samples import (
    LIES,
    NOW,
    PATIENCE,
    TECHNOLOGIES,
    Circle,
    Lie,
    binding_of,
    circle,
    report,
)

SIZE = 7  # ranks 5 and 6 are children of rank 1, the others of rank 0
KEYS = [fixed_bytes(f"key {rank}") for rank in range(SIZE)]


@pytest.fixture(scope="module")
def made() -> Circle:
    return circle(KEYS)


@pytest.mark.parametrize("name", TECHNOLOGIES)
def test_all_pairs_of_workers_pass_peer_verification(name: str) -> None:
    made = circle(KEYS, TECHNOLOGIES[name]())
    for own in range(SIZE):
        known = made.peer_verifier(own)
        for rank in set(range(SIZE)) - {own}:
            known.verify(rank, made.presentations[rank].encode())
            assert known.verified(rank)


def test_both_workers_agree_whether_verification_is_due(made: Circle) -> None:
    sides = [made.peer_verifier(rank) for rank in range(SIZE)]
    due = {(one, two) for one in range(SIZE) for two in range(SIZE) if sides[one].due(two)}
    assert due == {(two, one) for one, two in due}
    related = {(rank, parent_of(rank)) for rank in range(1, SIZE)}
    assert {(one, two) for one, two in due if one > two} == {
        (one, two) for one in range(SIZE) for two in range(one) if (one, two) not in related
    }


def test_signing_kinds_need_no_peer_verification() -> None:
    """A secret and a certificate endorse the entry itself: there is nothing more that a proof could say to others."""
    workers = [worker(rank, SIZE) for rank in range(SIZE)]
    shared = workers[0].shared
    listings = [Listing(each.entry, 1, bytes(32), shared.endorse(each.entry, bytes(32))) for each in workers]
    roster = seal(Policy((shared,)), workers[0].entry, listings, 1, b"")
    known = PeerVerifier(Policy((shared,)), roster, 5, None, NOW, PATIENCE)
    assert not any(known.due(rank) for rank in range(SIZE))
    liar = replace(workers[5].entry, public_key=bytes(32))  # what a parent would have to list
    forged = replace(listings[5], entry=liar)
    with pytest.raises(AdmissionError, match="rank 5 is not endorsed"):
        seal(Policy((shared,)), workers[0].entry, [*listings[:5], forged, *listings[6:]], 1, b"")


@pytest.mark.promise("A worker listed by evidence or a token is verified again by each worker that links with it.")
@pytest.mark.parametrize("lie", LIES, ids=lambda each: each.__name__)
def test_a_lie_in_the_tree_is_detected(lie: Lie) -> None:
    mixed = circle(KEYS)
    shown = lie(mixed)
    with pytest.raises(
        AdmissionError, match=rf"worker 5, which worker 1 admitted, failed peer verification.*{LIES[lie]}"
    ):
        mixed.peer_verifier(4).verify(5, shown.encode())
    assert not mixed.peer_verifier(4).verified(5)


def test_a_proof_that_is_not_in_the_roster_is_refused(made: Circle) -> None:
    """However good: the roster is what all agreed on."""
    fresh = replace(made.presentations[5], proof=report(made.presentations[5].binding.digest, key=None))
    assert fresh.proof != made.presentations[5].proof
    with pytest.raises(AdmissionError, match="not the one in the roster"):
        made.peer_verifier(4).verify(5, fresh.encode())


def test_rank_0_presents_the_proof_it_presented_to_a_child(made: Circle) -> None:
    for child, fine in ((1, True), (4, True), (5, False)):
        binding = binding_of(made.entries, 0, shown_to=child)
        presentation = Presentation(snp.KIND, NOW, binding, report(binding.digest))
        known = made.peer_verifier(6, made.presentations[6])
        if fine:
            known.verify(0, presentation.encode())
        else:
            with pytest.raises(AdmissionError, match="for rank 5"):
                known.verify(0, presentation.encode())


@pytest.mark.parametrize("at", [NOW - PATIENCE - 302, NOW + 302], ids=["before", "after"])
def test_a_proof_is_verified_as_of_when_the_run_formed(made: Circle, at: float) -> None:
    """Not at another time: a worker must not claim that it was presented while its certificate was still valid."""
    with pytest.raises(AdmissionError, match="not presented while this run formed"):
        made.peer_verifier(4).verify(5, replace(made.presentations[5], at=int(at)).encode())


def test_a_certificate_that_expired_since_is_accepted(made: Circle) -> None:
    """Credentials are verified once a session: a group that is made later must not end the run."""
    known = made.peer_verifier(4)
    vm = snp_mint.foundry()
    known._policy = Policy((snp.verifier(vm.rules, lambda: NOW + 10**9, known=vm.roots),))
    known.verify(5, made.presentations[5].encode())


@pytest.mark.promise("A worker listed by evidence or a token is verified again by each worker that links with it.")
def test_every_flipped_bit_of_what_a_proof_covers_is_refused(made: Circle) -> None:
    known, presentation = made.peer_verifier(4), made.presentations[5]
    for place in range(PREIMAGE_BYTES):
        preimage = bytearray(presentation.binding.preimage)
        preimage[place] ^= 1 << (place % 8)
        with pytest.raises(AdmissionError):
            known.verify(5, replace(presentation, binding=Binding(bytes(preimage))).encode())


@given(
    st.builds(
        Presentation,
        st.integers(0, 255),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=PREIMAGE_BYTES, max_size=PREIMAGE_BYTES).map(Binding),
        st.binary(max_size=300),
    ),
    st.binary(min_size=1, max_size=3),
)
def test_a_presentation_round_trips_and_has_one_encoding(presentation: Presentation, more: bytes) -> None:
    data = presentation.encode()
    assert Presentation.decode(data) == presentation
    assert len(data) <= keys.PRESENTATION_BYTES
    for wrong in (data + more, data[: -len(more)]):
        with pytest.raises(ProtocolError):
            Presentation.decode(wrong)


@given(st.binary(max_size=600))
def test_any_malformed_presentation_is_refused_naming_the_worker(data: bytes) -> None:
    with pytest.raises(AdmissionError, match="worker 5, which worker 1 admitted"):
        circle_once().peer_verifier(4).verify(5, data)


_ONCE: list[Circle] = []


def circle_once() -> Circle:
    if not _ONCE:
        _ONCE.append(circle(KEYS))
    return _ONCE[0]
