"""TDX: recorded quotes verify at their time, changed ones are refused, and each rule of a policy is enforced."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import dcap_qvl
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence.admission.policy_file.toml_table import parse
from ringfence.admission.proofs import tdx, tdx_quote
from ringfence.admission.proofs.tdx_collateral import Collateral
from ringfence.errors import AdmissionError, PolicyError
from tests.limits import HANG
from tests.unit.flips import flips
from tests.unit.snp_records import moment
from tests.unit.tdx_mint import foundry
from tests.unit.tdx_records import (
    FOLDER,
    OUTDATED,
    RECORDS,
    SGX,
    WITHOUT_COLLATERAL,
    Record,
    collateral,
    load,
    rules_for,
)

records = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
DATA = bytes(range(64))
DAY = 86400


# -- what was recorded ----------------------------------------------------------------------------------------------


@records
def test_a_recorded_quote_is_up_to_date_at_its_time_under_the_root_of_intel(record: Record) -> None:
    claims = tdx.authenticate(record.quote, record.collateral, record.now)
    assert (claims.status, claims.advisories) == ("UpToDate", ())


@records
def test_rules_made_from_a_quote_admit_it(record: Record) -> None:
    rules = rules_for(record)
    data = tdx_quote.read(record.quote).report_data
    assert tdx.verify(record.quote, data, rules, record.now).body.mrtd == rules.mrtd[0]
    with pytest.raises(AdmissionError, match="another connection or another worker"):
        tdx.verify(record.quote, DATA, rules, record.now)


@records
def test_a_recorded_quote_is_refused_before_and_after_its_collateral(record: Record) -> None:
    with pytest.raises(AdmissionError, match="issue date is in the future"):
        tdx.authenticate(record.quote, record.collateral, record.now - 20 * DAY)
    with pytest.raises(AdmissionError, match=r"TCBInfo expired; .* `ringfence evidence collateral`"):
        tdx.authenticate(record.quote, record.collateral, record.now + 40 * DAY)


def test_a_recorded_platform_of_no_known_tcb_level_is_refused() -> None:
    with pytest.raises(AdmissionError, match="No matching TCB level found"):
        tdx.authenticate(OUTDATED.quote, OUTDATED.collateral, OUTDATED.now)


@records
def test_collateral_of_another_platform_is_refused(record: Record) -> None:
    others = tuple(each.collateral[0] for each in (*RECORDS.values(), OUTDATED) if each is not record)
    with pytest.raises(AdmissionError, match="no collateral for its platform, FMSPC"):
        tdx.authenticate(record.quote, others, record.now)


def test_collateral_that_claims_to_be_of_this_platform_is_refused() -> None:
    """The FMSPC outside the signature is a label; the one inside decides."""
    record, other = RECORDS["dstack"], RECORDS["near"]
    disguised = replace(other.collateral[0], fmspc=record.collateral[0].fmspc)
    with pytest.raises(AdmissionError, match="does not verify"):
        tdx.authenticate(record.quote, (disguised,), other.now)
    with pytest.raises(AdmissionError, match="both for FMSPC"):
        tdx.authenticate(record.quote, (disguised, *record.collateral), record.now)


def test_collateral_for_sgx_is_no_collateral_for_tdx() -> None:
    with pytest.raises(ValueError, match="not for TDX"):
        collateral("phala-sgx_quote_collateral.json")


@pytest.mark.parametrize("file", SGX)
def test_a_recorded_enclave_is_no_td(file: str) -> None:
    with pytest.raises(AdmissionError, match="not a quote of a TDX guest but of an SGX enclave"):
        tdx.authenticate(load(file), RECORDS["dstack"].collateral, RECORDS["dstack"].now)


def test_a_recorded_enclave_with_a_bad_tcb_verifies_with_its_status() -> None:
    """What makes the check of the status ours to do."""
    terms = dcap_qvl.QuoteCollateralV3.from_json((FOLDER / "phala-sgx_quote_collateral.json").read_text())
    now = int(moment("2025-06-19"))
    verified = dcap_qvl.verify_with_root_ca(load(SGX[0]), terms, tdx.pinned_root(), now)
    assert verified.status == "ConfigurationAndSWHardeningNeeded"
    assert verified.status in tdx.STATUSES
    assert verified.advisory_ids == ["INTEL-SA-00289", "INTEL-SA-00615"]


@pytest.mark.parametrize(("file", "version"), WITHOUT_COLLATERAL.items())
def test_quotes_are_parsed_as_dcap_qvl_parses_them(file: str, version: int) -> None:
    quote = tdx_quote.trim(load(file))
    body, theirs = tdx_quote.read(quote), dcap_qvl.parse_quote(quote)
    report = theirs.report
    assert theirs.header.version == version
    assert body.attributes == int.from_bytes(report.td_attributes, "little")
    assert body.mrtd == report.mr_td
    assert body.rtmrs == (report.rt_mr0, report.rt_mr1, report.rt_mr2, report.rt_mr3)
    assert (body.mr_config_id, body.mr_owner) == (report.mr_config_id, report.mr_owner)
    assert body.mr_owner_config == report.mr_owner_config
    assert body.report_data == report.report_data == tdx_quote.report_data(load(file))
    assert body.mr_service_td == getattr(report, "mr_service_td", bytes(48))
    assert body.tcb_svn == report.tee_tcb_svn
    assert body.tcb_svn2 == getattr(report, "tee_tcb_svn2", body.tcb_svn)
    assert not body.has_older_module
    with pytest.raises(AdmissionError, match=r"no collateral|may debug|may migrate|SEPT_VE_DISABLE"):
        tdx.authenticate(quote, RECORDS["near"].collateral, RECORDS["near"].now)


@pytest.mark.promise("A guest that its host may debug is rejected.")
def test_a_recorded_td_that_its_host_may_debug_is_refused() -> None:
    with pytest.raises(AdmissionError, match="may debug the TD"):
        tdx.authenticate(load("trustee-tdx_quote_4.dat"), RECORDS["near"].collateral, RECORDS["near"].now)


def test_trailing_data_after_a_recorded_quote_is_refused() -> None:
    with pytest.raises(AdmissionError, match="trailing data after the quote"):
        tdx_quote.trim(load("google-tdx_prod_quote_SPR_E4.dat"))


@pytest.mark.promise("Signed evidence with a flipped bit is rejected.")
@pytest.mark.long
def test_every_flipped_bit_of_what_is_signed_is_refused(exhaustive: bool) -> None:
    record = RECORDS["dstack"]
    quote, terms, now = record.quote, record.collateral, record.now
    size = tdx_quote.read(quote).signed_bytes
    assert size == 632
    for changed in flips(quote[:size], exhaustive):
        with pytest.raises(AdmissionError):
            tdx.authenticate(changed + quote[size:], terms, now)


@pytest.mark.long
def test_a_flipped_unsigned_bit_is_refused_or_changes_no_claim(exhaustive: bool) -> None:
    """Newlines of PEM and the copy of the root in a quote can change: so the digest of a quote does not identify it."""
    record = RECORDS["dstack"]
    quote, terms, now = record.quote, record.collateral, record.now
    claims = tdx.authenticate(quote, terms, now)
    accepted = 0
    for place in range(632, len(quote), 1 if exhaustive else 7):
        changed = bytearray(quote)
        changed[place] ^= 1 << place % 8
        try:
            found = tdx.authenticate(bytes(changed), terms, now)
        except AdmissionError:
            continue
        assert found == claims
        accepted += 1
    assert accepted < len(quote) // 4


@records
def test_padding_must_be_zero_and_is_not_part_of_a_proof(record: Record) -> None:
    padded = load(record.file)
    assert len(padded) > len(record.quote)
    with pytest.raises(AdmissionError, match="70 bytes of trailing data after the quote"):
        tdx.authenticate(padded, record.collateral, record.now)
    for changed in flips(padded[len(record.quote) :]):
        with pytest.raises(AdmissionError, match="trailing data after the quote"):
            tdx_quote.trim(record.quote + changed)


def test_a_replayed_quote_is_refused_before_signatures_are_verified() -> None:
    """Nothing here would verify: there is no collateral, and the signatures are overwritten."""
    quote = foundry().quote(DATA)
    overwritten = quote[:700] + bytes(64) + quote[764:]
    rules = replace(foundry().rules, collateral=())
    with pytest.raises(AdmissionError, match="no collateral"):
        tdx.verify(overwritten, DATA, rules, time.time())
    with pytest.raises(AdmissionError, match="REPORTDATA differs"):
        tdx.verify(overwritten, bytes(64), rules, time.time())


# -- forms ----------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=6000))
@settings(deadline=None)
def test_any_bytes_are_a_quote_or_refused(proof: bytes) -> None:
    with pytest.raises(AdmissionError):
        tdx.verify(proof, DATA, foundry().rules, 0.0)


@given(st.data())
@settings(deadline=None)
def test_a_quote_that_is_cut_or_longer_is_refused(data: st.DataObject) -> None:
    quote = foundry().quote(DATA)
    cut = data.draw(st.integers(0, len(quote) - 1))
    extra = data.draw(st.binary(min_size=1, max_size=100))
    for wrong in (quote[:cut], quote + extra):
        with pytest.raises(AdmissionError):
            tdx_quote.read(wrong)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, b"\3", "version 3; this release reads"),
        (0, b"\6", "version 6; this release reads"),
        (2, b"\3", "key of type 3"),
        (4, b"\x82", "not a quote of a TDX guest"),
    ],
)
def test_headers_that_are_not_known_are_refused(place: int, value: bytes, reason: str) -> None:
    quote = bytearray(foundry().quote(DATA))
    quote[place : place + 1] = value
    with pytest.raises(AdmissionError, match=reason):
        tdx_quote.read(bytes(quote))


def test_a_quote_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(AdmissionError, match="where at most 16384 are allowed"):
        tdx_quote.read(foundry().quote(DATA).ljust(tdx_quote.QUOTE_BYTES + 1, b"\0"))


def test_collateral_ends_with_the_first_of_its_parts() -> None:
    assert {each.collateral[0].next_update for each in RECORDS.values()} == {
        "2025-07-19T10:00:35Z",
        "2025-10-02T07:03:51Z",
    }
    parts = json.loads(RECORDS["near"].collateral[0].text)
    parts["pck_crl"] = json.loads(RECORDS["dstack"].collateral[0].text)["pck_crl"]
    assert Collateral.parse(json.dumps(parts).encode()).next_update.startswith("2025-07")


@pytest.mark.parametrize("name", ["tcb_info", "qe_identity", "root_ca_crl", "pck_crl"])
@pytest.mark.parametrize("value", ["", "{}", "00", '{"nextUpdate": 1}', 1, None, "[" * 100_000])
def test_collateral_with_a_malformed_part_raises_value_error(name: str, value: object) -> None:
    parts = json.loads(RECORDS["near"].collateral[0].text)
    parts[name] = value
    with pytest.raises(ValueError):  # noqa: PT011 - which is its whole contract
        Collateral.parse(json.dumps(parts).encode())


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"tcb_info": "{}"}', b"[" * 100_000])
def test_what_is_no_collateral_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which is its whole contract
        Collateral.parse(content)


# -- minted under a test root ---------------------------------------------------------------------------------------


def verify(quote: bytes, rules: tdx.Rules | None = None) -> tdx.Claims:
    mint = foundry()
    return tdx.verify(quote, DATA, rules or mint.rules, time.time(), root=mint.root)


@pytest.mark.parametrize("service_td", [None, bytes(48)], ids=["version 4", "version 5"])
def test_a_minted_quote_is_admitted_under_the_test_root_only(service_td: bytes | None) -> None:
    mint = foundry()
    quote = mint.quote(DATA, service_td=service_td)
    assert verify(quote).status == "UpToDate"
    with pytest.raises(AdmissionError, match="does not verify"):
        tdx.verify(quote, DATA, mint.rules, time.time())


def attributes(bits: int) -> dict[int, bytes]:
    return {120: bits.to_bytes(8, "little")}


SEPT_VE_DISABLE = 1 << 28


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (attributes(SEPT_VE_DISABLE | 1), "may debug the TD"),
        (attributes(SEPT_VE_DISABLE | 1 << 5), "may debug the TD"),
        (attributes(0), "inject faults"),
        (attributes(SEPT_VE_DISABLE | 1 << 29), "may migrate the TD"),
        ({136: bytes(48)}, "its mrtd is 0000"),
        ({328: bytes(48)}, "its rtmr0 is 0000"),
        ({376: bytes(48)}, "its rtmr1 is 0000"),
        ({424: bytes(48)}, "its rtmr2 is 0000"),
        ({472: b"\1" * 48}, "its rtmr3 is 0101"),
        ({520: bytes(64)}, "made for another connection"),
        ({112: b"\1"}, "does not verify"),  # SEAM attributes
        ({64: b"\1"}, "does not verify"),  #  another signer of the TDX module
    ],
)
def test_a_signed_quote_that_says_the_wrong_thing_is_refused(changes: dict[int, bytes], reason: str) -> None:
    with pytest.raises(AdmissionError, match=reason):
        verify(foundry().quote(DATA, changes=changes))


def test_a_td_with_a_service_td_is_refused() -> None:
    with pytest.raises(AdmissionError, match="may migrate the TD"):
        verify(foundry().quote(DATA, service_td=b"\1" * 48))


SVN = tdx_quote.read(foundry().quote(DATA)).tcb_svn


@pytest.mark.promise("The firmware must be recent enough at launch, now, and as far back as the host can roll it.")
@pytest.mark.parametrize(
    ("now", "is_older"),
    [
        (SVN, False),
        (bytes((SVN[0] + 2, *SVN[1:])), False),
        (bytes((SVN[0] - 1, 3, *SVN[2:])), False),  # another version of the module counts its own SVN
        (bytes((SVN[0] - 1, *SVN[1:])), True),
        (bytes((255, SVN[1] - 1, *SVN[2:])), True),
        (bytes((*SVN[:2], SVN[2] - 1, *SVN[3:])), True),
        (bytes(16), True),
    ],
)
def test_a_module_that_is_older_than_at_the_launch_is_refused(now: bytes, is_older: bool) -> None:
    """Intel's levels are compared with the SVN at the launch; a module that was replaced since must not be below it."""
    quote = foundry().quote(DATA, changes={584: now}, service_td=bytes(48))
    if is_older:
        with pytest.raises(AdmissionError, match=r"TDX module is older than at the TD.s launch .*update the host"):
            verify(quote)
    else:
        assert verify(quote).status == "UpToDate"


def test_a_td_launched_on_an_old_module_is_refused_after_an_update() -> None:
    launched = bytes((2, *SVN[1:]))  # OutOfDate, by the recorded collateral
    quote = foundry().quote(DATA, changes={0: launched, 584: SVN}, service_td=bytes(48))
    with pytest.raises(
        AdmissionError, match=r"out of date when the TD was launched \(TDRelaunchAdvised\): launch it again"
    ):
        verify(quote, replace(foundry().rules, statuses=tdx.STATUSES))


def test_a_quote_signed_by_another_key_is_refused() -> None:
    with pytest.raises(AdmissionError, match="does not verify"):
        verify(foundry().quote(DATA, key=ec.generate_private_key(ec.SECP256R1())))


@pytest.mark.parametrize("status", [each for each in tdx.STATUSES if each != tdx.UP_TO_DATE])
def test_an_outdated_platform_needs_its_status_and_advisories_listed(status: str) -> None:
    mint = foundry()
    quote, rules = mint.quote(DATA), replace(mint.rules, collateral=(mint.collateral(status=status),))
    with pytest.raises(AdmissionError, match=rf"TCB is {status} \(INTEL-SA-00001\): update the host"):
        verify(quote, rules)
    with pytest.raises(AdmissionError, match="INTEL-SA-00001: update the host, or name them in advisories"):
        verify(quote, replace(rules, statuses=(status,)))
    assert verify(quote, replace(rules, statuses=(status,), advisories=("INTEL-SA-00001",))).status == status


def test_a_revoked_platform_is_refused_whatever_the_policy_accepts() -> None:
    mint = foundry()
    lenient = replace(mint.rules, statuses=tdx.STATUSES, advisories=("INTEL-SA-00001",))
    with pytest.raises(AdmissionError, match="Revoked"):
        verify(mint.quote(DATA), replace(lenient, collateral=(mint.collateral(status="Revoked"),)))
    with pytest.raises(AdmissionError, match="CertRevoked"):
        verify(mint.quote(DATA), replace(lenient, collateral=(mint.collateral(is_revoked=True),)))


@pytest.mark.parametrize("name", ["mr_config_id", "mr_owner", "mr_owner_config"])
def test_each_further_register_refuses_what_is_not_listed(name: str) -> None:
    rules = replace(foundry().rules, **{name: (b"\1" * 48,)})  # type: ignore[arg-type]
    with pytest.raises(AdmissionError, match=f"its {name} is 0000"):
        verify(foundry().quote(DATA), rules)


def test_an_unpinned_register_may_have_any_value() -> None:
    rules = foundry().rules
    rules = replace(rules, rtmrs=(*rules.rtmrs[:3], ()))
    assert verify(foundry().quote(DATA, changes={472: b"\7" * 48}), rules).body.rtmrs[3] == b"\7" * 48


# -- rules ----------------------------------------------------------------------------------------------------------


def policy() -> str:
    body = tdx_quote.read(foundry().quote(DATA))
    pinned = [f'rtmr{place} = "{value.hex()}"' for place, value in enumerate(body.rtmrs)]
    return "\n".join(['collateral = "platform.json"', f'mrtd = "{body.mrtd.hex()}"', *pinned, ""])


def read(text: str, content: bytes | None = None) -> tdx.Rules:
    table = parse(text.encode(), lambda path, limit: content or foundry().collateral().text.encode())
    found = tdx.read_rules(table)
    table.done()
    return found


def test_rules_are_read_as_they_are_written() -> None:
    found, wanted = read(policy()), foundry().rules
    assert replace(found, collateral=()) == replace(wanted, collateral=())
    assert [each.fmspc for each in found.collateral] == ["b0c06f000000"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("mrtd", "mrdt", "mrtd is missing"),
        ("collateral", "colateral", "collateral is missing"),
        ("rtmr3", "rtmr4", "rtmr3 must be pinned, or named in `unpinned`"),
        ("mrtd", 'unpinned = "rtmr0"\nmrtd', "rtmr0 must be pinned, or named in `unpinned`, and not both"),
        ("mrtd", 'unpinned = "mrtd"\nmrtd', "one of rtmr0"),
        ("mrtd", 'tcb_status = "Revoked"\nmrtd', "one of UpToDate"),
        ("mrtd", 'tcb_status = "OK"\nmrtd', "one of UpToDate"),
        ("mrtd", 'root = "root.der"\nmrtd', "unknown key 'root'"),
        ("mrtd", "allow_debug = true\nmrtd", "unknown key 'allow_debug'"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(old: str, new: str, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        read(policy().replace(old, new, 1))


def test_a_malformed_collateral_file_names_how_to_fetch_it() -> None:
    with pytest.raises(PolicyError, match=r"collateral: not a collateral file.*ringfence evidence collateral"):
        read(policy(), b"{}")


@pytest.mark.parametrize(
    "change",
    [
        {"mrtd": (bytes(48),)},
        {"rtmrs": ((), (), (), ())},
        {"collateral": RECORDS["near"].collateral},
        {"statuses": tdx.STATUSES[:2]},
        {"advisories": ("INTEL-SA-00001",)},
        {"mr_config_id": (bytes(48),)},
        {"mr_owner": (bytes(48),)},
        {"mr_owner_config": (bytes(48),)},
    ],
)
def test_every_rule_is_in_the_content_and_is_explained(change: dict[str, object]) -> None:
    rules = foundry().rules
    changed = replace(rules, **change)  # type: ignore[arg-type]
    assert changed.content() != rules.content()
    assert changed.explain() != rules.explain()


def test_the_same_collateral_in_another_register_is_another_policy() -> None:
    """Lists are counted, so that a value cannot slide from one register into the next."""
    rules, value = foundry().rules, bytes(48)
    one = replace(rules, rtmrs=((value,), (), (), ()))
    assert one.content() != replace(rules, rtmrs=((), (value,), (), ())).content()


def test_the_test_root_is_part_of_the_policy_digest() -> None:
    mint = foundry()
    production = tdx.verifier(mint.rules, time.time)
    assert production.content() == mint.rules.content()
    assert production.content() != tdx.verifier(mint.rules, time.time, root=mint.root).content()


@pytest.mark.processes
def test_without_dcap_qvl_the_error_names_what_to_install() -> None:
    program = (
        "import sys, time\n"
        "sys.modules['dcap_qvl'] = None\n"
        "from ringfence.admission.proofs import tdx\n"
        "try: tdx.verifier(tdx.Rules((), ((),) * 4, ()), time.time)\n"
        "except RuntimeError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    assert done.stdout.startswith("ConfigurationError to verify TDX quotes, dcap-qvl is needed")
    assert 'pip install "dcap-qvl>=0.7,<0.8"' in done.stdout, done.stderr


def test_a_library_panic_is_a_refusal_and_an_interrupt_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(ValueError, match="failed: index out of bounds"):
        tdx.asked(fail, panic("index out of bounds"))
    with pytest.raises(KeyboardInterrupt):
        tdx.asked(fail, KeyboardInterrupt())


def test_minted_collateral_has_the_form_of_the_recorded() -> None:
    assert set(json.loads(foundry().collateral().text)) == set(json.loads(RECORDS["dstack"].collateral[0].text))
