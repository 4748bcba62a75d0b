"""Proof by attestation token: a verifier service named in the policy has verified the worker, for this connection.

The token is a JWT in EAT form (RFC 9711), as NVIDIA's NRAS, Trustee and the clouds' services issue them. The worker sends its
hardware's evidence to the service with a nonce, the SHA-256 of the binding in hexadecimal digits, and the token must contain
it as `eat_nonce`. The signature identifies the service; its findings are in the claims, so a policy must name at least one.

proof = token · number of detached submodules · name, token of each, by name
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.policy import Clock
from ringfence.admission.policy_file.toml_table import TomlTable, quoted
from ringfence.admission.proofs import jose
from ringfence.admission.proofs.attestation import AttestationVerifier
from ringfence.admission.proofs.jose import Json, PublicKey
from ringfence.admission.proofs.token_claims import (
    NAME_CHARACTERS,
    Expected,
    compare_claims,
    encode_claims,
    explain_claims,
    read_claims,
)
from ringfence.errors import AdmissionError, ProtocolError

KIND: Final = 6
LEEWAY_SECONDS: Final = 60  # between the service's clock and this one
SUBMODULES: Final = 64
_NO_DEBUG: Final = ("disabled", "disabled-since-boot", "disabled-permanently", "disabled-fully-and-permanently")
_TIME_LIMIT: Final = 1 << 53


@dataclass(frozen=True)
class Rules:
    """The table [admit.token]: the trusted service, and the claims that its tokens must have."""

    issuer: str
    keys: tuple[PublicKey, ...]
    claims: Mapping[str, Expected]
    audience: str | None = None
    submodules: int | None = None  #             the exact number
    submodule_claims: Mapping[str, Expected] | None = None  # of each of them

    def content(self) -> bytes:
        parts = [encoding.blob(self.issuer.encode()), encoding.blob((self.audience or "").encode())]
        parts += [encoding.number(len(self.keys), 2)]
        for key in sorted(self.keys, key=lambda each: each.kid):
            parts += [encoding.blob(key.kid.encode()), encoding.text(key.algorithm), encoding.blob(key.spki)]
        parts += [encoding.number(0 if self.submodules is None else self.submodules, 2)]
        parts += [encode_claims(self.claims), encode_claims(self.submodule_claims or {})]
        return b"".join(parts)

    def explain(self) -> list[str]:
        lines = [f"{self.issuer} issued a token for this connection, signed with one of {len(self.keys)} pinned keys"]
        if self.audience is not None:
            lines.append(f"the token's audience is {self.audience}")
        lines += [f"the token claims {line}" for line in explain_claims(self.claims)]
        if self.submodules is not None:
            lines.append(f"the token has exactly {self.submodules} submodules")
        lines += [f"of every submodule it claims {line}" for line in explain_claims(self.submodule_claims or {})]
        return lines


def read_rules(table: TomlTable) -> Rules:
    """Read the policy's table [admit.token]. Raises PolicyError."""
    claims = table.table("claims")
    submodule_claims = table.table("submodule_claims", None)
    rules = Rules(
        issuer=table.text("issuer"),
        keys=jose.read_keys(table.file("keys"), f"{table.where}, keys"),
        claims=read_claims(claims),
        audience=table.text("audience", None),
        submodules=table.number("submodules", None, least=1, most=SUBMODULES),
        submodule_claims=None if submodule_claims is None else read_claims(submodule_claims),
    )
    table.done()
    if not rules.claims:
        raise claims.error("names no claim: a signed token can also say that the evidence was bad")
    if submodule_claims is not None and not rules.submodule_claims:
        raise submodule_claims.error("names no claim: leave the table out, or say what must hold of every submodule")
    return rules


@dataclass(frozen=True)
class Claims:
    """The claims of a verified token."""

    claims: Json
    submodules: dict[str, Json]


def nonce_of(binding_digest: bytes) -> str:
    """Return the nonce that the token must contain."""
    return hashlib.sha256(binding_digest).hexdigest()


# -- verifying --------------------------------------------------------------------------------------------------------


def verify(proof: bytes, rules: Rules, nonce: str, now: float) -> Claims:
    """Verify the token and all its submodules. Raises AdmissionError.

    A third party can verify a stored preimage and proof in the same way.
    """
    token, detached = decode(proof)
    claims = _verify_one(token, rules, nonce, now)
    submodules = _submodules(claims, detached, rules, nonce, now)
    compare_claims("the token", claims, rules.claims)
    if rules.submodules is not None and len(submodules) != rules.submodules:
        to_peer = f"the token has {len(submodules)} submodules, where the policy asks for"
        raise AdmissionError(f"{to_peer} exactly {rules.submodules}", to_peer=f"{to_peer} another number")
    if rules.submodule_claims is not None:
        if not submodules:
            raise AdmissionError("the token has no submodules, and the policy asks for claims of each")
        for name, found in submodules.items():
            compare_claims(f"the token's submodule {quoted(name)}", found, rules.submodule_claims)
    return Claims(claims, submodules)


def _verify_one(token: str, rules: Rules, nonce: str, now: float) -> Json:
    """Verify one signed token: issuer, time, audience, nonce and debug status."""
    claims = jose.verify(token, rules.keys)
    if claims.get("iss") != rules.issuer:
        to_peer = f"the token was issued by {quoted(claims.get('iss'))}, the policy trusts"
        raise AdmissionError(f"{to_peer} {rules.issuer}", to_peer=f"{to_peer} another issuer")
    _check_time(claims, now)
    _check_audience(claims, rules)
    _check_nonce(claims, nonce)
    _check_debug(claims)
    return claims


def _check_time(claims: Json, now: float) -> None:
    end = _time(claims, "exp")
    if end is None:
        raise AdmissionError("the token has no expiry (exp)")
    if now >= end + LEEWAY_SECONDS:
        raise AdmissionError(f"the token expired {now - end:.0f} s ago: compare the clocks, or fetch a new one")
    for name in ("nbf", "iat"):
        begin = _time(claims, name)
        if begin is not None and now < begin - LEEWAY_SECONDS:
            raise AdmissionError(f"the token is not valid for another {begin - now:.0f} s ({name}): compare the clocks")


def _time(claims: Json, name: str) -> int | None:
    value = claims.get(name)
    if value is None and name not in claims:
        return None
    if type(value) is not int or not 0 <= value < _TIME_LIMIT:
        raise AdmissionError(f"the token's {name} is not a time in seconds")
    return value


def _check_audience(claims: Json, rules: Rules) -> None:
    meant = claims.get("aud")
    audiences = meant if isinstance(meant, list) else [] if meant is None else [meant]
    if rules.audience is None and not audiences:
        return
    if rules.audience is None:
        raise AdmissionError(f"the token's audience is {quoted(meant)}: set audience in the policy if that is this run")
    if rules.audience not in audiences:
        to_peer = f"the token's audience is {quoted(meant)}, the policy asks for"
        raise AdmissionError(f"{to_peer} {rules.audience}", to_peer=f"{to_peer} another audience")


def _check_nonce(claims: Json, nonce: str) -> None:
    value = claims.get("eat_nonce")
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, str) or not value.isascii() or not keys.same(value.encode(), nonce.encode()):
        raise AdmissionError("the token has another nonce: it was not made for this connection")


def _check_debug(claims: Json) -> None:
    state = claims.get("dbgstat", _NO_DEBUG[0])
    if state not in _NO_DEBUG:
        raise AdmissionError(f"the token's debug status is {quoted(state)}, not disabled")


def _submodules(claims: Json, detached: Mapping[str, str], rules: Rules, nonce: str, now: float) -> dict[str, Json]:
    """Return the claims of all submodules: inside the token, or in detached tokens that it names by their digest.

    Every named token must be present, and no other.
    """
    listed = claims.get("submods", {})
    if not isinstance(listed, dict) or len(listed) > SUBMODULES:
        raise AdmissionError(f"the token's submodules are not an object with at most {SUBMODULES} members")
    found: dict[str, Json] = {}
    for name, value in listed.items():
        if isinstance(value, dict):
            _check_debug(value)
            _check_flat(name, value)
            found[name] = value
        elif name not in detached:
            raise AdmissionError(f"the token's submodule {quoted(name)} is missing")
        else:
            digest = hashlib.sha256(detached[name].encode("ascii")).hexdigest()
            if value != ["DIGEST", ["SHA-256", digest]]:
                raise AdmissionError(
                    f"the token's digest of submodule {quoted(name)} differs from the submodule that was presented"
                )
            found[name] = _verify_one(detached[name], rules, nonce, now)
            _check_flat(name, found[name])
    unlisted = sorted(detached.keys() - {name for name, value in listed.items() if not isinstance(value, dict)})
    if unlisted:
        raise AdmissionError(f"the submodule {quoted(unlisted[0])} was presented, and the token does not list it")
    return found


def _check_flat(name: str, claims: Json) -> None:
    """Refuse nested submodules: no rule covers their claims, so a bad device could be hidden there."""
    if "submods" in claims:
        raise AdmissionError(
            f"the token's submodule {quoted(name)} has submodules of its own, which policies do not support"
        )


def verifier(rules: Rules, clock: Clock) -> AttestationVerifier[Rules]:
    """Return the verifier of attestation tokens by the rules of one table."""

    def check(proof: bytes, digest: bytes, rules: Rules, now: float) -> object:
        return verify(proof, rules, nonce_of(digest), now)

    return AttestationVerifier(KIND, "attestation token", rules, clock, check, sources="tokens")


# -- encoding -------------------------------------------------------------------------------------------------------


def read_answer(answer: bytes) -> tuple[str, dict[str, str]]:
    """Parse a service's answer: a token, or a token with detached submodules: [["JWT", token], {name: token, ...}].

    Raises AdmissionError.
    """
    text = answer.strip()
    if not text.startswith(b"["):
        return _ascii(text), {}
    try:
        document = jose.read_json(text)
    except ValueError as error:
        raise AdmissionError(f"the service's answer is malformed: {quoted(str(error))}") from None
    match document:
        case [["JWT", str(token)], dict(detached)] if all(isinstance(each, str) for each in detached.values()):
            return token, detached
    raise AdmissionError('the service\'s answer is neither a token nor [["JWT", token], {name: token, ...}]')


def encode(token: str, detached: Mapping[str, str]) -> bytes:
    if len(detached) > SUBMODULES or any(len(name) > NAME_CHARACTERS or not _plain(name) for name in detached):
        raise AdmissionError("a token with too many submodules, or with names that are not allowed")
    parts = [encoding.blob(_bytes(token)), encoding.number(len(detached), 1)]
    for name in sorted(detached):
        parts += [encoding.text(name), encoding.blob(_bytes(detached[name]))]
    return b"".join(parts)


def decode(proof: bytes) -> tuple[str, dict[str, str]]:
    reader = encoding.Reader(proof)
    try:
        token = _ascii(reader.blob(keys.PROOF_LIMIT_BYTES))
        count = reader.number(1)
        detached = {
            reader.text(NAME_CHARACTERS): _ascii(reader.blob(keys.PROOF_LIMIT_BYTES))
            for _ in range(min(count, SUBMODULES + 1))
        }
        reader.end()
    except ProtocolError as error:
        raise AdmissionError(f"a token proof is malformed: {error}") from None
    if encode(token, detached) != proof:
        raise AdmissionError("a token proof is malformed: its submodules are not in order")
    return token, detached


def _plain(name: str) -> bool:
    return bool(name) and encoding.is_printable(name)


def _ascii(data: bytes) -> str:
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise AdmissionError("a token is not ASCII text") from None


def _bytes(token: str) -> bytes:
    if not token.isascii():
        raise AdmissionError("a token is not ASCII text")
    return token.encode("ascii")
