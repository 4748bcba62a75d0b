"""The agreed roster: workers with certificates sign it, and each verifies the signatures of all others before it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from ringfence import keys
from ringfence.admission.agreement import Signers
from ringfence.admission.messages import TREE, Acknowledge, Go, Message, decode
from ringfence.admission.policy import Policy, Prover, Verifier
from ringfence.admission.proofs.bundle import BundleProver, BundleVerifier
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Rules
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.tree import Outgoing, Phase, Terms, Tree, parent_of
from ringfence.errors import AdmissionError, ProtocolError
from tests.certificates import Authority, now, spiffe
from tests.unit.admission_samples import SECRET, SUITES, fixed_bytes, worker

SIZE = 7  # rank 1 has the children 5 and 6
AUTHORITY = Authority()
RULES = Rules((AUTHORITY.der,), ("spiffe://example.org/worker/{rank}",), "example.org")
CREDENTIALS = [AUTHORITY.issue(spiffe(f"worker/{rank}")) for rank in range(SIZE)]
SHARED = SharedSecret(SECRET, "run-7")


def by_certificate(rank: int) -> tuple[Verifier, Prover]:
    return CertificateVerifier(RULES, now), CertificateProver(CREDENTIALS[rank])


def by_both(rank: int) -> tuple[Verifier, Prover]:
    verifier, prover = by_certificate(rank)
    return BundleVerifier([SHARED, verifier]), BundleProver([SHARED, prover])


def by_secret(rank: int) -> tuple[Verifier, Prover]:
    return SHARED, SHARED


class Run:
    """Trees that are joined by queues. `change` may replace a message on its way."""

    def __init__(self, means: Callable[[int], tuple[Verifier, Prover]]) -> None:
        self.trees = []
        self.queue: deque[tuple[int, Outgoing]] = deque()
        for rank in range(SIZE):
            verifier, prover = means(rank)
            terms = Terms(keys.Secret(bytes(32)), b"", SUITES)
            other = by_secret(0)[0] if verifier.kind != SHARED.kind else by_certificate(0)[0]
            self.trees.append(Tree(worker(rank, SIZE).entry, Policy((verifier, other)), prover, terms))
        self.kinds = [means(rank)[1].kind for rank in range(SIZE)]

    def run(self, change: Callable[[int, int, Message], Message] = lambda sender, peer, message: message) -> None:
        self.send(0, self.trees[0].begin())
        for rank in range(1, SIZE):
            parent = parent_of(rank)
            assert parent is not None
            digest = fixed_bytes(f"proof {rank}")
            self.trees[parent].attach_child(worker(rank, SIZE).entry, digest, self.kinds[rank])
            self.send(rank, self.trees[rank].attach_parent(worker(parent, SIZE).entry, digest))
        while self.queue:
            sender, (peer, message) = self.queue.popleft()
            self.send(peer, self.trees[peer].receive(sender, change(sender, peer, message)))

    def send(self, sender: int, outgoing: list[Outgoing]) -> None:
        self.queue.extend((sender, each) for each in outgoing)

    @property
    def phases(self) -> set[Phase]:
        return {tree.phase for tree in self.trees}


def mixed(rank: int) -> tuple[Verifier, Prover]:
    return by_certificate(rank) if rank in (0, 2, 5) else by_secret(rank)


@pytest.mark.parametrize(
    ("means", "signers"),
    [(by_certificate, SIZE), (by_both, SIZE), (mixed, 3), (by_secret, 0)],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_go_has_the_signature_of_every_worker_with_a_key(
    means: Callable[[int], tuple[Verifier, Prover]], signers: int
) -> None:
    seen: list[Go] = []

    def watch(sender: int, peer: int, message: Message) -> Message:
        if isinstance(message, Go):
            seen.append(message)
        return message

    run = Run(means)
    run.run(watch)
    assert run.phases == {Phase.GO}
    assert len(seen) == SIZE - 1, "one message on each edge, as without signatures"
    assert {len(go.signatures) for go in seen} == {signers}
    assert all(tree._signers is None and not tree._signatures for tree in run.trees), "dropped once they are verified"


def altered() -> Iterator[tuple[str, Callable[[tuple[bytes, ...]], tuple[bytes, ...]]]]:
    yield "flipped", lambda found: (*found[:3], bytes([found[3][0]]) + bytes(len(found[3]) - 1), *found[4:])
    yield "empty", lambda found: (*found[:3], b"", *found[4:])
    yield "of another rank", lambda found: (*found[:3], found[4], *found[4:])
    yield "two swapped", lambda found: (*found[:3], found[4], found[3], *found[5:])
    yield (
        "of another roster",
        lambda found: (*found[:3], CertificateProver(CREDENTIALS[3]).sign_roster(3, bytes(32)), *found[4:]),
    )


@pytest.mark.promise("Two rosters end the join on every worker, by name, if every name stands for one rank.")
@pytest.mark.parametrize(("name", "change"), list(altered()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_worker_whose_signature_does_not_verify_is_named(
    name: str, change: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]
) -> None:
    def lie(sender: int, peer: int, message: Message) -> Message:
        return (
            replace(message, signatures=change(message.signatures))
            if isinstance(message, Go) and peer == 2
            else message
        )

    run = Run(by_certificate)
    with pytest.raises(
        AdmissionError, match=r"the roster that rank 2 holds was not signed by rank 3 \(spiffe://example.org/worker/3\)"
    ):
        run.run(lie)
    assert run.trees[2].phase is Phase.AGREE


@pytest.mark.parametrize("kind", [Acknowledge, Go])
@pytest.mark.parametrize("count", [-1, 1])
def test_signatures_that_are_missing_or_too_many_are_errors(kind: type[Acknowledge], count: int) -> None:
    def lie(sender: int, peer: int, message: Message) -> Message:
        if type(message) is not kind or 1 not in (sender, peer):
            return message
        found = message.signatures
        return replace(message, signatures=found[:-1] if count < 0 else (*found, b"one more"))

    with pytest.raises(ProtocolError, match="signatures of the roster, where"):
        Run(by_certificate).run(lie)


def test_a_message_with_more_signatures_than_workers_is_refused() -> None:
    with pytest.raises(ProtocolError, match="signatures of a roster"):
        decode(TREE, Go.TYPE, bytes(32) + b"\xff\xff\xff\xff")


def test_no_key_signs_for_a_secret() -> None:
    run = Run(by_secret)
    run.run()
    assert Signers.of(tuple(run.trees[0]._listings.values())).ranks == frozenset()
