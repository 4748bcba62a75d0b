"""AMD's certificate revocation lists, one for each product line, signed by its root.

They come from files that the policy names, so all workers use the same ones, and a peer cannot present an older one. A list can
revoke what the root has signed: the keys that sign VCEKs and VLEKs, and with them every chip below.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from ringfence.errors import AdmissionError

_SCHEME: Final = padding.PSS(padding.MGF1(hashes.SHA384()), 48)
_MESSAGE_CHARACTERS: Final = 200
FETCH: Final = "AMD serves it at https://kdsintf.amd.com/vcek/v1/LINE/crl"


@dataclass(frozen=True)
class RevocationList:
    """One list. Its signature is checked when a report is verified."""

    raw: bytes

    @classmethod
    def parse(cls, content: bytes) -> RevocationList:
        """Parse a list in DER or PEM form. Raises ValueError."""
        try:
            made = cls(content)
            if made.end < made.list.last_update_utc:
                raise ValueError("its next update is before its last update")
            # The library reads these when they are asked for: here, not before a verifier.
            _ = (made.issuer, len(made.list))
            return made
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:  # TypeError: strange names
            raise ValueError(f"not a certificate revocation list: {error}"[:_MESSAGE_CHARACTERS]) from None

    @cached_property
    def list(self) -> x509.CertificateRevocationList:
        is_text = self.raw.lstrip().startswith(b"-----BEGIN")
        return x509.load_pem_x509_crl(self.raw) if is_text else x509.load_der_x509_crl(self.raw)

    @property
    def end(self) -> datetime:
        end = self.list.next_update_utc
        if end is None:
            raise ValueError("it has no next update")
        return end

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.raw).digest()

    @property
    def issuer(self) -> bytes:
        return self.list.issuer.public_bytes()

    def describe(self) -> str:
        """Describe the list in one printable line."""
        return f"list of revoked certificates of {self.list.issuer.rfc4514_string()[:_MESSAGE_CHARACTERS]!a}"


def check(
    lists: Sequence[RevocationList],
    others: Sequence[RevocationList],
    root: x509.Certificate,
    signer: x509.Certificate,
    name: str,
    now: float,
) -> None:
    """Check that every list of this root is signed and current, and does not revoke `signer`. Raises AdmissionError.

    `lists` are those of the rule: if it has any, one must be of this root. `others` are those of the policy's other rules.
    """
    own = [each for each in dict.fromkeys((*lists, *others)) if each.issuer == root.subject.public_bytes()]
    if lists and not own:
        to_peer = f"there is no list of revoked certificates for {name}"
        raise AdmissionError(f"{to_peer}: name it in crl; {FETCH}", to_peer=to_peer)
    moment = datetime.fromtimestamp(now, UTC)
    for each in own:
        _check_signed(each, root)
        if not each.list.last_update_utc <= moment <= each.end:
            raise AdmissionError(
                f"the list of revoked certificates for {name} is valid from {each.list.last_update_utc:%Y-%m-%d} to "
                f"{each.end:%Y-%m-%d}, and it is {moment:%Y-%m-%d}: fetch a new one; {FETCH}",
                to_peer=f"the policy's list of revoked certificates for {name} is not valid now",
            )
        if each.list.get_revoked_certificate_by_serial_number(signer.serial_number) is not None:
            raise AdmissionError(f"AMD has revoked the key that signed its endorsement certificate, for {name}")


def objection(revoked: RevocationList, roots: Iterable[x509.Certificate], now: float) -> str | None:
    """Return why this list would refuse every guest of its product line, other than its expiry, or None."""
    root = next((each for each in roots if each.subject.public_bytes() == revoked.issuer), None)
    if root is None:
        return f"none of AMD's roots issued it; {FETCH}"
    try:
        _check_signed(revoked, root)
    except AdmissionError as error:
        return str(error)
    begin = revoked.list.last_update_utc
    return (
        f"it is valid from {begin:%Y-%m-%d} on: check the clock" if datetime.fromtimestamp(now, UTC) < begin else None
    )


def _check_signed(revoked: RevocationList, root: x509.Certificate) -> None:
    key = root.public_key()
    if not isinstance(key, rsa.RSAPublicKey):
        raise AdmissionError("the root's key is not an RSA key")
    try:
        key.verify(revoked.list.signature, revoked.list.tbs_certlist_bytes, _SCHEME, hashes.SHA384())
    except InvalidSignature:
        text = "a list of revoked certificates in the policy was not signed by AMD"
        raise AdmissionError(f"{text}: fetch it again; {FETCH}", to_peer=text) from None
