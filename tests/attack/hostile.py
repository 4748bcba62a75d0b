"""For each kind of proof: workers that it admits, and the most expensive proof of a peer without credentials.

What a verifier compares first, such as the bytes that a quote must carry, is right: that costs an attacker nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Policy, Prover, Verifier
from ringfence.admission.proofs import (
    azure,
    bundle,
    certificate,
    certificate_signature,
    nvidia,
    snp,
    snp_report,
    tdx,
    token,
)
from ringfence.admission.proofs.certificate import CertificateProver, CertificateVerifier
from ringfence.admission.proofs.secret import SharedSecret
from tests import provers
from tests.attack.expensive import chains, large_rsa_key
from tests.certificates import Authority, now, spiffe
from tests.unit import azure_mint, nvidia_mint, snp_mint, tdx_mint, token_mint

GPUS = 4
RUN = "crowd"


@dataclass(frozen=True)
class Kind:
    """`admission` returns policy and prover of a rank; `hostile` makes a proof for a binding."""

    admission: Callable[[int], tuple[Policy, Prover]]
    hostile: Callable[[Binding], bytes]

    @property
    def number(self) -> int:
        return self.admission(0)[1].kind


def by_secret() -> Kind:
    shared = SharedSecret(keys.Secret(bytes(range(32))), RUN)
    return Kind(lambda rank: (Policy((shared,)), shared), lambda binding: bytes(keys.PROOF_LIMIT_BYTES))


def _certified() -> tuple[Verifier, Callable[[int], Prover], bytes]:
    authority = Authority()
    rules = certificate.Rules((authority.der,), ("spiffe://example.org/trainer/*",), "example.org")
    hostile = certificate_signature.encode(
        chains(authority.name)["three issuers of one name, large exponents"], bytes(70)
    )
    return (
        CertificateVerifier(rules, now),
        lambda rank: CertificateProver(authority.issue(spiffe(f"trainer/{rank}"))),
        hostile,
    )


def by_certificate() -> Kind:
    verifier, prover, hostile = _certified()
    return Kind(lambda rank: (Policy((verifier,)), prover(rank)), lambda binding: hostile)


def _quoted() -> tuple[Verifier, Prover, Callable[[Binding], bytes]]:
    td = tdx_mint.foundry()
    recorded = td.quote(bytes([7]) * 64)
    at = recorded.index(bytes([7]) * 64)

    def hostile(binding: Binding) -> bytes:
        """Another machine's quote with the expected REPORTDATA written into it."""
        return recorded[:at] + binding.digest + recorded[at + 64 :]

    return tdx.verifier(td.rules, time.time, root=td.root), provers.of_tdx(td.quote), hostile


def by_tdx() -> Kind:
    verifier, prover, hostile = _quoted()
    return Kind(lambda rank: (Policy((verifier,)), prover), hostile)


def by_snp() -> Kind:
    vm = snp_mint.foundry()
    own, recorded = vm.certificate(), bytearray(vm.report(bytes(64)))

    def hostile(binding: Binding) -> bytes:
        recorded[snp_report.REPORT_DATA] = binding.digest
        return snp.encode(bytes(recorded), own)

    verifier = snp.verifier(vm.rules, time.time, known=vm.roots)
    prover = provers.of_snp(lambda data: (vm.report(data), own))
    return Kind(lambda rank: (Policy((verifier,)), prover), hostile)


def _own_vtpm() -> azure_mint.Machine:
    """An attacker's vTPM: its key is the largest that is accepted, and its runtime data is full of what is ignored."""
    key = large_rsa_key()
    ignored = {f"x{count}": 0 for count in range(700)}
    return azure_mint.Machine(key, azure_mint.runtime_data(key.public_key(), False, **ignored))


def by_azure_snp() -> Kind:
    honest, own = azure_mint.machine(), _own_vtpm()
    recorded = bytearray(snp_mint.foundry().report(bytes(64)))
    recorded[snp_report.REPORT_DATA] = own.covered  # another machine's report

    def hostile(binding: Binding) -> bytes:
        attestation = own.attestation(azure.nonce_of(binding.digest))
        return azure.encode_snp(bytes(recorded), azure_mint.certificate(), attestation)

    roots = snp_mint.foundry().roots
    verifier = azure.snp_verifier(azure_mint.snp_rules(), time.time, known=roots)
    prover = provers.of_azure(azure.SNP_KIND, lambda nonce: honest.snp_proof(honest.attestation(nonce)))
    return Kind(lambda rank: (Policy((verifier,)), prover), hostile)


def by_azure_tdx() -> Kind:
    honest, own = azure_mint.machine(), _own_vtpm()
    quote = tdx_mint.foundry().quote(bytes([7]) * 64).replace(bytes([7]) * 64, own.covered, 1)

    def hostile(binding: Binding) -> bytes:
        return azure.encode_tdx(quote, own.attestation(azure.nonce_of(binding.digest)))

    verifier = azure.tdx_verifier(azure_mint.tdx_rules(), time.time, root=tdx_mint.foundry().root)
    prover = provers.of_azure(azure.TDX_KIND, lambda nonce: honest.tdx_proof(honest.attestation(nonce)))
    return Kind(lambda rank: (Policy((verifier,)), prover), hostile)


def by_nvidia() -> Kind:
    top = nvidia_mint.root()
    devices = [nvidia_mint.Device.under(top, number + 1) for number in range(GPUS)]
    claims = [
        nvidia.verify_report(each.gpu(bytes(32)), bytes(32), nvidia_mint.NOW, root=top.certificate) for each in devices
    ]
    rules = nvidia.Rules((claims[0].reference_values(),))
    recorded = [each.gpu(bytes(32)) for each in devices]

    def hostile(binding: Binding) -> bytes:
        nonce = nvidia.nonce_of(binding.digest)
        return nvidia.encode([nvidia.Gpu(each.report.replace(bytes(32), nonce, 1), each.chain) for each in recorded])

    verifier = nvidia.verifier(rules, lambda: nvidia_mint.NOW, root=top.certificate)
    prover = provers.of_nvidia(lambda nonce: [each.gpu(nonce) for each in devices])
    return Kind(lambda rank: (Policy((verifier,)), prover), hostile)


def by_token() -> Kind:
    verifier = token.verifier(token_mint.rules(), lambda: token_mint.NOW)
    padding = ",".join(f'"{count}":0' for count in range(7000))
    header = f'{{"alg":"ES384","kid":"p384","typ":"JWT",{padding}}}'.encode()
    hostile = token.encode(f"{token_mint.text(header)}.{token_mint.text(b'{}')}.{token_mint.text(bytes([1]) * 96)}", {})

    def fetch(nonce: str) -> bytes:
        return token_mint.ES384.sign(token_mint.claims(eat_nonce=nonce)).encode()

    return Kind(lambda rank: (Policy((verifier,)), provers.of_token(fetch)), lambda binding: hostile)


def combined() -> Kind:
    """A certificate and a quote. Without a valid certificate the quote is not verified."""
    (certified, signer, forged), (quoted, quoter, recorded) = _certified(), _quoted()

    def hostile(binding: Binding) -> bytes:
        return bundle.encode([(certified.kind, forged), (quoted.kind, recorded(binding))])

    policy = Policy((bundle.BundleVerifier([certified, quoted]),))
    return Kind(lambda rank: (policy, bundle.BundleProver([signer(rank), quoter])), hostile)


KINDS: dict[str, Callable[[], Kind]] = {
    "secret": by_secret,
    "certificate": by_certificate,
    "tdx": by_tdx,
    "snp": by_snp,
    "nvidia": by_nvidia,
    "token": by_token,
    "azure_snp": by_azure_snp,
    "azure_tdx": by_azure_tdx,
    "combined": combined,
}
