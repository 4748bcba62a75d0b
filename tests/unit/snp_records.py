"""The recorded SEV-SNP reports: what each file holds, and rules that admit exactly that guest."""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from ringfence.admission.proofs.snp import Rules
from ringfence.admission.proofs.snp_report import PRODUCTS, REPORT_BYTES, SnpReport

FOLDER = Path(__file__).parents[1] / "evidence" / "snp"
HCL = 32  # where the report begins in what Azure's paravisor hands out


def moment(text: str) -> float:
    """Seconds since 1970 at noon of a day."""
    return datetime.fromisoformat(f"{text}T12:00:00").replace(tzinfo=UTC).timestamp()


def content(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def der(pem: bytes) -> bytes:
    """The first certificate of a PEM file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # AMD's serial numbers are 0
        return x509.load_pem_x509_certificates(pem)[0].public_bytes(Encoding.DER)


def unpadded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@dataclass(frozen=True)
class Record:
    name: str
    product: str
    version: int
    day: str
    load: Callable[[], tuple[bytes, bytes]]

    @property
    def report(self) -> bytes:
        return self.load()[0]

    @property
    def certificate(self) -> bytes:
        return self.load()[1]

    @property
    def now(self) -> float:
        return moment(self.day)


def plain(report: str, certificate: str) -> Callable[[], tuple[bytes, bytes]]:
    return lambda: (content(report), content(certificate))


def azure_milan() -> tuple[bytes, bytes]:
    return content("trustee-az-hcl-report.bin")[HCL : HCL + REPORT_BYTES], der(content("trustee-az-vcek.pem"))


def azure_milan_2() -> tuple[bytes, bytes]:
    found = json.loads(content("trustee-az-evidence-v2.json"))
    return unpadded(found["hcl_report"])[HCL : HCL + REPORT_BYTES], unpadded(found["vcek"])


def azure_genoa() -> tuple[bytes, bytes]:
    found = json.loads(content("trustee-az-evidence-genoa.json"))
    return bytes(found["report"])[HCL : HCL + REPORT_BYTES], der(found["vcek"].encode())


def virtee() -> tuple[bytes, bytes]:
    return bytes.fromhex(content("virtee-report_milan.hex").decode()), content("virtee-vcek_milan.der")


RECORDS = {
    record.name: record
    for record in (
        Record("google", "milan", 2, "2024-01-01", plain("google-attestation.bin", "google-vcek.testcer")),
        Record("trustee", "milan", 2, "2024-01-01", plain("trustee-test-report.bin", "trustee-test-vcek.der")),
        Record("virtee", "milan", 2, "2024-01-01", virtee),
        Record("azure", "milan", 2, "2024-01-01", azure_milan),
        Record("azure, later", "milan", 3, "2026-01-01", azure_milan_2),
        Record("vlek", "milan", 3, "2025-06-01", plain("trustee-test-vlek-report.bin", "trustee-test-vlek.der")),
        Record("azure genoa", "genoa", 3, "2026-01-01", azure_genoa),
        Record("oak genoa", "genoa", 5, "2026-01-01", plain("oak-genoa_report.bin", "oak-genoa_vcek.der")),
        Record("oak turin", "turin", 5, "2026-01-01", plain("oak-turin_report.bin", "oak-turin_vcek.der")),
    )
}
DEBUGGED = "google"
PROVISIONAL = {"trustee", "azure", "vlek"}  # run newer microcode than their host has committed
SILENT = {name for name, record in RECORDS.items() if record.version == 2}  # do not say if memory aliases were checked
AWS = "CN=cc-us-east-2.amazonaws.com"


def rules_for(record: Record) -> Rules:
    """Rules that this guest just meets."""
    report, product = SnpReport.decode(record.report), PRODUCTS[record.product]
    return Rules(
        measurements=(report.measurement,),
        minimum_tcb=((product.name, product.tcb(report.reported_tcb)),),
        vmpl=report.vmpl,
        vlek_providers=(AWS,) if record.name == "vlek" else (),
        allow_provisional_firmware=record.name in PROVISIONAL,
        require_alias_check=record.name not in SILENT,
    )
