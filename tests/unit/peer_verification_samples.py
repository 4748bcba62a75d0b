"""Workers that were let in by evidence, minted under a test root: their roster, and what each shows at first contact."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric import ec

from ringfence.admission.binding import Binding, Role, bind, proof_digest
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.messages import Hello
from ringfence.admission.peer_verification import Acquaintances, Showing
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
    """One kind of evidence: who judges it, and how the test's own hardware or service makes a proof for a binding."""

    kind: int
    policy: Policy
    make: Callable[[Binding], bytes]


def by_snp() -> Technology:
    vm = snp_mint.foundry()
    judge = snp.SnpVerifier(vm.rules, time.time, known=vm.roots)
    return Technology(snp.KIND, Policy((judge,)), lambda binding: report(binding.digest))


def by_tdx() -> Technology:
    td = tdx_mint.foundry()
    judge = tdx.TdxVerifier(td.rules, time.time, root=td.root)
    return Technology(tdx.KIND, Policy((judge,)), lambda binding: td.quote(binding.digest))


def by_token() -> Technology:
    judge = token.TokenVerifier(token_mint.rules(), time.time)

    def make(binding: Binding) -> bytes:
        claims = token_mint.claims(eat_nonce=token.nonce_of(binding.digest), iat=NOW, nbf=NOW, exp=NOW + 600)
        return token.encode(token_mint.ES384.sign(claims), {})

    return Technology(token.KIND, Policy((judge,)), make)


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
    showings: list[Showing]

    @property
    def listings(self) -> list[Listing]:
        found = []
        for entry, showing in zip(self.entries, self.showings, strict=True):
            digest = proof_digest(showing.kind, showing.binding, showing.proof) if entry.rank else bytes(32)
            found.append(Listing(entry, showing.kind, digest, b""))
        return found

    @property
    def roster(self) -> Roster:
        return seal(self.technology.policy, self.entries[0], self.listings, 1, b"")

    def acquaintances(self, own: int, showing: Showing | None = None) -> Acquaintances:
        return Acquaintances(self.technology.policy, self.roster, own, showing or self.showings[own], NOW, PATIENCE)


def circle(public_keys: Sequence[bytes], technology: Technology | None = None) -> Circle:
    """Honest workers with these keys."""
    size, used = len(public_keys), technology or by_snp()
    entries = [entry_of(rank, size, key) for rank, key in enumerate(public_keys)]
    showings = []
    for rank in range(size):
        binding = binding_of(entries, rank, policy=used.policy)
        showings.append(Showing(used.kind, NOW, binding, used.make(binding)))
    return Circle(used, entries, showings)


Lie = Callable[[Circle], Showing]  # how somebody gets into a roster, and what is shown of it


def a_parent_that_lists_a_stranger(made: Circle) -> Showing:
    """It says that rank 5 came with a good proof. There is none: the stranger signed a report with a key of its own."""
    binding = made.showings[5].binding
    showing = replace(made.showings[5], proof=report(binding.digest, key=ec.generate_private_key(ec.SECP384R1())))
    made.showings[5] = showing
    return showing


def a_stranger_that_shows_anothers_proof(made: Circle) -> Showing:
    """Genuine, and fresh, and of another worker of this very run."""
    made.showings[5] = made.showings[4]
    return made.showings[4]


def a_parent_that_swaps_the_key_of_its_child(made: Circle) -> Showing:
    """The child's proof is genuine and covers the child's own key; the key in the roster is the parent's choice."""
    genuine = circle([fixed_bytes("the child's own key")] * len(made.entries)).showings[5]
    made.showings[5] = genuine
    return genuine


def a_guest_that_runs_something_else(made: Circle) -> Showing:
    """It has the hardware, and its parent closed its eyes to what it measured."""
    binding = made.showings[5].binding
    showing = replace(made.showings[5], proof=report(binding.digest, changes={0x90: bytes(48)}))
    made.showings[5] = showing
    return showing


LIES: Mapping[Lie, str] = {
    a_parent_that_lists_a_stranger: "not signed by the key of its certificate",
    a_stranger_that_shows_anothers_proof: "made by rank 4 as a child, for rank 0",
    a_parent_that_swaps_the_key_of_its_child: "another entry than the one in the roster",
    a_guest_that_runs_something_else: "measurement",
}
