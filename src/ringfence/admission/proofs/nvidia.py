"""Proof by NVIDIA GPUs: each presented GPU signs the nonce, and its measurements are the policy's reference values.

    report (SPDM) ── signed by ──► attestation key ── certified, with its firmware ──► NVIDIA's root (pinned)
      ├ nonce = SHA-256 of the binding: these GPUs, on this connection, now
      └ model, driver, VBIOS, measurements: as in one of the policy's files of reference values

proof = certificates, each once · for each GPU: indices of its certificates, leaf first and without the root; report
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from ringfence import keys
from ringfence.admission import encoding, roots
from ringfence.admission.policy import Clock
from ringfence.admission.policy_file.policy_file import duration_text
from ringfence.admission.policy_file.toml_table import TomlTable
from ringfence.admission.proofs import nvidia_chain, ocsp_status, spdm
from ringfence.admission.proofs import reference_values as reference_values
from ringfence.admission.proofs.attestation import AttestationVerifier
from ringfence.admission.proofs.nvidia_chain import CertifiedGpu
from ringfence.admission.proofs.reference_values import ReferenceValues
from ringfence.errors import AdmissionError, ProtocolError

KIND: Final = 5
GPUS: Final = range(1, 17)  # of one worker
_SERIAL_BYTES: Final = 20
_PROTECTED_PCIE: Final = {None: False, b"\x55": False, b"\xaa": True}  # older drivers do not report it


@dataclass(frozen=True)
class Gpu:
    """The evidence of one GPU: its report, and its certificate chain, leaf first and without the root."""

    report: bytes
    chain: tuple[bytes, ...]


@dataclass(frozen=True)
class Rules:
    """The table [admit.nvidia]."""

    reference_values: tuple[ReferenceValues, ...]
    gpus: int | None = None  #     the exact number; None: at least one
    protected_pcie: bool = False  # whether data between GPUs may be in plaintext
    revoked: frozenset[int] = frozenset()  # serial numbers of certificates
    revocation: ocsp_status.OcspRule | None = None  # None: this rule asks for no OCSP responses
    shared: ocsp_status.OcspRule | None = None  # of all rules of the policy

    def content(self) -> bytes:
        """Return a canonical encoding, with the required age of OCSP responses and without the responses."""
        return b"".join(
            (
                encoding.number(len(self.reference_values), 2),
                *sorted(encoding.blob(each.content()) for each in self.reference_values),
                encoding.number(self.gpus or 0, 1),
                encoding.number(self.protected_pcie, 1),
                *(encoding.number(serial, _SERIAL_BYTES) for serial in sorted(self.revoked)),
                b"" if self.revocation is None else encoding.number(self.revocation.max_age, 8),
            )
        )

    def explain(self) -> list[str]:
        count = "every GPU that it presents, at least one," if self.gpus is None else f"exactly {self.gpus} GPUs, each"
        lines = [f"presents {count} with a report signed under NVIDIA's root and the reference values of one of:"]
        lines += [f"  {each}" for each in sorted(map(str, self.reference_values))]
        if self.protected_pcie:
            lines.append("GPUs in protected-PCIe mode are accepted: data between them over NVLink is in plaintext")
        if self.revoked:
            lines.append(f"{len(self.revoked)} certificates are refused as revoked")
        if self.revocation is None:
            lines.append("revoked certificates are not detected otherwise (ocsp)")
        else:
            age = duration_text(self.revocation.max_age)
            lines.append(f"not revoked by the newest OCSP responses of NVIDIA, which are at most {age} old")
        lines.append("a GPU does not attest which machine it is in: ask for tdx or snp in the same rule")
        return lines


def read_rules(table: TomlTable) -> Rules:
    """Read the policy's table [admit.nvidia]. Raises PolicyError."""
    files = [
        reference_values.read(content, f"{table.where}, reference values {count}")
        for count, content in enumerate(table.files("reference_values"), 1)
    ]
    if len({each.key for each in files}) != len(files):
        raise table.error("two files have reference values for one model, driver and VBIOS: put both values into one")
    rules = Rules(
        reference_values=tuple(files),
        gpus=table.number("gpus", None, least=GPUS[0], most=GPUS[-1]),
        protected_pcie=table.flag("protected_pcie", False),
        revoked=frozenset(_serial(table, each) for each in table.texts("revoked", ())),
    )
    responses = table.contents("ocsp", None, limit=ocsp_status.RESPONSE_BYTES)
    max_age = table.duration("ocsp_max_age", None)
    table.done()
    try:
        return replace(rules, revocation=ocsp_status.OcspRule.read(responses, max_age))
    except ValueError as error:
        raise table.error(f"ocsp: {error}") from None


@dataclass(frozen=True)
class Claims:
    """The claims of one verified report."""

    device: str
    model: str
    driver: str | None  # a switch has none
    vbios: str
    firmware_id: bytes
    measurements: dict[int, bytes]
    protected_pcie: bool
    certificates: tuple[x509.Certificate, ...]  # leaf first, root last

    @property
    def serials(self) -> tuple[int, ...]:
        """The serial numbers of all certificates below the root."""
        return tuple(each.serial_number for each in self.certificates[:-1])

    def reference_values(self) -> ReferenceValues:
        """Return the reference values with which a policy would admit this GPU. Raises AdmissionError."""
        if self.driver is None:
            raise AdmissionError(f"{self.device} is not a GPU: it names no driver")
        values: dict[int, tuple[bytes, ...]] = {index: (value,) for index, value in self.measurements.items()}
        return ReferenceValues(self.model, self.driver, self.vbios, (self.firmware_id,), values)


def nonce_of(binding_digest: bytes) -> bytes:
    """Return the nonce that the GPUs sign: 32 bytes, so the binding's 64 are hashed."""
    return hashlib.sha256(binding_digest).digest()


@cache
def pinned_root() -> x509.Certificate:
    """Return the NVIDIA Device Identity CA, which is part of this package."""
    return nvidia_chain.load_root(roots.read("nvidia-device-root.pem"))


# -- verifying --------------------------------------------------------------------------------------------------------


def verify_report(gpu: Gpu, nonce: bytes, now: float, *, root: x509.Certificate | None = None) -> Claims:
    """Verify the chain, the signature and the nonce of one device, whatever its model and measurements.

    Raises AdmissionError.
    """
    device = nvidia_chain.verify(gpu.chain, root or pinned_root(), datetime.fromtimestamp(now, UTC))
    return claims_of(device, gpu.report, nonce)


def claims_of(device: CertifiedGpu, report_bytes: bytes, nonce: bytes) -> Claims:
    """Verify a report that `device` signed over `nonce`, and return its claims. Raises AdmissionError."""
    report = spdm.read(report_bytes)
    half = spdm.SIGNATURE_BYTES // 2
    r, s = (int.from_bytes(part, "big") for part in (report.signature[:half], report.signature[half:]))
    try:
        device.key.verify(encode_dss_signature(r, s), report.signed, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise AdmissionError(f"the report of {device.name} is not signed by its attestation key") from None
    _check_nonce(device.name, report.nonce, nonce)
    # With older drivers, only the certificate has it.
    firmware_id = report.opaque.get(spdm.FIRMWARE_ID, device.firmware_id)
    if firmware_id != device.firmware_id:
        raise AdmissionError(f"the report of {device.name} was made by other firmware than its key was certified for")
    mode = report.opaque.get(spdm.PROTECTED_PCIE)
    if mode not in _PROTECTED_PCIE:
        raise AdmissionError(
            f"the report of {device.name} has a protected-PCIe mode that this release does not support"
        )
    return Claims(
        device=device.name,
        model=device.model,
        driver=spdm.driver_version(report),
        vbios=spdm.vbios_version(report),
        firmware_id=firmware_id,
        measurements=report.measurements,
        protected_pcie=_PROTECTED_PCIE[mode],
        certificates=device.certificates,
    )


def _check_nonce(device: str, found: bytes, nonce: bytes) -> None:
    if not keys.same(found, nonce):
        raise AdmissionError(f"the report of {device} has another nonce: it was not made for this connection")


def verify(
    proof: bytes, binding_digest: bytes, rules: Rules, now: float, *, root: x509.Certificate | None = None
) -> tuple[Claims, ...]:
    """Verify every GPU of a proof. Raises AdmissionError.

    A third party can verify a stored preimage and proof in the same way.
    """
    gpus = decode(proof)
    if rules.gpus is not None and len(gpus) != rules.gpus:  # before the expensive checks
        to_peer = f"{len(gpus)} GPUs are presented, where the policy asks for"
        raise AdmissionError(f"{to_peer} exactly {rules.gpus}", to_peer=f"{to_peer} another number")
    nonce = nonce_of(binding_digest)
    for gpu in gpus:  # cheap and not authenticated; repeated below on the signed report
        _check_nonce("a GPU", spdm.request_nonce(gpu.report), nonce)
    claims = tuple(verify_report(gpu, nonce, now, root=root) for gpu in gpus)
    if len({each.device for each in claims}) != len(claims):
        raise AdmissionError("one GPU is presented twice: present each once")
    for each in claims:
        _check(each, rules, now)
    return claims


def _check(claims: Claims, rules: Rules, now: float) -> None:
    revoked = [serial for serial in claims.serials if serial in rules.revoked]
    if revoked:
        raise AdmissionError(f"the policy lists certificate {revoked[0]:X} of {claims.device} as revoked")
    revocation = rules.shared or rules.revocation
    if revocation is not None:
        revocation.check(claims.device, claims.certificates, now)
    if claims.protected_pcie and not rules.protected_pcie:
        raise AdmissionError(
            f"{claims.device} is in protected-PCIe mode, in which GPUs exchange data in plaintext: set its mode to "
            "confidential computing, or accept this with `protected_pcie = true` in the policy"
        )
    wanted = (claims.model, claims.driver, claims.vbios)
    for each in rules.reference_values:
        if each.key == wanted:
            each.compare(claims.firmware_id, claims.measurements)
            return
    known = "; ".join(sorted(map(str, rules.reference_values)))
    to_peer = (
        f"{claims.device} runs driver {claims.driver or 'none'} and VBIOS {claims.vbios}, for which the policy has no "
        "reference values"
    )
    raise AdmissionError(f"{to_peer}. It has: {known}", to_peer=to_peer)


def verifier(rules: Rules, clock: Clock, *, root: x509.Certificate | None = None) -> AttestationVerifier[Rules]:
    """Return the verifier of GPUs by the rules of one table. `root` is for tests; a policy cannot set it."""
    check = partial(verify, root=root)
    return AttestationVerifier(KIND, "NVIDIA GPU attestation", rules, clock, check, sources="GPUs")


# -- encoding -------------------------------------------------------------------------------------------------------


def encode(gpus: Sequence[Gpu]) -> bytes:
    """Encode a proof. Each certificate is included once, in the order of first use: GPUs of a machine share most."""
    if len(gpus) not in GPUS:
        raise AdmissionError(f"a worker presents {GPUS[0]} to {GPUS[-1]} GPUs, not {len(gpus)}")
    table = list(dict.fromkeys(certificate for gpu in gpus for certificate in gpu.chain))
    parts = [encoding.number(len(table), 1), *map(encoding.blob, table), encoding.number(len(gpus), 1)]
    for gpu in gpus:
        places = [table.index(certificate) for certificate in gpu.chain]
        parts += [encoding.number(len(places), 1), bytes(places), encoding.blob(gpu.report)]
    return b"".join(parts)


def decode(proof: bytes) -> tuple[Gpu, ...]:
    """Decode a proof in its only encoding. Raises AdmissionError."""
    try:
        gpus = _decode(encoding.Reader(proof))
    except ProtocolError as error:
        raise AdmissionError(f"a GPU proof is malformed: {error}") from None
    if encode(gpus) != proof:
        raise AdmissionError("a GPU proof is malformed: its certificates are not in order")
    return gpus


def _decode(reader: encoding.Reader) -> tuple[Gpu, ...]:
    table = [reader.blob(nvidia_chain.CERTIFICATE_BYTES) for _ in range(reader.number(1))]
    gpus = []
    for _ in range(reader.number(1)):
        places = reader.take(reader.number(1))
        if any(place >= len(table) for place in places):
            raise AdmissionError("a GPU proof is malformed: it refers to a certificate that is missing")
        gpus.append(Gpu(reader.blob(spdm.REPORT_BYTES), tuple(table[place] for place in places)))
    reader.end()
    return tuple(gpus)


def _serial(table: TomlTable, text: str) -> int:
    try:
        serial = int(text, 16)
        serial.to_bytes(_SERIAL_BYTES, "big")
    except (ValueError, OverflowError):
        raise table.error("revoked must list serial numbers in hexadecimal digits") from None
    return serial
