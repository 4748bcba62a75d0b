"""Azure: recorded and minted evidence verifies, each broken link of the chain to the guest is refused."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.policy_file.policy_file import PolicyFile, Rule
from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import azure, hcl_report, kinds, snp, tdx, tdx_quote, tpm_quote
from ringfence.errors import AdmissionError, PolicyError
from tests.unit import azure_mint, snp_mint, tdx_mint, tdx_records
from tests.unit.azure_mint import NONCE, PCRS, Machine, attest, machine
from tests.unit.azure_records import RECORDS, WITHOUT_QUOTE, Record
from tests.unit.flips import flips

records = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
both = pytest.mark.parametrize("kind", ["azure_snp", "azure_tdx"])


def verify(kind: str, proof: bytes, rules: azure.Rules | None = None, nonce: bytes = NONCE) -> azure.Guest:
    now = time.time()
    if kind == "azure_snp":
        known = snp_mint.foundry().roots
        return azure.verify_snp(proof, nonce, rules or azure_mint.snp_rules(), now, known=known)[1]
    return azure.verify_tdx(proof, nonce, rules or azure_mint.tdx_rules(), now, root=tdx_mint.foundry().root)[1]


def proof_of(kind: str, attestation: azure.Attestation | None = None, vm: Machine | None = None) -> bytes:
    vm = vm or machine()
    return vm.snp_proof(attestation) if kind == "azure_snp" else vm.tdx_proof(attestation)


def rules_of(kind: str) -> azure.Rules:
    return azure_mint.snp_rules() if kind == "azure_snp" else azure_mint.tdx_rules()


# -- what was recorded ----------------------------------------------------------------------------------------------


@records
def test_recorded_evidence_verifies_at_its_time_under_the_root_of_amd(record: Record) -> None:
    claims, guest = azure.verify_snp(record.proof, record.nonce, record.rules, record.now)
    assert claims.report.vmpl == 0
    assert guest.runtime.has_secure_boot
    assert guest.quote.firmware_version == azure_mint.FIRMWARE
    assert hcl_report.read(record.hcl).is_consistent


@records
def test_recorded_evidence_is_refused_for_another_connection(record: Record) -> None:
    with pytest.raises(AdmissionError, match="another connection or another worker"):
        azure.verify_snp(record.proof, NONCE, record.rules, record.now)


@records
def test_recorded_evidence_of_another_boot_is_refused(record: Record) -> None:
    other = replace(record.rules, pcrs=((4, (bytes(32),)),))
    with pytest.raises(AdmissionError, match=f"its PCR 4 is {record.pcrs[4].hex()}"):
        azure.verify_snp(record.proof, record.nonce, other, record.now)


def test_the_attestation_key_of_one_recorded_vm_does_not_pass_with_the_report_of_another() -> None:
    one, other = RECORDS.values()
    mixed = azure.encode_snp(hcl_report.read(other.hcl).hardware, other.certificate, one.attestation)
    with pytest.raises(AdmissionError, match="does not cover the vTPM's runtime data"):
        azure.verify_snp(mixed, one.nonce, other.rules, other.now)


def test_a_recorded_hcl_report_without_a_quote_parses() -> None:
    found = hcl_report.read(WITHOUT_QUOTE)
    assert found.kind == hcl_report.SNP and found.is_consistent
    assert hcl_report.read_runtime_data(found.runtime_data).vm_id == "911B0EF8-9DBA-48B0-B275-4E4DF2D39252"


def test_a_recorded_td_of_the_preview_is_refused_for_its_attributes() -> None:
    """Launched without SEPT_VE_DISABLE, whatever its collateral."""
    quote = tdx_quote.trim(tdx_records.load("trustee-td-quote.bin"))
    with pytest.raises(AdmissionError, match="SEPT_VE_DISABLE"):
        tdx.authenticate(quote, (), time.time())
    assert tdx_quote.read(quote).rtmrs == (bytes(48),) * 4


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
@pytest.mark.long
@records
def test_every_flipped_bit_of_recorded_evidence_is_refused(record: Record, exhaustive: bool) -> None:
    """TPM quote, its signature, PCR values, runtime data, report, VCEK and lengths: nothing of a proof is unsigned."""
    rules, nonce, now, count = record.rules, record.nonce, record.now, 0
    for changed in flips(record.proof, exhaustive):
        with pytest.raises(AdmissionError):
            azure.verify_snp(changed, nonce, rules, now)
        count += 1
    assert count == (8 if exhaustive else 1) * len(record.proof)


@records
def test_every_flipped_bit_of_a_recorded_tpm_quote_is_refused_by_its_signature(record: Record) -> None:
    """Also those that leave the nonce alone and parse: the signature covers all of them."""
    key = hcl_report.read_runtime_data(record.attestation.runtime_data).attestation_key
    tpm_quote.verify(record.quote, record.signature, key)
    for quote, signature in (
        *((changed, record.signature) for changed in flips(record.quote)),
        *((record.quote, changed) for changed in flips(record.signature)),
    ):
        with pytest.raises(AdmissionError, match="not signed with the vTPM's attestation key"):
            tpm_quote.verify(quote, signature, key)


# -- what was minted ------------------------------------------------------------------------------------------------


@both
def test_minted_evidence_is_accepted(kind: str) -> None:
    guest = verify(kind, proof_of(kind))
    assert guest.pcrs == PCRS
    assert guest.runtime.vm_id == azure_mint.VM_ID
    assert (guest.quote.clock, guest.quote.reset_count, guest.quote.is_clock_safe) == (4711, 2, True)


@both
def test_minted_evidence_is_refused_under_the_pinned_roots(kind: str) -> None:
    check: Callable[..., object] = azure.verify_snp if kind == "azure_snp" else azure.verify_tdx
    with pytest.raises(AdmissionError):
        check(proof_of(kind), NONCE, rules_of(kind), time.time())


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
@pytest.mark.long
@both
def test_every_flipped_bit_of_minted_evidence_is_refused(kind: str, exhaustive: bool) -> None:
    """Of a TDX quote: what its signature covers. The rest has bytes without meaning (tests/unit/test_tdx.py)."""
    proof, rules = proof_of(kind), rules_of(kind)
    unsigned = range(0) if kind == "azure_snp" else range(4 + 632, 4 + len(machine().tdx_quote))
    for place, changed in enumerate(flips(proof, exhaustive)):
        if (place // 8 if exhaustive else place) in unsigned:
            continue
        with pytest.raises(AdmissionError):
            verify(kind, changed, rules)


@pytest.mark.promise("Azure's vTPM is trusted only with a key that the verified hardware report covers.")
@both
def test_a_quote_of_another_key_is_refused(kind: str) -> None:
    """An attacker's own TPM, or none: the runtime data names another key, or is not that of the report."""
    attacker = machine(1)
    forged = attacker.attestation()
    with pytest.raises(AdmissionError, match="does not cover the vTPM's runtime data"):
        verify(kind, proof_of(kind, forged))
    with pytest.raises(AdmissionError, match="not signed with the vTPM's attestation key"):
        verify(kind, proof_of(kind, replace(forged, runtime_data=machine().runtime)))


@both
def test_a_quote_over_another_binding_is_refused(kind: str) -> None:
    for nonce in (bytes(32), NONCE[:-1], NONCE + b"\0", b""):
        with pytest.raises(AdmissionError, match="another connection or another worker"):
            verify(kind, proof_of(kind, machine().attestation(nonce)))


@both
def test_other_pcr_values_than_the_quoted_ones_are_refused(kind: str) -> None:
    good = machine().attestation(pcrs=(bytes(32), *PCRS[1:]))
    with pytest.raises(AdmissionError, match="PCR values are not those of the TPM quote"):
        verify(kind, proof_of(kind, replace(good, pcrs=PCRS)))
    with pytest.raises(AdmissionError, match="its PCR 0 is 0000"):
        verify(kind, proof_of(kind, good))


@both
def test_each_rule_of_the_vtpm_is_enforced(kind: str) -> None:
    rules = rules_of(kind)
    accepted = (
        replace(rules, pcrs=((23, (bytes(32), PCRS[23])),)),
        replace(rules, tpm_firmware=(bytes(8), azure_mint.FIRMWARE)),
        replace(rules, vm_ids=(azure_mint.VM_ID,)),
    )
    for each in accepted:
        verify(kind, proof_of(kind), each)
    refused = (
        (replace(rules, pcrs=((23, (bytes(32),)),)), "its PCR 23 is"),
        (replace(rules, tpm_firmware=(bytes(8),)), "its tpm_firmware is 2020031200120003"),
        (replace(rules, vm_ids=("another",)), "its vm_id is 7DF7B373"),
    )
    for each, reason in refused:
        with pytest.raises(AdmissionError, match=reason):
            verify(kind, proof_of(kind), each)


@both
def test_a_vm_without_secure_boot_is_refused_unless_the_policy_accepts_it(kind: str) -> None:
    vm = machine().with_runtime(secure_boot=False)
    with pytest.raises(AdmissionError, match="without secure boot"):
        verify(kind, proof_of(kind, vm=vm))
    verify(kind, proof_of(kind, vm=vm), replace(rules_of(kind), require_secure_boot=False))


@both
def test_the_rules_of_the_hardware_report_apply_to_the_paravisor(kind: str) -> None:
    hardware = rules_of(kind).hardware
    if isinstance(hardware, snp.Rules):
        other: snp.Rules | tdx.Rules = replace(hardware, measurements=(bytes(48),))
    else:
        other = replace(hardware, mrtd=(bytes(48),))
    with pytest.raises(AdmissionError, match=r"its (measurement|mrtd) is"):
        verify(kind, proof_of(kind), replace(rules_of(kind), hardware=other))


def test_report_data_is_the_digest_padded_by_zeros() -> None:
    """A report whose second half is not zero was made for something else."""
    vm = machine()
    report = snp_mint.foundry().report(hashlib.sha256(vm.runtime).digest() + b"\1" + bytes(31))
    with pytest.raises(AdmissionError, match="does not cover"):
        verify("azure_snp", azure.encode_snp(report, azure_mint.certificate(), vm.attestation()))


# -- the forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"\xffTCH"}, "a TPM did not make it"),
        ({"type": b"\x80\x17"}, "type 0x8017, not a quote"),
        ({"signer": (67).to_bytes(2, "big") + bytes(67)}, "a field of 67 bytes"),
        ({"extra data": (65).to_bytes(2, "big") + bytes(65)}, "a field of 65 bytes"),
        ({"safe": b"\2"}, "a flag of value 2"),
        ({"selection": bytes.fromhex("00000001 000b 03 feffff")}, "does not cover PCRs"),
        ({"selection": bytes.fromhex("00000001 0004 03 ffffff")}, "does not cover PCRs"),
        ({"selection": bytes.fromhex("00000000")}, "does not cover PCRs"),
        ({"digest": b"\0\x1f" + bytes(31)}, "a PCR digest of 31 bytes"),
        ({"digest": b"\0\x21" + bytes(33)}, "a field of 33 bytes"),
        ({"end": b"\0"}, "1 bytes of trailing data"),
        ({"end": bytes(400)}, "at most 512 are allowed"),
    ],
)
def test_a_quote_of_another_form_is_refused_even_if_the_key_signed_it(changes: dict[str, bytes], reason: str) -> None:
    with pytest.raises(AdmissionError, match=reason):
        verify("azure_snp", proof_of("azure_snp", machine().attestation(changes=changes)))


def test_a_truncated_quote_is_refused() -> None:
    whole = attest(NONCE)
    tpm_quote.read(whole)
    for length in range(len(whole)):
        with pytest.raises(AdmissionError, match="malformed"):
            tpm_quote.read(whole[:length])


def _changed(change: Callable[[dict[str, object]], object]) -> bytes:
    found = json.loads(machine().runtime)
    change(found)
    return json.dumps(found).encode()


def _weak() -> bytes:
    return azure_mint.runtime_data(rsa.generate_private_key(65537, 1024).public_key())


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (lambda: b"", "malformed"),
        (lambda: b"[]", "not an object"),
        (lambda: b"\xff", "not JSON|malformed"),
        (lambda: b'{"keys":1,"keys":1}', "a duplicate name"),
        (lambda: b"[" * 5000, "nested too deeply|malformed"),
        (lambda: bytes(8193), "at most 8192"),
        (lambda: _changed(lambda found: found.pop("keys")), "it has no keys"),
        (lambda: _changed(lambda found: found.update(keys=[])), "0 keys named HCLAkPub"),
        (lambda: _changed(lambda found: found["keys"].append(found["keys"][0])), "2 keys named HCLAkPub"),  # type: ignore[attr-defined,index]
        (lambda: _changed(lambda found: found["keys"][0].update(kty="EC")), "not an RSA key for sig"),  # type: ignore[index]
        (lambda: _changed(lambda found: found["keys"][0].update(key_ops=["encrypt"])), "not an RSA key for sig"),  # type: ignore[index]
        (lambda: _changed(lambda found: found["keys"][0].update(n=1)), "not an RSA key"),  # type: ignore[index]
        (lambda: _changed(lambda found: found["keys"][0].update(e="Aw")), "exponent 65537"),  # type: ignore[index]
        (lambda: _changed(lambda found: found["keys"][0].update(n="A=")), "base64url"),  # type: ignore[index]
        (_weak, "2048 bits or more"),
        (lambda: _changed(lambda found: found.pop("vm-configuration")), "no vm-configuration"),
        (lambda: machine().with_runtime(secure_boot=1).runtime, "secure-boot is not true or false"),
        (lambda: machine().with_runtime(vmUniqueId="x" * 65).runtime, "vmUniqueId"),
        (lambda: machine().with_runtime(vmUniqueId="\n").runtime, "vmUniqueId"),
    ],
)
def test_runtime_data_of_another_form_is_refused(runtime: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(AdmissionError, match=reason):
        hcl_report.read_runtime_data(runtime())


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, b"HCLB", "not an HCL report"),
        (8, b"\xff\xff", "inconsistent lengths"),
        (1216, b"\xff\xff", "inconsistent lengths"),
        (1216 + 16, b"\xff\xff\xff\xff", "inconsistent lengths"),
        (1216 + 8, b"\3", "of type 3, neither"),
        (1216 + 12, b"\2", "hash type 2, not SHA-256"),
        (2599, b"\1", "trailing data"),
    ],
)
def test_an_hcl_report_of_another_form_is_refused(place: int, value: bytes, reason: str) -> None:
    data = bytearray(azure_mint.hcl(hcl_report.SNP, machine().snp_report, machine().runtime))
    assert hcl_report.read(bytes(data)).is_consistent
    data[place : place + len(value)] = value
    with pytest.raises(AdmissionError, match=reason):
        hcl_report.read(bytes(data))


def test_an_hcl_report_that_ends_early_or_is_too_long_is_refused() -> None:
    whole = azure_mint.hcl(hcl_report.TDX, azure_mint.td_report(machine().covered), machine().runtime, padded=0)
    assert hcl_report.read(whole).is_consistent
    for length in (0, 31, 1235, len(whole) - 1):
        with pytest.raises(AdmissionError, match="truncated"):
            hcl_report.read(whole[:length])
    with pytest.raises(AdmissionError, match="at most 16384"):
        hcl_report.read(whole + bytes(1 << 14))
    with pytest.raises(AdmissionError, match="after the TD report"):
        hcl_report.read(azure_mint.hcl(hcl_report.TDX, bytes(1183) + b"\1", machine().runtime))


@given(st.binary(max_size=4000))
@settings(deadline=None)
def test_any_bytes_are_evidence_or_refused(data: bytes) -> None:
    for parser in (azure.decode_snp, azure.decode_tdx, tpm_quote.read, hcl_report.read, hcl_report.read_runtime_data):
        with pytest.raises(AdmissionError):
            parser(data)


@both
def test_a_proof_round_trips_and_refuses_trailing_data(kind: str) -> None:
    proof = proof_of(kind)
    decode: Callable[[bytes], tuple[object, ...]] = azure.decode_snp if kind == "azure_snp" else azure.decode_tdx
    encode: Callable[..., bytes] = azure.encode_snp if kind == "azure_snp" else azure.encode_tdx
    assert encode(*decode(proof)) == proof
    for wrong in (proof + b"\0", proof[:-1], b"", proof[4:]):
        with pytest.raises(AdmissionError, match="malformed"):
            decode(wrong)


# -- policies -------------------------------------------------------------------------------------------------------

SNP_KEYS = (
    f'measurement = "{"00" * 48}"\nMORE[minimum_tcb]\nmilan = {{ bootloader = 4, tee = 0, snp = 8, microcode = 1 }}\n'
)


def read(text: str) -> azure.Rules:
    def no_files(path: str, limit: int) -> bytes:
        raise AssertionError(path)

    table = parse(text.encode(), no_files)
    found = azure.read_snp_rules(table)
    table.done()
    return found


def test_a_table_has_the_keys_of_snp_and_those_of_the_vtpm() -> None:
    value = "ab" * 32
    more = f'tpm_firmware = "{"01" * 8}"\nvm_id = ["a", "b"]\nrequire_secure_boot = false\npcrs = {{ 4 = "{value}" }}\n'
    rules = read(SNP_KEYS.replace("MORE", more))
    assert rules.pcrs == ((4, (bytes.fromhex(value),)),)
    assert (rules.tpm_firmware, rules.vm_ids, rules.require_secure_boot) == ((b"\1" * 8,), ("a", "b"), False)
    text = "\n".join(rules.explain())
    for part in ("AMD SEV-SNP guest", f"PCR 4 {value}", "any PCR 0, 1, 2, 3, 5", "of the VM a or b", "without secure"):
        assert part in text
    assert "with secure boot" in "\n".join(azure_mint.tdx_rules().explain())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "pcrs is missing"),
        ("pcrs = {}\n", "at least one of 0 to 23"),
        ('pcrs = { 24 = "00" }\n', "at least one of 0 to 23"),
        (f'pcrs = {{ 4 = "{"00" * 32}", 24 = "00" }}\n', "unknown key '24'"),
        ('pcrs = { 4 = "00" }\n', "64 hexadecimal digits"),
        (f'pcrs = {{ 23 = "{"00" * 32}" }}\n', "pins only 16 and 23, which any software in the guest can reset"),
        (f'pcrs = {{ 16 = "{"00" * 32}", 23 = "{"00" * 32}" }}\n', "pins only 16 and 23"),
        (f'pcrs = {{ 4 = "{"00" * 32}" }}\nnothing = 1\n', "unknown key 'nothing'"),
    ],
)
def test_a_table_without_pcrs_or_with_unknown_keys_is_refused(more: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        read(SNP_KEYS.replace("MORE", more))


def test_the_content_of_rules_changes_with_each_of_them_and_not_with_their_order() -> None:
    rules = azure_mint.snp_rules()
    others = [
        replace(rules, pcrs=rules.pcrs[1:]),
        replace(rules, pcrs=((0, (bytes(32),)), *rules.pcrs[1:])),
        replace(rules, tpm_firmware=(bytes(8),)),
        replace(rules, vm_ids=("a",)),
        replace(rules, vm_ids=("a", "b")),
        replace(rules, require_secure_boot=False),
        replace(rules, hardware=snp_mint.foundry("genoa").rules),
    ]
    assert len({each.content() for each in (rules, *others)}) == 1 + len(others)
    assert replace(rules, pcrs=rules.pcrs[::-1]).content() == rules.content()


def test_a_revocation_in_another_rule_counts_for_azure() -> None:
    mint = snp_mint.foundry()
    revoked = mint.revoked(1)
    plain = replace(mint.rules, revoked=(revoked,))
    file = PolicyFile(
        (Rule((("snp", plain),)), Rule((("azure_snp", azure_mint.snp_rules()),))),
    )
    shared = kinds._share_revocations(file, "the policy").rules[1].proofs[0][1]
    assert isinstance(shared, azure.Rules) and isinstance(shared.hardware, snp.Rules)
    assert shared.hardware.listed == (revoked,)
    with pytest.raises(AdmissionError, match="revoked"):
        verify("azure_snp", proof_of("azure_snp"), shared)
