"""Attacks on admission by evidence and tokens: genuine evidence in the wrong place, at the wrong time. TLS is real."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.entry import Listing
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import Admit, Hello, Message, Proof, Reason
from ringfence.admission.policy import Policy, Prover, verify
from ringfence.admission.proofs import snp, tdx
from ringfence.admission.proofs.attestation import AttestationProver
from ringfence.errors import AdmissionError
from ringfence.transport.tls import Credentials
from tests.attack.technologies import NAMES, Make, prover, technology
from tests.attack.unauthenticated_peer import channel_of, tls_pair
from tests.unit import snp_mint, tdx_mint
from tests.unit.admission_samples import SUITES, Tamper, converse, fixed_bytes, worker

every_kind = pytest.mark.parametrize("name", NAMES)


@dataclass(frozen=True)
class Party:
    """A worker or an attacker: a rank, a TLS key, a policy, and a prover."""

    rank: int
    tls: Credentials
    policy: Policy
    prover: Prover

    @property
    def hello(self) -> Hello:
        entry = worker(self.rank, tls_key_digest=self.tls.key_digest).entry
        return Hello(entry, self.policy.digest, SUITES, self.policy.kinds)

    def handshake(self, role: Role, peer: int) -> Handshake:
        return Handshake(role, self.hello, frozenset({peer}), self.policy, self.prover)


def party(rank: int, name: str, make: Make | None = None, policy: Policy | None = None) -> Party:
    used = technology(name)
    return Party(rank, Credentials(), policy or used.policy, prover(used.kind, make or used.make))


def meet(child: Party, parent: Party, tamper: Tamper = lambda role, message: message) -> tuple[Handshake, Handshake]:
    near, far = tls_pair(child.tls, parent.tls)
    one, two = child.handshake(Role.CHILD, parent.rank), parent.handshake(Role.PARENT, child.rank)
    converse(one, two, (channel_of(near), channel_of(far)), tamper)
    return one, two


def refusal_of(handshake: Handshake) -> str:
    """Return why a worker refused; no worker was admitted."""
    assert handshake.admitted is None
    assert handshake.state is State.REFUSED
    assert handshake.refusal is not None
    assert handshake.refusal.reason is Reason.PROOF
    return handshake.refusal.text


@every_kind
def test_two_attested_workers_admit_each_other(name: str) -> None:
    for each in meet(party(1, name), party(0, name)):
        assert each.state is State.DONE
        assert each.admitted is not None
        assert each.admitted.proof_name == technology(name).how


# -- genuine evidence in the wrong place ----------------------------------------------------------------------------


@pytest.mark.promise("A proof is valid on one connection only.")
@every_kind
def test_evidence_replayed_on_another_connection_is_refused(name: str) -> None:
    """Same keys and hellos on both connections: only the TLS exporter differs."""
    child, parent = party(1, name), party(0, name)
    received: list[Message] = []

    def record(role: Role, message: Message) -> Message:
        received.append(message)
        return message

    meet(child, parent, record)
    recorded = next(message for message in received if isinstance(message, Proof))

    def replay(role: Role, message: Message) -> Message:
        return recorded if role is Role.CHILD and isinstance(message, Proof) else message

    _, two = meet(child, parent, replay)
    assert technology(name).elsewhere in refusal_of(two)


@pytest.mark.promise("A proof that is reflected to its maker is rejected.")
@every_kind
def test_evidence_reflected_to_its_maker_is_refused(name: str) -> None:
    """The parent presents the child's own proof."""
    child, parent = party(1, name), party(0, name)
    shown: list[Proof] = []

    def reflect(role: Role, message: Message) -> Message:
        if isinstance(message, Proof):
            if role is Role.PARENT:
                return shown[0]
            shown.append(message)
        return message

    one, _ = meet(child, parent, reflect)
    assert technology(name).elsewhere in refusal_of(one)


@pytest.mark.promise("A proof made in one role is rejected in the other.")
@every_kind
def test_evidence_for_the_wrong_role_is_refused(name: str) -> None:
    """A parent's evidence for the same two workers is not valid as the child's."""
    used, child, parent = technology(name), party(1, name), party(0, name)
    near, far = tls_pair(child.tls, parent.tls)
    as_parent = Handshake(Role.PARENT, child.hello, frozenset({0}), used.policy, child.prover)
    as_parent.begin(channel_of(near))
    as_parent.receive(parent.hello)
    proofs: list[bytes] = []
    wrong = replace(child, prover=prover(used.kind, lambda data: proofs[0]))
    binding = as_parent._binding(of_peer=False)
    proofs.append(child.prover.prove(binding))
    two = parent.handshake(Role.PARENT, 1)
    one = wrong.handshake(Role.CHILD, 0)
    converse(one, two, (channel_of(near), channel_of(far)))
    assert technology(name).elsewhere in refusal_of(two)


@pytest.mark.promise("A man in the middle that relays an admission or another worker's evidence is rejected.")
@every_kind
def test_evidence_relayed_from_an_honest_worker_is_refused(name: str) -> None:
    """A man in the middle collects an honest worker's evidence and presents it to the real parent."""
    honest, parent = party(1, name), party(0, name)
    middle = party(0, name)  # the parent, as the honest worker sees it
    caught: list[bytes] = []
    near, _ = tls_pair(honest.tls, middle.tls)
    towards = honest.handshake(Role.CHILD, 0)
    towards.begin(channel_of(near))
    caught += [each.proof for each in towards.receive(middle.hello) if isinstance(each, Proof)]
    assert len(caught) == 1
    relay = replace(party(1, name), prover=prover(technology(name).kind, lambda data: caught[0]))
    _, two = meet(relay, parent)
    assert technology(name).elsewhere in refusal_of(two)


@pytest.mark.promise("A parent that swaps its child's key is detected, if all workers hold one roster.")
@every_kind
def test_a_parent_that_swaps_the_childs_key_has_no_evidence_for_it(name: str) -> None:
    """The binding covers the entry with the key for links: evidence is not valid for another entry."""
    child, parent = party(1, name), party(0, name)

    def swap(role: Role, message: Message) -> Message:
        if role is Role.CHILD and isinstance(message, Hello):
            return replace(message, entry=replace(message.entry, public_key=fixed_bytes("another key")))
        return message

    _, two = meet(child, parent, swap)
    assert technology(name).elsewhere in refusal_of(two)


@every_kind
def test_a_child_without_evidence_receives_none(name: str) -> None:
    """The child proves first, and the parent collects no evidence for a child that has not."""
    asked: list[bytes] = []

    def ask(data: bytes) -> bytes:
        asked.append(data)
        return technology(name).make(data)

    parent = party(0, name, make=ask)
    received: list[Message] = []

    def empty(role: Role, message: Message) -> Message:
        if role is Role.PARENT:
            received.append(message)
        elif isinstance(message, Proof):
            return replace(message, proof=b"")
        return message

    _, two = meet(party(1, name), parent, empty)
    refusal_of(two)
    assert not asked
    assert not any(isinstance(message, Proof | Admit) for message in received)


# -- evidence of the wrong guest ------------------------------------------------------------------------------------


def tdx_quote_with(**changes: object) -> Make:
    return lambda data: tdx_mint.foundry().quote(data, **changes)  # type: ignore[arg-type]


def snp_proof_with(certificate: Callable[[], bytes] | None = None, **changes: object) -> Make:
    vm = snp_mint.foundry()
    made = certificate or vm.certificate
    return lambda data: snp.encode(vm.report(data, **changes), made())  # type: ignore[arg-type]


def older() -> dict[str, int]:
    return {**snp_mint.VERSIONS, "microcode": 200}


WRONG: dict[str, tuple[str, Callable[[], Make], str]] = {
    "a debug TD": ("tdx", lambda: tdx_quote_with(changes={120: b"\1\0\0\x10"}), "may debug the TD"),
    "a debug guest": ("snp", lambda: snp_proof_with(changes={0x0A: b"\x0b"}), "may debug the guest"),
    "a TD of another firmware": ("tdx", lambda: tdx_quote_with(changes={136: bytes(48)}), "its mrtd is 00"),
    "a TD of another kernel": ("tdx", lambda: tdx_quote_with(changes={376: bytes(48)}), "its rtmr1 is 00"),
    "a guest of another image": ("snp", lambda: snp_proof_with(changes={0x90: bytes(48)}), "its measurement is 00"),
    "a quote of another key": (
        "tdx",
        lambda: tdx_quote_with(key=ec.generate_private_key(ec.SECP256R1())),
        "does not verify",
    ),
    "another chip's VCEK": (
        "snp",
        lambda: snp_proof_with(key=ec.generate_private_key(ec.SECP384R1())),
        "VCEK is of another chip",
    ),
    "a VCEK that names another chip": (
        "snp",
        lambda: snp_proof_with(lambda: snp_mint.foundry().certificate(chip=bytes(64))),
        "its VCEK for 0000",
    ),
    "out-of-date firmware": (
        "snp",
        lambda: snp_proof_with(lambda: snp_mint.foundry().certificate(versions=older()), versions=older()),
        "out of date: microcode 200 (at least 219) in REPORTED_TCB",
    ),
    "a guest that was launched on out-of-date firmware": (
        "snp",
        lambda: snp_proof_with(changes={snp_mint.LAUNCH: snp_mint.foundry().tcb(older())}),
        "in LAUNCH_TCB",
    ),
    "a host that can roll back to out-of-date firmware": (
        "snp",
        lambda: snp_proof_with(changes={snp_mint.COMMITTED: snp_mint.foundry().tcb(older())}),
        "in COMMITTED_TCB",
    ),
    "a host that runs older firmware than it reports": (
        "snp",
        lambda: snp_proof_with(changes={snp_mint.CURRENT: snp_mint.foundry().tcb(older())}),
        "contradicts itself",
    ),
    "memory that was not checked for aliases": (
        "snp",
        lambda: snp_proof_with(changes={snp_mint.PLATFORM_INFO: bytes(1)}),
        "memory for aliases",
    ),
    "an older TDX module than at the launch": (
        "tdx",
        lambda: tdx_quote_with(changes={584: b"\2"}, service_td=bytes(48)),
        "older than at the TD's launch",
    ),
    "an expired VCEK": (
        "snp",
        lambda: snp_proof_with(lambda: snp_mint.foundry().certificate(days=(-9, -1))),
        "is valid from",
    ),
    "a VLEK of a cloud that the policy does not name": (
        "snp",
        lambda: snp_proof_with(lambda: snp_mint.foundry().certificate("vlek"), changes={0x48: b"\4"}),
        "vlek_providers does not name",
    ),
}


@pytest.mark.promise("A guest that its host may debug is rejected.")
@pytest.mark.promise("The firmware must be recent enough at launch, now, and as far back as the host can roll it.")
@pytest.mark.promise("A guest or GPU whose measurements differ from the reference values is rejected.")
@pytest.mark.parametrize("case", WRONG)
def test_genuine_evidence_of_the_wrong_guest_is_refused(case: str) -> None:
    name, make, reason = WRONG[case]
    _, two = meet(party(1, name, make()), party(0, name))
    assert reason in refusal_of(two)
    one, two = meet(party(1, name), party(0, name, make()))
    assert reason in refusal_of(one)
    assert two.admitted is None, "a refused worker has admitted its peer"


@pytest.mark.promise("A platform whose firmware is outdated or revoked is rejected.")
@pytest.mark.parametrize("status", ["OutOfDate", "Revoked"])
def test_a_td_on_an_out_of_date_or_revoked_platform_is_refused(status: str) -> None:
    td = tdx_mint.foundry()
    rules = replace(td.rules, collateral=(td.collateral(status=status),))
    policy = Policy((tdx.verifier(rules, time.time, root=td.root),))
    _, two = meet(party(1, "tdx", policy=policy), party(0, "tdx", policy=policy))
    assert status in refusal_of(two)


@pytest.mark.promise("The newest collateral, CRL and QE identity decide, whichever file or rule lists them.")
@pytest.mark.parametrize("said", [{"is_revoked": True}, {"is_ca_revoked": True}, {"qe_status": "Revoked"}], ids=str)
@pytest.mark.parametrize("place", ["the same platform", "another platform"])
def test_an_older_collateral_file_admits_no_revoked_platform(said: dict[str, object], place: str) -> None:
    """The older file has not expired and revokes nothing. Both orders are tried."""
    td = tdx_mint.foundry()
    fmspc = None if place == "the same platform" else "00a06d080000"
    files = (td.collateral(number=18, fmspc=fmspc, **said), td.collateral(age=28))  # type: ignore[arg-type]
    for listed in (files, files[::-1]):
        policy = Policy((tdx.verifier(replace(td.rules, collateral=listed), time.time, root=td.root),))
        one, two = meet(party(1, "tdx", policy=policy), party(0, "tdx", policy=policy))
        assert ("evoked" if fmspc else "both for FMSPC") in refusal_of(two)
        assert one.admitted is None


@pytest.mark.promise("Expired certificates, collateral and tokens are rejected at admission.")
@every_kind
def test_evidence_with_expired_endorsements_is_refused(name: str) -> None:
    later = technology(name).later
    _, two = meet(party(1, name, policy=later), party(0, name, policy=later))
    assert any(each in refusal_of(two).lower() for each in ("expired", "is valid from", "holds from"))


def test_evidence_of_one_kind_is_no_evidence_of_the_other() -> None:
    policy = Policy((*technology("tdx").policy.verifiers, *technology("snp").policy.verifiers))
    for name, other in (("tdx", "snp"), ("snp", "tdx")):
        mixed = AttestationProver(technology(other).kind, technology(name).make)
        child = replace(party(1, name, policy=policy), prover=mixed)
        _, two = meet(child, party(0, name, policy=policy))
        refusal_of(two)


def test_reference_values_and_roots_change_the_policy_digest() -> None:
    td = tdx_mint.foundry()
    other = Policy((tdx.verifier(replace(td.rules, rtmrs=((), (), (), ())), time.time, root=td.root),))
    production = Policy((tdx.verifier(td.rules, time.time),))
    assert len({each.digest for each in (technology("tdx").policy, other, production)}) == 3
    one, two = meet(party(1, "tdx", policy=other), party(0, "tdx"))
    assert one.admitted is None and two.admitted is None
    assert two.refusal is not None
    assert two.refusal.reason is Reason.POLICY


# -- the roster -----------------------------------------------------------------------------------------------------


@every_kind
def test_a_listing_by_evidence_carries_no_endorsement(name: str) -> None:
    used = technology(name)
    entry = worker(1).entry
    assert verify(used.policy, Listing(entry, used.kind, bytes(32), b"")).entry == entry
    with pytest.raises(AdmissionError, match="has an endorsement"):
        verify(used.policy, Listing(entry, used.kind, bytes(32), b"x"))


@pytest.mark.parametrize("name", ["tdx", "snp"])
def test_a_third_party_verifies_a_stored_preimage_and_proof(name: str) -> None:
    """A stored preimage and proof are enough to repeat the verification without the connection."""
    used, child, parent = technology(name), party(1, name), party(0, name)
    near, far = tls_pair(child.tls, parent.tls)
    one = child.handshake(Role.CHILD, 0)
    one.begin(TlsValues(child.tls.key_digest, parent.tls.key_digest, channel_of(near).exporter))
    shown = one.receive(parent.hello)[0]
    assert isinstance(shown, Proof)
    preimage = one._binding(of_peer=False)
    if name == "tdx":
        td = tdx_mint.foundry()
        assert tdx.verify(shown.proof, preimage.digest, td.rules, time.time(), root=td.root).status == "UpToDate"
    else:
        vm = snp_mint.foundry()
        assert snp.verify(shown.proof, preimage.digest, vm.rules, time.time(), known=vm.roots).product.name == "milan"
    assert used.kind == shown.kind
    assert channel_of(far).exporter == channel_of(near).exporter
