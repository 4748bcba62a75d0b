"""Collateral: what Intel says of its platforms (TCB levels, the quoting enclave's identity, revocations), signed and dated.

It comes from files that the policy names; `ringfence evidence collateral` fetches them. Being signed by Intel, it need not
be fetched from Intel; being part of the policy, it is the same for all workers, and nobody can show an older one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

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
_MESSAGE_CHARACTERS: Final = 500  # libraries quote what they could not read, however long it is


@dataclass(frozen=True)
class Collateral:
    """For one kind of platform, which its FMSPC names."""

    text: str
    fmspc: str  #       12 hexadecimal digits, lower case
    next_update: str  # when the first part of it expires

    @classmethod
    def parse(cls, content: bytes) -> Collateral:
        """Raises ValueError. That it is Intel's is checked when a quote is."""
        text = content.decode("utf-8")
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or set(found) != KEYS:
                raise ValueError("it must hold " + ", ".join(sorted(KEYS)))
            info, identity = json.loads(found["tcb_info"]), json.loads(found["qe_identity"])
            if info["id"] != "TDX" or not isinstance(info["fmspc"], str):
                raise ValueError("collateral that is not for TDX")
            ends = [datetime.fromisoformat(each["nextUpdate"]) for each in (info, identity)]
            ends += [_end_of_list(found[name]) for name in ("root_ca_crl", "pck_crl")]
            return cls(text, info["fmspc"].lower(), f"{min(ends):%Y-%m-%dT%H:%M:%SZ}")
        except (ValueError, KeyError, TypeError, RecursionError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
            name = "" if type(error) is ValueError else f"{type(error).__name__} "
            raise ValueError(f"not a collateral file: {name}{error}"[:_MESSAGE_CHARACTERS]) from None

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


def _end_of_list(digits: Any) -> datetime:
    """When a list of revoked certificates expires."""
    end = x509.load_der_x509_crl(bytes.fromhex(digits)).next_update_utc
    return end or datetime.max.replace(tzinfo=UTC)
