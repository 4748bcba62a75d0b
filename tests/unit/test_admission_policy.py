"""Only verify() creates an Admitted, and a roster consists of Admitted workers only."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from ringfence import keys
from ringfence.admission.entry import Listing
from ringfence.admission.policy import Admitted, Evidence, Policy, Verifier, verify
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Rules
from ringfence.admission.roster import roster_digest, seal
from ringfence.errors import AdmissionError
from tests.certificates import Authority, now, spiffe
from tests.unit.admission_samples import Worker, worker


def listing(one: Worker) -> Listing:
    return Listing(one.entry, 1, bytes(32), one.shared.endorse(one.entry, bytes(32)))


def world(size: int) -> list[Listing]:
    return [listing(worker(rank, size)) for rank in range(size)]


@pytest.mark.promise("Only a verification by the policy creates an admitted worker.")
def test_only_verify_creates_an_admitted() -> None:
    entry = worker(1).entry
    with pytest.raises(TypeError, match=r"only policy\.verify"):
        Admitted(entry, "shared secret", object())
    admitted = verify(worker(0).policy, listing(worker(1)))
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copier(admitted)
    with pytest.raises(AttributeError):
        admitted.entry = entry  # type: ignore[misc]


def test_an_endorsed_listing_is_admitted_and_a_changed_one_is_not() -> None:
    good = listing(worker(1))
    policy = worker(0).policy
    assert verify(policy, good).entry == worker(1).entry
    changed = (
        replace(good, entry=replace(good.entry, public_key=bytes(32))),
        replace(good, entry=replace(good.entry, rank=2)),
        replace(good, entry=replace(good.entry, port=1)),
        replace(good, proof_digest=b"\1" * 32),
        replace(good, endorsement=bytes(32)),
        replace(good, endorsement=b""),
        listing(worker(1, secret=keys.Secret(bytes(range(32))))),
    )
    for bad in changed:
        with pytest.raises(AdmissionError, match="not endorsed"):
            verify(policy, bad)


def test_rules_of_two_members_admit_nobody() -> None:
    """The order of rules may differ between workers: they would take the worker for one of different members."""
    one, two = Authority("one"), Authority("two")
    both = Rules(tuple(sorted((one.der, two.der))), ("spiffe://example.org/worker/{rank}",), "example.org")
    entry = worker(1).entry
    shown = Listing(entry, 2, bytes(32), CertificateProver(one.issue(spiffe("worker/1"))).endorse(entry, bytes(32)))
    of_one, of_both = CertificateVerifier(replace(both, authorities=(one.der,)), now), CertificateVerifier(both, now)
    of_two = CertificateVerifier(replace(both, authorities=(two.der,)), now)
    assert verify(Policy((of_one, of_two), ("a", "b")), shown).member == "a"
    assert verify(Policy((of_two, of_one, of_both), ("b", "a", "a")), shown).member == "a"
    assert verify(Policy((of_one, of_both)), shown).member == ""
    for members in (("a", "b"), ("a", ""), ("", "a")):
        with pytest.raises(AdmissionError, match=r"rank 1: rules of two members admit spiffe://example\.org/worker/1"):
            verify(Policy((of_one, of_both), members), shown)


class Surprised(Verifier):
    """A verifier whose library raises what it never announced."""

    kind = 1
    name = "surprise"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def content(self) -> bytes:
        return b""

    def verify(self, evidence: Evidence) -> None:
        raise self._error

    def verify_listing(self, listing: Listing) -> None:
        raise self._error


class PanicException(BaseException):
    """As Rust's panics arrive in Python."""


@pytest.mark.promise("No fuzzed input crashes a parser or takes it more than 5 s of CPU time.")
@pytest.mark.parametrize("error", [KeyError(1), RecursionError(), OverflowError(), PanicException("index")])
def test_any_exception_of_a_library_is_a_refusal(error: BaseException) -> None:
    shown = listing(worker(1))
    with pytest.raises(AdmissionError, match=rf"cannot be verified \({type(error).__name__}\)"):
        verify(Policy((Surprised(error),)), shown)
    assert (
        verify(Policy((Surprised(error), worker(0).shared)), shown).proof_name == "shared secret"
    )  # the next rule is still asked


def test_an_interrupt_is_not_a_refusal() -> None:
    with pytest.raises(KeyboardInterrupt):
        verify(Policy((Surprised(KeyboardInterrupt()),)), listing(worker(1)))


def test_a_kind_that_the_policy_does_not_name_is_refused() -> None:
    with pytest.raises(AdmissionError, match=r"kind 7.*accepts: shared secret"):
        verify(worker(0).policy, replace(listing(worker(1)), kind=7))


def test_an_empty_policy_admits_no_worker() -> None:
    with pytest.raises(AdmissionError):
        verify(Policy(()), listing(worker(1)))


def test_the_policy_digest_reveals_nothing_of_the_secret() -> None:
    assert worker(0).policy.digest == worker(0, secret=keys.Secret(bytes(range(32)))).policy.digest


def test_a_roster_is_complete_ordered_and_of_one_world() -> None:
    own = worker(0, 3)
    roster = seal(own.policy, own.entry, world(3), 1, b"table")
    assert [entry.rank for entry in roster.entries] == [0, 1, 2]
    wrong = (
        world(3)[:2],
        [*world(3), listing(worker(3, 4))],
        list(reversed(world(3))),
        [*world(3)[:2], listing(worker(1, 3))],
        [*world(3)[:2], listing(worker(2, 3, generation="4"))],
        [*world(3)[:2], listing(worker(2, 4))],
    )
    for listings in wrong:
        with pytest.raises(AdmissionError):
            seal(own.policy, own.entry, listings, 1, b"table")


def test_the_roster_digest_covers_everything() -> None:
    policy, changed = bytes(32), replace(world(3)[2], proof_digest=b"\1" * 32)
    base = roster_digest(policy, world(3), 1, b"table")
    others = {
        roster_digest(b"\1" * 32, world(3), 1, b"table"),
        roster_digest(policy, world(3), 2, b"table"),
        roster_digest(policy, world(3), 1, b"tables"),
        roster_digest(policy, world(2), 1, b"table"),
        roster_digest(policy, [*world(3)[:2], changed], 1, b"table"),
    }
    assert len(others) == 5
    assert base not in others
