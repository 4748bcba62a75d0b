"""The kinds of evidence that tests attack: a verifier of each, and simulated hardware or a simulated service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ringfence.admission.policy import Clock, Policy, Prover
from ringfence.admission.proofs import azure, nvidia, snp, tdx, token
from tests import provers
from tests.unit import azure_mint, nvidia_mint, snp_mint, tdx_mint, token_mint

NAMES = ("tdx", "snp", "nvidia", "token", "azure_snp", "azure_tdx")
DAY = 86400
YEAR = 365 * DAY
Make = Callable[[bytes], bytes]  # makes a proof over these bytes


@dataclass(frozen=True)
class Technology:
    """One kind of evidence: the policy that verifies it, and how simulated hardware makes it."""

    kind: int
    how: str  # the name of the proof in logs
    policy: Policy
    make: Make
    later: Policy  # the same verifier, when collateral, certificate or token has expired
    elsewhere: str = "made for another connection or another worker"  # the refusal of evidence from another connection


def _later(seconds: float) -> Clock:
    return lambda: time.time() + seconds


@cache
def technology(name: str) -> Technology:
    match name:
        case "tdx":
            td = tdx_mint.foundry()
            now, later = (
                Policy((tdx.verifier(td.rules, clock, root=td.root),)) for clock in (time.time, _later(60 * DAY))
            )
            return Technology(tdx.KIND, "TDX", now, td.quote, later)
        case "snp":
            vm = snp_mint.foundry()
            now, later = (
                Policy((snp.verifier(vm.rules, clock, known=vm.roots),)) for clock in (time.time, _later(60 * DAY))
            )
            certificate = vm.certificate()
            return Technology(snp.KIND, "SEV-SNP", now, lambda data: snp.encode(vm.report(data), certificate), later)
        case "nvidia":
            return _nvidia()
        case "azure_snp":
            return _azure_snp()
        case "azure_tdx":
            return _azure_tdx()
    return _token()


def _azure_snp() -> Technology:
    vm, roots = azure_mint.machine(), snp_mint.foundry().roots
    now, later = (
        Policy((azure.snp_verifier(azure_mint.snp_rules(), clock, known=roots),))
        for clock in (time.time, _later(60 * DAY))
    )
    return Technology(azure.SNP_KIND, "SEV-SNP on Azure", now, lambda nonce: vm.snp_proof(vm.attestation(nonce)), later)


def _azure_tdx() -> Technology:
    vm, root = azure_mint.machine(), tdx_mint.foundry().root
    now, later = (
        Policy((azure.tdx_verifier(azure_mint.tdx_rules(), clock, root=root),))
        for clock in (time.time, _later(60 * DAY))
    )
    return Technology(azure.TDX_KIND, "TDX on Azure", now, lambda nonce: vm.tdx_proof(vm.attestation(nonce)), later)


def _nvidia() -> Technology:
    top = nvidia_mint.root()
    devices = [nvidia_mint.Device.under(top, number) for number in (1, 2)]
    root = top.certificate
    known = nvidia.verify_report(devices[0].gpu(bytes(32)), bytes(32), time.time(), root=root).reference_values()
    now, later = (
        Policy((nvidia.verifier(nvidia.Rules((known,)), clock, root=root),)) for clock in (time.time, _later(10 * YEAR))
    )
    return Technology(
        kind=nvidia.KIND,
        how="NVIDIA GPU attestation",
        policy=now,
        make=lambda nonce: nvidia.encode([device.gpu(nonce) for device in devices]),
        later=later,
        elsewhere="it was not made for this connection",
    )


def _token() -> Technology:
    def make(nonce: bytes) -> bytes:
        now = int(time.time())
        claims = token_mint.claims(exp=now + 3600, nbf=now, iat=now, eat_nonce=nonce.decode())
        return token.encode(token_mint.ES256.sign(claims), {})

    now, later = (Policy((token.verifier(token_mint.rules(), clock),)) for clock in (time.time, _later(2 * 3600)))
    return Technology(
        kind=token.KIND,
        how="attestation token",
        policy=now,
        make=make,
        later=later,
        elsewhere="it was not made for this connection",
    )


def prover(kind: int, make: Make) -> Prover:
    """The prover of a worker whose hardware or service answers with this proof."""
    match kind:
        case tdx.KIND:
            return provers.of_tdx(make)
        case snp.KIND:
            return provers.of_snp(lambda data: snp.decode(make(data)))
        case azure.SNP_KIND | azure.TDX_KIND:
            return provers.of_azure(kind, make)
        case nvidia.KIND:
            return provers.of_nvidia(lambda nonce: nvidia.decode(make(nonce)))
    return provers.of_token(lambda nonce: token.decode(make(nonce.encode()))[0].encode())
