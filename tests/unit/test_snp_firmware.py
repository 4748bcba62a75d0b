"""SEV-SNP: every TCB of a report counts, and so does what the platform says of its firmware and its memory."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import snp
from ringfence.admission.proofs.snp_report import PRODUCTS, SnpReport
from ringfence.errors import AdmissionError, PolicyError
from ringfence.evidence import measure
from tests.unit.snp_mint import (
    ALIAS_CHECK,
    COMMITTED,
    CURRENT,
    LAUNCH,
    MEASUREMENT,
    PLATFORM_INFO,
    REPORTED,
    VERSIONS,
    Foundry,
    foundry,
)
from tests.unit.snp_records import PROVISIONAL, RECORDS, SILENT, rules_for

DATA = bytes(range(64))
CURRENT_VERSION, COMMITTED_VERSION = 0x1E8, 0x1EC  # build, minor, major
LAUNCH_MITIGATIONS, CURRENT_MITIGATIONS = 0x1F8, 0x200
PLACES = {"REPORTED": REPORTED, "COMMITTED": COMMITTED, "LAUNCH": LAUNCH, "CURRENT": CURRENT}
OLDER = [(name, part) for name in PRODUCTS for part in PRODUCTS[name].tcb_parts if VERSIONS[part] > 0]


def verify(mint: Foundry, changes: dict[int, bytes], rules: snp.Rules | None = None) -> snp.Claims:
    """A report of the mint's versions but for these bytes, with a certificate for its REPORTED_TCB."""
    proof = snp.encode(mint.report(DATA, changes=changes), mint.certificate())
    return snp.verify(proof, DATA, rules or mint.rules, time.time(), known=mint.roots)


# -- TCB versions ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("The firmware must be recent enough at launch, now, and as far back as the host can roll it.")
@pytest.mark.parametrize(("product", "part"), OLDER)
@pytest.mark.parametrize(
    ("field", "todo"),
    [("COMMITTED", "have the host commit its firmware"), ("LAUNCH", "launch the guest again")],
)
def test_the_minimum_holds_for_every_tcb_of_a_report(product: str, part: str, field: str, todo: str) -> None:
    mint = foundry(product)
    older = {**VERSIONS, part: VERSIONS[part] - 1}
    reason = rf"out of date: {part} {older[part]} \(at least {VERSIONS[part]}\) in {field}_TCB; {todo}"
    for rules in (mint.rules, replace(mint.rules, allow_provisional_firmware=True)):
        with pytest.raises(AdmissionError, match=reason) as caught:
            verify(mint, {PLACES[field]: mint.tcb(older)}, rules)
        assert "at least" not in caught.value.to_peer


@pytest.mark.parametrize(("product", "part"), OLDER)
def test_current_firmware_below_what_it_reports_is_refused(product: str, part: str) -> None:
    """Also where the policy's minimum would allow it."""
    mint = foundry(product)
    older = {**VERSIONS, part: VERSIONS[part] - 1}
    rules = replace(mint.rules, allow_provisional_firmware=True)
    low = tuple(
        (name, replace(tcb, parts=tuple((each, 0) for each, _ in tcb.parts))) for name, tcb in rules.minimum_tcb
    )
    for each in (rules, replace(rules, minimum_tcb=low)):
        with pytest.raises(
            AdmissionError, match=rf"CURRENT_TCB has {part} {older[part]} \(at least {VERSIONS[part]}\)"
        ):
            verify(mint, {CURRENT: mint.tcb(older)}, each)
    committed = mint.tcb({**VERSIONS, part: VERSIONS[part] + 1})
    with pytest.raises(
        AdmissionError, match=rf"CURRENT_TCB has {part} {VERSIONS[part]} \(at least {VERSIONS[part] + 1}"
    ):
        verify(mint, {COMMITTED: committed}, replace(rules, minimum_tcb=low))


@pytest.mark.parametrize("field", PLACES)
def test_a_tcb_of_the_wrong_form_is_refused(field: str) -> None:
    with pytest.raises(AdmissionError, match="malformed TCB version for milan"):
        verify(foundry(), {PLACES[field] + 3: b"\1"})


def provisional(mint: Foundry) -> list[dict[int, bytes]]:
    """Reports of firmware that the host can still take back: a newer TCB, build, minor or major version."""
    newer = {CURRENT: mint.tcb({**VERSIONS, "microcode": VERSIONS["microcode"] + 1})}
    return [newer, *({CURRENT_VERSION + place: b"\1"} for place in range(3))]


@pytest.mark.promise("The firmware must be recent enough at launch, now, and as far back as the host can roll it.")
def test_firmware_that_is_not_committed_is_refused_unless_allowed() -> None:
    mint = foundry()
    allowed = replace(mint.rules, allow_provisional_firmware=True)
    for changes in provisional(mint):
        with pytest.raises(AdmissionError, match=r"provisional.* commit it, or set allow_provisional_firmware"):
            verify(mint, changes)
        assert verify(mint, changes, allowed).product.name == "milan"


@pytest.mark.parametrize("place", range(3), ids=["build", "minor", "major"])
def test_a_current_version_below_the_committed_is_refused(place: int) -> None:
    mint = foundry()
    for rules in (mint.rules, replace(mint.rules, allow_provisional_firmware=True)):
        with pytest.raises(AdmissionError, match="its current version is below the committed"):
            verify(mint, {COMMITTED_VERSION + place: b"\1"}, rules)


# -- memory aliases -------------------------------------------------------------------------------------------------


@pytest.mark.promise("An SEV-SNP platform without the memory alias check (BadRAM) is rejected by default.")
@pytest.mark.parametrize("version", [2, 3, 5])
def test_a_platform_that_has_not_checked_for_memory_aliases_is_refused(version: int) -> None:
    """Version 2 cannot say it; the firmware that makes such reports is older than the check."""
    mint = foundry()
    said = {0x00: version.to_bytes(4, "little"), 0x188: bytes(2) if version == 2 else bytes((0x19, 0x01))}
    silent = {**said, PLATFORM_INFO: bytes([0xFF & ~ALIAS_CHECK])}
    with pytest.raises(AdmissionError, match=r"memory for aliases.*require_alias_check"):
        verify(mint, silent)
    assert verify(mint, silent, replace(mint.rules, require_alias_check=False)).report.version == version
    if version == 2:
        with pytest.raises(AdmissionError, match="memory for aliases"):
            verify(mint, said)  # the bit was reserved then, and says nothing
    else:
        assert verify(mint, said).report.version == version


# -- mitigations ----------------------------------------------------------------------------------------------------


def vector(bits: int) -> bytes:
    return bits.to_bytes(8, "little")


def test_a_platform_without_the_mitigations_of_the_policy_is_refused() -> None:
    mint = foundry()
    rules = replace(mint.rules, mitigations=(("milan", 0b101),))
    both = {LAUNCH_MITIGATIONS: vector(0b1101), CURRENT_MITIGATIONS: vector(0b101)}
    assert verify(mint, both, rules).product.name == "milan"
    for place, name in ((LAUNCH_MITIGATIONS, "LAUNCH"), (CURRENT_MITIGATIONS, "CURRENT")):
        with pytest.raises(AdmissionError, match=f"lacks mitigations 0x4 in {name}_MIT_VECTOR") as caught:
            verify(mint, {**both, place: vector(0b1011)}, rules)
        assert "0x4" not in caught.value.to_peer
    with pytest.raises(AdmissionError, match="lacks mitigations 0x5 in LAUNCH_MIT_VECTOR"):
        verify(mint, {**both, 0x00: (3).to_bytes(4, "little")}, rules)  # which has no such field
    other = replace(mint.rules, mitigations=(("genoa", 0b101),))
    assert verify(mint, {}, other).product.name == "milan"


def test_what_is_measured_of_old_and_provisional_firmware_admits_it() -> None:
    """A guest that was launched before its host's firmware was updated, and not committed."""
    mint = foundry("turin")
    changes = {
        CURRENT: mint.tcb({**VERSIONS, "snp": VERSIONS["snp"] + 1}),
        COMMITTED: mint.tcb({**VERSIONS, "fmc": 0}),
        LAUNCH: mint.tcb({**VERSIONS, "microcode": 7}),
        PLATFORM_INFO: bytes(1),
        LAUNCH_MITIGATIONS: vector(0b110),
        CURRENT_MITIGATIONS: vector(1 << 63 | 0b011),
    }
    report = SnpReport.decode(mint.report(DATA, changes=changes))
    text = measure.snp_table(report, (mint.product,), None)
    (table,) = parse(f"[[admit]]\n{text}".encode(), lambda path, limit: b"").tables("admit")
    rules = snp.read_rules(table.table("snp"))
    assert verify(mint, changes, rules).report.signed == report.signed
    assert (rules.allow_provisional_firmware, rules.require_alias_check) == (True, False)
    assert rules.mitigations == (("turin", 0b010),)
    assert dict(rules.minimum_tcb[0][1].parts) == {**VERSIONS, "fmc": 0, "microcode": 7}


# -- recorded -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [each for each in RECORDS if each != "google"])
def test_a_recorded_report_needs_exactly_its_own_exceptions(name: str) -> None:
    record = RECORDS[name]
    proof, data = snp.encode(record.report, record.certificate), SnpReport.decode(record.report).report_data
    for allow, require in itertools.product((False, True), repeat=2):
        rules = replace(rules_for(record), allow_provisional_firmware=allow, require_alias_check=require)
        if (name in PROVISIONAL and not allow) or (name in SILENT and require):
            with pytest.raises(AdmissionError, match=r"provisional|memory for aliases"):
                snp.verify(proof, data, rules, record.now)
        else:
            snp.verify(proof, data, rules, record.now)
    found = rules_for(record)
    assert (found.allow_provisional_firmware, found.require_alias_check) == (name in PROVISIONAL, name not in SILENT)


def test_a_recorded_report_has_the_mitigations_that_it_says() -> None:
    record = RECORDS["oak genoa"]
    proof, data = snp.encode(record.report, record.certificate), SnpReport.decode(record.report).report_data
    snp.verify(proof, data, replace(rules_for(record), mitigations=(("genoa", 1),)), record.now)
    with pytest.raises(AdmissionError, match="lacks mitigations 0x2 in LAUNCH_MIT_VECTOR"):
        snp.verify(proof, data, replace(rules_for(record), mitigations=(("genoa", 3),)), record.now)


# -- rules ----------------------------------------------------------------------------------------------------------

POLICY = f"""
measurement = "{MEASUREMENT.hex()}"
minimum_tcb.milan = {{ bootloader = 4, tee = 0, snp = 24, microcode = 219 }}
"""


def read(text: str) -> snp.Rules:
    table = parse((POLICY + text).encode(), lambda path, limit: b"")
    found = snp.read_rules(table)
    table.done()
    return found


def test_the_safe_values_are_the_defaults() -> None:
    assert read("") == read("allow_provisional_firmware = false\nrequire_alias_check = true") == foundry().rules
    assert read("mitigations.milan = 0x5").mitigations == (("milan", 5),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mitigations.genoa = 1", "mitigations names genoa, and minimum_tcb does not"),
        ("mitigations.naples = 1", "unknown key 'naples'"),
        ("mitigations.milan = 0", "from 1 to"),
        ('require_alias_check = "no"', "true or false"),
        ("allow_provisional_firmware = 1", "true or false"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        read(text)
