"""`ringfence selftest --record`: what is signed of a self-test, for others to verify with `ringfence audit`."""

from __future__ import annotations

from pathlib import Path

import ringfence
from ringfence.cli.selftest.report import SelftestReport
from ringfence.record import code, selftest
from ringfence.record.statement import Statement


def statement_of(report: SelftestReport) -> Statement:
    """Return what is signed of a self-test."""
    predicate = {
        "began": report.began,
        "device": report.device,
        "workers": report.workers,
        "quick": report.quick,
        "confidential": report.confidential,
        "environment": report.environment,
        "checks": {f"{each.section}/{each.name}": each.state for each in report.results},
        "passed": report.passed,
        "rates": report.rates,
    }
    return selftest.statement_of(predicate, code.package_subjects(Path(ringfence.__file__).parent))
