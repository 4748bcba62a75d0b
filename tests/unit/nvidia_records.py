"""The recorded reports of NVIDIA devices, as tests/evidence/nvidia holds them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from ringfence.admission.proofs import nvidia_chain, spdm
from ringfence.admission.proofs.nvidia import Gpu, pinned_root

FOLDER = Path(__file__).parents[1] / "evidence" / "nvidia"
NOW = 1_794_600_000.0  # 2026-11-13; the certificates hold until the year 9999

SERIALIZED = (
    "hopper_evidence.json",
    "hopper_evidence_cert_hold.json",
    "evidence_hopper_590_12.json",
    "multi_gpu_hopper.json",
    "switch_evidence_ls10.json",
    "multi_switch_ls10.json",
)
PAIRS = (
    ("trustee_hopperAttestationReport.txt", "hopper_cert_chain_case1.txt"),
    ("hopper_coco_report1.txt", "hopper_coco_certs1.txt"),
    ("sdk_hopperAttestationReport.txt", "sdk_hopperCertChain.txt"),
    ("sdk_blackwellAttestationReport.txt", "sdk_blackwellCertChain.txt"),
)
BAD_SIGNATURE = ("sdk_hopperAttestationReportInvalidSignature.txt", "sdk_hopperCertChain.txt")


@dataclass(frozen=True)
class Record:
    """One device as it was recorded."""

    name: str
    report: bytes  # as the driver gave it
    pem: bytes
    nonce: bytes

    @property
    def gpu(self) -> Gpu:
        """As a prover would send it."""
        return Gpu(spdm.trim(self.report), nvidia_chain.chain_of(self.pem, pinned_root()))


def pair(names: tuple[str, str]) -> Record:
    report = bytes.fromhex((FOLDER / names[0]).read_text().strip())
    return Record(names[0], report, (FOLDER / names[1]).read_bytes(), report[4:36])


def serialized(name: str) -> list[Record]:
    return [
        Record(
            f"{name}[{place}]",
            base64.b64decode(each["evidence"]),
            base64.b64decode(each["certificate"]),
            bytes.fromhex(each["nonce"]),
        )
        for place, each in enumerate(json.loads((FOLDER / name).read_text()))
    ]


def records() -> list[Record]:
    return [each for name in SERIALIZED for each in serialized(name)] + [pair(names) for names in PAIRS]


def record(name: str) -> Record:
    return next(each for each in records() if each.name == name)


TOKENS = ("hopperClaimsv3_detached_eat.json", "switch_detached_eat.json")
RECORDED_HOPPER = record("hopper_evidence.json[0]")
RECORDED_BLACKWELL = record("sdk_blackwellAttestationReport.txt")
