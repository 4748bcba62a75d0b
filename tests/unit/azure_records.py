"""The recorded evidence of confidential VMs on Azure: SEV-SNP reports inside HCL reports, and quotes of their vTPMs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ringfence.admission.proofs import azure, hcl_report, tpm_quote
from tests.unit import snp_records
from tests.unit.snp_records import content, der, unpadded


@dataclass(frozen=True)
class Record:
    """A VM's evidence; the nonce is what another verifier had asked for."""

    name: str  # also of the SEV-SNP record
    hcl: bytes
    certificate: bytes
    quote: bytes
    signature: bytes
    pcrs: tuple[bytes, ...]

    @property
    def attestation(self) -> azure.Attestation:
        return azure.Attestation(hcl_report.read(self.hcl).runtime_data, self.quote, self.signature, self.pcrs)

    @property
    def proof(self) -> bytes:
        return azure.encode_snp(hcl_report.read(self.hcl).hardware, self.certificate, self.attestation)

    @property
    def nonce(self) -> bytes:
        return tpm_quote.read(self.quote).extra_data

    @property
    def now(self) -> float:
        return snp_records.RECORDS[self.name].now

    @property
    def rules(self) -> azure.Rules:
        """Rules that this VM just meets."""
        hardware = snp_records.rules_for(snp_records.RECORDS[self.name])
        return azure.Rules(hardware, tuple((index, (self.pcrs[index],)) for index in range(16)))


def _milan() -> Record:
    found = json.loads(content("trustee-az-evidence-v2.json"))
    quote = found["tpm_quote"]
    return Record(
        name="azure, later",
        hcl=unpadded(found["hcl_report"]),
        certificate=unpadded(found["vcek"]),
        quote=bytes.fromhex(quote["message"]),
        signature=bytes.fromhex(quote["signature"]),
        pcrs=tuple(map(bytes.fromhex, quote["pcrs"])),
    )


def _genoa() -> Record:
    found = json.loads(content("trustee-az-evidence-genoa.json"))
    quote = found["quote"]
    return Record(
        name="azure genoa",
        hcl=bytes(found["report"]),
        certificate=der(found["vcek"].encode()),
        quote=bytes(quote["message"]),
        signature=bytes(quote["signature"]),
        pcrs=tuple(map(bytes, quote["pcrs"])),
    )


RECORDS = {record.name: record for record in (_milan(), _genoa())}
WITHOUT_QUOTE = content("trustee-az-hcl-report.bin")
