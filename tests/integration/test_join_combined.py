"""A rule with a certificate, a TDX guest and every GPU: a worker must present all three on one connection."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from ringfence.admission.binding import Binding
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs import bundle, certificate, nvidia, tdx
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier
from ringfence.config.settings import Settings
from tests import provers
from tests.certificates import HOUR, Authority, spiffe
from tests.integration.join_cluster import Clock, Warnings, World
from tests.limits import FAR
from tests.unit import nvidia_mint, tdx_mint

TODAY = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
AUTHORITY = Authority(start=TODAY - HOUR, end=TODAY + HOUR)
GPU_ROOT = nvidia_mint.root()
GPUS = [nvidia_mint.Device.under(GPU_ROOT, number) for number in (1, 2)]
BY_ALL = "certificate and TDX and NVIDIA GPU attestation"


def gpus(nonce: bytes) -> list[nvidia.Gpu]:
    return [device.gpu(nonce) for device in GPUS]


def reference_values() -> nvidia.Rules:
    (gpu, _) = gpus(bytes(32))
    claims = nvidia.verify_report(gpu, bytes(32), time.time(), root=GPU_ROOT.certificate)
    return nvidia.Rules(reference_values=(claims.reference_values(),), gpus=len(GPUS))


def policy() -> Policy:
    rules = certificate.Rules((AUTHORITY.der,), ("spiffe://example.org/worker/*",), "example.org")
    td = tdx_mint.foundry()
    return Policy(
        (
            bundle.BundleVerifier(
                [
                    CertificateVerifier(rules, time.time),
                    tdx.verifier(td.rules, time.time, root=td.root),
                    nvidia.verifier(reference_values(), time.time, root=GPU_ROOT.certificate),
                ]
            ),
        )
    )


def proofs(name: str, authority: Authority = AUTHORITY) -> list[Prover]:
    key = ec.generate_private_key(ec.SECP256R1())
    credential = authority.issue(spiffe(f"worker/{name}"), key=key, start=TODAY - HOUR, end=TODAY + HOUR)
    quote = tdx_mint.foundry().quote
    return [CertificateProver(credential), provers.of_tdx(quote), provers.of_nvidia(gpus)]


class Elsewhere(Prover):
    """Shows what another worker's hardware says of another connection."""

    def __init__(self, inner: Prover) -> None:
        self.kind = inner.kind
        self._inner = inner

    def prove(self, binding: Binding) -> bytes:
        return self._inner.prove(Binding(b"another connection"))


def test_workers_with_all_three_admit_each_other() -> None:
    with World(6) as world:
        for rank in range(6):
            world.start([rank], {rank: Settings()}, {rank: (policy(), bundle.prover_for(proofs(str(rank))))})
        members = world.members()
        assert {each.proof_name for member in members for each in member.roster.admitted} == {BY_ALL}
        assert len({member.roster.digest for member in members}) == 1


def without_gpus() -> Prover:
    return bundle.prover_for(proofs("1")[:2])


def with_gpus_of_another_machine() -> Prover:
    own, quote, gpu = proofs("1")
    return bundle.prover_for([own, quote, Elsewhere(gpu)])


def with_a_quote_of_another_machine() -> Prover:
    own, quote, gpu = proofs("1")
    return bundle.prover_for([own, Elsewhere(quote), gpu])


def with_a_certificate_of_another_authority() -> Prover:
    return bundle.prover_for(proofs("1", Authority(start=TODAY - HOUR, end=TODAY + HOUR)))


def with_a_certificate_alone() -> Prover:
    return proofs("1")[0]


@pytest.mark.parametrize(
    ("show", "heard", "logged"),
    [
        (
            without_gpus,
            "rank 1 presents proofs of kinds [2, 3]",
            "; this rule asks for " + BY_ALL + ", kinds [2, 3, 5]",
        ),
        (with_gpus_of_another_machine, "nonce", ""),
        (with_a_quote_of_another_machine, "REPORTDATA differs", ""),
        (with_a_certificate_of_another_authority, "not issued under an authority of the policy", ""),
        (with_a_certificate_alone, "rank 1 presents a proof of kind 2", "; this worker's policy accepts: " + BY_ALL),
    ],
)
def test_a_worker_that_lacks_one_of_them_is_refused(
    show: Callable[[], Prover], heard: str, logged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is refused hears what is about itself; what the policy asks for stays with its verifier."""
    clock, world = Clock(monkeypatch), World(2)
    good = bundle.prover_for(proofs("0"))
    with Warnings() as warnings:
        world.start([0, 1], dict.fromkeys((0, 1), Settings()), {0: (policy(), good), 1: (policy(), show())})
        warnings.wait_for(lambda texts: sum(heard in text for text in texts) == 2)
    clock.advance(FAR)
    assert heard in world.error(1)
    assert not logged or logged not in world.error(1)
    assert heard + logged in world.error(0)
