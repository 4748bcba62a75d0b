"""A strict parser of SEV-SNP attestation reports: 1,184 bytes in the layout of AMD's firmware ABI, not verified yet.

The parser is our own: there was no maintained Python package that verifies reports. The report is one structure of fixed size;
`snp.py` and `snp_chain.py` verify its signature and certificates with `cryptography`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringfence.errors import AdmissionError

REPORT_BYTES: Final = 0x4A0
SIGNED_BYTES: Final = 0x2A0
REPORT_DATA: Final = slice(0x50, 0x90)
VERSIONS: Final = (2, 3, 5)

_R: Final = slice(0x2A0, 0x2E8)  # the signature's integers, little-endian,
_S: Final = slice(0x2E8, 0x330)  # with room for more than P-384 needs
_NUMBER_BYTES: Final = 48
_ECDSA_P384_SHA384: Final = 1
_FLAGS_KNOWN: Final = 0b11111  # the author's key, the masked chip key, the signing key

TCB_PARTS: Final = ("bootloader", "tee", "snp", "microcode")
TCB_PARTS_TURIN: Final = ("fmc", *TCB_PARTS)
_PLACES: Final = (0, 1, 6, 7)  # of the parts in the 8 bytes; all others are zero
_PLACES_TURIN: Final = (0, 1, 2, 3, 7)

_ALIAS_CHECK_COMPLETE: Final = 1 << 5  # of PLATFORM_INFO

_POLICY_KNOWN: Final = (1 << 26) - 1
_POLICY_ONE: Final = 1 << 17  # reserved, always set


@dataclass(frozen=True)
class Product:
    """A line of AMD processors with its own root and its own layout of TCB versions."""

    name: str
    family: int
    models: tuple[range, ...]
    tcb_parts: tuple[str, ...] = TCB_PARTS
    tcb_places: tuple[int, ...] = _PLACES
    chip_bytes: int = 64  # used by the chip's identity in CHIP_ID

    def tcb(self, raw: bytes) -> Tcb:
        """Return the versions in the 8 bytes of a TCB_VERSION. Raises AdmissionError."""
        if any(byte for place, byte in enumerate(raw) if place not in self.tcb_places):
            raise AdmissionError(f"a malformed TCB version for {self.name}: {raw.hex()}")
        return Tcb(tuple(zip(self.tcb_parts, (raw[place] for place in self.tcb_places), strict=True)))


PRODUCTS: Final = {
    product.name: product
    for product in (
        Product(name="milan", family=0x19, models=(range(0x10),)),
        Product(name="genoa", family=0x19, models=(range(0x10, 0x20), range(0xA0, 0xB0))),
        Product(
            name="turin",
            family=0x1A,
            models=(range(0x20),),
            tcb_parts=TCB_PARTS_TURIN,
            tcb_places=_PLACES_TURIN,
            chip_bytes=8,
        ),
    )
}


@dataclass(frozen=True)
class Tcb:
    """Security versions of the firmware, compared part by part: newer microcode does not offset an older bootloader."""

    parts: tuple[tuple[str, int], ...]

    def below(self, minimum: Tcb) -> tuple[str, ...]:
        """Describe the parts that are below a minimum."""
        least = dict(minimum.parts)
        return tuple(f"{part} {value} (at least {least[part]})" for part, value in self.parts if value < least[part])

    def __str__(self) -> str:
        return ", ".join(f"{part} {value}" for part, value in self.parts)


def _bit(place: int) -> property:
    return property(lambda policy: bool(policy.bits >> place & 1))


@dataclass(frozen=True)
class GuestPolicy:
    """What the guest's owner allows the host to do, fixed at launch."""

    bits: int

    smt = _bit(16)
    migration = _bit(18)
    debug = _bit(19)
    single_socket = _bit(20)
    cxl = _bit(21)
    ciphertext_hiding = _bit(24)

    @property
    def is_known(self) -> bool:
        return not self.bits & ~_POLICY_KNOWN and bool(self.bits & _POLICY_ONE)


@dataclass(frozen=True)
class SnpReport:
    """The fields of a report that are checked. Decoding verifies nothing: see `snp.authenticate`."""

    raw: bytes
    version: int
    guest_svn: int
    policy: GuestPolicy
    vmpl: int
    is_masked: bool  #    the host withholds the chip's key, so the report is not signed
    signing_key: int  #   0 VCEK, 1 VLEK
    report_data: bytes
    measurement: bytes
    host_data: bytes
    id_key_digest: bytes
    author_key_digest: bytes
    current_tcb: bytes  #   of the firmware that runs
    committed_tcb: bytes  # below which the host cannot roll back
    launch_tcb: bytes  #    that ran when the guest was launched
    reported_tcb: bytes  #  that the host chose to report: the signing key is derived from it
    current_version: tuple[int, int, int]  #    major, minor, build
    committed_version: tuple[int, int, int]
    has_checked_aliases: bool  #  since its last reset, and found none; reported from version 3 on
    current_mitigations: int  #   a bit each; reported from version 5 on
    launch_mitigations: int
    cpu: tuple[int, int] | None  # family and model, from version 3 on
    chip_id: bytes

    @property
    def products(self) -> tuple[Product, ...]:
        """The possible product lines. Reports before version 3 do not name it, and Turin does not make those."""
        if self.cpu is None:
            return PRODUCTS["milan"], PRODUCTS["genoa"]
        family, model = self.cpu
        return tuple(
            each
            for each in PRODUCTS.values()
            if family == each.family and any(model in models for models in each.models)
        )

    @property
    def signed(self) -> bytes:
        return self.raw[:SIGNED_BYTES]

    @property
    def signature(self) -> tuple[int, int]:
        return int.from_bytes(self.raw[_R], "little"), int.from_bytes(self.raw[_S], "little")

    @classmethod
    def decode(cls, raw: bytes) -> SnpReport:
        """Decode a report. Bytes that no signature covers must be zero, so that the encoding is unique.

        Raises AdmissionError.
        """
        if len(raw) != REPORT_BYTES:
            raise AdmissionError(f"a report has {REPORT_BYTES} bytes, this has {len(raw)}")
        version, algorithm, flags = _number(raw, 0x00), _number(raw, 0x34), _number(raw, 0x48)
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise AdmissionError(f"a report of version {version}; this release reads versions {known}")
        if algorithm != _ECDSA_P384_SHA384:
            raise AdmissionError(f"a report with signature algorithm {algorithm}, not ECDSA P-384")
        if flags & ~_FLAGS_KNOWN:
            raise AdmissionError(f"a report with flags {flags:#x}, some of which this release does not support")
        if any(raw[_R][_NUMBER_BYTES:]) or any(raw[_S][_NUMBER_BYTES:]) or any(raw[_S.stop :]):
            raise AdmissionError("the report has bytes other than zero after its signature")
        return cls(
            raw=raw,
            version=version,
            guest_svn=_number(raw, 0x04),
            policy=GuestPolicy(int.from_bytes(raw[0x08:0x10], "little")),
            vmpl=_number(raw, 0x30),
            is_masked=bool(flags >> 1 & 1),
            signing_key=flags >> 2 & 7,
            report_data=raw[REPORT_DATA],
            measurement=raw[0x90:0xC0],
            host_data=raw[0xC0:0xE0],
            id_key_digest=raw[0xE0:0x110],
            author_key_digest=raw[0x110:0x140],
            current_tcb=raw[0x38:0x40],
            committed_tcb=raw[0x1E0:0x1E8],
            launch_tcb=raw[0x1F0:0x1F8],
            reported_tcb=raw[0x180:0x188],
            current_version=(raw[0x1EA], raw[0x1E9], raw[0x1E8]),
            committed_version=(raw[0x1EE], raw[0x1ED], raw[0x1EC]),
            has_checked_aliases=version >= 3 and bool(_number(raw, 0x40) & _ALIAS_CHECK_COMPLETE),
            current_mitigations=_number(raw, 0x200, 8) if version >= 5 else 0,
            launch_mitigations=_number(raw, 0x1F8, 8) if version >= 5 else 0,
            cpu=(raw[0x188], raw[0x189]) if version >= 3 else None,
            chip_id=raw[0x1A0:0x1E0],
        )


def _number(raw: bytes, place: int, width: int = 4) -> int:
    return int.from_bytes(raw[place : place + width], "little")
