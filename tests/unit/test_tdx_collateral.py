"""TDX collateral: of all that a policy lists the newest decides, and what any of it revokes stays revoked."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.proofs import kinds, tdx, tdx_quote
from ringfence.admission.proofs.tdx_collateral import Collateral
from ringfence.errors import AdmissionError, PolicyError
from tests.unit.tdx_mint import foundry
from tests.unit.tdx_records import OUTDATED, RECORDS

DATA = bytes(range(64))
OTHER = "00a06d080000"  # the FMSPC of another platform


def verify(*collateral: Collateral, ca: str = "platform", statuses: tuple[str, ...] = ("UpToDate",)) -> tdx.Claims:
    mint = foundry()
    rules = replace(mint.rules, collateral=collateral, statuses=statuses, advisories=("INTEL-SA-00001",))
    return tdx.verify(mint.quote(DATA, ca=ca), DATA, rules, time.time(), root=mint.root)


def orders(*collateral: Collateral) -> Iterator[tuple[Collateral, ...]]:
    return itertools.permutations(collateral)


# -- two files for one platform -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "now_said",
    [{"is_revoked": True}, {"is_ca_revoked": True}, {"status": "Revoked"}, {"status": "OutOfDate"}],
    ids=str,
)
@pytest.mark.parametrize("age", [1, 28], ids=["of the same day", "of last month"])
def test_older_collateral_hides_no_newer_verdict(now_said: dict[str, object], age: int) -> None:
    """Neither order admits, nor does a policy that accepts every status which it can name."""
    mint = foundry()
    newer, older = mint.collateral(number=18, **now_said), mint.collateral(number=17, age=age)  # type: ignore[arg-type]
    assert verify(older).status == "UpToDate"
    for listed in orders(newer, older):
        with pytest.raises(AdmissionError, match="both for FMSPC b0c06f000000"):
            verify(*listed, statuses=tdx.STATUSES)


def policy(rules: list[list[str]], files: Mapping[str, Collateral]) -> PolicyFile:
    """A policy of TDX rules, each of which lists these files."""
    body = tdx_quote.read(foundry().quote(DATA))
    pinned = [f'rtmr{place} = "{value.hex()}"' for place, value in enumerate(body.rtmrs)]
    text = ["version = 1"]
    for names in rules:
        text += [
            "[[admit]]",
            "[admit.tdx]",
            f"collateral = {json.dumps(names)}",
            f'mrtd = "{body.mrtd.hex()}"',
            *pinned,
        ]
    return kinds.read("\n".join(text).encode(), lambda path, limit: files[path].text.encode())


@pytest.mark.promise("A policy with two collateral files for one platform is rejected, and the error names both.")
@pytest.mark.parametrize("rules", [[["new.json", "old.json"]], [["old.json"], ["new.json"]]], ids=["one rule", "two"])
def test_a_policy_with_two_files_for_one_platform_is_refused(rules: list[list[str]]) -> None:
    mint = foundry()
    files = {"new.json": mint.collateral(number=18), "old.json": mint.collateral(age=28)}
    with pytest.raises(PolicyError) as caught:
        policy(rules, files)
    text = str(caught.value)
    assert "new.json" in text
    assert "both for FMSPC b0c06f000000 and the platform CA" in text
    assert text.endswith("keep new.json, which is newer, and list old.json no longer")


def test_the_evaluation_number_decides_before_the_date() -> None:
    mint = foundry()
    files = {"early.json": mint.collateral(number=18, age=9), "standard.json": mint.collateral(number=17, age=1)}
    with pytest.raises(PolicyError, match=r"keep early\.json, which is newer"):
        policy([["early.json", "standard.json"]], files)


def test_one_file_in_two_rules_is_no_contradiction() -> None:
    files = {"one.json": foundry().collateral(), "copy.json": foundry().collateral(fmspc=OTHER)}
    assert len(policy([["one.json"], ["copy.json", "one.json"]], files).rules) == 2


def test_recorded_collateral_says_which_authority_it_is_for() -> None:
    found = [each.collateral[0] for each in (*RECORDS.values(), OUTDATED)]
    assert {each.ca for each in found} == {"platform"}
    for each in found:
        Collateral.parse(each.text.encode())


# -- parts that files share -----------------------------------------------------------------------------------------


@pytest.mark.promise("The newest collateral, CRL and QE identity decide, whichever file or rule lists them.")
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"fmspc": OTHER, "is_revoked": True}, "CertRevoked"),
        ({"fmspc": OTHER, "is_ca_revoked": True}, "CertRevoked"),
        ({"fmspc": OTHER, "ca": "processor", "is_ca_revoked": True}, "CertRevoked"),
        ({"fmspc": OTHER, "qe_status": "Revoked"}, "Revoked"),
        ({"fmspc": OTHER, "qe_status": "OutOfDate"}, "OutOfDate"),
        ({"ca": "processor", "status": "Revoked"}, "Revoked"),
        ({"ca": "processor", "status": "OutOfDate"}, "OutOfDate"),
    ],
    ids=str,
)
def test_the_newest_of_each_part_decides_whichever_file_has_it(other: dict[str, object], reason: str) -> None:
    mint = foundry()
    own, newer = mint.collateral(age=28), mint.collateral(number=18, **other)  # type: ignore[arg-type]
    assert verify(own).status == "UpToDate"
    for listed in orders(own, newer):
        with pytest.raises(AdmissionError, match=reason):
            verify(*listed)
    older = mint.collateral(number=16, age=29, **{key: other[key] for key in ("fmspc", "ca") if key in other})  # type: ignore[arg-type]
    assert verify(own, older).status == "UpToDate"


@pytest.mark.promise("The newest collateral, CRL and QE identity decide, whichever file or rule lists them.")
def test_a_file_of_another_rule_revokes_as_well() -> None:
    mint = foundry()
    files = {"own.json": mint.collateral(age=28), "other.json": mint.collateral(fmspc=OTHER, is_revoked=True)}
    quote = mint.quote(DATA)
    for names in (["own.json", "other.json"], ["other.json", "own.json"]):
        found = dict(zip(names, policy([[each] for each in names], files).rules, strict=True))
        rules = found["own.json"].proofs[0][1]
        assert isinstance(rules, tdx.Rules)
        with pytest.raises(AdmissionError, match="CertRevoked"):
            tdx.verify(quote, DATA, rules, time.time(), root=mint.root)
        rules = found["other.json"].proofs[0][1]
        assert isinstance(rules, tdx.Rules)
        with pytest.raises(
            AdmissionError, match="no collateral for its platform"
        ):  # the other rule admits no more than it did
            tdx.verify(quote, DATA, rules, time.time(), root=mint.root)


@pytest.mark.promise("The newest collateral, CRL and QE identity decide, whichever file or rule lists them.")
def test_a_newer_part_that_has_expired_lets_no_older_one_in() -> None:
    mint = foundry()
    own, expired = mint.collateral(number=17, age=2), mint.collateral(number=18, age=3, days=-1, ca="processor")
    assert verify(own).status == "UpToDate"
    for listed in orders(own, expired):
        with pytest.raises(AdmissionError, match=r"expired; .* `ringfence evidence collateral`"):
            verify(*listed)


def test_an_expired_file_of_another_platform_is_no_objection() -> None:
    mint = foundry()
    own, expired = mint.collateral(), mint.collateral(number=16, age=40, days=-10, fmspc=OTHER)
    for listed in orders(own, expired):
        assert verify(*listed).status == "UpToDate"


def test_what_an_older_list_revokes_must_stay_revoked() -> None:
    """Or the newer list would take back what a listed file says. Fetched again, both files have the same list."""
    mint = foundry()
    files = {"a.json": mint.collateral(), "b.json": mint.collateral(fmspc=OTHER, age=9, is_revoked=True)}
    for names in (["a.json", "b.json"], ["b.json", "a.json"]):
        with pytest.raises(PolicyError, match=r"pck_crl of b\.json revokes .* that a\.json does not: fetch both again"):
            policy([names], files)
    for listed in orders(*files.values()):
        with pytest.raises(AdmissionError, match="revokes"):
            verify(*listed)


@pytest.mark.parametrize(("key", "part"), [("status", "tcb_info"), ("qe_status", "qe_identity")])
def test_parts_of_one_number_and_date_that_differ_are_refused(key: str, part: str) -> None:
    """Neither is the newer one, so neither is used."""
    mint = foundry()
    two = (mint.collateral(), mint.collateral(ca="processor", **{key: "OutOfDate"}))  # type: ignore[arg-type]
    for listed in orders(*two):
        with pytest.raises(AdmissionError, match=f"{part} differs .* with the same number and date"):
            verify(*listed)


@pytest.mark.parametrize("ca", ["platform", "processor"])
def test_a_platform_is_verified_with_the_lists_of_its_own_authority(ca: str) -> None:
    mint = foundry()
    both = {each: mint.collateral(ca=each) for each in ("platform", "processor")}
    assert verify(*both.values(), ca=ca).status == "UpToDate"
    other = next(each for each in both if each != ca)
    with pytest.raises(AdmissionError, match=f"no collateral for its platform, FMSPC b0c06f000000 of the {ca} CA"):
        verify(both[other], ca=ca)
    revoked = mint.collateral(ca=ca, is_revoked=True)
    with pytest.raises(AdmissionError, match="CertRevoked"):
        verify(both[other], revoked, ca=ca)
    assert verify(both[other], revoked, ca=other).status == "UpToDate"
