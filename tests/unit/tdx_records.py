"""The recorded TDX and SGX quotes: what each file holds, its collateral and the day at which it verifies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ringfence.admission.proofs import tdx_quote
from ringfence.admission.proofs.tdx import Rules
from ringfence.admission.proofs.tdx_collateral import Collateral
from tests.unit.snp_records import moment

FOLDER = Path(__file__).parents[1] / "evidence" / "tdx"


def load(name: str) -> bytes:
    """The bytes of a recorded quote, whether the file holds them or their hexadecimal digits."""
    content = (FOLDER / name).read_bytes()
    return bytes.fromhex(content.decode().strip().removeprefix("0x")) if name.endswith((".hex", ".txt")) else content


def collateral(name: str) -> Collateral:
    return Collateral.parse((FOLDER / name).read_bytes())


@dataclass(frozen=True)
class Record:
    name: str
    file: str
    collateral_file: str
    day: str

    @property
    def quote(self) -> bytes:
        return tdx_quote.trim(load(self.file))

    @property
    def collateral(self) -> tuple[Collateral, ...]:
        return (collateral(self.collateral_file),)

    @property
    def now(self) -> float:
        return moment(self.day)


RECORDS = {
    record.name: record
    for record in (
        Record("dstack", "phala-tdx_quote", "phala-tdx_quote_collateral.json", "2025-06-20"),
        Record("near", "phala-near_quote_hex.txt", "phala-near_quote_collateral.json", "2025-09-10"),
    )
}
OUTDATED = Record("outdated", "phala-tdx_quote_outdated", "phala-tdx_quote_outdated_collateral.json", "2026-02-19")
WITHOUT_COLLATERAL = {
    "google-cos-113-tdx-quote.dat": 4,
    "google-quote_v5_sample.dat": 5,
    "phala-quote-from-tappd.hex": 4,
    "phala-tdx-quote.hex": 4,
    "trustee-td-quote.bin": 4,
    "trustee-tdx_quote_4.dat": 4,
    "trustee-tdx_quote_5.dat": 5,
    "trustee-tdx_quote_6.dat": 4,
}  # file: version
SGX = ("phala-sgx_quote", "trustee-occlum_quote.dat")


def rules_for(record: Record) -> Rules:
    """Rules that this TD just meets."""
    body = tdx_quote.read(record.quote)
    return Rules(
        mrtd=(body.mrtd,),
        rtmrs=tuple((each,) for each in body.rtmrs),
        collateral=record.collateral,
        mr_config_id=(body.mr_config_id,),
    )
