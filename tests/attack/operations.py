"""What a verifier computes, counted instead of timed: calls that the interpreter reports, weighted by what they cost."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, rsa

CALLS = 2000.0  # calls of functions that take as long as one ECDSA verification on P-256
CURVES = {"secp256r1": 1.0, "secp384r1": 8.0, "secp521r1": 12.0}
WEIGHTS = {  # in P-256 verifications, for code that is not Python and computes with more than one key
    "ClientVerifier.verify": 5.0,
    "Certificate.verify_directly_issued_by": 8.0,
    "py_verify_with_root_ca": 15.0,
    "parse_quote": 1.0,
    "load_der_x509_certificate": 0.3,
    "Lib.SSL_do_handshake": 3.0,
}
UNKNOWN = 100.0  # of a verification or a key agreement that has no weight


class Operations:
    """What this thread has computed. `cost` is a clock: it gives P-256 verifications where others give seconds."""

    def __init__(self) -> None:
        self.dear: Counter[str] = Counter()  # verifications, key agreements and what else has a weight, by name
        self._calls = 0
        self._weight = 0.0

    def cost(self) -> float:
        return self._weight + self._calls / CALLS

    def profile(self, _: object, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        self._calls += 1
        if event == "c_call":
            name = getattr(argument, "__qualname__", "")
            weight = WEIGHTS.get(name)
            if weight is None and name.endswith((".verify", ".exchange", ".decrypt", ".recover_data_from_signature")):
                weight = key_weight(argument.__self__)
            if weight is not None:
                self.dear[name] += 1
                self._weight += weight


def key_weight(key: object) -> float:
    """Return what one operation with a public key costs. An RSA key costs as much more as its exponent is longer."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return CURVES.get(key.curve.name, UNKNOWN)
    if isinstance(key, rsa.RSAPublicKey):
        return 0.5 * (key.key_size / 2048) ** 2 * max(1.0, key.public_numbers().e.bit_length() / 17)
    return UNKNOWN


@contextmanager
def counted() -> Iterator[Operations]:
    """Count what this thread computes in the `with` statement."""
    operations = Operations()
    before = sys.getprofile()
    sys.setprofile(operations.profile)
    try:
        yield operations
    finally:
        sys.setprofile(before)
