"""Collateral: what Intel says of its platforms (TCB levels, the quoting enclave's identity, revocations), signed and dated.

It comes from files that the policy names; `ringfence evidence collateral` fetches them. Being signed by Intel, it need not
be fetched from Intel; being part of the policy, it is the same for all workers, and nobody can show an older one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Final

KEYS: Final = frozenset(
    {
        "pck_crl_issuer_chain",
        "root_ca_crl",
        "pck_crl",
        "tcb_info_issuer_chain",
        "tcb_info",
        "tcb_info_signature",
        "qe_identity_issuer_chain",
        "qe_identity",
        "qe_identity_signature",
    }
)


@dataclass(frozen=True)
class Collateral:
    """For one kind of platform, which its FMSPC names."""

    text: str
    fmspc: str  #       12 hexadecimal digits, lower case
    next_update: str  # of the TCB levels

    @classmethod
    def parse(cls, content: bytes) -> Collateral:
        """Raises ValueError. That it is Intel's is checked when a quote is."""
        text = content.decode("utf-8")
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or set(found) != KEYS:
                raise ValueError("not a collateral file: it must hold " + ", ".join(sorted(KEYS)))
            info = json.loads(found["tcb_info"])
            kind, fmspc, next_update = info["id"], info["fmspc"], info["nextUpdate"]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a collateral file: {type(error).__name__} {error}") from None
        if kind != "TDX" or not isinstance(fmspc, str) or not isinstance(next_update, str):
            raise ValueError("collateral that is not for TDX")
        return cls(text, fmspc.lower(), next_update)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()
