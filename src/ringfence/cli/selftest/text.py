"""The report of a self-test for a terminal."""

from __future__ import annotations

from typing import Final

from ringfence.cli import terminal
from ringfence.cli.selftest.catalogue import Section
from ringfence.cli.selftest.results import FAILED, ISSUES, PASSED, SKIPPED, CheckResult, SelftestReport

MARKS: Final = {PASSED: "ok", FAILED: "!!", SKIPPED: "--"}
NOTHING_TO_REPORT: Final = "measured"


def step(found: Section | CheckResult) -> str:
    """Return the lines for a section that begins, or a result."""
    if isinstance(found, Section):
        return f"\n{found.title}"
    text = found.title if found.text in ("", NOTHING_TO_REPORT) else f"{found.title} ({found.text})"
    if found.state != PASSED:
        text = f"{found.title}: {found.state.upper()}: {found.text}"
    return terminal.wrap(text, f"  {MARKS[found.state]}  {found.name:16}  ")


def summary(report: SelftestReport) -> str:
    """Return what follows the list of checks: speed, confidential mode, verdict, what to do."""
    lines = ["", *_speed(report), terminal.wrap(f"Confidential mode: {report.confidential}")]
    lines += [terminal.wrap(reason, "  - ") for reason in report.reasons]
    lines += ["", terminal.wrap(f"{report.verdict}, in {report.seconds:.0f} s.")]
    for result in report.failed:
        lines += ["", terminal.wrap(f"{result.title}: {result.text}", f"{result.name}: ", "  ")]
        lines += [terminal.wrap(f"Meaning: {result.meaning}.", "  ", "    ")]
        lines += [terminal.wrap(f"What to do: {result.advice}", "  ", "    ")]
    return "\n".join(lines)


def ask_for_report(report: SelftestReport, written: str) -> str:
    """Return how to report this run. `written` is the file to attach, or empty."""
    if report.passed and report.device.startswith("sim"):
        return terminal.wrap("The simulated device says nothing about hardware: run this where there is a GPU as well.")
    why = "The project has no such hardware: please tell us that it works." if report.passed else "Please report this."
    file = f"attach {written}" if written else "run it again with --report selftest.json and attach that file"
    return terminal.wrap(f"{why} Open an issue and {file}: {ISSUES}")


def rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s"


def duration(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} µs"
        if seconds < 1e-3
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def _speed(report: SelftestReport) -> list[str]:
    lines = []
    if report.rates:
        lines += [
            terminal.table([["copies and sealing", "rate"], *([k, rate(v)] for k, v in report.rates.items())]),
            "",
        ]
    if report.all_reduce:
        rows = [
            [each["size"], duration(each["device"]), duration(each["host"]), f"{each['ratio']:.2f}"]
            for each in report.all_reduce
        ]
        lines += [terminal.table([["all-reduce", "on the device", "on the host", "ratio"], *rows]), ""]
    return lines
