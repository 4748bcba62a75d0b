"""A record whose key, statement and bytes are always the same."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence.record import envelope, selftest
from ringfence.record.statement import DIR_HASH, SHA256, Statement, Subject

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
SUBJECTS = (Subject("ringfence", DIR_HASH, "ab" * 32), Subject("ringfence/dataplane/_core.abi3.so", SHA256, "cd" * 32))


def predicate(**changes: Any) -> dict[str, Any]:
    """What a self-test of two checks says, with changes."""
    return {
        "began": "2026-11-18 12:00 UTC",
        "device": "cuda:0",
        "workers": 2,
        "quick": False,
        "confidential": "no",
        "environment": {"device": "cuda, a GPU", "torch": "2.13.0 (CUDA 13.0)"},
        "checks": {"start/begin": "passed", "order/producer": "passed"},
        "passed": True,
        "rates": {"device to host, pinned": 25e9},
        **changes,
    }


def statement(**changes: Any) -> Statement:
    return selftest.statement_of(predicate(**changes), SUBJECTS)


def record(**changes: Any) -> bytes:
    return envelope.sign(statement(**changes).encode(), KEY)
