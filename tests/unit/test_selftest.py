"""The parts of `ringfence selftest` that need no device: signs of confidential mode, the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringfence.cli.selftest import catalogue
from ringfence.cli.selftest.confidential import Signs, parse, verdict
from ringfence.cli.selftest.report import (
    FAILED,
    PASSED,
    SKIPPED,
    CheckResult,
    SelftestReport,
    anonymous,
    ask_for_report,
)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("CC status: ON\n", True), ("CC status: OFF\n", False), ("    CC Status : on", True), ("not supported", None)],
)
def test_the_status_of_the_driver_is_read(output: str, expected: bool | None) -> None:
    assert parse(output) is expected


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        (Signs(driver=True, pinned=False, blocks=0.1), "yes"),
        (Signs(driver=None, pinned=False, blocks=0.1), "yes"),
        (Signs(driver=True, pinned=True, blocks=0.0001), "yes"),
        (Signs(driver=False, pinned=True, blocks=0.0001), "no"),
        (Signs(driver=None, pinned=True, blocks=0.0001), "no"),
        (Signs(driver=None, pinned=True), "no"),
        (Signs(driver=None, pinned=True, blocks=0.1), "unclear"),
        (Signs(driver=False, pinned=False, blocks=0.1), "yes"),
        (Signs(driver=False, pinned=True, blocks=0.1), "unclear"),
        (Signs(driver=False, pinned=None), "no"),
        (Signs(driver=None, pinned=False, blocks=0.0001), "unclear"),
        (Signs(driver=None, pinned=None, blocks=None), "unclear"),
    ],
)
def test_confidential_mode_needs_signs_that_agree(signs: Signs, expected: str) -> None:
    found, reasons = verdict(signs)
    assert found == expected
    assert reasons


def test_texts_lose_names_and_addresses() -> None:
    names = {"/users/alice": "~", "node-7": "<host>", "alice": "<user>"}
    said = "node-7: cannot read /tmp/x/secret or /users/alice/.cache of alice; peer 10.1.2.3:5000, malice"
    assert anonymous(said, Path("/tmp/x"), names) == (
        "<host>: cannot read <folder>/secret or ~/.cache of <user>; peer <address>, malice"
    )


def a_report(*states: str) -> SelftestReport:
    checks = [(section, check) for section in catalogue.SECTIONS for check in section.checks]
    report = SelftestReport("cuda:0", 2, quick=False, environment={"device": "cuda, <a name & more>"})
    for state, (section, check) in zip(states, checks, strict=False):
        why = (check.meaning, section.advice) if state == FAILED else ("", "")
        report.results.append(CheckResult(section.name, check.name, check.title, state, "<said>", 0.1, *why))
    return report


def test_one_failure_or_a_skipped_check_is_no_pass() -> None:
    assert a_report(PASSED, PASSED).passed
    assert not a_report(PASSED, FAILED).passed
    assert not a_report(PASSED, SKIPPED).passed
    assert a_report(PASSED, FAILED, SKIPPED).verdict == "FAILED: 1 of 3 checks with 2 workers on cuda:0, 1 skipped"


def test_the_document_can_be_read_by_programs() -> None:
    document = json.loads(a_report(PASSED, FAILED).as_json())
    assert document["schema"] == 1
    assert document["passed"] is False
    assert [each["state"] for each in document["results"]] == [PASSED, FAILED]


def test_a_report_of_hardware_is_asked_for() -> None:
    assert "attach r.json" in ask_for_report(a_report(PASSED), "r.json")
    assert "--report selftest.json" in ask_for_report(a_report(FAILED), "")
