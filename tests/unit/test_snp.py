"""SEV-SNP: recorded reports verify at their time, changed ones are refused, and each rule of a policy is enforced."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import snp
from ringfence.admission.proofs.snp_chain import pinned
from ringfence.admission.proofs.snp_report import PRODUCTS, REPORT_BYTES, SIGNED_BYTES, SnpReport, Tcb
from ringfence.errors import AdmissionError, PolicyError
from tests.unit.flips import flips
from tests.unit.snp_mint import MEASUREMENT, VERSIONS, Foundry, foundry
from tests.unit.snp_records import AWS, DEBUGGED, RECORDS, Record, content, moment, rules_for

records = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
DATA = bytes(range(64))


def authenticate(record: Record, **changes: object) -> snp.Claims:
    values = {"report": record.report, "certificate": record.certificate, "now": record.now, **changes}
    return snp.authenticate(**values)  # type: ignore[arg-type]


# -- what was recorded ----------------------------------------------------------------------------------------------


@records
def test_a_recorded_report_verifies_at_its_time_under_the_root_of_amd(record: Record) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # AMD's serial number 0 is no reason to warn anybody
        claims = authenticate(record)
    assert claims.product is PRODUCTS[record.product]
    assert claims.report.version == record.version
    assert claims.provider == (AWS if record.name == "vlek" else None)


@pytest.mark.parametrize(
    "record", [each for each in RECORDS.values() if each.name != DEBUGGED], ids=lambda each: each.name
)
def test_rules_made_from_a_report_admit_it(record: Record) -> None:
    proof = snp.encode(record.report, record.certificate)
    claims = snp.verify(proof, SnpReport.decode(record.report).report_data, rules_for(record), record.now)
    assert claims.tcb == dict(rules_for(record).minimum_tcb)[record.product]


@pytest.mark.promise("A guest that its host may debug is rejected.")
def test_a_recorded_guest_that_its_host_may_debug_is_refused() -> None:
    claims = authenticate(RECORDS[DEBUGGED])
    with pytest.raises(AdmissionError, match="may debug the guest"):
        snp.check(claims, rules_for(RECORDS[DEBUGGED]))


@pytest.mark.promise("Evidence is valid only with the certificate of the device that signed it.")
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("trustee-test-vcek-invalid-legacy.der", "not signed by"),
        ("trustee-test-vcek-invalid-new.der", "not signed by"),
        ("virtee-vcek_milan.der", "not signed with the key of its certificate: the VCEK is of another chip"),
        ("virtee-vcek_turin.der", "not signed with the key"),
        ("trustee-test-vlek.der", "not signed with the key"),
        ("oak-genoa_vcek.der", "not signed with the key"),
    ],
)
def test_a_report_with_the_certificate_of_another_chip_is_refused(file: str, reason: str) -> None:
    record = RECORDS["trustee"]
    with pytest.raises(AdmissionError, match=reason):
        authenticate(record, certificate=content(file), now=moment("2025-09-01"))


def test_a_chain_of_another_product_line_is_refused() -> None:
    record = RECORDS["oak genoa"]
    for name in ("milan", "turin"):
        with pytest.raises(AdmissionError, match="was not issued under a pinned root"):
            authenticate(record, known={name: pinned()[name]})


@pytest.mark.parametrize(("name", "day"), [("vlek", "2025-12-11"), ("vlek", "2024-12-09"), ("trustee", "2031-01-01")])
def test_an_expired_or_early_certificate_is_refused(name: str, day: str) -> None:
    with pytest.raises(AdmissionError, match=rf"is valid from .* and it is {day}"):
        authenticate(RECORDS[name], now=moment(day))


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
@pytest.mark.long
def test_every_flipped_bit_of_a_report_is_refused(exhaustive: bool) -> None:
    """Signed bytes, the signature, and what lies behind it, which must be zero: 9,472 bits."""
    record = RECORDS["trustee"]
    certificate, now = record.certificate, record.now
    count = 0
    for changed in flips(record.report, exhaustive):
        with pytest.raises(AdmissionError):
            snp.authenticate(changed, certificate, now)
        count += 1
    assert count == (8 if exhaustive else 1) * REPORT_BYTES


@pytest.mark.parametrize("name", [each for each in RECORDS if each != "trustee"])
def test_a_flipped_bit_in_any_byte_of_a_report_is_refused(name: str) -> None:
    record = RECORDS[name]
    certificate, now = record.certificate, record.now
    for changed in flips(record.report, every=False):
        with pytest.raises(AdmissionError):
            snp.authenticate(changed, certificate, now)


@pytest.mark.long
@pytest.mark.parametrize("record", [RECORDS["trustee"], RECORDS["vlek"]], ids=lambda each: each.name)
def test_every_flipped_bit_of_an_endorsement_certificate_is_refused(record: Record, exhaustive: bool) -> None:
    for changed in flips(record.certificate, exhaustive):
        with pytest.raises(AdmissionError):
            authenticate(record, certificate=changed)


@pytest.mark.parametrize("place", [0x2D0, 0x318, 0x330, REPORT_BYTES - 1])
def test_bytes_that_nothing_signs_must_be_zero(place: int) -> None:
    report = bytearray(RECORDS["trustee"].report)
    assert place >= SIGNED_BYTES and report[place] == 0
    report[place] = 1
    with pytest.raises(AdmissionError, match="bytes other than zero"):
        authenticate(RECORDS["trustee"], report=bytes(report))


# -- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, REPORT_BYTES - 1, REPORT_BYTES + 1])
def test_a_report_has_one_length(length: int) -> None:
    with pytest.raises(AdmissionError, match="1184 bytes"):
        SnpReport.decode(bytes(length))


@pytest.mark.parametrize("version", [0, 1, 4, 6, 1 << 31])
def test_versions_that_were_never_tested_are_refused(version: int) -> None:
    report = foundry().report(DATA, changes={0: version.to_bytes(4, "little")})
    with pytest.raises(AdmissionError, match=f"version {version}; this release reads"):
        SnpReport.decode(report)


@pytest.mark.parametrize("bit", range(5, 32))
def test_unknown_flags_are_refused(bit: int) -> None:
    report = foundry().report(DATA, changes={0x48: (1 << bit).to_bytes(4, "little")})
    with pytest.raises(AdmissionError, match="some of which this release does not support"):
        SnpReport.decode(report)


@given(st.binary(max_size=3000))
@settings(deadline=None)
def test_any_bytes_are_a_proof_or_refused(proof: bytes) -> None:
    with pytest.raises(AdmissionError):
        snp.verify(proof, DATA, foundry().rules, 0.0)


@given(st.binary(max_size=2000))
@settings(deadline=None)
def test_any_bytes_are_a_certificate_or_refused(leaf: bytes) -> None:
    with pytest.raises(AdmissionError):
        snp.authenticate(RECORDS["trustee"].report, leaf, RECORDS["trustee"].now)


def test_a_proof_round_trips_and_refuses_trailing_data() -> None:
    proof = snp.encode(b"report", b"certificate")
    assert snp.decode(proof) == (b"report", b"certificate")
    for wrong in (proof + b"\0", proof[:-1], b"", proof[4:]):
        with pytest.raises(AdmissionError, match="malformed"):
            snp.decode(wrong)


def test_a_certificate_with_bytes_behind_it_is_refused() -> None:
    with pytest.raises(AdmissionError, match="malformed"):
        authenticate(RECORDS["trustee"], certificate=RECORDS["trustee"].certificate + b"\0")


def test_a_replayed_report_is_refused_before_signatures_are_verified() -> None:
    proof = snp.encode(foundry().report(DATA), b"not a certificate")
    with pytest.raises(AdmissionError, match="malformed"):
        snp.verify(proof, DATA, foundry().rules, time.time(), known=foundry().roots)
    with pytest.raises(AdmissionError, match="REPORT_DATA differs"):
        snp.verify(proof, bytes(64), foundry().rules, time.time(), known=foundry().roots)


def test_a_refused_guest_learns_nothing_of_the_policy() -> None:
    mint = foundry()
    high = Tcb(tuple((part, 251) for part, _ in mint.rules.minimum_tcb[0][1].parts))
    cases = (
        (replace(mint.rules, minimum_tcb=(("milan", high),)), "251"),
        (replace(mint.rules, minimum_tcb=(("turin", high),)), "Turin"),
        (replace(mint.rules, vmpl=3), "wants 3"),
        (replace(mint.rules, guest_svn=4711), "4711"),
    )
    for rules, secret in cases:
        with pytest.raises(AdmissionError) as caught:
            verify(mint, mint.report(DATA), mint.certificate("vcek"), rules)
        assert secret in str(caught.value)
        assert secret not in caught.value.to_peer


# -- minted under a test root ---------------------------------------------------------------------------------------


def verify(mint: Foundry, report: bytes, certificate: bytes, rules: snp.Rules | None = None) -> snp.Claims:
    proof = snp.encode(report, certificate)
    return snp.verify(proof, DATA, rules or mint.rules, time.time(), known=mint.roots)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", ["vcek", "vlek"])
def test_a_minted_report_is_admitted_under_the_test_root_only(product: str, kind: str) -> None:
    mint = foundry(product)
    changes = {0x48: (1 << 2).to_bytes(4, "little")} if kind == "vlek" else {}
    report, certificate = mint.report(DATA, changes=changes), mint.certificate(kind)
    rules = replace(mint.rules, vlek_providers=("test",))
    assert verify(mint, report, certificate, rules).product.name == product
    with pytest.raises(AdmissionError, match="was not issued under a pinned root of AMD"):
        snp.verify(snp.encode(report, certificate), DATA, rules, time.time())


def number(value: int, width: int = 4) -> bytes:
    return value.to_bytes(width, "little")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({0x08: number(0xB0000, 8)}, "may debug the guest"),
        ({0x08: number(0x70000, 8)}, "allows a migration agent"),
        ({0x08: number(0x230000, 8)}, "allows CXL memory"),
        ({0x08: number(0x10000, 8)}, "bits that this release does not support"),
        ({0x08: number(1 << 40 | 0x30000, 8)}, "bits that this release does not support"),
        ({0x30: number(1)}, "at VMPL 1, the policy wants 0"),
        ({0x34: number(2)}, "signature algorithm 2"),
        ({0x48: number(1 << 1)}, "masks the chip's key"),
        ({0x48: number(1 << 2)}, "another kind of key"),
        ({0x48: number(7 << 2)}, "another kind of key"),
        ({0x50: bytes(64)}, "made for another connection"),
        ({0x90: bytes(48)}, "its measurement is 0000.*does not list"),
        ({0x188: bytes((0x1A, 0x02))}, "family 0x1a, model 0x2; its certificate is for Milan"),
        ({0x188: bytes((0x19, 0x11))}, "model 0x11; its certificate is for Milan"),
        ({0x182: b"\1"}, "malformed TCB version"),
        ({0x1A0: bytes(64)}, "report is from chip 0000000000000000, its VCEK for 0102"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_signed_report_that_says_the_wrong_thing_is_refused(changes: dict[int, bytes], reason: str) -> None:
    mint = foundry()
    with pytest.raises(AdmissionError, match=reason):
        verify(mint, mint.report(DATA, changes=changes), mint.certificate())


PARTS = [(name, part) for name, product in PRODUCTS.items() for part in product.tcb_parts if VERSIONS[part] > 0]


@pytest.mark.promise("A platform whose firmware is outdated or revoked is rejected.")
@pytest.mark.parametrize(("product", "part"), PARTS)
def test_firmware_older_than_the_policy_wants_is_refused_part_by_part(product: str, part: str) -> None:
    mint = foundry(product)
    older = {**dict.fromkeys(VERSIONS, 255), part: VERSIONS[part] - 1}
    with pytest.raises(AdmissionError, match=rf"out of date: {part} {older[part]} \(at least {VERSIONS[part]}\)"):
        verify(mint, mint.report(DATA, versions=older), mint.certificate(versions=older))


def test_newer_firmware_than_the_policy_wants_is_admitted() -> None:
    mint, newer = foundry(), {**VERSIONS, "snp": 25}
    assert verify(mint, mint.report(DATA, versions=newer), mint.certificate(versions=newer)).tcb.parts[2] == ("snp", 25)


def test_a_certificate_for_another_tcb_is_refused() -> None:
    mint = foundry()
    with pytest.raises(AdmissionError, match="its certificate for bootloader 4, tee 0, snp 25"):
        verify(mint, mint.report(DATA), mint.certificate(versions={**VERSIONS, "snp": 25}))


@pytest.mark.promise("Evidence is valid only with the certificate of the device that signed it.")
def test_the_vcek_of_another_chip_is_refused_though_amd_signed_it() -> None:
    mint = foundry()
    other = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(AdmissionError, match="VCEK is of another chip"):
        verify(mint, mint.report(DATA, key=other), mint.certificate())
    with pytest.raises(AdmissionError, match="its VCEK for 0909"):
        verify(mint, mint.report(DATA), mint.certificate(chip=b"\x09" * 64))


def test_an_expired_minted_certificate_is_refused() -> None:
    mint = foundry()
    with pytest.raises(AdmissionError, match="SEV-VCEK is valid from"):
        verify(mint, mint.report(DATA), mint.certificate(days=(-3, -1)))


def test_a_vlek_is_refused_unless_its_provider_is_named() -> None:
    mint = foundry()
    report = mint.report(DATA, changes={0x48: number(1 << 2)})
    with pytest.raises(AdmissionError, match="VLEK of 'test', which vlek_providers does not name"):
        verify(mint, report, mint.certificate("vlek"))


def test_a_turin_report_must_say_that_it_is_one() -> None:
    mint = foundry("turin")
    with pytest.raises(AdmissionError, match="report is of version 2; its certificate is for Turin"):
        verify(mint, mint.report(DATA, changes={0x00: number(2)}), mint.certificate())


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"guest_svn": 1}, "guest SVN is 0"),
        ({"host_data": (b"\1" * 32,)}, "its host_data is 00"),
        ({"id_key_digests": (b"\1" * 48,)}, "its id_key_digest is 00"),
        ({"author_key_digests": (b"\1" * 48,)}, "its author_key_digest is 00"),
        ({"chip_ids": (b"\1" * 64,)}, "its chip_id is 0102"),
        ({"allow_smt": False}, "allows simultaneous multithreading"),
        ({"require_single_socket": True}, "not kept to a single socket"),
        ({"require_ciphertext_hiding": True}, "does not require ciphertext hiding"),
    ],
)
def test_each_rule_refuses_what_does_not_meet_it(rule: dict[str, object], reason: str) -> None:
    mint = foundry()
    rules = replace(mint.rules, **rule)  # type: ignore[arg-type]
    with pytest.raises(AdmissionError, match=reason):
        verify(mint, mint.report(DATA), mint.certificate(), rules)


def test_a_product_line_without_a_minimum_is_refused() -> None:
    mint = foundry("genoa")
    rules = replace(mint.rules, minimum_tcb=foundry("milan").rules.minimum_tcb)
    with pytest.raises(AdmissionError, match="runs on Genoa, and the policy admits Milan"):
        verify(mint, mint.report(DATA), mint.certificate(), rules)


# -- rules ----------------------------------------------------------------------------------------------------------

POLICY = f"""
measurement = "{MEASUREMENT.hex()}"
minimum_tcb.milan = {{ bootloader = 4, tee = 0, snp = 24, microcode = 219 }}
"""


def read(text: str) -> snp.Rules:
    def no_file(path: str, limit: int) -> bytes:
        raise FileNotFoundError(2, "No such file", path)

    table = parse(text.encode(), no_file)
    found = snp.read_rules(table)
    table.done()
    return found


def test_rules_are_read_as_they_are_written() -> None:
    assert read(POLICY) == foundry().rules


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "minimum_tcb is missing"),
        ("minimum_tcb = {}", "must name at least one of milan, genoa, turin"),
        (POLICY.replace("measurement", "mesurement"), "measurement is missing"),
        (POLICY.replace(", microcode = 219", ""), "microcode is missing"),
        (POLICY.replace("219", "256"), "0 to 255"),
        (POLICY.replace("milan", "naples"), "must name at least one"),
        (POLICY.replace("milan = { ", "milan = { fmc = 1, "), "unknown key 'fmc'"),
        (POLICY + 'root = "root.pem"', "unknown key 'root'"),
        (POLICY + "allow_debug = true", "unknown key 'allow_debug'"),
        (POLICY + 'known = "milan"', "unknown key 'known'"),
        (POLICY + f'chip_id = "{"00" * 64}"\nvlek_providers = "x"', "exclude each other"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        read(text)


@pytest.mark.parametrize(
    "change",
    [
        {"measurements": (bytes(48),)},
        {"measurements": (MEASUREMENT, bytes(48))},
        {"minimum_tcb": foundry("genoa").rules.minimum_tcb},
        {"vmpl": 1},
        {"guest_svn": 1},
        {"host_data": (bytes(32),)},
        {"id_key_digests": (bytes(48),)},
        {"author_key_digests": (bytes(48),)},
        {"chip_ids": (bytes(64),)},
        {"vlek_providers": ("test",)},
        {"allow_smt": False},
        {"allow_migration": True},
        {"allow_cxl": True},
        {"require_single_socket": True},
        {"require_ciphertext_hiding": True},
        {"allow_provisional_firmware": True},
        {"require_alias_check": False},
        {"mitigations": (("milan", 1),)},
        {"revoked": (foundry().revoked(),)},
    ],
)
def test_every_rule_is_in_the_content_and_is_explained(change: dict[str, object]) -> None:
    rules = foundry().rules
    changed = replace(rules, **change)  # type: ignore[arg-type]
    assert changed.content() != rules.content()
    assert changed.explain() != rules.explain()


def test_the_order_of_lists_means_nothing() -> None:
    one, two = bytes(48), b"\1" * 48
    rules = foundry().rules
    assert replace(rules, measurements=(one, two)).content() == replace(rules, measurements=(two, one)).content()


def test_the_root_is_part_of_the_policy_digest() -> None:
    mint = foundry()
    production = snp.verifier(mint.rules, time.time)
    assert production.content() != snp.verifier(mint.rules, time.time, known=mint.roots).content()
