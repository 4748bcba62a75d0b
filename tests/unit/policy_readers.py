"""The functions that read the tables of a policy, where several tables share keys."""

from __future__ import annotations

from collections.abc import Callable

from ringfence.admission.proofs import azure, kinds, snp, tdx

_SHARED: dict[str, tuple[Callable[..., object], ...]] = {
    "azure_snp": (snp.read_rules, azure.read_keys),
    "azure_tdx": (tdx.read_rules, azure.read_keys),
}


def readers(kind: str) -> tuple[Callable[..., object], ...]:
    """All functions that ask the table of a kind for keys."""
    return _SHARED.get(kind, ()) or (kinds.KINDS[kind].read_rules,)
