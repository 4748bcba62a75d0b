"""An attestation service for tests, which signs any token."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from ringfence.admission.proofs import jose, token

NOW = 1_790_000_000.0
ISSUER = "https://verifier.example"
NONCE = hashlib.sha256(b"binding").hexdigest()


def text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int, width: int | None = None) -> str:
    return text(value.to_bytes(width or (value.bit_length() + 7) // 8, "big"))


@dataclass(frozen=True)
class Signer:
    kid: str
    algorithm: str
    private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

    def jwk(self) -> dict[str, object]:
        named: dict[str, object] = {"kid": self.kid, "alg": self.algorithm, "use": "sig"}
        if isinstance(self.private, rsa.RSAPrivateKey):
            numbers = self.private.public_key().public_numbers()
            return named | {"kty": "RSA", "n": number(numbers.n), "e": number(numbers.e)}
        point = self.private.public_key().public_numbers()
        width = self.private.curve.key_size // 8
        curve = {32: "P-256", 48: "P-384"}[width]
        return named | {"kty": "EC", "crv": curve, "x": number(point.x, width), "y": number(point.y, width)}

    def sign(self, claims: object, **header: object) -> str:
        """A token; a header field of None is left out."""
        fields = {"alg": self.algorithm, "kid": self.kid, "typ": "JWT"} | header
        kept = {name: value for name, value in fields.items() if value is not None}
        return self.sign_bytes(json.dumps(kept).encode(), json.dumps(claims).encode())

    def sign_bytes(self, header: bytes, claims: bytes) -> str:
        message = f"{text(header)}.{text(claims)}"
        return f"{message}.{text(self.signature(message.encode()))}"

    def signature(self, message: bytes) -> bytes:
        if isinstance(self.private, rsa.RSAPrivateKey):
            return self.private.sign(message, padding.PKCS1v15(), hashes.SHA256())
        width = self.private.curve.key_size // 8
        hash_ = {32: hashes.SHA256(), 48: hashes.SHA384()}[width]
        r, s = decode_dss_signature(self.private.sign(message, ec.ECDSA(hash_)))
        return r.to_bytes(width, "big") + s.to_bytes(width, "big")


def key_set(*signers: Signer) -> bytes:
    return json.dumps({"keys": [signer.jwk() for signer in signers]}).encode()


ES256 = Signer("p256", "ES256", ec.generate_private_key(ec.SECP256R1()))
ES384 = Signer("p384", "ES384", ec.generate_private_key(ec.SECP384R1()))
RS256 = Signer("rsa", "RS256", rsa.generate_private_key(65537, 2048))
SIGNERS = (ES256, ES384, RS256)


def claims(**changes: object) -> dict[str, object]:
    """Claims that are accepted; a claim of None is left out."""
    good = {
        "iss": ISSUER,
        "exp": int(NOW) + 3600,
        "nbf": int(NOW),
        "iat": int(NOW),
        "eat_nonce": NONCE,
        "measres": "success",
        "ready": True,
    }
    return {name: value for name, value in (good | changes).items() if value is not None}


def rules(**changes: object) -> token.Rules:
    wanted = {"issuer": ISSUER, "keys": jose.read_keys(key_set(*SIGNERS), "keys"), "claims": {"ready": True}}
    return token.Rules(**(wanted | changes))  # type: ignore[arg-type]


def detached(tokens: Mapping[str, str]) -> dict[str, object]:
    """The claim that names them."""
    return {name: ["DIGEST", ["SHA-256", hashlib.sha256(each.encode()).hexdigest()]] for name, each in tokens.items()}
