"""A strict parser of Intel TDX quotes, versions 4 and 5.

    header (48) · body (584, or type and size and 584 or 648) · size · signature · key · QE report · certificates

Parsing verifies nothing: `tdx.authenticate` verifies Intel's signatures with dcap-qvl. The quote is parsed here too, to check
the fields below and to refuse trailing data before the signatures are verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence.errors import AdmissionError

QUOTE_BYTES: Final = 16 * 1024
REPORT_DATA_BYTES: Final = 64
REGISTER_BYTES: Final = 48

_HEADER_BYTES: Final = 48
_TDX: Final = 0x81
_ECDSA_P256: Final = 2
_TD_1_0: Final = 584
_TD_1_5: Final = 648
_BODIES_V5: Final = {2: _TD_1_0, 3: _TD_1_5}  # type: size
_SIGNATURE_AND_KEY: Final = 64 + 64
_QE_REPORT_AND_SIGNATURE: Final = 384 + 64
_CERTIFIED_BY_QE: Final = 6
_CERTIFIED_BY_CHAIN: Final = 5


@dataclass(frozen=True)
class Body:
    """The TDX module's report of a TD."""

    signed_bytes: int  # of the quote, from its start
    tcb_svn: bytes  #     of module (SVN, version), loader and others, at the TD's launch
    tcb_svn2: bytes  #    the same now: the module can be updated while TDs run
    attributes: int
    mrtd: bytes
    mr_config_id: bytes
    mr_owner: bytes
    mr_owner_config: bytes
    rtmrs: tuple[bytes, bytes, bytes, bytes]
    report_data: bytes
    mr_service_td: bytes  # zero: no service TD, such as one for migration, is bound to this one

    # A host can inspect a TD that has any bit of the lowest byte set; only DEBUG is in use.
    @property
    def is_debug(self) -> bool:
        return bool(self.attributes & 0xFF)

    @property
    def has_older_module(self) -> bool:
        """Whether the module is older now than at the launch. Each version of the module counts its own SVN."""
        launched, now = self.tcb_svn, self.tcb_svn2
        module = (now[1], now[0]) < (launched[1], launched[0])
        return module or any(new < old for new, old in zip(now[2:], launched[2:], strict=True))

    @property
    def is_migratable(self) -> bool:
        return bool(self.attributes >> 29 & 1)

    @property
    def has_sept_ve_disabled(self) -> bool:
        """Without it, a host can inject faults into the guest at pages of its choice."""
        return bool(self.attributes >> 28 & 1)


def trim(quote: bytes) -> bytes:
    """Return the quote without the trailing zeros of some kernels and hosts. Raises AdmissionError."""
    end = _end(quote)
    if any(quote[end:]):
        raise AdmissionError("there is trailing data after the quote")
    return quote[:end]


def read(quote: bytes) -> Body:
    """Parse a quote without trailing data. Raises AdmissionError."""
    if _end(quote) != len(quote):
        raise AdmissionError(f"{len(quote) - _end(quote)} bytes of trailing data after the quote")
    start, size = _body(quote)
    body = quote[start : start + size]
    return Body(
        signed_bytes=start + size,
        tcb_svn=body[:16],
        tcb_svn2=body[584:600] if size == _TD_1_5 else body[:16],
        attributes=int.from_bytes(body[120:128], "little"),
        mrtd=body[136:184],
        mr_config_id=body[184:232],
        mr_owner=body[232:280],
        mr_owner_config=body[280:328],
        rtmrs=(body[328:376], body[376:424], body[424:472], body[472:520]),
        report_data=body[520:584],
        mr_service_td=body[600:648] if size == _TD_1_5 else bytes(REGISTER_BYTES),
    )


def report_data(quote: bytes) -> bytes:
    """Return the 64 bytes of report data, regardless of trailing data. Raises AdmissionError."""
    start, _ = _body(quote)
    return quote[start + 520 : start + 584]


def _body(quote: bytes) -> tuple[int, int]:
    """Return the position and the size of the body."""
    version, key_type, tee = _number(quote, 0, 2), _number(quote, 2, 2), _number(quote, 4, 4)
    if tee != _TDX:
        raise AdmissionError("not a quote of a TDX guest" + (" but of an SGX enclave" if tee == 0 else ""))
    if key_type != _ECDSA_P256:
        raise AdmissionError(f"a quote with a key of type {key_type}, not ECDSA P-256")
    if version == 4:
        return _HEADER_BYTES, _TD_1_0
    if version != 5:
        raise AdmissionError(f"a quote of version {version}; this release reads versions 4 and 5")
    kind, size = _number(quote, _HEADER_BYTES, 2), _number(quote, _HEADER_BYTES + 2, 4)
    if _BODIES_V5.get(kind) != size:
        raise AdmissionError(
            f"a quote whose body has type {kind} and {size} bytes, which this release does not support"
        )
    return _HEADER_BYTES + 6, size


def _end(quote: bytes) -> int:
    """Return where the quote ends by its own length fields, which must be consistent."""
    if len(quote) > QUOTE_BYTES:
        raise AdmissionError(f"a quote of {len(quote)} bytes, where at most {QUOTE_BYTES} are allowed")
    start, size = _body(quote)
    at = start + size + 4
    end = at + _number(quote, at - 4, 4)
    at += _SIGNATURE_AND_KEY + 6
    by_qe = _number(quote, at - 6, 2) == _CERTIFIED_BY_QE and at + _number(quote, at - 4, 4) == end
    at += _QE_REPORT_AND_SIGNATURE + 2
    at += _number(quote, at - 2, 2) + 6
    by_chain = _number(quote, at - 6, 2) == _CERTIFIED_BY_CHAIN and at + _number(quote, at - 4, 4) == end
    if not by_qe or not by_chain or end > len(quote):
        raise AdmissionError("a quote with inconsistent lengths, or without its certificates")
    return end


def _number(quote: bytes, place: int, width: int) -> int:
    field = quote[place : place + width]
    if len(field) != width:
        raise AdmissionError("the quote is truncated")
    return int.from_bytes(field, "little")
