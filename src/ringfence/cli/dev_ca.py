"""The certificate authority in a folder with which `ringfence certificate` issues certificates."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringfence.admission.proofs.identity import is_trust_domain
from ringfence.config.private_files import read_private, replace_file, write_new
from ringfence.errors import ConfigurationError

_AUTHORITY_DAYS = 3650
_File = tuple[Path, bytes, int, str]  # path, content, mode, and what an error message calls it
_BEFORE = datetime.timedelta(minutes=5)  # tolerance for clocks that differ


class Authority:
    """A certificate authority whose certificate names its trust domain, as those of SPIFFE do."""

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, *, new: bool = False
    ) -> None:
        self.folder = folder
        self.file = folder / "ca.pem"
        self._unwritten = _files(folder, "ca", certificate, key) if new else []
        self._certificate = certificate
        self._key = key
        self.trust_domain = trust_domain_of(certificate) or ""

    @classmethod
    def open_or_make(cls, folder: Path, trust_domain: str | None, default: str) -> Authority:
        """Open the authority in a folder, or make one in memory; `issue` writes it. Raises ConfigurationError."""
        if (folder / "ca.pem").exists() or (folder / "ca.key").exists():
            return cls.open(folder, trust_domain)
        return cls._make(folder, trust_domain or default)

    @classmethod
    def open(cls, folder: Path, trust_domain: str | None = None) -> Authority:
        """Open the authority in a folder. Raises ConfigurationError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = load_pem_private_key(read_private(folder / "ca.key", "key"), None)
            found = trust_domain_of(certificate)
        except OSError as error:
            raise ConfigurationError(
                f"cannot read {error.filename}: {error.strerror}. An authority needs both ca.pem and ca.key: "
                "restore the missing file, or name a new folder"
            ) from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(f"cannot read the authority in {folder}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key() or not found:
            raise ConfigurationError(f"ca.pem and ca.key in {folder} were not made by one `ringfence certificate new`")
        if trust_domain not in (None, found):
            raise ConfigurationError(f"the authority in {folder} is for trust domain {found}, not {trust_domain}")
        return cls(folder, certificate, key)

    @classmethod
    def _make(cls, folder: Path, trust_domain: str) -> Authority:
        if not is_trust_domain(trust_domain):
            raise ConfigurationError(f"{trust_domain!a} is not a trust domain: use a name such as example.org")
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ringfence authority of {trust_domain}"[:64])])
        begun = builder(name, name, key.public_key(), key.public_key(), f"spiffe://{trust_domain}", _AUTHORITY_DAYS)
        certificate = (
            begun.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(issues=True), critical=True)
            .sign(key, hashes.SHA384())
        )
        return cls(folder, certificate, key, new=True)

    def issue(self, names: Sequence[str], days: int) -> list[dict[str, str]]:
        """Write a certificate and key for each name, and those of a new authority.

        Returns the identity and the paths of each. Raises ConfigurationError, and writes nothing, if any file exists.
        """
        taken = [path for name in names for path in _paths(self.folder, name) if path.exists()]
        if taken:
            raise ConfigurationError(f"{taken[0]} exists, and certificates are never overwritten: choose another name")
        files, made = list(self._unwritten), []
        for name in names:
            key = ec.generate_private_key(ec.SECP256R1())
            identity, certificate = self._sign(name, key.public_key(), days)
            files += _files(self.folder, name, certificate, key)
            chain, secret = (str(path.absolute()) for path in _paths(self.folder, name))
            made.append({"id": identity, "certificate": chain, "key": secret})
        _write_all(self.folder, files)
        return made

    def renew(self, names: Sequence[str], days: int) -> list[dict[str, str]]:
        """Replace the certificate of each name by one with the same key and new dates; the older ones stay beside it.

        Returns the identity and the path of each. Raises ConfigurationError, and then every certificate is as before.
        """
        known = self._known_list(self.folder / "ca.crl")
        files, made = [], []
        for name in names:
            certificates = self._certificates(name)
            for each in certificates:
                if known is not None and known.get_revoked_certificate_by_serial_number(each.serial_number) is not None:
                    raise ConfigurationError(f"the certificate of {name} was revoked: issue one under another name")
            key = certificates[0].public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            identity, certificate = self._sign(name, key, days)
            now = datetime.datetime.now(datetime.UTC)
            older = [each for each in certificates if each.not_valid_after_utc > now]
            chain = _paths(self.folder, name)[0]
            files += [(_older(chain), b"".join(map(_pem, older))), (chain, _pem(certificate))]
            made.append({"id": identity, "certificate": str(chain.absolute())})
        for path, content in files:
            replace_file(path, content, 0o644)
        return made

    def revoke(self, names: Sequence[str], days: int) -> tuple[Path, list[int]]:
        """Write the list of revoked certificates: those of before, and those of `names`. It is valid for `days`.

        Returns its path and the serial numbers in it. Raises ConfigurationError, and then the list is unchanged.
        """
        path = self.folder / "ca.crl"
        known = self._known_list(path)
        serials = [each.serial_number for name in names for each in self._certificates(name)]
        now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        entries = {} if known is None else {each.serial_number: each.revocation_date_utc for each in known}
        entries = {**dict.fromkeys(serials, now), **entries}
        number = 1 if known is None else 1 + known.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(now)
            .next_update(now + datetime.timedelta(days=days))
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(key_id, critical=False)
        )
        for serial, date in entries.items():
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date)
            builder = builder.add_revoked_certificate(entry.build())
        replace_file(path, builder.sign(self._key, hashes.SHA384()).public_bytes(Encoding.PEM), 0o644)
        return path, list(entries)

    def _known_list(self, path: Path) -> x509.CertificateRevocationList | None:
        try:
            found = x509.load_pem_x509_crl(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read {path}, to which new entries are added: {error}") from error
        if not found.is_signature_valid(self._key.public_key()):
            raise ConfigurationError(f"{path} is not a list of this authority: restore it, or move it away")
        return found

    def _certificates(self, name: str) -> list[x509.Certificate]:
        """The certificate of a name, and those before it that have not expired: revoking one means all of them."""
        path = _paths(self.folder, name)[0]
        older = _older(path)
        try:
            found = x509.load_pem_x509_certificates(path.read_bytes() + (older.read_bytes() if older.exists() else b""))
            for each in found:
                each.verify_directly_issued_by(self._certificate)
        except OSError as error:
            raise ConfigurationError(f"cannot read the certificate of {name}, {path}: {error.strerror}") from error
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ConfigurationError(f"{path} is not a certificate of this authority") from error
        return found

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, days: int) -> tuple[str, x509.Certificate]:
        identity = f"spiffe://{self.trust_domain}/worker/{name}"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = self._certificate.subject
        begun = builder(subject, issuer, key, self._key.public_key(), identity, days)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        certificate = (
            begun.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(issues=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .sign(self._key, hashes.SHA384())
        )
        return identity, certificate


def trust_domain_of(certificate: x509.Certificate) -> str | None:
    """Return the trust domain in an authority's certificate, or None."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    found = names.get_values_for_type(x509.UniformResourceIdentifier)
    domain = found[0].removeprefix("spiffe://") if len(found) == 1 and found[0].startswith("spiffe://") else ""
    return domain if is_trust_domain(domain) else None


def builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    uri: str,
    days: int,
) -> x509.CertificateBuilder:
    """Return what the certificates of an authority and of its workers have in common."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def key_usage(*, issues: bool) -> x509.KeyUsage:
    """Return the key usage of an authority or of a worker."""
    return x509.KeyUsage(
        digital_signature=not issues,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=issues,
        crl_sign=issues,
        encipher_only=False,
        decipher_only=False,
    )


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


def _older(chain: Path) -> Path:
    """Where the certificates are that were renewed and have not expired."""
    return chain.with_suffix(".older.pem")


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _files(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[_File]:
    chain, secret = _paths(folder, name)
    return [
        (secret, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600, "a key"),
        (chain, _pem(certificate), 0o644, "a certificate"),
    ]


def _write_all(folder: Path, files: Sequence[_File]) -> None:
    """Write all files or none, so that a failed call can be repeated."""
    folders = [each for each in (folder, *folder.parents) if not each.exists()]
    written: list[Path] = []
    try:
        _make_folder(folder)
        for path, content, mode, what in files:
            write_new(path, content, mode, what)
            written.append(path)
    except BaseException:
        for remove in (*(path.unlink for path in written), *(each.rmdir for each in folders)):
            with contextlib.suppress(OSError):
                remove()
        raise


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make {folder}: {error.strerror}") from error
