"""A strict parser of the report that Azure's paravisor (HCL) keeps in the vTPM, and of the runtime data in it.

    "HCLA" · version · size · request · status · 12 bytes · hardware report (1,184) · size · version · type · hash · size · JSON
                                                                                                       (little-endian)

The hardware report is that of the paravisor: its report data is the SHA-256 of the JSON, the runtime data, which names the
public attestation key of the vTPM. Nothing signs the headers, so a proof leaves them out.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa

from ringfence.admission.encoding import is_printable
from ringfence.admission.proofs import jose
from ringfence.errors import AdmissionError

HCL_BYTES: Final = 16 * 1024
RUNTIME_BYTES: Final = 8 * 1024
HARDWARE_BYTES: Final = 1184  # of an SEV-SNP report; a TD report is padded to it
TD_REPORT_BYTES: Final = 1024
TD_REPORT_DATA: Final = slice(128, 192)
SNP: Final = 2
TDX: Final = 4

_HEADER: Final = struct.Struct("<4s4I12x")
_REQUEST: Final = struct.Struct("<5I")
_MAGIC: Final = b"HCLA"
_SHA256: Final = 1
_KEY_NAME: Final = "HCLAkPub"
_KEY_BITS: Final = (2048, 3072, 4096)
_EXPONENT: Final = 65537
_VM_ID_CHARACTERS: Final = 64


@dataclass(frozen=True)
class HclReport:
    """The parts of a report that a proof contains."""

    kind: int  #             SNP or TDX
    hardware: bytes  #       an SEV-SNP report, or a TD report (TDREPORT)
    runtime_data: bytes  #   JSON

    @property
    def is_consistent(self) -> bool:
        """Whether the hardware report covers the runtime data."""
        place = slice(0x50, 0x90) if self.kind == SNP else TD_REPORT_DATA
        return self.hardware[place] == report_data_of(self.runtime_data)


def read(data: bytes) -> HclReport:
    """Parse a report as the vTPM stores it, with trailing zeros. Raises AdmissionError."""
    if len(data) > HCL_BYTES:
        raise AdmissionError(f"an HCL report of {len(data)} bytes, where at most {HCL_BYTES} are allowed")
    start = _HEADER.size + HARDWARE_BYTES
    at = start + _REQUEST.size
    if len(data) < at:
        raise AdmissionError("the HCL report is truncated")
    magic, _, size, _, _ = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise AdmissionError("not an HCL report")
    request_bytes, _, kind, hash_type, length = _REQUEST.unpack_from(data, start)
    if length > RUNTIME_BYTES or request_bytes != _REQUEST.size + length or size != start + request_bytes:
        raise AdmissionError("an HCL report with inconsistent lengths")
    if hash_type != _SHA256:
        raise AdmissionError(f"an HCL report with hash type {hash_type}, not SHA-256")
    if len(data) < at + length or any(data[at + length :]):
        raise AdmissionError("the HCL report is truncated, or has trailing data")
    hardware = data[_HEADER.size : start]
    if kind == TDX:
        if any(hardware[TD_REPORT_BYTES:]):
            raise AdmissionError("there is trailing data after the TD report")
        hardware = hardware[:TD_REPORT_BYTES]
    elif kind != SNP:
        raise AdmissionError(f"an HCL report of type {kind}, neither SEV-SNP nor TDX: not a confidential VM")
    return HclReport(kind, hardware, data[at : at + length])


def report_data_of(runtime_data: bytes) -> bytes:
    """Return the report data of a hardware report that covers this runtime data."""
    return hashlib.sha256(runtime_data).digest() + bytes(32)


@dataclass(frozen=True)
class RuntimeData:
    """The claims of the paravisor that are checked. Meaningful only if a verified hardware report covers them."""

    attestation_key: rsa.RSAPublicKey
    has_secure_boot: bool
    vm_id: str


def read_runtime_data(data: bytes) -> RuntimeData:
    """Parse runtime data. Raises AdmissionError."""
    if len(data) > RUNTIME_BYTES:
        raise AdmissionError(f"runtime data of {len(data)} bytes, where at most {RUNTIME_BYTES} are allowed")
    try:
        found = jose.read_json(data)
        if not isinstance(found, dict):
            raise ValueError("not an object")
        configuration = found.get("vm-configuration")
        if not isinstance(configuration, dict):
            raise ValueError("it has no vm-configuration")
        return RuntimeData(
            attestation_key=_key(found.get("keys")),
            has_secure_boot=_flag(configuration, "secure-boot"),
            vm_id=_vm_id(configuration.get("vmUniqueId")),
        )
    except (ValueError, UnsupportedAlgorithm) as error:
        text = str(error) if is_printable(str(error)) else "not JSON"
        raise AdmissionError(f"the vTPM's runtime data is malformed: {text[:200]}") from None


def _key(keys: object) -> rsa.RSAPublicKey:
    if not isinstance(keys, list):
        raise ValueError("it has no keys")
    named = [each for each in keys if isinstance(each, dict) and each.get("kid") == _KEY_NAME]
    if len(named) != 1:
        raise ValueError(f"it has {len(named)} keys named {_KEY_NAME}")
    (key,) = named
    if key.get("kty") != "RSA" or key.get("key_ops") != ["sign"]:
        raise ValueError(f"{_KEY_NAME} is not an RSA key for signatures")
    modulus, exponent = (_number(key.get(name)) for name in ("n", "e"))
    if modulus.bit_length() not in _KEY_BITS or exponent != _EXPONENT:
        raise ValueError(f"{_KEY_NAME} is not an RSA key of 2048 bits or more with exponent {_EXPONENT}")
    return rsa.RSAPublicNumbers(exponent, modulus).public_key()


def _number(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(f"{_KEY_NAME} is not an RSA key")
    return int.from_bytes(jose.decode_base64(value), "big")


def _flag(values: dict[str, object], name: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is not true or false")
    return value


def _vm_id(value: object) -> str:
    if not isinstance(value, str) or len(value) > _VM_ID_CHARACTERS or not is_printable(value):
        raise ValueError("vmUniqueId is not an identifier")
    return value
