"""Keys that AMD issues to a cloud instead of a chip (VLEK), as on AWS: recorded evidence, and minted evidence for the rest."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ringfence.admission.proofs import kinds, snp
from ringfence.admission.proofs.snp_report import SnpReport
from ringfence.cli.evidence_views import look
from ringfence.errors import AdmissionError, ConfigurationError
from ringfence.evidence import guest, tsm
from ringfence.evidence.evidence_file import StoredEvidence
from tests.fake_tsm import Kernel
from tests.unit.snp_mint import foundry
from tests.unit.snp_records import AWS, RECORDS, moment, rules_for
from tests.unit.test_collect import VCEK, VLEK, table

RECORD = RECORDS["vlek"]
REPORT = SnpReport.decode(RECORD.report)
PROOF = snp.encode(RECORD.report, RECORD.certificate)
OF_VLEK = {0x48: (1 << 2).to_bytes(4, "little")}


def test_a_recorded_guest_of_aws_names_no_chip() -> None:
    assert REPORT.signing_key == 1
    assert REPORT.chip_id == bytes(64)
    claims = snp.authenticate(RECORD.report, RECORD.certificate, RECORD.now)
    assert (claims.provider, claims.product.name) == (AWS, "milan")
    assert not REPORT.policy.debug and not REPORT.policy.migration


def test_a_recorded_guest_of_aws_is_admitted_only_if_its_region_is_named() -> None:
    named = rules_for(RECORD)
    snp.verify(PROOF, REPORT.report_data, named, RECORD.now)
    snp.verify(PROOF, REPORT.report_data, replace(named, vlek_providers=("other", AWS)), RECORD.now)
    for providers in ((), ("CN=cc-eu-west-1.amazonaws.com",), (AWS.removeprefix("CN="),), (AWS.upper(),)):
        with pytest.raises(AdmissionError, match="which vlek_providers does not name"):
            snp.verify(PROOF, REPORT.report_data, replace(named, vlek_providers=providers), RECORD.now)


def test_a_recorded_guest_of_aws_is_not_admitted_by_its_chip() -> None:
    """All guests of a region have the same key and report no chip."""
    pinned = replace(rules_for(RECORD), chip_ids=(b"\1" * 64,))
    with pytest.raises(AdmissionError, match="its chip_id is 0000"):
        snp.verify(PROOF, REPORT.report_data, pinned, RECORD.now)


def test_the_policy_that_measure_prints_admits_a_recorded_guest_of_aws() -> None:
    view = look(StoredEvidence("snp", PROOF, REPORT.report_data), REPORT.report_data, {}, RECORD.now)
    assert view.claims["endorsed by"] == f"VLEK of {AWS}"
    text = f"version = 1\n[[admit]]\n{view.toml}".encode()
    (_, rules), *_ = kinds.read(text, tsm.KernelFiles().read).rules[0].proofs
    assert isinstance(rules, snp.Rules) and rules.vlek_providers == (AWS,)
    snp.verify(PROOF, REPORT.report_data, rules, RECORD.now)


def test_a_vlek_ends_after_a_year_and_a_new_one_must_be_fetched() -> None:
    with pytest.raises(AdmissionError, match=r"SEV-VLEK is valid from 2024-12-10 to 2025-12-10, .* fetch a new one"):
        snp.authenticate(RECORD.report, RECORD.certificate, moment("2026-01-01"))


def test_the_kind_of_key_that_a_report_names_must_be_that_of_its_certificate() -> None:
    """Signed by one key, so only the flag tells a VLEK from a VCEK."""
    mint = foundry()
    data, now = bytes(64), time.time()
    for changes, kind in (({}, "vlek"), (OF_VLEK, "vcek")):
        with pytest.raises(AdmissionError, match="another kind of key"):
            snp.authenticate(mint.report(data, changes=changes), mint.certificate(kind), now, known=mint.roots)


def test_a_host_of_aws_provides_the_certificate_of_its_region() -> None:
    def report(data: bytes, level: int) -> bytes:
        return foundry().report(data, changes=OF_VLEK)

    both = table((VCEK, b"of the chip"), (VLEK, foundry().certificate("vlek")))
    found = guest.snp(bytes(64), Kernel(tsm.SNP, report, auxblob=both, level_floor=0))
    claims = snp.authenticate(*found, time.time(), known=foundry().roots)
    assert claims.provider == "test"
    with pytest.raises(ConfigurationError, match=r"a key that AMD gave to its cloud \(VLEK\)") as caught:
        guest.snp(bytes(64), Kernel(tsm.SNP, report, auxblob=table((VCEK, b"x")), level_floor=0))
    assert "kdsintf" not in str(caught.value), "AMD serves VLEKs to clouds only"
