"""Proof by certificate: an authority of the policy issued the worker's certificate, and the worker has its key.

The certificate is not used in TLS. Its key signs the binding, so that the signature is valid for one worker, on one
connection, in one direction. It also signs the worker's entry, so that all other workers can verify the roster.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import ENDORSEMENT_BYTES, WORLD_LIMIT, Entry, Listing
from ringfence.admission.policy import Clock, Evidence, Prover, Verifier
from ringfence.admission.policy_file.policy_file import duration_text
from ringfence.admission.policy_file.toml_table import TomlTable
from ringfence.admission.proofs import authorities, certificate_path, crl, identity
from ringfence.admission.proofs.certificate_path import extension_of
from ringfence.admission.proofs.certificate_signature import (
    CERTIFICATE_BYTES,
    CHAIN_LIMIT,
    PrivateKey,
    PublicKey,
    Statement,
    decode,
    encode,
    is_signed,
    sign,
)
from ringfence.errors import AdmissionError, ProtocolError

_REASON_CHARACTERS: Final = 160
_RANKS: Final = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7}))?")


@dataclass(frozen=True)
class Rules:
    """The table `[admit.certificate]`."""

    authorities: tuple[bytes, ...]  # DER, sorted
    ids: tuple[str, ...]  #           patterns
    trust_domain: str | None = None  # of SPIFFE; None: any URI or DNS name that a pattern matches
    ranks: tuple[int, int] | None = None  # the first and the last that it admits; None: any
    revocation: crl.CrlRule | None = None  # None: this rule asks for no lists
    shared: crl.CrlRule | None = None  # of all rules of the policy

    def content(self) -> bytes:
        """Return a canonical encoding, with the required age of lists and without the lists, which are renewed."""
        # A pattern has no space, so no pattern of another rule ends in the same way.
        ending = "" if self.ranks is None else f" ranks {self.ranks[0]}-{self.ranks[1]}"
        revocation = (
            () if self.revocation is None else (encoding.blob(b""), encoding.number(self.revocation.max_age, 8))
        )
        return b"".join(
            (
                encoding.text(self.trust_domain or ""),
                encoding.number(len(self.ids), 2),
                *(encoding.text(pattern + ending) for pattern in sorted(self.ids)),
                *map(encoding.blob, self.authorities),
                *revocation,
            )
        )

    @property
    def binds_ranks(self) -> bool:
        """Whether this rule admits a name as one rank or as a range of ranks only. A range does not tell two workers apart."""
        return self.ranks is not None or all(map(identity.binds_rank, self.ids))

    def explain(self) -> list[str]:
        what = f"a SPIFFE identity of {self.trust_domain}" if self.trust_domain else "a certificate"
        lines = [f"presents {what} named " + " or ".join(self.ids), f"  as {self._explain_ranks()}"]
        lines += [f"  issued by {authorities.describe(each)}" for each in self.authorities]
        if self.revocation is None:
            lines.append("certificates cannot be revoked under this rule (crl)")
        else:
            age = duration_text(self.revocation.max_age)
            lines.append(f"not revoked by the newest list of its issuer, which is at most {age} old")
        return lines

    def _explain_ranks(self) -> str:
        if self.ranks is not None:
            first, last = self.ranks
            return (
                f"rank {first}" if first == last else f"any of the ranks {first} to {last}, and listed as one another"
            )
        if identity.stand_for_one_rank(self.ids):
            return "the rank in its name"
        if self.binds_ranks:
            return "any rank that its name stands for: workers with such names can be listed as one another"
        return "any rank (a name is not bound to a rank)"

    def check_rank(self, name: str, rank: int | None) -> None:
        """Check that the rule admits this name, as this rank; None: as any rank. Raises AdmissionError."""
        in_range = rank is None or self.ranks is None or self.ranks[0] <= rank <= self.ranks[1]
        if in_range and identity.matches(name, self.ids, rank):
            return
        wanted = " or ".join(self.ids) + ("" if self.ranks is None else f" as rank {self.ranks[0]} to {self.ranks[1]}")
        as_rank = "" if rank is None or not self.binds_ranks else f" as rank {rank}"
        raise AdmissionError(
            f"the certificate is for {name}{as_rank and f', presented{as_rank}'}; the policy admits {wanted}",
            to_peer=f"the certificate is for {name}, which the policy does not admit{as_rank}",
        )


@dataclass(frozen=True)
class Claims:
    """The claims of a verified certificate."""

    id: str


@dataclass(eq=False)
class Credential:
    """A worker's own certificate, with its intermediates, and its key."""

    chain: tuple[bytes, ...]  # DER, the worker's own first
    key: PrivateKey = field(repr=False)

    def forget(self) -> None:
        """Drop the key, even if references to this object remain."""
        vars(self).pop("key", None)


def read_rules(table: TomlTable) -> Rules:
    trust_domain = table.text("trust_domain", None)
    if trust_domain is not None and not identity.is_trust_domain(trust_domain):
        raise table.error("trust_domain must be a SPIFFE trust domain such as example.org, without spiffe://")
    ids = table.texts("ids")
    for pattern in ids:
        if (objection := identity.pattern_error(pattern, trust_domain)) is not None:
            raise table.error(f"ids: {pattern!a} {objection}")
    ranks = table.text("ranks", None)
    bounds = None if ranks is None else _RANKS.fullmatch(ranks)
    span = None if bounds is None else (int(bounds[1]), int(bounds[2] or bounds[1]))
    if ranks is not None and (span is None or not span[0] <= span[1] < WORLD_LIMIT):
        raise table.error('ranks must be a rank such as "5", or a range of ranks such as "0-7"')
    found: set[bytes] = set()
    for content in table.files("ca"):
        try:
            found |= set(authorities.read(content, spiffe=trust_domain is not None))
        except ValueError as error:
            raise table.error(f"ca: {error}") from None
    lists, max_age = table.contents("crl", None, limit=crl.LIST_BYTES), table.duration("crl_max_age", None)
    table.done()
    try:
        revocation = crl.CrlRule.read(lists, max_age, found)
    except ValueError as error:
        raise table.error(f"crl: {error}") from None
    return Rules(tuple(sorted(found)), ids, trust_domain, span, revocation)


# -- verifying --------------------------------------------------------------------------------------------------------


def verify(rules: Rules, proof: bytes, statement: Statement, now: float, rank: int | None = None) -> Claims:
    """Verify the certificates of a proof and the first one's signature of a statement. Raises AdmissionError."""
    try:
        chain, signature = decode(proof)
    except ProtocolError as error:
        raise AdmissionError(f"the certificate proof is malformed: {error}") from error
    claims, key = verify_chain(rules, chain, now, rank)
    if not is_signed(key, signature, statement.message(chain)):
        raise AdmissionError(
            f"the signature with the certificate of {claims.id} is not over this connection and this worker's entry: "
            "it was made for another connection, or with another key"
        )
    return claims


def verify_chain(
    rules: Rules, chain: tuple[bytes, ...], now: float, rank: int | None = None
) -> tuple[Claims, PublicKey]:
    """Verify that an authority of the policy issued the first certificate, and return its claims and key.

    `rank` is that of the worker that presents it; None: of no worker, such as an agent. Raises AdmissionError.
    """
    try:
        path = certificate_path.build_path(rules.authorities, chain)
        verified = _verified_path(path, rules, now)
        if isinstance(verified, str):
            path.check_leaf()  # before more of it is parsed for the message
        extensions, key = path.leaf.extensions, path.leaf.public_key()
    except certificate_path.PathError as error:
        raise AdmissionError(f"the certificate was not issued under an authority of the policy: {error}") from error
    except certificate_path.UNREADABLE as error:
        raise AdmissionError("a certificate is malformed or not supported") from error
    name = identity.name_of(extensions, rules.trust_domain)
    _check_times(name, path.leaf, now)
    _check_use(name, path.leaf)
    if isinstance(verified, str):
        raise AdmissionError(f"the certificate of {name} was not issued under an authority of the policy: {verified}")
    rules.check_rank(name, rank)  # checked last: an unverified name could be anything
    revocation = rules.shared or rules.revocation
    if revocation is not None:
        revocation.check(name, verified, now)
    assert isinstance(key, PublicKey)
    return Claims(name), key


def _check_times(name: str, leaf: x509.Certificate, now: float) -> None:
    if now > leaf.not_valid_after_utc.timestamp():
        raise AdmissionError(
            f"the certificate of {name} expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC: renew it"
        )
    if now < leaf.not_valid_before_utc.timestamp():
        raise AdmissionError(
            f"the certificate of {name} is valid from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M:%S} UTC: "
            "compare the clocks of both machines"
        )


def _check_use(name: str, leaf: x509.Certificate) -> None:
    """Check that the key may sign data, and may not sign certificates."""
    usage, purposes = extension_of(leaf, x509.KeyUsage), extension_of(leaf, x509.ExtendedKeyUsage)
    if usage is None:
        raise AdmissionError(f"the certificate of {name} has no key usage; digitalSignature is needed")
    if not usage.digital_signature or usage.key_cert_sign or usage.crl_sign:
        raise AdmissionError(
            f"the key usage of the certificate of {name} must have digitalSignature, and neither keyCertSign nor cRLSign"
        )
    both = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    if purposes is not None and not both <= set(purposes):
        raise AdmissionError(
            f"the extended key usage of the certificate of {name} must have clientAuth and serverAuth, or be absent: "
            "a worker is client and server"
        )


def _verified_path(path: certificate_path.CertificatePath, rules: Rules, now: float) -> list[x509.Certificate] | str:
    """Return the path from the leaf to the authority, or why `cryptography` refuses it.

    It checks signatures, names, constraints, extensions and validity.
    """
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    verifier = (
        PolicyBuilder()
        .store(_store(rules.authorities))
        .time(moment)
        .max_chain_depth(CHAIN_LIMIT)
        .build_client_verifier()
    )
    try:
        return verifier.verify(path.leaf, path.between).chain
    except VerificationError as error:
        # The library quotes the certificate, and an unauthenticated peer chose its text, which goes to a log.
        return encoding.escape(str(error).partition(" (encountered processing")[0], _REASON_CHARACTERS)


@lru_cache(maxsize=16)
def _store(authorities: tuple[bytes, ...]) -> Store:
    return Store([x509.load_der_x509_certificate(each) for each in authorities])


def has_signed_roster(chain: tuple[bytes, ...], rank: int, roster_digest: bytes, signature: bytes) -> bool:
    """Return whether the first certificate's key signed this roster as this rank. The chain was verified with the roster."""
    key = x509.load_der_x509_certificate(chain[0]).public_key()
    assert isinstance(key, PublicKey)
    return is_signed(key, signature, Statement.acknowledgement(rank, roster_digest).message(chain))


class CertificateVerifier(Verifier):
    """Verifies certificate proofs by the rules of one table."""

    kind = 2
    name = "certificate"

    def __init__(self, rules: Rules, clock: Clock) -> None:
        self._rules = rules
        self._clock = clock
        self._verified_names: dict[
            bytes, str
        ] = {}  # listings and their names: rank 0 meets each twice, and a signature is dear

    def content(self) -> bytes:
        return self._rules.content()

    def for_agents(self) -> Verifier:
        return _AgentVerifier(self._rules, self._clock)

    def verify(self, evidence: Evidence) -> str:
        moment = evidence.moment(self._clock)
        return self._verify(evidence.entry, evidence.proof, Statement.proof(evidence.binding), moment)

    def verify_listing(self, listing: Listing) -> str:
        fingerprint = hashlib.sha256(listing.encode()).digest()
        if fingerprint not in self._verified_names:
            statement = Statement.endorsement(listing.entry, listing.proof_digest)
            name = self._verify(listing.entry, listing.endorsement, statement, self._clock())
            self._verified_names[fingerprint] = name
        return self._verified_names[fingerprint]

    def _verify(self, entry: Entry, proof: bytes, statement: Statement, moment: float) -> str:
        try:
            return verify(self._rules, proof, statement, moment, self._rank(entry)).id
        except AdmissionError as error:
            raise error.with_prefix(f"rank {entry.rank}: ") from error

    def _rank(self, entry: Entry) -> int | None:
        """Return the rank that the name in the certificate must be admitted for; None: any."""
        return entry.rank


class _AgentVerifier(CertificateVerifier):
    """Verifies certificates of agents, whose ranks are those of nodes."""

    def _rank(self, entry: Entry) -> int | None:
        return None


# -- proving --------------------------------------------------------------------------------------------------------


class CertificateProver(Prover):
    """Makes proofs and endorsements with the worker's own key."""

    kind = 2

    def __init__(self, credential: Credential) -> None:
        self._credential = credential

    def prove(self, binding: Binding) -> bytes:
        return sign_statement(self._credential, Statement.proof(binding))

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return sign_statement(self._credential, Statement.endorsement(entry, proof_digest))

    def sign_roster(self, rank: int, roster_digest: bytes) -> bytes:
        credential = self._credential
        return sign(credential.key, Statement.acknowledgement(rank, roster_digest).message(credential.chain))


def read_credential(chain: bytes, key: bytes) -> Credential:
    """Read a certificate with its intermediates, and its key, in PEM form. Raises ValueError."""
    certificates = authorities.from_pem(chain)
    try:
        private = load_pem_private_key(key, None)
        public = certificates[0].public_key()
    except TypeError:
        raise ValueError("the key is encrypted: store it without a password") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("the key is not a private key in PEM form") from None
    encoded = tuple(each.public_bytes(Encoding.DER) for each in certificates)
    fields = [certificate_path.parse_fields(each) for each in encoded]
    if private.public_key() != public:
        raise ValueError("the key is not that of the first certificate")
    if not isinstance(private, PrivateKey) or not certificate_path.is_accepted_key(fields[0].key):
        raise ValueError(f"the key is not {certificate_path.KEYS}")
    try:
        certificate_path.check_order(fields)
    except certificate_path.PathError as error:
        raise ValueError(str(error)) from None
    size = len(encode(encoded, bytes(_most_signature_bytes(private))))
    if len(encoded) > CHAIN_LIMIT or max(map(len, encoded)) > CERTIFICATE_BYTES or size > ENDORSEMENT_BYTES:
        raise ValueError(
            f"{len(encoded)} certificates of {size} bytes; at most {CHAIN_LIMIT} of {ENDORSEMENT_BYTES} bytes can be "
            "presented: leave out the authority's own, or use elliptic-curve keys"
        )
    return Credential(encoded, private)


def _most_signature_bytes(key: PrivateKey) -> int:
    """Return the size limit of a signature: that of the RSA key, of two integers in DER, or Ed25519's 64 bytes."""
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return 64
    width = (key.key_size + 7) // 8
    return width if isinstance(key, rsa.RSAPrivateKey) else 2 * (width + 3) + 3


def sign_statement(credential: Credential, statement: Statement) -> bytes:
    """Sign a statement, and return the signature with the certificates."""
    return encode(credential.chain, sign(credential.key, statement.message(credential.chain)))
