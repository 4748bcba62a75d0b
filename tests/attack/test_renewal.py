"""A worker that no longer passes cannot stay in a session by proofs of before, of others, of elsewhere, or by silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ringfence.admission.policy import Policy
from ringfence.admission.proofs.attestation import AttestationVerifier
from ringfence.admission.renewal import Challenge, Renewal
from ringfence.errors import ConfigurationError
from tests.memory_cluster import all_reduce
from tests.renewing_cluster import Message, RenewingWorld
from tests.unit.admission_samples import fixed_bytes
from tests.unit.peer_verification_samples import TECHNOLOGIES, by_snp, by_tdx, report

SIZE = 7  # rank 5 and rank 6 are below rank 1


@pytest.fixture
def world() -> RenewingWorld:
    return RenewingWorld(SIZE, by_snp())


def still_adds_up(world: RenewingWorld) -> None:
    tensors = [torch.full((8,), float(rank)) for rank in range(SIZE)]
    requests = [
        world.submit(world.communicators[rank], all_reduce(world.communicators[rank], tensor))
        for rank, tensor in enumerate(tensors)
    ]
    world.run(requests)
    assert all(torch.equal(each, torch.full((8,), 21.0)) for each in tensors)


def ended(world: RenewingWorld, *texts: str) -> None:
    """The session has ended on every worker, and all of them say so."""
    failures = world.failures()
    assert all(all(text in each for text in texts) for each in failures), failures


@pytest.mark.parametrize("technology", TECHNOLOGIES)
def test_honest_workers_go_on(technology: str) -> None:
    world = RenewingWorld(SIZE, TECHNOLOGIES[technology]())
    for _ in range(3):
        still_adds_up(world)
        world.tick()
    assert not any(engine.failed for engine in world.engines), world.failures()
    assert [sorted(jobs.verified) for jobs in world.jobs] == [
        sorted(3 * ranks) for ranks in ([1, 2, 3, 4], [0, 5, 6], [0], [0], [0], [1], [1])
    ]


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
def test_a_worker_that_runs_something_else_is_named(world: RenewingWorld) -> None:
    world.tick()
    world.jobs[5].make = lambda binding: report(binding.digest, changes={0x90: bytes(48)})
    still_adds_up(world)
    world.tick()
    ended(world, "worker 5 no longer passes verification by worker 1: ", "measurement")


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
def test_a_root_that_no_longer_passes_is_named_by_its_children(world: RenewingWorld) -> None:
    world.jobs[0].make = lambda binding: report(binding.digest, changes={0x90: bytes(48)})
    world.tick(3)
    ended(world, "worker 0 no longer passes verification by worker 3: ", "measurement")


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
def test_the_policy_of_now_decides(world: RenewingWorld) -> None:
    world.tick()
    vm = by_snp().policy.verifiers[0]
    assert isinstance(vm, AttestationVerifier)
    stricter = replace(vm.rules, measurements=(bytes(48),))
    world.jobs[1].policy = Policy((replace(vm, rules=stricter),))
    world.tick(1)
    ended(world, "no longer passes verification by worker 1: ")


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
@pytest.mark.parametrize("drops", [Challenge, Renewal], ids=["never asked", "never answers"])
def test_a_silent_worker_is_named_after_two_intervals(world: RenewingWorld, drops: type[Message]) -> None:
    def drop(message: Message) -> Message | None:
        return None if isinstance(message, drops) else message

    world.on_wire[(1, 5) if drops is Challenge else (5, 1)] = drop
    world.tick()
    assert not any(engine.failed for engine in world.engines)
    world.tick(1)
    ended(world, "worker 5 did not prove itself again to worker 1 within 600 s (verify_every)")


@pytest.mark.promise("A proof of verification again is valid for one challenge, one connection and one session.")
def test_a_replayed_proof_is_refused(world: RenewingWorld) -> None:
    kept: list[Message] = []

    def replay(message: Message) -> Message:
        kept.append(message)
        return kept[0]

    world.on_wire[5, 1] = lambda message: replay(message) if isinstance(message, Renewal) else message
    world.tick()
    assert not any(engine.failed for engine in world.engines)
    world.tick()
    ended(world, "worker 5 no longer passes verification by worker 1: ")


def other_exporter(world: RenewingWorld) -> None:
    """Rank 5's proof for a connection of its own, such as one that a relay has opened."""
    edge = world.engines[5].edges[0]
    edge.exporter = fixed_bytes("another connection")  # type: ignore[misc]


def other_session(world: RenewingWorld) -> None:
    renewals = world.jobs[5].renewals
    renewals._roster = replace(renewals._roster, digest=fixed_bytes("another roster"))


def other_direction(world: RenewingWorld) -> None:
    """The proof that rank 1 presents to rank 5, sent back."""

    def reflect(message: Message) -> Message:
        return world_renewal(world, 1, 5, world.engines[1])

    world.on_wire[5, 1] = lambda message: reflect(message) if isinstance(message, Renewal) else message


def of_a_sibling(world: RenewingWorld) -> None:
    """Rank 6, which passes, proves for rank 5 that it is itself."""
    world.on_wire[5, 1] = lambda message: (
        world_renewal(world, 6, 1, world.engines[1]) if isinstance(message, Renewal) else message
    )


def world_renewal(world: RenewingWorld, prover: int, verifier: int, asked: object) -> Renewal:
    jobs, nonce = world.jobs[prover], world.engines[1].reverification._neighbours[5].nonce  # type: ignore[union-attr]
    assert nonce is not None
    (edge,) = [each for each in world.engines[prover].edges if each.peer == verifier]
    return Renewal(jobs.kind, jobs.make(jobs.renewals.own_binding(verifier, edge.exporter, nonce)))


@pytest.mark.promise("A proof of verification again is valid for one challenge, one connection and one session.")
@pytest.mark.parametrize(
    "lie", [other_exporter, other_session, other_direction, of_a_sibling], ids=lambda each: each.__name__
)
def test_a_proof_of_elsewhere_is_refused(world: RenewingWorld, lie: Callable[[RenewingWorld], None]) -> None:
    lie(world)
    world.tick(1)
    ended(world, "worker 5 no longer passes verification by worker 1: ")


@pytest.mark.promise("A proof of verification again is valid for one challenge, one connection and one session.")
def test_a_proof_of_admission_is_refused(world: RenewingWorld) -> None:
    """And no proof for a challenge admits to a later join: the two have labels of their own."""
    presented = world.circle.presentations[5]
    world.on_wire[5, 1] = lambda message: (
        Renewal(presented.kind, presented.proof) if isinstance(message, Renewal) else message
    )
    world.tick(1)
    ended(world, "worker 5 no longer passes verification by worker 1: ")


@pytest.mark.promise(
    "With `verify_every`, a worker that no longer passes ends the session on every worker, by name, within two intervals."
)
def test_another_kind_of_proof_is_refused(world: RenewingWorld) -> None:
    other = by_tdx()
    world.jobs[1].policy = Policy((*world.jobs[1].policy.verifiers, *other.policy.verifiers))
    world.jobs[5].kind, world.jobs[5].make = other.kind, other.make
    world.tick(1)
    ended(world, "worker 5 no longer passes", "presents a proof of kind 3, and was admitted by one of kind 4")


def test_a_worker_that_cannot_prove_itself_says_so(world: RenewingWorld) -> None:
    world.jobs[5].error = ConfigurationError("the chip does not answer")
    world.tick(1)
    ended(world, "worker 5 cannot prove itself again: the chip does not answer")


def test_a_worker_that_cannot_verify_names_itself(world: RenewingWorld) -> None:
    world.jobs[1].error = ConfigurationError("cannot read the policy")
    world.tick(1)
    ended(world, "worker 1 cannot ", "cannot read the policy")
    assert {engine.blamed for engine in world.engines} == {1}


def test_a_worker_that_does_not_get_to_verify_names_itself(world: RenewingWorld) -> None:
    world.tick()
    world.jobs[1].silent = True
    for _ in range(2):
        world.tick(1)
        assert not any(engine.failed for engine in world.engines), world.failures()
    world.tick(1)
    ended(world, "worker 1 has not verified worker ", "again within 600 s")
    assert {engine.blamed for engine in world.engines} == {1}


@pytest.mark.parametrize("message", [Challenge(bytes(32)), Renewal(4, b"proof")], ids=["challenge", "renewal"])
def test_a_message_out_of_order_ends_the_session(world: RenewingWorld, message: Message) -> None:
    world.jobs[1].silent = isinstance(message, Challenge)
    for _ in range(2):
        world.engines[5].edges[0].send(message)
    world.tick(2)
    ended(world, "ProtocolError" if isinstance(message, Challenge) else "", "worker 5 sent a ", "challenge")


def test_a_worker_that_left_is_asked_no_more(world: RenewingWorld) -> None:
    world.engines[5].leave()
    world.tick()
    world.tick()
    assert not any(engine.failed for rank, engine in enumerate(world.engines) if rank != 5), world.failures()
