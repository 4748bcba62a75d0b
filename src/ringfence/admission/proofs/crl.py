"""Certificate revocation lists (CRLs, RFC 5280) for the certificates of workers, from files that the policy names.

Each certificate below the authority must be covered by a current list that its issuer has signed. The newest list of an issuer
decides. A list is authenticated when a peer presents its issuer's certificate, because that may be an intermediate one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ringfence.admission.proofs import freshness
from ringfence.admission.proofs.certificate_path import UNREADABLE, extension_of
from ringfence.admission.proofs.freshness import Memory, Validity
from ringfence.errors import AdmissionError

LIST_BYTES: Final = 16 << 20  # of one file
LISTS: Final = 1024  # in one file
KEY: Final = "crl_max_age"
_HASHES: Final = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
_BLOCK: Final = re.compile(rb"-----BEGIN ([A-Z0-9 ]{1,32})-----.*?-----END \1-----", re.DOTALL)
_SUBJECT_CHARACTERS: Final = 200


@dataclass(frozen=True)
class Crl:
    """One list, in DER. `name` is its file, for messages."""

    name: str
    raw: bytes

    @cached_property
    def list(self) -> x509.CertificateRevocationList:
        return x509.load_der_x509_crl(self.raw)

    @cached_property
    def issuer(self) -> bytes:
        return self.list.issuer.public_bytes()

    @cached_property
    def validity(self) -> Validity:
        number = extension_of(self.list, x509.CRLNumber)
        return Validity(
            self.list.last_update_utc, self.list.next_update_utc, None if number is None else number.crl_number
        )

    @cached_property
    def key_id(self) -> bytes | None:
        """Return the identifier of the key that signed it, if it names one."""
        found = extension_of(self.list, x509.AuthorityKeyIdentifier)
        return None if found is None else found.key_identifier

    @cached_property
    def scope(self) -> x509.IssuingDistributionPoint | None:
        """Return which of the issuer's certificates the list covers. None: all."""
        return extension_of(self.list, x509.IssuingDistributionPoint)

    @cached_property
    def serials(self) -> frozenset[int]:
        """Return every serial number in it: each is refused, whatever the extensions of its entry say."""
        return frozenset(each.serial_number for each in self.list)

    def covers(self, certificate: x509.Certificate) -> bool:
        """Whether a certificate of this issuer is in the list's scope (RFC 5280, section 6.3.3 (b)(2))."""
        if self.scope is None:
            return True
        constraints = extension_of(certificate, x509.BasicConstraints)
        is_ca = constraints is not None and constraints.ca
        if (self.scope.only_contains_user_certs and is_ca) or (self.scope.only_contains_ca_certs and not is_ca):
            return False
        return self.scope.full_name is None or not _points(certificate).isdisjoint(self.scope.full_name)

    def describe(self) -> str:
        """Describe the list in one printable line."""
        return f"list of revoked certificates of {describe_name(self.list.issuer)} in {self.name!a}"


def read(name: str, content: bytes) -> list[Crl]:
    """Return the lists of a file: one in DER, or one or more in PEM form. Raises ValueError, which says what is wrong."""
    try:
        found = [Crl(name, each) for each in _split(content)]
        for each in found:
            _check_form(each)
    except UNREADABLE as error:
        text = error if type(error) is ValueError else "it is malformed"
        raise ValueError(f"{name} is not a list of revoked certificates: {text}"[:_SUBJECT_CHARACTERS]) from None
    return found


def _split(content: bytes) -> list[bytes]:
    if not content.lstrip().startswith(b"-----BEGIN"):
        return [content]
    blocks = list(_BLOCK.finditer(content))
    if not blocks or {each[1] for each in blocks} != {b"X509 CRL"} or len(blocks) > LISTS:
        raise ValueError(f"a PEM file must have 1 to {LISTS} blocks, all of X509 CRL")
    return [x509.load_pem_x509_crl(each[0]).public_bytes(Encoding.DER) for each in blocks]


def _check_form(found: Crl) -> None:
    """Check what can be checked without the issuer. Raises ValueError."""
    validity, scope, _ = found.validity, found.scope, (found.issuer, found.key_id, len(found.list))
    if validity.end is None:
        raise ValueError("it has no nextUpdate, so it would never expire")
    if validity.end < validity.start:
        raise ValueError("its nextUpdate is before its thisUpdate")
    algorithm = found.list.signature_hash_algorithm  # None: Ed25519
    if algorithm is not None and not isinstance(algorithm, _HASHES):
        raise ValueError(f"it is signed with {algorithm.name}: use SHA-256, SHA-384 or SHA-512")
    for each in found.list.extensions:
        if isinstance(each.value, x509.DeltaCRLIndicator):
            raise ValueError("it is a delta list: use the complete one")
        if each.critical and not isinstance(each.value, x509.IssuingDistributionPoint):
            raise ValueError(f"it has the unknown critical extension {each.oid.dotted_string}")
    if scope is None:
        return
    if scope.indirect_crl:
        raise ValueError("it is an indirect list, with certificates of other issuers: use the issuer's own")
    if scope.only_some_reasons or scope.only_contains_attribute_certs or scope.relative_name is not None:
        raise ValueError("it covers only some reasons, or no certificates: use the complete list")


# -- checking -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrlRule:
    """The revocation rule of one table, or of all tables of a policy. Only `max_age` is part of the policy's digest."""

    max_age: int  # seconds
    lists: tuple[Crl, ...]
    authorities: frozenset[bytes]  # identities of authorities under which every certificate needs a list
    memory: Memory = field(default=freshness.PROCESS, compare=False, repr=False)

    @classmethod
    def read(
        cls, files: Iterable[tuple[str, bytes]] | None, max_age: int | None, authorities: Iterable[bytes]
    ) -> CrlRule | None:
        """Return the rule of a table, or None if it has none. `authorities` are in DER. Raises ValueError."""
        if (files is None) != (max_age is None):
            raise ValueError("crl and crl_max_age belong together: name the lists, and how old the newest may be")
        if files is None or max_age is None:
            return None
        lists = tuple(each for name, content in files for each in read(name, content))
        identities = (identity(x509.load_der_x509_certificate(each)) for each in authorities)
        return cls(max_age, lists, frozenset(identities))

    @classmethod
    def merge(cls, found: Iterable[CrlRule], memory: Memory) -> CrlRule | None:
        """Return the strictest: all lists, all authorities and the smallest age. None: there are none."""
        rules = list(found)
        if not rules:
            return None
        lists = dict.fromkeys(each for rule in rules for each in rule.lists)
        authorities = frozenset[bytes]().union(*(rule.authorities for rule in rules))
        return cls(min(rule.max_age for rule in rules), tuple(lists), authorities, memory)

    @cached_property
    def _by_issuer(self) -> dict[bytes, list[Crl]]:
        found: dict[bytes, list[Crl]] = {}
        for each in self.lists:
            found.setdefault(each.issuer, []).append(each)
        return found

    @cached_property
    def _signed(self) -> dict[x509.Certificate, list[Crl]]:
        """The lists that an issuer has signed; verified once."""
        return {}

    def newest_of(self, authority: bytes) -> Crl | None:
        """Return the newest list that an authority, in DER, has signed. Raises AdmissionError if one is forged."""
        issuer = x509.load_der_x509_certificate(authority)
        named = self._by_issuer.get(issuer.subject.public_bytes(), [])
        return (
            max(self._signed_by(issuer, named), key=lambda each: each.validity.order, default=None) if named else None
        )

    def check(self, name: str, chain: Sequence[x509.Certificate], now: float) -> None:
        """Check a verified chain, leaf first and authority last. `name` is the leaf's. Raises AdmissionError.

        Every certificate but the last needs a list if the authority is one of a rule with lists. Otherwise, a list
        of another rule still counts if the same issuer has signed it.
        """
        is_required = identity(chain[-1]) in self.authorities
        for depth, (certificate, issuer) in enumerate(pairwise(chain)):
            what = f"the certificate of {name}"
            if depth:
                what = f"the certificate of authority {describe_name(certificate.subject)}, above that of {name},"
            newest = self._newest(certificate, issuer, what, is_required)
            if newest is not None:
                self._check_one(newest, certificate, issuer, what, now)

    def _newest(
        self, certificate: x509.Certificate, issuer: x509.Certificate, what: str, is_required: bool
    ) -> Crl | None:
        named = self._by_issuer.get(issuer.subject.public_bytes(), [])
        covering = [each for each in self._signed_by(issuer, named) if each.covers(certificate)] if named else []
        if not covering:
            if is_required:
                text = f"there is no list of revoked certificates of {describe_name(issuer.subject)} for {what}"
                raise AdmissionError(
                    f"{text}: put the list of that authority where the policy's crl points",
                    to_peer="this worker has no list of revoked certificates of the certificate's issuer",
                )
            return None
        newest = max(covering, key=lambda each: each.validity.order)
        for each in covering:
            if each is newest:  # comparing its serial numbers with themselves would read all of them
                continue
            is_same = each.validity.order == newest.validity.order
            if each.validity.contradicts(newest.validity) or (is_same and each.serials != newest.serials):
                text = f"the {newest.describe()} and the one in {each.name!a} contradict each other: keep the newest"
                raise _unusable(text)
        return newest

    def _signed_by(self, issuer: x509.Certificate, named: list[Crl]) -> list[Crl]:
        if issuer not in self._signed:
            usage = extension_of(issuer, x509.KeyUsage)
            if usage is None or not usage.crl_sign:
                raise _unusable(f"{describe_name(issuer.subject)} may not sign lists: its key usage lacks cRLSign")
            self._signed[issuer] = [each for each in named if _is_of(each, issuer)]
        return self._signed[issuer]

    def _check_one(
        self, newest: Crl, certificate: x509.Certificate, issuer: x509.Certificate, what: str, now: float
    ) -> None:
        by = describe_name(issuer.subject)
        if certificate.serial_number in newest.serials:
            raise AdmissionError(f"{what} was revoked by {by}{_details(newest, certificate)}: it needs a new one")
        scope = None if newest.scope is None else newest.scope.public_bytes()
        self.memory.check((identity(issuer), scope), newest.validity, f"the list of revoked certificates of {by}")
        if (objection := newest.validity.objection(self.max_age, now, KEY)) is not None:
            raise _unusable(f"the {newest.describe()} {objection}: fetch the current one")


@lru_cache(maxsize=256)
def identity(authority: x509.Certificate) -> bytes:
    """Return name and key of an authority, which its renewed certificates share."""
    key = authority.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return authority.subject.public_bytes() + key


def describe_name(name: x509.Name) -> str:
    """Return a name in printable characters, quoted and not too long."""
    return ascii(name.rfc4514_string()[:_SUBJECT_CHARACTERS])


def _is_of(found: Crl, issuer: x509.Certificate) -> bool:
    """Whether the issuer signed the list. Raises AdmissionError if it names the issuer and its key, and is not signed by it.

    Another authority may have the same name; then the list names another key.
    """
    own = extension_of(issuer, x509.SubjectKeyIdentifier)
    if found.key_id is not None and own is not None and found.key_id != own.digest:
        return False
    key = issuer.public_key()
    try:
        if found.list.is_signature_valid(key):  # type: ignore[arg-type]
            return True
    except (InvalidSignature, *UNREADABLE):
        pass
    raise _unusable(f"the {found.describe()} was not signed by that authority: remove it, or fetch it again")


def _unusable(text: str) -> AdmissionError:
    return AdmissionError(
        text, to_peer="this worker's list of revoked certificates of the certificate's issuer is not usable"
    )


def _details(found: Crl, certificate: x509.Certificate) -> str:
    entry = found.list.get_revoked_certificate_by_serial_number(certificate.serial_number)
    if entry is None:
        return ""
    try:
        reason = f" ({entry.extensions.get_extension_for_class(x509.CRLReason).value.reason.value})"
    except (x509.ExtensionNotFound, *UNREADABLE):
        reason = ""
    return f" on {entry.revocation_date_utc:%Y-%m-%d}{reason}"


def _points(certificate: x509.Certificate) -> frozenset[x509.GeneralName]:
    """Return where a certificate says that the complete lists of its own issuer are."""
    points = extension_of(certificate, x509.CRLDistributionPoints) or ()
    complete = (point for point in points if not point.crl_issuer and not point.reasons)
    return frozenset(name for point in complete for name in point.full_name or ())
