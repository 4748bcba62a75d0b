"""Workers admitted by evidence under a test root: their roster, and their presentations at peer verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric import ec

from ringfence.admission.binding import Binding, Role, bind, proof_digest
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.messages import Hello
from ringfence.admission.peer_verification import PeerVerifier, Presentation
from ringfence.admission.policy import Policy
from ringfence.admission.proofs import snp, tdx, token
from ringfence.admission.roster import Roster, seal
from ringfence.admission.tree import parent_of
from tests.unit import snp_mint, tdx_mint, token_mint
from tests.unit.admission_samples import SUITES, fixed_bytes, worker

NOW = int(time.time())
PATIENCE = 30.0


@dataclass(frozen=True)
class Technology:
    """One kind of evidence: its verifier, and how the test's hardware or service makes a proof for a binding."""

    kind: int
    policy: Policy
    make: Callable[[Binding], bytes]


def by_snp() -> Technology:
    vm = snp_mint.foundry()
    verify = snp.verifier(vm.rules, time.time, known=vm.roots)
    return Technology(snp.KIND, Policy((verify,)), lambda binding: report(binding.digest))


def by_tdx() -> Technology:
    td = tdx_mint.foundry()
    verify = tdx.verifier(td.rules, time.time, root=td.root)
    return Technology(tdx.KIND, Policy((verify,)), lambda binding: td.quote(binding.digest))


def by_token() -> Technology:
    verify = token.verifier(token_mint.rules(), time.time)

    def make(binding: Binding) -> bytes:
        claims = token_mint.claims(eat_nonce=token.nonce_of(binding.digest), iat=NOW, nbf=NOW, exp=NOW + 600)
        return token.encode(token_mint.ES384.sign(claims), {})

    return Technology(token.KIND, Policy((verify,)), make)


TECHNOLOGIES = {"SEV-SNP": by_snp, "TDX": by_tdx, "token": by_token}


def report(data: bytes, **changes: object) -> bytes:
    """A proof for 64 bytes, by the test's own chip."""
    vm = snp_mint.foundry()
    return snp.encode(vm.report(data, **changes), vm.certificate())  # type: ignore[arg-type]


def entry_of(rank: int, size: int, public_key: bytes) -> Entry:
    return worker(rank, size, public_key=public_key).entry


def binding_of(
    entries: Sequence[Entry], rank: int, *, shown_to: int | None = None, policy: Policy | None = None
) -> Binding:
    """What `rank` covered by its proof when it met its parent, or, being rank 0, its first child."""
    parent = parent_of(rank)
    other = shown_to if shown_to is not None else 1 if parent is None else parent
    policy = policy or by_snp().policy
    hellos = [Hello(entries[each], policy.digest, SUITES, policy.kinds) for each in (rank, other)]
    digests = [entries[each].tls_key_digest for each in (rank, other)]
    role = Role.PARENT if parent is None else Role.CHILD
    return bind(role, hellos[0], hellos[1], digests[0], digests[1], fixed_bytes(f"exporter {rank}"))


@dataclass
class Circle:
    """One roster, and the showings of its workers."""

    technology: Technology
    entries: list[Entry]
    presentations: list[Presentation]

    @property
    def listings(self) -> list[Listing]:
        found = []
        for entry, presentation in zip(self.entries, self.presentations, strict=True):
            digest = (
                proof_digest(presentation.kind, presentation.binding, presentation.proof) if entry.rank else bytes(32)
            )
            found.append(Listing(entry, presentation.kind, digest, b""))
        return found

    @property
    def roster(self) -> Roster:
        return seal(self.technology.policy, self.entries[0], self.listings, 1, b"")

    def peer_verifier(self, own: int, presentation: Presentation | None = None) -> PeerVerifier:
        return PeerVerifier(
            self.technology.policy, self.roster, own, presentation or self.presentations[own], NOW, PATIENCE
        )


def circle(public_keys: Sequence[bytes], technology: Technology | None = None) -> Circle:
    """Honest workers with these keys."""
    size, used = len(public_keys), technology or by_snp()
    entries = [entry_of(rank, size, key) for rank, key in enumerate(public_keys)]
    presentations = []
    for rank in range(size):
        binding = binding_of(entries, rank, policy=used.policy)
        presentations.append(Presentation(used.kind, NOW, binding, used.make(binding)))
    return Circle(used, entries, presentations)


Lie = Callable[[Circle], Presentation]  # how somebody gets into a roster, and what is shown of it


def a_parent_that_lists_an_unauthenticated_peer(made: Circle) -> Presentation:
    """It says that rank 5 came with a good proof. There is none: the peer signed a report with a key of its own."""
    binding = made.presentations[5].binding
    presentation = replace(
        made.presentations[5], proof=report(binding.digest, key=ec.generate_private_key(ec.SECP384R1()))
    )
    made.presentations[5] = presentation
    return presentation


def an_unauthenticated_peer_that_shows_anothers_proof(made: Circle) -> Presentation:
    """Genuine, and fresh, and of another worker of this very run."""
    made.presentations[5] = made.presentations[4]
    return made.presentations[4]


def a_parent_that_swaps_the_key_of_its_child(made: Circle) -> Presentation:
    """The child's proof is genuine and covers the child's own key; the key in the roster is the parent's choice."""
    genuine = circle([fixed_bytes("the child's own key")] * len(made.entries)).presentations[5]
    made.presentations[5] = genuine
    return genuine


def a_guest_that_runs_something_else(made: Circle) -> Presentation:
    """It has the hardware, and its parent closed its eyes to what it measured."""
    binding = made.presentations[5].binding
    presentation = replace(made.presentations[5], proof=report(binding.digest, changes={0x90: bytes(48)}))
    made.presentations[5] = presentation
    return presentation


LIES: Mapping[Lie, str] = {
    a_parent_that_lists_an_unauthenticated_peer: "not signed with the key of its certificate",
    an_unauthenticated_peer_that_shows_anothers_proof: "made by rank 4 as a child, for rank 0",
    a_parent_that_swaps_the_key_of_its_child: "another entry than the one in the roster",
    a_guest_that_runs_something_else: "measurement",
}
