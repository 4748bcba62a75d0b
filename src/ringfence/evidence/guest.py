"""The evidence of this guest: a TDX quote, or an SEV-SNP report with the certificate of its key."""

from __future__ import annotations

import ssl
import uuid
from typing import Final

from ringfence.admission.proofs import snp_report, tdx_quote
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import tsm

AMD_KEY_SERVICE: Final = "https://kdsintf.amd.com"

_ENTRY_BYTES: Final = 24  # of the host's certificate table: GUID, offset, length
_VLEK: Final = 1
_LEAVES: Final = {
    0: uuid.UUID("63da758d-e664-4564-adc5-f4b93be8accd").bytes,  # VCEK
    _VLEK: uuid.UUID("a8074bc2-a25a-483e-aae6-39c045a0b8a1").bytes,  # VLEK
}
_URL_NAMES: Final = {"fmc": "fmcSPL", "bootloader": "blSPL", "tee": "teeSPL", "snp": "snpSPL", "microcode": "ucodeSPL"}


def tdx(report_data: bytes, files: tsm.KernelFiles) -> bytes:
    """Return a quote of this TD, without padding. Raises ConfigurationError."""
    collected = tsm.collect(report_data, files)
    _check_provider(collected.provider, tsm.TDX)
    try:
        return tdx_quote.trim(collected.outblob)
    except AdmissionError as error:
        raise ConfigurationError(f"the kernel returned a malformed quote: {error}") from error


def snp(
    report_data: bytes, files: tsm.KernelFiles, *, certificate: bytes | None = None, level: int | None = None
) -> tuple[bytes, bytes]:
    """Return a report of this guest, and the certificate of its signing key: the given one, or else the host's.

    Raises ConfigurationError.
    """
    collected = tsm.collect(report_data, files, level=level)
    _check_provider(collected.provider, tsm.SNP)
    try:
        report = snp_report.SnpReport.decode(collected.outblob)
    except AdmissionError as error:
        raise ConfigurationError(f"the kernel returned a malformed report: {error}") from error
    found = certificate or leaf_of(collected.auxblob, report.signing_key)
    if found is None and report.signing_key == _VLEK:
        raise ConfigurationError(
            "the host signs with a key that AMD gave to its cloud (VLEK) and provides no certificate for it: try again, or "
            "set RINGFENCE_VCEK_FILE to one that another guest in this region got, such as by `snpguest certificates`"
        )
    if found is None:
        raise ConfigurationError(
            "the host provides no certificate for this chip: set RINGFENCE_VCEK_FILE to a file fetched from "
            + " or ".join(vcek_urls(report))
        )
    return report.raw, found


def leaf_of(table: bytes, signing_key: int) -> bytes | None:
    """Return the VCEK or VLEK of a host's certificate table, or None. The verifier checks it."""
    for place in range(0, len(table) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
        name = table[place : place + 16]
        if name == bytes(16):
            return None
        offset = int.from_bytes(table[place + 16 : place + 20], "little")
        length = int.from_bytes(table[place + 20 : place + 24], "little")
        if name == _LEAVES.get(signing_key):
            content = table[offset : offset + length]
            return content if length and len(content) == length else None
    return None


def vcek_urls(report: snp_report.SnpReport) -> list[str]:
    """Return where AMD serves the VCEK of a report: one URL, or two if the report does not name its product line."""
    urls = []
    for product in report.products:
        versions = "&".join(f"{_URL_NAMES[part]}={value}" for part, value in product.tcb(report.reported_tcb).parts)
        chip = report.chip_id[: product.chip_bytes].hex()
        urls.append(f"{AMD_KEY_SERVICE}/vcek/v1/{product.name.capitalize()}/{chip}?{versions}")
    return urls


def read_certificate(content: bytes) -> bytes:
    """Return the first certificate of a PEM file, or the content of a DER file. Raises ValueError."""
    begin, end = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
    if begin not in content:
        return content
    first = content[content.index(begin) :].partition(end)[0] + end
    return ssl.PEM_cert_to_DER_cert(first.decode("ascii"))


def _check_provider(found: str, wanted: str) -> None:
    if found != wanted:
        names = {tsm.TDX: "TDX", tsm.SNP: "SEV-SNP"}
        raise ConfigurationError(f"this is a {names.get(found, found)} guest, not a {names[wanted]} guest")
