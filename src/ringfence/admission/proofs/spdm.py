"""A GPU's attestation report: the SPDM 1.1 request with the nonce, the GPU's response, and its signature over both.

    GET_MEASUREMENTS   11 e0 01 ff · nonce (32) · slot (1)                                                  37 bytes
    MEASUREMENTS       11 60 00 00 · blocks (1) · length (3) · blocks · nonce (32) · length (2) · opaque
    signature          r · s, 48 bytes each, big-endian: ECDSA P-384 with SHA-384 over all preceding bytes

All other numbers are little-endian. A block is index · 1 · length (2) · type · length (2) · SHA-384 value. Opaque data is
a list of type (2) · length (2) · value. Everything is signed, and nothing may follow the signature.

The parser is our own. NVIDIA's Python packages (nv-attestation-sdk, nv-local-gpu-verifier) are at the end of their support, pin
old releases of cryptography and pyOpenSSL, and verify only with access to online services; their successor has no Python
interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence.errors import AdmissionError

NONCE_BYTES: Final = 32
MEASUREMENT_BYTES: Final = 48
SIGNATURE_BYTES: Final = 96
REPORT_BYTES: Final = 8192  # what a driver's buffer holds

DRIVER_VERSION: Final = 3
VBIOS_VERSION: Final = 6
FIRMWARE_ID: Final = 20
PROTECTED_PCIE: Final = 21

_REQUEST: Final = bytes((0x11, 0xE0, 0x01, 0xFF))  # signed, all measurements
_RESPONSE: Final = bytes((0x11, 0x60, 0x00, 0x00))
_SLOT: Final = 0
_DMTF: Final = 1
_FIRMWARE: Final = 1


@dataclass(frozen=True)
class SpdmReport:
    """One device's report, parsed. Its fields are not trusted before the signature was verified."""

    nonce: bytes
    measurements: dict[int, bytes]
    opaque: dict[int, bytes]
    signed: bytes
    signature: bytes

    @property
    def length(self) -> int:
        return len(self.signed) + len(self.signature)


def read(data: bytes) -> SpdmReport:
    """Parse a report without trailing data. Raises AdmissionError."""
    report = _read(data)
    if report.length != len(data):
        raise AdmissionError(
            f"the GPU report has {len(data) - report.length} bytes of trailing data after its signature"
        )
    return report


def request_nonce(data: bytes) -> bytes:
    """Return the nonce of the request without parsing the rest, for a cheap first check."""
    return data[len(_REQUEST) : len(_REQUEST) + NONCE_BYTES]


def trim(data: bytes) -> bytes:
    """Return the report without the trailing bytes of some drivers; for collectors, never for verifiers."""
    return data[: _read(data).length]


def driver_version(report: SpdmReport) -> str | None:
    """Return the driver's version, such as "550.90.07"; None for a switch, which has no driver."""
    value = report.opaque.get(DRIVER_VERSION)
    return None if value is None else _text("driver version", value.removesuffix(b"\0"))


def vbios_version(report: SpdmReport) -> str:
    """Return the VBIOS version, such as "96.00.9F.00.01". A GPU reports two 32-bit numbers, a switch a text."""
    value = report.opaque.get(VBIOS_VERSION)
    if value is None:
        raise AdmissionError("the GPU report names no VBIOS")
    if len(value) != 8:
        return _text("VBIOS version", value)
    if any(value[5:]):
        raise AdmissionError("the GPU report's VBIOS version has an unknown format")
    return ".".join(f"{byte:02X}" for byte in (*reversed(value[:4]), value[4]))


# -- parts ----------------------------------------------------------------------------------------------------------


class _Cursor:
    """Reads fields in order. `at` is the position: the signature covers everything before it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise AdmissionError(
                f"the GPU report is truncated: {count} bytes expected, {len(self._data) - self.at} left"
            )
        part = self._data[self.at : end]
        self.at = end
        return part

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def expect(self, wanted: bytes, what: str) -> None:
        found = self.take(len(wanted))
        if found != wanted:
            raise AdmissionError(f"not a GPU report: {what} is {found.hex()}, where {wanted.hex()} is expected")

    @property
    def empty(self) -> bool:
        return self.at == len(self._data)


def _read(data: bytes) -> SpdmReport:
    if len(data) > REPORT_BYTES:
        raise AdmissionError(f"a GPU report of {len(data)} bytes, where at most {REPORT_BYTES} are allowed")
    cursor = _Cursor(data)
    cursor.expect(_REQUEST, "the request's header")
    nonce = cursor.take(NONCE_BYTES)
    cursor.expect(bytes([_SLOT]), "the certificate slot")
    cursor.expect(_RESPONSE, "the response's header")
    blocks = cursor.number(1)
    measurements = _measurements(cursor.take(cursor.number(3)), blocks)
    cursor.take(NONCE_BYTES)  # the device's own
    opaque = _opaque(cursor.take(cursor.number(2)))
    signed = data[: cursor.at]
    return SpdmReport(nonce, measurements, opaque, signed, cursor.take(SIGNATURE_BYTES))


def _measurements(record: bytes, blocks: int) -> dict[int, bytes]:
    cursor = _Cursor(record)
    found: dict[int, bytes] = {}
    last = 0
    for _ in range(blocks):
        index, kind, size = cursor.number(1), cursor.number(1), cursor.number(2)
        value_type, value_size = cursor.number(1), cursor.number(2)
        value = cursor.take(value_size)
        form = (kind, size, value_type, value_size)
        if form != (_DMTF, 3 + MEASUREMENT_BYTES, _FIRMWARE, MEASUREMENT_BYTES):
            raise AdmissionError(f"the GPU's measurement {index} is not a SHA-384 digest of firmware")
        if index <= last:
            raise AdmissionError(f"the GPU's measurement {index} is out of order")
        found[index] = value
        last = index
    if not cursor.empty or not found:
        raise AdmissionError("the number of the GPU's measurements is wrong")
    return found


def _opaque(data: bytes) -> dict[int, bytes]:
    cursor = _Cursor(data)
    fields: dict[int, bytes] = {}
    while not cursor.empty:
        kind = cursor.number(2)
        if kind in fields:
            raise AdmissionError(f"the GPU report has a duplicate field {kind}")
        fields[kind] = cursor.take(cursor.number(2))
    return fields


def _text(name: str, value: bytes) -> str:
    if not 1 <= len(value) <= 32 or not all(0x20 < byte < 0x7F for byte in value):
        raise AdmissionError(f"the GPU report's {name} is not a short text")
    return value.decode("ascii")
