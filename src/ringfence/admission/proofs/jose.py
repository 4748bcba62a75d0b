"""A strict JWT verifier: a pinned key must have made the signature, with that key's own algorithm.

The key comes from the policy's key set and is selected by the token's `kid`, never taken from the token. The algorithm is a
property of the key: the token's header must agree, and selects nothing. Every value has one encoding only.

This module does not use a JOSE library. PyJWT and similar ones would add a run-time dependency for three algorithms, let the
header take part in the choice of the algorithm, and accept duplicate names, padding and other encodings of the same token.
Signatures are verified by `cryptography`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Final, NoReturn

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence.admission.policy_file.toml_table import quoted
from ringfence.errors import AdmissionError, PolicyError

KEYS: Final = range(1, 65)  # of one set
_HEADER_CHARACTERS: Final = 8192  # some issuers put a certificate chain there, which is ignored
_SIGNATURE_CHARACTERS: Final = 1400  # of RSA with 8192 bits
_TYPES: Final = ("jwt", "eat+jwt", "application/eat+jwt")
_RSA_BITS: Final = range(2048, 8193)
_CURVES: Final[dict[str, tuple[str, type[ec.EllipticCurve], int, hashes.HashAlgorithm]]] = {
    "P-256": ("ES256", ec.SECP256R1, 32, hashes.SHA256()),
    "P-384": ("ES384", ec.SECP384R1, 48, hashes.SHA384()),
}
_BASE64: Final = re.compile(r"[A-Za-z0-9_-]*")
_KEY_PRIVATE: Final = ("d", "p", "q", "dp", "dq", "qi", "oth", "k")

Json = dict[str, object]


@dataclass(frozen=True)
class PublicKey:
    """One public key of a set, with its only algorithm."""

    kid: str
    algorithm: str  # ES256, ES384 or RS256
    public: ec.EllipticCurvePublicKey | rsa.RSAPublicKey

    @property
    def spki(self) -> bytes:
        return self.public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


# -- verifying --------------------------------------------------------------------------------------------------------


def verify(token: str, keys: tuple[PublicKey, ...]) -> Json:
    """Return the claims of a token that one of `keys` signed. Raises AdmissionError."""
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        raise AdmissionError("a token does not have the form header.claims.signature")
    if len(parts[0]) > _HEADER_CHARACTERS or len(parts[2]) > _SIGNATURE_CHARACTERS:
        raise AdmissionError("a token has a header or a signature that is too long")
    header = _object("header", _decode("header", parts[0]))
    key = _key(header, keys)
    signature = _decode("signature", parts[2])
    if not _signed(key, signature, f"{parts[0]}.{parts[1]}".encode("ascii")):
        raise AdmissionError(f"the token's signature was not made with the key {quoted(key.kid)}")
    return _object("claims", _decode("claims", parts[1]))


def read_json(text: bytes) -> object:
    """Parse JSON without duplicate names and without NaN or Infinity. Raises ValueError."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _key(header: Json, keys: tuple[PublicKey, ...]) -> PublicKey:
    for name in ("crit", "b64", "zip", "enc"):
        if name in header:
            raise AdmissionError(f"the token's header asks for {name}, which this verifier does not support")
    kind = header.get("typ", "JWT")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise AdmissionError(f"the token's header says it is {quoted(kind)}, not a JWT or an EAT")
    kid = header.get("kid")
    for key in keys:
        if key.kid != kid:
            continue
        if header.get("alg") != key.algorithm:
            to_peer = f"the token's header says algorithm {quoted(header.get('alg'))}; its key is for"
            raise AdmissionError(f"{to_peer} {key.algorithm}", to_peer=f"{to_peer} another")
        return key
    raise AdmissionError(
        f"the token names key {quoted(kid)}, which is not in the policy's key set: if its issuer has changed keys, "
        "fetch the set anew and give it to every worker"
    )


def _signed(key: PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        if isinstance(key.public, rsa.RSAPublicKey):
            key.public.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
            return True
        _, _, width, hash_ = next(each for each in _CURVES.values() if each[0] == key.algorithm)
        if len(signature) != 2 * width:
            return False
        r, s = (int.from_bytes(part, "big") for part in (signature[:width], signature[width:]))
        key.public.verify(encode_dss_signature(r, s), message, ec.ECDSA(hash_))
        return True
    except InvalidSignature:
        return False


def _decode(name: str, text: str) -> bytes:
    try:
        return decode_base64(text)
    except ValueError:
        raise AdmissionError(f"the token's {name} is not base64url") from None


def _object(name: str, text: bytes) -> Json:
    try:
        value = read_json(text)
    except ValueError as error:
        raise AdmissionError(f"the token's {name} is malformed: {quoted(str(error))}") from None
    if not isinstance(value, dict):
        raise AdmissionError(f"the token's {name} is not a JSON object")
    return value


def decode_base64(text: str) -> bytes:
    """Decode base64url without padding, in its canonical form. Raises ValueError."""
    if not _BASE64.fullmatch(text):
        raise ValueError("not base64url")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        raise ValueError("not base64url") from None
    if base64.urlsafe_b64encode(data).rstrip(b"=") != text.encode("ascii"):
        raise ValueError("not canonical base64url")
    return data


def _unique(pairs: list[tuple[str, object]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a duplicate name in an object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# -- the key set ----------------------------------------------------------------------------------------------------


def read_keys(content: bytes, where: str) -> tuple[PublicKey, ...]:
    """Read a JWKS, as an issuer publishes it. Raises PolicyError."""
    try:
        document = read_json(content)
    except ValueError as error:
        raise PolicyError(f"{where} is not a JSON key set: {quoted(str(error))}") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) not in KEYS:
        raise PolicyError(f'{where} must have {KEYS[0]} to {KEYS[-1]} keys: {{"keys": [...]}}')
    found = [_read_key(each, f"{where}, key {count}") for count, each in enumerate(entries, 1)]
    if len({key.kid for key in found}) != len(found):
        raise PolicyError(f"{where} has two keys with one name (kid)")
    return tuple(sorted(found, key=lambda key: key.kid))


def _read_key(entry: object, where: str) -> PublicKey:
    if not isinstance(entry, dict):
        raise PolicyError(f"{where} is not a key")
    if any(name in entry for name in _KEY_PRIVATE):
        raise PolicyError(f"{where} is a private or a symmetric key: a policy has an issuer's public keys only")
    kid = entry.get("kid")
    if not isinstance(kid, str) or not 1 <= len(kid) <= 256 or not kid.isprintable():
        raise PolicyError(f"{where} has no name (kid)")
    operations = entry.get("key_ops", ["verify"])
    if entry.get("use", "sig") != "sig" or not isinstance(operations, list) or "verify" not in operations:
        raise PolicyError(f"{where} is not for signatures: leave it out")
    try:
        algorithm, public = _public(entry)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise PolicyError(f"{where} is not an EC key on P-256 or P-384, nor an RSA key of 2048 bits or more") from None
    if entry.get("alg", algorithm) != algorithm:
        raise PolicyError(f"{where} is for {quoted(entry['alg'])}; a key of its type is used with {algorithm}")
    return PublicKey(kid, algorithm, public)


def _public(entry: Json) -> tuple[str, ec.EllipticCurvePublicKey | rsa.RSAPublicKey]:
    if entry.get("kty") == "EC":
        algorithm, curve, width, _ = _CURVES[_text(entry, "crv", _CURVES)]
        x, y = (decode_base64(_text(entry, name)) for name in ("x", "y"))
        if len(x) != width or len(y) != width:
            raise ValueError("a coordinate of the wrong length")
        return algorithm, ec.EllipticCurvePublicNumbers(_number(x), _number(y), curve()).public_key()
    if entry.get("kty") == "RSA":
        n, e = (_number(decode_base64(_text(entry, name))) for name in ("n", "e"))
        if n.bit_length() not in _RSA_BITS or e < 65537:
            raise ValueError("a weak RSA key")
        return "RS256", rsa.RSAPublicNumbers(e, n).public_key()
    raise ValueError("an unsupported type of key")


def _text(entry: Json, name: str, allowed: dict[str, object] | object = None) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or (isinstance(allowed, dict) and value not in allowed):
        raise ValueError(name)
    return value


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")
