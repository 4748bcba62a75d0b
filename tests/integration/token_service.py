"""A minimal verifier service: prints a token for a nonce, signed with the key in a file.

python -m tests.integration.token_service KEY CLAIMS NONCE
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tests.unit.token_mint import ISSUER, Signer


def signer_in(path: Path) -> Signer:
    key = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Signer("service", "ES384", key)


if __name__ == "__main__":
    path, claims, nonce = sys.argv[1:]
    now = int(time.time())
    good = {"iss": ISSUER, "iat": now, "exp": now + 600, "eat_nonce": nonce, "measres": "success"}
    print(signer_in(Path(path)).sign(good | json.loads(claims)))
