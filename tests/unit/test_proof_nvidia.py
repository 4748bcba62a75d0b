"""NVIDIA's devices: every recorded report verifies, every changed bit is refused, and a policy's file pins what may run."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from cryptography import x509

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Listing
from ringfence.admission.policy import Evidence, Policy, Prover, verify
from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import kinds, nvidia, nvidia_chain, reference_values, spdm
from ringfence.admission.proofs.nvidia import Gpu, Rules
from ringfence.errors import AdmissionError, PolicyError
from tests import provers
from tests.certificates import ODD_FEATURE
from tests.unit import nvidia_mint as mint
from tests.unit.admission_samples import worker
from tests.unit.flips import flips
from tests.unit.nvidia_records import BAD_SIGNATURE, NOW, Record, pair, record, records, serialized

RECORDS = records()
BINDING = Binding(b"what two workers say of one connection")
ROOT = mint.root()


@cache
def claims(one: Record) -> nvidia.Claims:
    return nvidia.verify_report(one.gpu, one.nonce, NOW)


def device_of(one: Record) -> nvidia_chain.CertifiedGpu:
    return nvidia_chain.verify(one.gpu.chain, nvidia.pinned_root(), datetime.fromtimestamp(NOW, UTC))


# -- recorded -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", RECORDS, ids=lambda one: one.name)
def test_every_recorded_report_verifies(one: Record) -> None:
    found = claims(one)
    assert found.vbios
    assert (found.driver is None) == (found.model == "LS_10")
    assert len(found.measurements) == (31 if found.model == "LS_10" else 64)


def test_there_are_sixteen_of_three_models() -> None:
    assert len(RECORDS) == 16
    assert {claims(one).model for one in RECORDS} == {"GH100", "GB100", "LS_10"}


def test_what_a_report_says_is_what_others_read_in_it() -> None:
    found = claims(record("trustee_hopperAttestationReport.txt"))  # NVIDIA's service gave a token for its like
    assert (found.driver, found.vbios) == ("550.90.07", "96.00.9F.00.01")
    assert found.firmware_id.hex().startswith("f5c384aebb579217a2c66b17ed0f28e6")
    assert found.measurements[10].hex().startswith("059b32e712a153f490dbfb7976a9e275")


def test_nvidias_sample_of_a_bad_signature_is_refused() -> None:
    with pytest.raises(AdmissionError, match="not signed by its attestation key"):
        claims(pair(BAD_SIGNATURE))


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
def test_every_flipped_bit_of_a_report_is_refused(full: bool) -> None:
    one = record("hopper_evidence.json[0]")
    device = device_of(one)
    assert nvidia.claims_of(device, one.gpu.report, one.nonce)
    for count, changed in enumerate(flips(one.gpu.report)):
        if not full and count // 8 % 8 != count % 8:
            continue  # a bit of every byte; --full: every bit
        with pytest.raises(AdmissionError):
            nvidia.claims_of(device, changed, one.nonce)


def test_a_flipped_bit_of_a_certificate_is_refused(full: bool) -> None:
    one = record("sdk_blackwellAttestationReport.txt")
    for place, certificate in enumerate(one.gpu.chain):
        for count, changed in enumerate(flips(certificate)):
            if count % (8 if full else 61):
                continue
            chain = (*one.gpu.chain[:place], changed, *one.gpu.chain[place + 1 :])
            with pytest.raises(AdmissionError):
                nvidia.verify_report(replace(one.gpu, chain=chain), one.nonce, NOW)


def test_the_byte_of_a_certificate_that_is_not_signed_must_be_zero() -> None:
    one = record("sdk_blackwellAttestationReport.txt")
    certificate = one.gpu.chain[2]
    place = len(certificate) - len(x509.load_der_x509_certificate(certificate).signature) - 1
    changed = certificate[:place] + b"\1" + certificate[place + 1 :]
    chain = (*one.gpu.chain[:2], changed, *one.gpu.chain[3:])
    with pytest.raises(AdmissionError, match="signature with unused bits"):
        nvidia.verify_report(replace(one.gpu, chain=chain), one.nonce, NOW)


def test_trailing_driver_bytes_are_trimmed_by_the_prover_only() -> None:
    one = record("hopper_coco_report1.txt")
    assert len(one.report) == len(one.gpu.report) + 1
    assert claims(one)
    with pytest.raises(AdmissionError, match="1 bytes of trailing data after its signature"):
        nvidia.verify_report(replace(one.gpu, report=one.report), one.nonce, NOW)


def test_every_shorter_report_is_refused() -> None:
    report = record("hopper_evidence.json[0]").gpu.report
    for length in range(len(report)):
        with pytest.raises(AdmissionError, match="truncated"):
            spdm.read(report[:length])


def test_another_nonce_is_refused() -> None:
    one = record("hopper_evidence.json[0]")
    with pytest.raises(AdmissionError, match="not made for this connection"):
        nvidia.verify_report(one.gpu, hashlib.sha256(b"another").digest(), NOW)


def test_before_its_certificates_a_report_is_refused() -> None:
    one = record("sdk_blackwellAttestationReport.txt")
    early = datetime(2022, 6, 1, tzinfo=UTC).timestamp()
    with pytest.raises(AdmissionError, match=r"is valid from 2023.*it is 2022"):
        nvidia.verify_report(one.gpu, one.nonce, early)


@pytest.mark.promise("Evidence is valid only with the certificate of the device that signed it.")
def test_another_devices_chain_is_refused() -> None:
    one, two = serialized("multi_gpu_hopper.json")[:2]
    with pytest.raises(AdmissionError, match="not signed by its attestation key"):
        nvidia.verify_report(replace(one.gpu, chain=two.gpu.chain), one.nonce, NOW)
    mixed = (one.gpu.chain[0], two.gpu.chain[1], *one.gpu.chain[2:])
    with pytest.raises(AdmissionError, match="not valid under NVIDIA's root"):
        nvidia.verify_report(replace(one.gpu, chain=mixed), one.nonce, NOW)


def test_the_boot_roms_certificate_cannot_stand_for_the_report_key() -> None:
    one = record("hopper_evidence.json[0]")
    with pytest.raises(AdmissionError, match="not valid for signing reports"):
        nvidia.verify_report(replace(one.gpu, chain=one.gpu.chain[1:]), one.nonce, NOW)


# -- reference values --------------------------------------------------------------------------------------------------


def reference_values_of(*found: Record) -> tuple[reference_values.ReferenceValues, ...]:
    return tuple({each.key: each for each in (claims(one).reference_values() for one in found)}.values())


def verified(one: Record, rules: Rules) -> None:
    """The policy's part of the verdict on a recorded report."""
    nvidia._check(claims(one), rules, NOW)


def test_measurements_of_one_driver_and_vbios_are_the_same_on_every_gpu() -> None:
    first, *rest = [one for one in RECORDS if claims(one).driver == "590.12"]
    rules = Rules(reference_values_of(first), protected_pcie=True)
    assert len(rest) == 5
    for one in rest:
        verified(one, rules)


def test_one_combination_does_not_admit_another() -> None:
    gpus = [one for one in RECORDS if claims(one).driver]
    for one in gpus:
        for other in gpus:
            if claims(one).reference_values().key != claims(other).reference_values().key:
                with pytest.raises(AdmissionError, match=r"no reference values\. It has: G"):
                    verified(one, Rules(reference_values_of(other), protected_pcie=True))


@pytest.mark.promise("A guest or GPU whose measurements differ from the reference values is rejected.")
def test_another_measurement_more_or_fewer_are_refused_by_number() -> None:
    one = record("trustee_hopperAttestationReport.txt")
    (good,) = reference_values_of(one)
    verified(one, Rules((good,)))
    without = {index: values for index, values in good.measurements.items() if index != 7}
    cases = {
        "measurement 31": good.measurements | {31: (bytes(48),)},
        "measurement 7": without,
        "measurement 65": good.measurements | {65: (bytes(48),)},
    }
    for reason, values in cases.items():
        with pytest.raises(AdmissionError, match=reason + ":.*evidence measure"):
            verified(one, Rules((replace(good, measurements=values),)))
    verified(one, Rules((replace(good, measurements=good.measurements | {31: (bytes(48), *good.measurements[31])}),)))
    with pytest.raises(AdmissionError, match="started with firmware that is not in"):
        verified(one, Rules((replace(good, firmware_ids=(bytes(48),)),)))


def test_protected_pcie_is_refused_unless_the_policy_allows_it() -> None:
    one = record("hopper_evidence.json[0]")
    assert claims(one).protected_pcie
    with pytest.raises(AdmissionError, match=r"in plaintext.*protected_pcie = true"):
        verified(one, Rules(reference_values_of(one)))


def test_a_held_certificate_verifies_and_a_policy_can_refuse_it() -> None:
    one = record("hopper_evidence_cert_hold.json[0]")  # NVIDIA's service says: on hold. Nobody is asked here.
    verified(one, Rules(reference_values_of(one)))
    serial = claims(one).serials[1]
    with pytest.raises(AdmissionError, match=f"{serial:X}.*revoked"):
        verified(one, Rules(reference_values_of(one), revoked=frozenset({serial})))


@pytest.mark.promise("What one rule of a policy revokes, every rule rejects.")
def test_what_one_rule_calls_revoked_all_rules_refuse() -> None:
    """Any rule admits: one that does not repeat the serial number would admit what the other refuses."""
    one = record("hopper_evidence_cert_hold.json[0]")
    table = '[[admit]]\n[admit.nvidia]\nreference_values = "reference_values.toml"\n'
    text = f'version = 1\n{table}{table}gpus = 1\nrevoked = "{claims(one).serials[1]:X}"\n'
    content = reference_values.write(claims(one).reference_values()).encode()
    policy = kinds.read(text.encode(), lambda path, limit: content)
    for rule in policy.rules:
        rules = rule.proofs[0][1]
        assert isinstance(rules, Rules)
        with pytest.raises(AdmissionError, match="revoked"):
            verified(one, rules)


def test_a_switch_is_not_a_gpu() -> None:
    switch = record("switch_evidence_ls10.json[0]")
    with pytest.raises(AdmissionError, match="runs driver none"):
        verified(switch, Rules(reference_values_of(RECORDS[0])))
    with pytest.raises(AdmissionError, match="not a GPU"):
        claims(switch).reference_values()


@pytest.mark.parametrize("one", [one for one in RECORDS if "switch" not in one.name], ids=lambda one: one.name)
def test_reference_values_values_are_written_and_read_back(one: Record) -> None:
    found = claims(one).reference_values()
    assert reference_values.read(reference_values.write(found).encode(), "the file") == found


# -- the policy -----------------------------------------------------------------------------------------------------


def rules_from(tmp_path: Path, text: str, *files: str) -> Rules:
    for number, content in enumerate(files):
        (tmp_path / f"{number}.toml").write_text(content)
    return nvidia.read_rules(parse(text.encode(), lambda path, limit: (tmp_path / path).read_bytes()[:limit]))


def test_a_table_of_the_policy_is_read(tmp_path: Path) -> None:
    one, two = (reference_values.write(claims(each).reference_values()) for each in (RECORDS[0], RECORDS[1]))
    text = 'reference_values = ["0.toml", "1.toml"]\ngpus = 8\nprotected_pcie = true\nrevoked = ["41AD48FF92CDC93D9A"]'
    rules = rules_from(tmp_path, text, one, two)
    assert (rules.gpus, rules.protected_pcie, rules.revoked) == (8, True, frozenset({0x41AD48FF92CDC93D9A}))
    swapped = rules_from(tmp_path, text.replace('"0.toml", "1.toml"', '"1.toml", "0.toml"'), one, two)
    assert swapped.content() == rules.content()
    assert swapped.explain() == rules.explain()
    assert any("590.12" in line for line in rules.explain())
    plain = rules_from(tmp_path, 'reference_values = "0.toml"', one)
    assert (plain.gpus, plain.protected_pcie) == (None, False)


def test_everything_in_the_rules_is_in_their_content() -> None:
    first, second = reference_values_of(RECORDS[0], RECORDS[1])
    base = Rules((first,), gpus=4)
    others = [
        Rules((second,), gpus=4),
        Rules((first, second), gpus=4),
        Rules((first,)),
        Rules((first,), gpus=5),
        Rules((first,), gpus=4, protected_pcie=True),
        Rules((first,), gpus=4, revoked=frozenset({7})),
        Rules((replace(first, firmware_ids=(bytes(48),)),), gpus=4),
        Rules((replace(first, measurements=first.measurements | {3: (bytes(48),)}),), gpus=4),
    ]
    assert len({each.content() for each in (base, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpus = 8", "reference_values is missing"),
        ('reference_values = "0.toml"\ngpus = 0', "whole number from 1 to 16"),
        ('reference_values = "0.toml"\nroot = "my.pem"', "unknown key 'root'"),
        ('reference_values = "0.toml"\nrevoked = "x"', "hexadecimal"),
        ('reference_values = "0.toml"\nrevoked = "-1"', "hexadecimal"),
        ('reference_values = ["0.toml", "1.toml"]', "two files"),
        ('reference_values = "2.toml"', "measurements is missing"),
        ('reference_values = "3.toml"', "numbers of measurements, 1 to 255"),
        ('reference_values = "4.toml"', "96 hexadecimal digits"),
        ('reference_values = "5.toml"', "unknown key 'mesurement'"),
        ('reference_values = "6.toml"', "short text"),
        ('reference_values = "7.toml"', "has no measurement"),
    ],
)
def test_what_a_policy_may_not_say(tmp_path: Path, text: str, reason: str) -> None:
    good = reference_values.write(claims(RECORDS[0]).reference_values())
    head = good.split("[measurements]")[0]
    value = "0" * 96
    files = (
        good,
        good,
        head,
        head + f'[measurements]\n01 = "{value}"',
        head + '[measurements]\n1 = "00"',
        "mesurement = 1\n" + good,
        good.replace("GH100", "GH 100"),
        head + "[measurements]\n",
    )
    with pytest.raises(PolicyError, match=reason):
        rules_from(tmp_path, text, *files)


def test_no_policy_reaches_the_root(tmp_path: Path) -> None:
    """The pinned root is an argument that only code can hand in: no rule holds one, and no key of a table is read as one."""
    assert "root" not in Rules.__dataclass_fields__
    content = reference_values.write(claims(RECORDS[0]).reference_values())
    for name in ("root", "roots", "ca", "trust", "anchor", "pinned_root"):
        with pytest.raises(PolicyError, match=f"unknown key '{name}'"):
            rules_from(tmp_path, f'reference_values = "0.toml"\n{name} = "mine.pem"', content)
    device = mint.Device.under(ROOT)
    verifier = nvidia.verifier(Rules((minted_reference_values(device),)), lambda: mint.NOW)
    with pytest.raises(AdmissionError, match="not valid under NVIDIA's root"):
        verifier.verify(evidence(provers.of_nvidia(lambda nonce: [device.gpu(nonce)])))


# -- minted ---------------------------------------------------------------------------------------------------------


def minted_reference_values(device: mint.Device) -> reference_values.ReferenceValues:
    found = nvidia.verify_report(device.gpu(bytes(32)), bytes(32), mint.NOW, root=ROOT.certificate)
    return found.reference_values()


def evidence(prover: Prover, binding: Binding = BINDING) -> Evidence:
    return Evidence(worker(1).entry, prover.kind, prover.prove(binding), binding)


def verdict(*devices: mint.Device, gpus: int | None = None, rules: Rules | None = None) -> None:
    """Verify a proof of freshly minted GPUs."""
    rules = rules or Rules((minted_reference_values(mint.Device.under(ROOT)),), gpus=gpus)
    verifier = nvidia.verifier(rules, lambda: mint.NOW, root=ROOT.certificate)
    admitted = verify(
        Policy((verifier,)), evidence(provers.of_nvidia(lambda nonce: [device.gpu(nonce) for device in devices]))
    )
    assert admitted.proof_name == "NVIDIA GPU attestation"


def test_fresh_evidence_admits() -> None:
    verdict(mint.Device.under(ROOT))
    verdict(*(mint.Device.under(ROOT, number) for number in range(1, 4)), gpus=3)


@pytest.mark.promise("A proof is valid on one connection only.")
def test_a_proof_is_good_on_its_own_connection_only() -> None:
    device = mint.Device.under(ROOT)
    shown = evidence(provers.of_nvidia(lambda nonce: [device.gpu(nonce)]))
    verifier = nvidia.verifier(Rules((minted_reference_values(device),)), lambda: mint.NOW, root=ROOT.certificate)
    verifier.verify(shown)
    with pytest.raises(AdmissionError, match=r"rank 1: .*not made for this connection"):
        verifier.verify(replace(shown, binding=Binding(b"another connection")))


def test_gpus_are_counted_and_each_is_another() -> None:
    one, two = mint.Device.under(ROOT), mint.Device.under(ROOT, 2)
    with pytest.raises(AdmissionError, match="2 GPUs are presented, where the policy asks for exactly 3"):
        verdict(one, two, gpus=3)
    with pytest.raises(AdmissionError, match="presented twice"):
        verdict(one, one, gpus=2)
    again = replace(one).boot()  # the same device, with a fresh key
    with pytest.raises(AdmissionError, match="presented twice"):
        verdict(one, again, gpus=2)


@pytest.mark.promise("A worker that presents fewer GPUs than the policy's `gpus` is rejected.")
def test_a_missing_gpu_is_refused_if_the_policy_sets_a_count() -> None:
    """A worker has two and presents one. Only `gpus` tells a verifier how many there are."""
    one, two = (mint.Device.under(ROOT, number) for number in (1, 2))
    verdict(one, two, gpus=2)
    verdict(one)
    with pytest.raises(AdmissionError, match="1 GPUs are presented, where the policy asks for exactly 2"):
        verdict(one, gpus=2)


def test_one_bad_gpu_among_good_ones_is_refused() -> None:
    bad = mint.Device.under(ROOT, 2)
    bad.measurements[9] = bytes(48)
    with pytest.raises(AdmissionError, match="in measurement 9:"):
        verdict(mint.Device.under(ROOT), bad, mint.Device.under(ROOT, 3))


def test_a_replayed_report_is_refused_before_signatures_are_verified() -> None:
    """The nonces of all GPUs come before the chain of the first."""
    nonce, rules = nvidia.nonce_of(b"this one"), Rules((minted_reference_values(mint.Device.under(ROOT)),))
    good = Gpu(mint.Device.under(ROOT).report(nonce), (b"no", b"certificates"))
    bad = Gpu(mint.Device.under(ROOT).report(bytes(32)), (b"no", b"certificates"))
    with pytest.raises(AdmissionError, match="not valid under NVIDIA's root"):
        nvidia.verify(nvidia.encode([good]), b"this one", rules, mint.NOW, root=ROOT.certificate)
    with pytest.raises(AdmissionError, match="a GPU has another nonce"):
        nvidia.verify(nvidia.encode([good, bad]), b"this one", rules, mint.NOW, root=ROOT.certificate)


@pytest.mark.parametrize("mode", [b"", b"\0", b"\x56", b"\xab", b"\xaa\0", b"\x55\x55"])
def test_an_unknown_protected_pcie_mode_is_refused(mode: bytes) -> None:
    device = mint.Device.under(ROOT)
    device.opaque[spdm.PROTECTED_PCIE] = mode
    with pytest.raises(AdmissionError, match="does not support"):
        verdict(device)


@pytest.mark.promise("A refusal does not tell the peer which values the policy asks for.")
def test_a_refused_worker_learns_nothing_of_the_policy() -> None:
    known = minted_reference_values(mint.Device.under(ROOT))
    cases = ((Rules((known,), gpus=7), "exactly 7"), (Rules((replace(known, driver="999.99"),)), "999.99"))
    for rules, secret in cases:
        with pytest.raises(AdmissionError) as caught:
            verdict(mint.Device.under(ROOT), rules=rules)
        assert secret in str(caught.value)
        assert secret not in caught.value.to_peer


def test_firmware_other_than_the_certified_is_refused() -> None:
    device = mint.Device.under(ROOT)
    device.opaque[20] = hashlib.sha384(b"other firmware").digest()
    with pytest.raises(AdmissionError, match="other firmware than its key was certified for"):
        verdict(device)


def chain_with(device: mint.Device, **changes: object) -> Gpu:
    return replace(device.gpu(bytes(32)), **changes)  # type: ignore[arg-type]


def refused(gpu: Gpu, reason: str, now: float = mint.NOW, root: x509.Certificate = ROOT.certificate) -> None:
    with pytest.raises(AdmissionError, match=reason):
        nvidia.verify_report(gpu, bytes(32), now, root=root)


def test_issuers_that_may_not_issue_are_refused() -> None:
    top = mint.Device.under(ROOT)
    provisioner, model = top.above

    def gpu(rom_extensions: mint.Extensions) -> Gpu:
        return replace(top, rom=provisioner.issue("GH100 A01 GSP BROM", rom_extensions)).boot().gpu(bytes(32))

    assert nvidia.verify_report(gpu(mint.issuing()), bytes(32), mint.NOW, root=ROOT.certificate)
    refused(gpu([]), "issuer certificate in the GPU.s chain is not a CA")
    refused(gpu([(mint.usage(issues=True), True)]), "issuer certificate in the GPU.s chain is not a CA")
    refused(
        gpu([(x509.BasicConstraints(ca=True, path_length=None), True)]),
        "issuer certificate in the GPU.s chain is not a CA",
    )
    refused(
        gpu([(x509.BasicConstraints(ca=False, path_length=None), True)]),
        "issuer certificate in the GPU.s chain is not a CA",
    )
    unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\5\0")
    refused(gpu([*mint.issuing(), (unknown, True)]), "critical extension 1.2.3.4")
    tight = model.issue("Test GH100 Provisioner ICA 1", mint.issuing(path_length=0))
    rom = tight.issue("GH100 A01 GSP BROM", mint.issuing())
    refused(replace(top, above=(tight, model), rom=rom).boot().gpu(bytes(32)), "path length constraint")


def test_leaves_of_the_wrong_form_are_refused() -> None:
    top = mint.Device.under(ROOT)
    assert top.rom is not None
    rom = top.rom
    good = top.leaf_extensions()
    other_rom = mint.Device.under(ROOT).rom
    assert other_rom is not None
    firmware = top.firmware_id
    oid = x509.ObjectIdentifier("2.23.133.5.4.1")
    cases: list[tuple[mint.Extensions, str]] = [
        ([*good[1:]], "not valid for signing reports"),
        ([*mint.issuing(), *good[1:]], "not valid for signing reports"),
        ([good[0], good[2]], "does not name one NVIDIA device"),
        ([good[0], mint.device_name("AMD:GH100:1"), good[2]], "does not name one NVIDIA device"),
        ([good[0], good[1]], "names no firmware"),
        ([*good[:2], mint.device_id(other_rom.key.public_key(), firmware)], "belongs to another boot ROM"),
        ([*good[:2], mint.device_id(rom.key.public_key(), firmware[:47])], "not a SHA-384 digest"),
        ([*good[:2], (x509.UnrecognizedExtension(oid, b"\x30\x82\x00\x01"), False)], "malformed"),
        ([*good[:2], (x509.UnrecognizedExtension(oid, b""), False)], "malformed"),
    ]
    for extensions, reason in cases:
        refused(replace(top, leaf=rom.issue("GH100 A01 GSP FMC LF", extensions)).gpu(bytes(32)), reason)
    expired = rom.issue("GH100 A01 GSP FMC LF", good, end=datetime(2026, 1, 1, tzinfo=UTC))
    refused(replace(top, leaf=expired).gpu(bytes(32)), "to 2026-01-01, and it is 2026-11-01")


NO_FIRMWARE, OTHER_FIRMWARE = bytes(48), hashlib.sha384(b"other firmware").digest()
FIRMWARE = mint.Device.firmware_id


def leaf_with(*said: tuple[x509.ExtensionType, bool]) -> Gpu:
    """Of a device whose leaf says these things about its firmware."""
    device = mint.Device.under(ROOT)
    assert device.rom is not None
    return replace(device, leaf=device.rom.issue("leaf", [*device.leaf_extensions()[:2], *said])).gpu(bytes(32))


@pytest.mark.parametrize("flags", [None, bytes.fromhex("0080000001"), b"\0\0", b"\0"])
def test_a_leaf_names_one_firmware_and_no_bad_state(flags: bytes | None) -> None:
    for ids in ((FIRMWARE,), (FIRMWARE, NO_FIRMWARE)):
        gpu = leaf_with(mint.tcb_info(*ids, flags=flags))
        assert nvidia.verify_report(gpu, bytes(32), mint.NOW, root=ROOT.certificate).firmware_id == FIRMWARE


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([mint.tcb_info(FIRMWARE, OTHER_FIRMWARE)], "names several firmwares"),
        ([mint.tcb_info(FIRMWARE, NO_FIRMWARE, OTHER_FIRMWARE)], "names several firmwares"),
        ([mint.tcb_info(FIRMWARE, flags=b"\0\x40")], "not secure, in recovery or under debug"),
        ([mint.tcb_info(FIRMWARE, flags=b"\0\xa0")], "not secure, in recovery or under debug"),
        ([mint.tcb_info(FIRMWARE, flags=bytes.fromhex("0090000001"))], "not secure, in recovery or under debug"),
        ([mint.tcb_info(FIRMWARE, flags=b"")], "malformed"),
        ([mint.tcb_info()], "names no firmware"),
        ([mint.tcb_info(FIRMWARE[:47])], "not a SHA-384 digest"),
    ],
)
def test_a_leaf_that_says_more_than_one_firmware_is_refused(
    said: list[tuple[x509.ExtensionType, bool]], reason: str
) -> None:
    """The first is not enough: what stands beside it was started as well."""
    refused(leaf_with(*said), reason)


def test_a_leaf_that_says_its_firmware_in_two_ways_is_refused() -> None:
    device = mint.Device.under(ROOT)
    assert device.rom is not None
    for said in (FIRMWARE, OTHER_FIRMWARE):
        both = [*device.leaf_extensions(), mint.tcb_info(said)]
        for extensions in (both, [*both[:2], both[3], both[2]]):
            refused(
                replace(device, leaf=device.rom.issue("leaf", extensions)).gpu(bytes(32)), "names several firmwares"
            )


def test_an_extension_that_the_library_trips_over_is_a_refusal() -> None:
    top = mint.root()
    device = mint.Device.under(top)
    device.rom = device.above[0].issue("odd", [*mint.issuing(), (ODD_FEATURE, False)])
    with pytest.raises(AdmissionError, match="not valid under NVIDIA's root: KeyError"):
        nvidia_chain.verify(device.boot().chain, top.certificate, mint.BEGIN)


def test_a_chain_of_wrong_length_or_root_is_refused() -> None:
    device = mint.Device.under(ROOT)
    refused(chain_with(device, chain=()), "chain has 0 certificates")
    refused(chain_with(device, chain=device.chain[:1]), "chain has 1 certificates")
    refused(chain_with(device, chain=device.chain * 2), "chain has 8 certificates")
    refused(chain_with(device, chain=device.chain[:3]), "not valid under NVIDIA's root")
    refused(chain_with(device, chain=(b"", *device.chain[1:])), "not valid under NVIDIA's root")
    refused(chain_with(device, chain=(bytes(2049), *device.chain[1:])), "of 2049 bytes")
    refused(device.gpu(bytes(32)), "not valid under NVIDIA's root", root=mint.root().certificate)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"measurements": {2: bytes(48), 1: bytes(48)}}, "measurement 1 is out of order"),
        ({"measurements": {}}, "number of the GPU.s measurements is wrong"),
        ({"measurements": {1: bytes(47)}}, "not a SHA-384 digest"),
        ({"opaque": {6: b""}}, "VBIOS version is not a short text"),
        ({"opaque": {6: bytes(8), 3: b""}}, "driver version is not a short text"),
        ({"opaque": {6: b"\0\0\0\0\0\0\0\1"}}, "unknown form"),
        ({"opaque": {3: b"570 \xff\0"}}, "driver version is not a short text"),
    ],
)
def test_signed_nonsense_is_refused(changes: dict[str, object], reason: str) -> None:
    device = replace(mint.Device.under(ROOT), **changes)  # type: ignore[arg-type]
    refused(device.gpu(bytes(32)), reason)


# -- bytes ----------------------------------------------------------------------------------------------------------


def test_gpus_share_certificates_on_the_wire_and_eight_fit_a_proof() -> None:
    gpus = [one.gpu for one in serialized("multi_gpu_hopper.json")]
    proof = nvidia.encode(gpus)
    assert nvidia.decode(proof) == tuple(gpus)
    certificates = {certificate for gpu in gpus for certificate in gpu.chain}
    assert len(certificates) == 10  # two of each GPU's own, two that all share
    lengths = 2 + 10 * 4 + 4 * 9
    assert len(proof) == sum(map(len, certificates)) + sum(len(gpu.report) for gpu in gpus) + lengths
    assert 2 * len(proof) <= keys.PROOF_LIMIT_BYTES


def test_a_proof_has_one_form() -> None:
    device = mint.Device.under(ROOT)
    proof = nvidia.encode([device.gpu(bytes(32))])
    assert nvidia.encode(nvidia.decode(proof)) == proof
    head = 1 + sum(4 + len(each) for each in device.chain)
    extra = bytes([5]) + proof[1:head] + (1).to_bytes(4, "big") + b"x" + proof[head:]
    bad = {
        "trailing data": proof + b"\0",
        "truncated": proof[:-1],
        "not in order": extra,  # a certificate that nobody uses
        "is missing": proof[: head + 2] + b"\x04" + proof[head + 3 :],
        "1 to 16 GPUs": b"\0\0",
        "GPU proof is malformed: truncated message": b"",
    }
    for reason, changed in bad.items():
        with pytest.raises(AdmissionError, match=reason):
            nvidia.decode(changed)
    with pytest.raises(AdmissionError, match="not in order"):
        nvidia.decode(proof[: head + 2] + b"\1\0" + proof[head + 4 :])


def test_a_listing_without_endorsement_relies_on_the_parent() -> None:
    verifier = nvidia.verifier(Rules((minted_reference_values(mint.Device.under(ROOT)),)), lambda: mint.NOW)
    listing = Listing(worker(1).entry, nvidia.KIND, bytes(32), b"")
    assert verify(Policy((verifier,)), listing).entry == worker(1).entry
    assert provers.of_nvidia(lambda nonce: []).endorse(worker(1).entry, bytes(32)) == b""
    with pytest.raises(AdmissionError, match="GPUs have none"):
        verify(Policy((verifier,)), replace(listing, endorsement=b"x"))
