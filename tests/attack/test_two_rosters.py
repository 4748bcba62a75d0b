"""A lying worker in the admission tree shows its child one roster and the other workers another.

Where certificates name ranks, all workers refuse, before the session begins. Otherwise the attack succeeds, as
docs/security/limitations.md states under "Two rosters". A change that makes one of these tests fail changes that section too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ringfence import keys
from ringfence.admission.binding import Binding, proof_digest
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.messages import Acknowledge, Entries, Go, Message, Welcome
from ringfence.admission.peer_verification import PeerVerifier, Presentation
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs import certificate, identity
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier, Rules
from ringfence.admission.roster import Roster
from ringfence.admission.tree import CHECKING, Outgoing, Phase, Terms, Tree
from ringfence.errors import AdmissionError, AuthenticationError, ProtocolError
from ringfence.link.hello import Lane, LinkHandshake, LinkHello, read_hello, write_hello
from tests.certificates import Authority, now, spiffe
from tests.unit.admission_samples import SUITES, fixed_bytes, worker
from tests.unit.peer_verification_samples import NOW, PATIENCE, Technology, binding_of, by_snp, entry_of

SIZE, LIAR, CHILD, OTHER = 6, 1, 5, 2  # rank 5 is the child of rank 1; ranks 1 to 4 are those of rank 0


@dataclass(frozen=True)
class Means:
    """The credentials of each worker. The liar uses only its own."""

    policy: Policy
    provers: Sequence[Prover]
    technology: Technology | None = None
    bound: bool = False  # a certificate names a rank
    made: dict[bytes, Presentation] = field(
        default_factory=dict
    )  # signatures differ each time, and one of them is listed

    def presentation(self, entries: Sequence[Entry], rank: int) -> Presentation:
        """Evidence for the entry of `rank`, made by hardware that the policy admits."""
        assert self.technology is not None
        binding = binding_of(entries, rank, policy=self.policy)
        if binding.preimage not in self.made:
            shown = Presentation(self.technology.kind, NOW, binding, self.technology.make(binding))
            self.made[binding.preimage] = shown
        return self.made[binding.preimage]

    def digest(self, entries: Sequence[Entry], rank: int) -> bytes:
        if rank == 0:
            return bytes(32)
        if self.technology is None:
            return fixed_bytes(f"proof {rank}")
        shown = self.presentation(entries, rank)
        return proof_digest(shown.kind, shown.binding, shown.proof)

    def lie(self, entries: Sequence[Entry], rank: int) -> Listing:
        """Return a listing that the liar can make with its own credentials."""
        digest, prover = self.digest(entries, rank), self.provers[LIAR]
        return Listing(entries[rank], prover.kind, digest, prover.endorse(entries[rank], digest))


class Hardware(Prover):
    """A machine that makes evidence and endorses no entry."""

    def __init__(self, technology: Technology) -> None:
        self.kind = technology.kind
        self._technology = technology

    def prove(self, binding: Binding) -> bytes:
        return self._technology.make(binding)


def a_secret() -> Means:
    shared = worker(0, SIZE).shared
    return Means(Policy((shared,)), [shared] * SIZE)


def certificates(pattern: str = "*", ranks: tuple[int, int] | None = None, ranks_of_a_name: int = 1) -> Means:
    authority = Authority()
    rules = Rules((authority.der,), (f"spiffe://example.org/worker/{pattern}",), "example.org", ranks)
    names = [f"worker/{rank // ranks_of_a_name}" for rank in range(SIZE)]
    provers = [CertificateProver(authority.issue(spiffe(name))) for name in names]
    return Means(Policy((CertificateVerifier(rules, now),)), provers, bound=identity.stand_for_one_rank(rules.ids))


def certificates_for_ranks() -> Means:
    return certificates("{rank}")


def certificates_for_a_range() -> Means:
    return certificates(ranks=(0, SIZE - 1))


def certificates_for_one_machine() -> Means:
    return certificates("{rank/8}", ranks_of_a_name=8)


def certificates_for_machines() -> Means:
    return certificates("{rank/2}", ranks_of_a_name=2)


def evidence_alone() -> Means:
    technology = by_snp()
    return Means(technology.policy, [Hardware(technology)] * SIZE, technology)


ALL = pytest.mark.parametrize(
    "means",
    [a_secret, certificates, certificates_for_a_range, certificates_for_one_machine, evidence_alone],
    ids=lambda each: each.__name__,
)


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


class Split:
    """A run of six that forms around a liar. The honest workers run the real code.

    The liar puts itself in the place of the other side, unless names are bound to ranks. Then it has two entries of its own,
    one for each side, and lists the others as they are: all that the policy lets it endorse.
    """

    def __init__(self, means: Means) -> None:
        self.refused: dict[int, str] = {}
        self.means = means
        self.own = [X25519PrivateKey.generate() for _ in range(SIZE)]
        self.liars = [X25519PrivateKey.generate() for _ in range(SIZE)]  # one for each worker that it impersonates
        self.true = [entry_of(rank, SIZE, public(key)) for rank, key in enumerate(self.own)]
        false = [
            replace(entry, public_key=public(key), tls_key_digest=fixed_bytes("the liar's"), host="203.0.113.9")
            for entry, key in zip(self.true, self.liars, strict=True)
        ]
        self.above = self.true if means.bound else [*self.true[:CHILD], false[CHILD]]
        invented = [LIAR] if means.bound else [0, 2, 3, 4]
        self.below = [false[rank] if rank in invented else true for rank, true in enumerate(self.true)]
        self.trees = {
            rank: Tree(self.true[rank], means.policy, means.provers[rank], Terms(secret_of(rank), b"", SUITES))
            for rank in range(SIZE)
            if rank != LIAR
        }
        self._form()

    def _form(self) -> None:
        means, trees = self.means, self.trees
        honest = (2, 3, 4)
        trees[0].begin()
        for rank in (LIAR, *honest):
            trees[0].attach_child(self.true[rank], means.digest(self.true, rank), means.provers[rank].kind)
        (listed,) = trees[CHILD].attach_parent(self.below[LIAR], means.digest(self.true, CHILD))
        assert isinstance(listed.message, Entries)
        (child,) = listed.message.listings
        trees[0].receive(
            LIAR, Entries((means.lie(self.above, LIAR), child if means.bound else means.lie(self.above, CHILD)))
        )
        for rank in honest:
            (up,) = trees[rank].attach_parent(self.true[0], means.digest(self.true, rank))
            down = trees[0].receive(rank, up.message)
        welcome = down[0].message
        assert isinstance(welcome, Welcome)
        shown = [means.lie(self.below, rank) for rank in range(CHILD)]
        if means.bound:
            shown = [shown[rank] if rank == LIAR else welcome.listings[rank] for rank in range(CHILD)]
        (ack,) = self.tell(CHILD, LIAR, replace(welcome, listings=(*shown, child)))
        assert isinstance(ack.message, Acknowledge)
        above, below = self.roster(0).digest, ack.message.roster_digest
        signed = [
            *self.signed(above, [LIAR]),
            *(ack.message.signatures if means.bound else self.signed(above, [CHILD])),
        ]
        self.tell(0, LIAR, Acknowledge(above, tuple(signed)))
        for rank in honest:
            (up,) = self.tell(rank, 0, welcome)
            down = self.tell(0, rank, up.message)
        go = down[0].message
        assert isinstance(go, Go)
        for rank in honest:
            self.tell(rank, 0, go)
        others = list(self.signed(below, range(CHILD)))
        if means.bound:
            others = [others[rank] if rank == LIAR else go.signatures[rank] for rank in range(CHILD)]
        self.tell(CHILD, LIAR, Go(below, (*others, *ack.message.signatures)))

    def signed(self, digest: bytes, ranks: Iterable[int]) -> tuple[bytes, ...]:
        """Return what the liar can sign with its own credential in the name of these workers."""
        liar = self.means.provers[LIAR]
        return tuple(filter(None, (liar.sign_roster(rank, digest) for rank in ranks)))

    def tell(self, rank: int, peer: int, message: Message) -> list[Outgoing]:
        """Deliver a message as the join does: what the worker sends goes out before it checks, and a refusal ends its part."""
        tree = self.trees[rank]
        found = tree.take(peer, message)
        try:
            while tree.phase in CHECKING:
                found += tree.check()
        except AdmissionError as error:
            self.refused[rank] = str(error)
        return found

    def roster(self, rank: int) -> Roster:
        session = self.trees[rank].session
        assert session is not None
        return session.roster

    def session_key(self, rank: int) -> keys.Secret:
        """Return the key of the session that this worker is in. The liar knows all inputs of it."""
        return keys.session_key(secret_of(0), self.roster(rank).digest)

    def link(self, worker: int, private: X25519PrivateKey, peer: bytes, hello: LinkHello) -> tuple[bytes, bytes]:
        """Return both keys of a link in the session of `worker`, as the holder of this private key derives them."""
        shared = private.exchange(X25519PublicKey.from_public_bytes(peer))
        # Both send their ML-KEM messages over this connection, so the liar has its secret too.
        handshake = LinkHandshake(self.session_key(worker), shared, hello, fixed_bytes("acceptor"))
        secrets = handshake.secrets(fixed_bytes("ML-KEM"), b"key", b"ciphertext")
        return secrets.forth.reveal(), secrets.back.reveal()


def secret_of(rank: int) -> keys.Secret:
    return keys.Secret(bytes([rank]) * 32)


def hello(sender: int, receiver: int) -> LinkHello:
    return LinkHello(sender, receiver, Lane.COLLECTIVE, fixed_bytes("a group without the liar"), fixed_bytes("dialler"))


@pytest.mark.promise("Two rosters end the join on every worker, by name, if every name stands for one rank.")
def test_two_rosters_under_certificates_for_ranks_are_refused() -> None:
    split = Split(certificates_for_ranks())
    assert {rank: tree.phase for rank, tree in split.trees.items()} == dict.fromkeys(split.trees, Phase.AGREE)
    child = r"not signed by rank 5 \(spiffe://example.org/worker/5\)\."
    for rank in (0, 2, 3, 4):
        liars = "rank 1 or rank 5" if rank == 0 else "rank 0 or rank 1 or rank 5"
        found = (
            f"the roster that rank {rank} holds was {child} In the admission tree, {liars} passed on or signed another"
        )
        assert re.match(found, split.refused[rank])
    others = (
        r"not signed by rank 0 \(spiffe://example.org/worker/0\), rank 2 .* rank 3 .* rank 4 .* rank 0 or rank 1 passed"
    )
    assert re.search(f"the roster that rank 5 holds was {others}", split.refused[5])


@pytest.mark.promise("A certificate that a rule binds to a rank is rejected for any other rank.")
@pytest.mark.parametrize(
    ("means", "name"), [(certificates_for_ranks, "worker/1"), (certificates_for_machines, "worker/0")]
)
def test_a_liar_cannot_list_others_under_its_own_name(means: Callable[[], Means], name: str) -> None:
    """Neither other ranks, nor those of another machine."""
    with pytest.raises(
        AdmissionError, match=f"rank 5: the certificate is for .*{name}, presented as rank 5; the policy"
    ):
        Split(replace(means(), bound=False))


def test_the_attack_is_found_if_nobody_verifies_the_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above can fail."""
    monkeypatch.setattr(certificate, "has_signed_roster", lambda *anything: True)
    split = Split(certificates_for_ranks())
    assert {tree.phase for tree in split.trees.values()} == {Phase.GO}
    assert split.roster(CHILD).digest != split.roster(0).digest


@pytest.mark.promise("A worker with children can show two rosters, and read and change what passes between the sides.")
@ALL
def test_a_lying_parent_can_come_between_two_sides(means: Callable[[], Means]) -> None:
    split = Split(means())
    assert {tree.phase for tree in split.trees.values()} == {Phase.GO}, "a worker detected the lie"
    for one, two in ((CHILD, OTHER), (OTHER, CHILD)):  # each takes the liar for the other
        said = hello(one, two)
        honest = split.link(one, split.own[one], split.roster(one).entries[two].public_key, said)
        assert split.link(one, split.liars[two], public(split.own[one]), said) == honest


@pytest.mark.promise("A lying parent passes peer verification with evidence of its own hardware.")
def test_a_lying_parent_passes_with_its_own_hardware() -> None:
    means = evidence_alone()
    split = Split(means)
    for one, two, entries in ((CHILD, OTHER, split.below), (OTHER, CHILD, split.above)):
        known = PeerVerifier(
            means.policy, split.roster(one), one, means.presentation(split.true, one), float(NOW), PATIENCE
        )
        assert known.due(two)
        known.verify(two, means.presentation(entries, two).encode())


@pytest.mark.promise("Workers that hold one roster have each other's keys, and no link joins two rosters.")
@ALL
def test_workers_with_one_roster_have_each_others_keys(means: Callable[[], Means]) -> None:
    """The liar comes between its two sides, not between workers of one side, and no link joins the two sides."""
    split = Split(means())
    above = [split.roster(rank) for rank in (0, 2, 3, 4)]
    assert len({roster.digest for roster in above}) == 1
    for roster in above:
        assert list(roster.entries[:CHILD]) == split.true[:CHILD]
    assert split.roster(CHILD).entries[CHILD] == split.true[CHILD]
    assert split.roster(CHILD).digest != above[0].digest
    with pytest.raises(AuthenticationError):
        read_hello(split.session_key(OTHER), write_hello(split.session_key(CHILD), hello(CHILD, OTHER)))


@pytest.mark.promise("A worker without children in the tree can list no other worker.")
@ALL
def test_a_worker_without_children_lists_only_itself(means: Callable[[], Means]) -> None:
    held = means()
    entries = [entry_of(rank, SIZE, fixed_bytes(f"key {rank}")) for rank in range(SIZE)]
    root = Tree(entries[0], held.policy, held.provers[0], Terms(secret_of(0), b"", SUITES))
    root.begin()
    root.attach_child(entries[4], held.digest(entries, 4), held.provers[4].kind)
    for rank in (LIAR, CHILD):
        with pytest.raises(ProtocolError, match=f"rank 4 sent an entry for rank {rank}, which is not below it"):
            root.receive(4, Entries((held.lie(entries, rank),)))
