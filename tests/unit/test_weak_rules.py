"""Rules that pass `ringfence policy check` and keep out less than they seem to are named by it."""

from __future__ import annotations

from ringfence.admission.policy_file.policy_file import PolicyFile, Rule, Rules
from ringfence.admission.proofs import azure, nvidia, secret, snp, tdx
from ringfence.admission.proofs.snp_report import Tcb
from ringfence.cli.weak_rules import weaknesses

VALUE = (bytes(48),)
PINNED = tdx.Rules(mrtd=VALUE, rtmrs=(VALUE, VALUE, VALUE, ()), collateral=())
PARTS = ("bootloader", "tee", "snp", "microcode")
SECRET = secret.Rules()


def milan(least: int) -> snp.Rules:
    return snp.Rules(measurements=VALUE, minimum_tcb=(("milan", Tcb(tuple((part, least) for part in PARTS))),))


def weak(*rules: dict[str, Rules]) -> list[str]:
    return weaknesses(PolicyFile(tuple(Rule(tuple(rule.items())) for rule in rules)))


def test_strong_rules_are_not_named() -> None:
    gpus = nvidia.Rules(reference_values=(), gpus=8)
    assert weak({"tdx": PINNED, "nvidia": gpus}, {"snp": milan(3)}, {"secret": SECRET}) == []


def test_a_kernel_that_is_not_pinned_is_named() -> None:
    for rtmrs in (((), (), (), ()), (VALUE, VALUE, (), VALUE), (VALUE, (), VALUE, VALUE)):
        (found,) = weak({"tdx": tdx.Rules(mrtd=VALUE, rtmrs=rtmrs, collateral=())})
        assert found.startswith("rule 1: tdx: rtmr1 and rtmr2 are not both pinned")


def test_on_azure_the_vtpm_measures_the_kernel() -> None:
    paravisor = tdx.Rules(mrtd=VALUE, rtmrs=((), (), (), ()), collateral=())
    assert weak({"azure_tdx": azure.Rules(hardware=paravisor, pcrs=((4, (bytes(32),)),))}) == []


def test_platforms_without_fixes_are_named() -> None:
    old = tdx.Rules(mrtd=VALUE, rtmrs=(VALUE,) * 4, collateral=(), statuses=("UpToDate", "OutOfDate"))
    assert weak({"secret": SECRET, "tdx": old}) == [
        "rule 1: tdx: OutOfDate: platforms that lack Intel's fixes are admitted"
    ]
    for kind, rules in (("snp", milan(0)), ("azure_snp", azure.Rules(hardware=milan(0), pcrs=((4, (bytes(32),)),)))):
        assert weak({kind: rules}) == [
            f"rule 1: {kind}: minimum_tcb of milan is zero: firmware without AMD's fixes is admitted"
        ]


def test_gpus_without_their_machine_are_named() -> None:
    (found,) = weak({"secret": SECRET, "nvidia": nvidia.Rules(reference_values=(), gpus=8)})
    assert found == "rule 1: a GPU does not attest the machine that it is in: add tdx or snp"


def test_a_rule_beside_one_that_asks_for_less_is_named() -> None:
    assert weak({"secret": SECRET, "tdx": PINNED}, {"snp": milan(3)}, {"secret": SECRET}) == [
        "rule 1: keeps nobody out, since rule 3 asks for less"
    ]
    assert weak({"secret": SECRET}, {"secret": SECRET}) == []
