"""A verifier's token: a worker is admitted if a service that the policy names has verified it, for this very connection.

The token is a JWT in EAT form (RFC 9711): NVIDIA's NRAS, Trustee and the clouds' services give such. The worker sends its
hardware's evidence to the service with a nonce, the SHA-256 of the binding in hexadecimal digits, and the token must carry
it as `eat_nonce`. A signature says who verified; what they found is in the claims, so a policy must name at least one.

proof = token · number of detached submodules · name, token of each, by name
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.policy import Clock, Evidence
from ringfence.admission.proofs import jose
from ringfence.admission.proofs.jose import Json, Key
from ringfence.errors import AdmissionError, PolicyError, ProtocolError
from ringfence.policy.toml_table import Table, shown

KIND: Final = 6
LEEWAY_SECONDS: Final = 60  # between the service's clock and this one
SUBMODULES: Final = 64
NAME_CHARACTERS: Final = 128
_NO_DEBUG: Final = ("disabled", "disabled-since-boot", "disabled-permanently", "disabled-fully-and-permanently")
_TIME_LIMIT: Final = 1 << 53

Expected = tuple[str, ...] | int | bool | Mapping[str, "Expected"]


@dataclass(frozen=True)
class Rules:
    """Which service is believed, and what it must have found."""

    issuer: str
    keys: tuple[Key, ...]
    claims: Mapping[str, Expected]
    audience: str | None = None
    submodules: int | None = None  #             exactly so many
    submodule_claims: Mapping[str, Expected] | None = None  # of every one of them

    def content(self) -> bytes:
        parts = [encoding.blob(self.issuer.encode()), encoding.blob((self.audience or "").encode())]
        parts += [encoding.number(len(self.keys), 2)]
        for key in sorted(self.keys, key=lambda each: each.kid):
            parts += [encoding.blob(key.kid.encode()), encoding.text(key.algorithm), encoding.blob(key.spki)]
        parts += [encoding.number(0 if self.submodules is None else self.submodules, 2)]
        parts += [_content(self.claims), _content(self.submodule_claims or {})]
        return b"".join(parts)

    def explain(self) -> list[str]:
        lines = [
            f"{self.issuer} has given it a token for this connection, signed with one of {len(self.keys)} pinned keys"
        ]
        if self.audience is not None:
            lines.append(f"the token is meant for {self.audience}")
        lines += [f"the token says {line}" for line in _explain(self.claims)]
        if self.submodules is not None:
            lines.append(f"the token speaks of exactly {self.submodules} submodules")
        lines += [f"of every submodule it says {line}" for line in _explain(self.submodule_claims or {})]
        return lines


def read_rules(table: Table) -> Rules:
    """The policy's table [admit.token]."""
    claims = table.table("claims")
    submodule_claims = table.table("submodule_claims", None)
    rules = Rules(
        issuer=table.text("issuer"),
        keys=jose.read_keys(table.file("keys"), f"{table.where}, keys"),
        claims=_expectations(claims),
        audience=table.text("audience", None),
        submodules=table.number("submodules", None, least=1, most=SUBMODULES),
        submodule_claims=None if submodule_claims is None else _expectations(submodule_claims),
    )
    table.done()
    if not rules.claims:
        raise claims.error("names no claim: a signed token can also say that the evidence was bad")
    if submodule_claims is not None and not rules.submodule_claims:
        raise submodule_claims.error("names no claim: leave the table out, or say what must hold of every submodule")
    return rules


@dataclass(frozen=True)
class Claims:
    """What a verified token says."""

    claims: Json
    submodules: dict[str, Json]


def nonce_of(binding_digest: bytes) -> str:
    """What the service must put into the token."""
    return hashlib.sha256(binding_digest).hexdigest()


# -- verifying --------------------------------------------------------------------------------------------------------


def verify(proof: bytes, rules: Rules, nonce: str, now: float) -> Claims:
    """The token and all its submodules, against the rules. A third party can verify a stored preimage and proof alike."""
    token, detached = decode(proof)
    claims = _verify_one(token, rules, nonce, now)
    submodules = _submodules(claims, detached, rules, nonce, now)
    _compare("the token", claims, rules.claims)
    if rules.submodules is not None and len(submodules) != rules.submodules:
        told = f"the token speaks of {len(submodules)} submodules where the policy asks for"
        raise AdmissionError(f"{told} exactly {rules.submodules}", told=f"{told} another number")
    if rules.submodule_claims is not None:
        if not submodules:
            raise AdmissionError("the token speaks of no submodules, and the policy asks for claims about each")
        for name, found in submodules.items():
            _compare(f"the token's submodule {shown(name)}", found, rules.submodule_claims)
    return Claims(claims, submodules)


def _verify_one(token: str, rules: Rules, nonce: str, now: float) -> Json:
    """One signed token: the issuer's, about this connection, at this time, for us, and not of a machine under debug."""
    claims = jose.verify(token, rules.keys)
    if claims.get("iss") != rules.issuer:
        told = f"the token is of {shown(claims.get('iss'))}, the policy believes"
        raise AdmissionError(f"{told} {rules.issuer}", told=f"{told} another issuer")
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
        raise AdmissionError(f"the token expired {now - end:.0f} s ago: compare the clocks, or fetch it anew")
    for name in ("nbf", "iat"):
        begin = _time(claims, name)
        if begin is not None and now < begin - LEEWAY_SECONDS:
            raise AdmissionError(f"the token begins to hold in {begin - now:.0f} s ({name}): compare the clocks")


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
        raise AdmissionError(f"the token is meant for {shown(meant)}: name that as audience in the policy if it is you")
    if rules.audience not in audiences:
        told = f"the token is meant for {shown(meant)}, the policy asks for"
        raise AdmissionError(f"{told} {rules.audience}", told=f"{told} another audience")


def _check_nonce(claims: Json, nonce: str) -> None:
    value = claims.get("eat_nonce")
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, str) or not value.isascii() or not keys.same(value.encode(), nonce.encode()):
        raise AdmissionError("the token carries another nonce: it was not made for this connection")


def _check_debug(claims: Json) -> None:
    state = claims.get("dbgstat", _NO_DEBUG[0])
    if state not in _NO_DEBUG:
        raise AdmissionError(f"the token says that debugging is {shown(state)}, not that it is disabled")


def _submodules(claims: Json, detached: Mapping[str, str], rules: Rules, nonce: str, now: float) -> dict[str, Json]:
    """Claims inside the token, and tokens that it names by their digest: each of which must be here, and no other."""
    listed = claims.get("submods", {})
    if not isinstance(listed, dict) or len(listed) > SUBMODULES:
        raise AdmissionError("the token's submodules are not an object of a few")
    found: dict[str, Json] = {}
    for name, value in listed.items():
        if isinstance(value, dict):
            _check_debug(value)
            _check_flat(name, value)
            found[name] = value
        elif name not in detached:
            raise AdmissionError(f"the token's submodule {shown(name)} is not with it")
        else:
            digest = hashlib.sha256(detached[name].encode("ascii")).hexdigest()
            if value != ["DIGEST", ["SHA-256", digest]]:
                raise AdmissionError(f"the token vouches for another submodule {shown(name)} than came with it")
            found[name] = _verify_one(detached[name], rules, nonce, now)
            _check_flat(name, found[name])
    unauthenticated_peers = sorted(
        detached.keys() - {name for name, value in listed.items() if not isinstance(value, dict)}
    )
    if unauthenticated_peers:
        raise AdmissionError(
            f"a submodule {shown(unauthenticated_peers[0])} comes with the token, which does not vouch for it"
        )
    return found


def _check_flat(name: str, claims: Json) -> None:
    """What a service says two levels down no rule looks at, so nobody would see a bad device there."""
    if "submods" in claims:
        raise AdmissionError(
            f"the token's submodule {shown(name)} has submodules of its own, which no policy can verify"
        )


def _compare(where: str, claims: Mapping[str, object], expected: Mapping[str, Expected]) -> None:
    for name, wanted in expected.items():
        value = claims.get(name)
        if isinstance(wanted, Mapping):
            _compare(f"{where}, in {name}", value if isinstance(value, dict) else {}, wanted)
        elif not _agrees(value, wanted):
            said = shown(value) if name in claims else "nothing"
            raise AdmissionError(
                f"{where} says {said} of {name}; the policy asks for {_words(wanted)}",
                told=f"{where} does not say what the policy asks for",
            )


def _agrees(value: object, wanted: tuple[str, ...] | int | bool) -> bool:
    """Of one type and equal: in Python 1 is True, in a policy it is not."""
    if isinstance(wanted, tuple):
        return isinstance(value, str) and value in wanted
    return type(value) is type(wanted) and value == wanted


class TokenVerifier:
    """The verifier."""

    kind = KIND
    name = "attestation token"

    def __init__(self, rules: Rules, clock: Clock) -> None:
        self._rules = rules
        self._clock = clock

    def content(self) -> bytes:
        return self._rules.content()

    def verify(self, evidence: Evidence) -> None:
        try:
            verify(evidence.proof, self._rules, nonce_of(evidence.binding.digest), evidence.moment(self._clock))
        except AdmissionError as error:
            raise error.within(f"rank {evidence.entry.rank}: ") from None

    def verify_listing(self, listing: Listing) -> None:
        """A service signs no entries: whoever did not see the token relies on the admitted parent that did."""
        if listing.endorsement:
            raise AdmissionError(f"the entry of rank {listing.entry.rank} has an endorsement, and a token makes none")


class TokenProver:
    """The maker. `fetch` gets the service's answer for a nonce."""

    kind = KIND

    def __init__(self, fetch: Callable[[str], bytes]) -> None:
        self._fetch = fetch

    def prove(self, binding: Binding) -> bytes:
        return encode(*read_answer(self._fetch(nonce_of(binding.digest))))

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return b""


# -- bytes ----------------------------------------------------------------------------------------------------------


def read_answer(answer: bytes) -> tuple[str, dict[str, str]]:
    """A service's answer: a token alone, or a token with detached submodules: [["JWT", token], {name: token, ...}]."""
    text = answer.strip()
    if not text.startswith(b"["):
        return _ascii(text), {}
    try:
        document = jose.read_json(text)
    except ValueError as error:
        raise AdmissionError(f"the service's answer cannot be read: {shown(str(error))}") from None
    match document:
        case [["JWT", str(token)], dict(detached)] if all(isinstance(each, str) for each in detached.values()):
            return token, detached
    raise AdmissionError('the service\'s answer is neither a token nor [["JWT", token], {name: token, ...}]')


def encode(token: str, detached: Mapping[str, str]) -> bytes:
    if len(detached) > SUBMODULES or any(len(name) > NAME_CHARACTERS or not _plain(name) for name in detached):
        raise AdmissionError("a token with too many submodules, or with strange names")
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
        raise AdmissionError("a token is not text") from None


def _bytes(token: str) -> bytes:
    if not token.isascii():
        raise AdmissionError("a token is not text")
    return token.encode("ascii")


# -- expectations ---------------------------------------------------------------------------------------------------


def _expectations(table: Table) -> dict[str, Expected]:
    for name in table.names:  # the author's own words, which go to terminals and into errors
        if not 1 <= len(name) <= NAME_CHARACTERS or not name.isprintable():
            raise table.error(f"{shown(name)} must be the name of a claim, 1 to {NAME_CHARACTERS} printable characters")
    return {name: _expectation(table, name) for name in table.names}


def _expectation(table: Table, name: str) -> Expected:
    """A text, a list of texts of which any is right, a number, true or false, or a table of such."""
    inner: Table | None = None
    try:
        inner = table.table(name)
    except PolicyError:
        for read in (table.flag, table.number, table.texts):
            try:
                return read(name)
            except PolicyError:
                continue
        raise table.error(
            f"{name} must be a text, a list of texts, a whole number, true or false, or a table of such"
        ) from None
    expected = _expectations(inner)
    if not expected:
        raise inner.error("names no claim")
    return expected


def _content(expected: Mapping[str, Expected]) -> bytes:
    """Canonical, with a mark of each type."""
    parts = [encoding.number(len(expected), 2)]
    for name, wanted in sorted(expected.items()):
        parts.append(encoding.blob(name.encode()))
        if isinstance(wanted, Mapping):
            parts += [b"t", _content(wanted)]
        elif isinstance(wanted, tuple):
            parts += [b"s", encoding.number(len(wanted), 2), *(encoding.blob(each.encode()) for each in sorted(wanted))]
        else:
            parts += [b"b" if isinstance(wanted, bool) else b"n", encoding.number(wanted, 8)]
    return b"".join(parts)


def _explain(expected: Mapping[str, Expected], within: str = "") -> list[str]:
    lines = []
    for name, wanted in sorted(expected.items()):
        if isinstance(wanted, Mapping):
            lines += _explain(wanted, f"{within}{name}.")
        else:
            lines.append(f"{within}{name} is {_words(wanted)}")
    return lines


def _words(wanted: tuple[str, ...] | int | bool) -> str:
    if isinstance(wanted, tuple):
        return " or ".join(wanted)
    return str(wanted).lower()
