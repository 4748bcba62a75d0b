"""Provers of each kind of attestation, from what collects it: as `session/join/provers.py` makes them for a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringfence.admission.proofs import azure, nvidia, snp, tdx, token
from ringfence.admission.proofs.attestation import AttestationProver


def of_tdx(collect: Callable[[bytes], bytes]) -> AttestationProver:
    """`collect` returns a quote over 64 bytes."""
    return AttestationProver(tdx.KIND, collect)


def of_snp(collect: Callable[[bytes], tuple[bytes, bytes]]) -> AttestationProver:
    """`collect` returns a report over 64 bytes, and its endorsement certificate."""
    return AttestationProver(snp.KIND, lambda digest: snp.encode(*collect(digest)))


def of_nvidia(collect: Callable[[bytes], Sequence[nvidia.Gpu]]) -> AttestationProver:
    """`collect` returns the evidence of every GPU over a nonce."""
    return AttestationProver(nvidia.KIND, lambda digest: nvidia.encode(collect(nvidia.nonce_of(digest))))


def of_token(collect: Callable[[str], bytes]) -> AttestationProver:
    """`collect` returns the service's answer for a nonce."""
    return AttestationProver(
        token.KIND, lambda digest: token.encode(*token.read_answer(collect(token.nonce_of(digest))))
    )


def of_azure(kind: int, collect: Callable[[bytes], bytes]) -> AttestationProver:
    """`collect` returns a proof over 32 bytes of extra data."""
    return AttestationProver(kind, lambda digest: collect(azure.nonce_of(digest)))
