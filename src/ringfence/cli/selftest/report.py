"""Outcomes of checks and the report of a self-test, as data and as text, without anything that identifies machine or user."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ringfence
from ringfence.cli import terminal
from ringfence.cli.selftest.catalogue import Section

if TYPE_CHECKING:
    from ringfence.record.statement import Statement

SCHEMA: Final = 1
PASSED: Final = "passed"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
ISSUES: Final = "https://github.com/ringfence/ringfence/issues"

MARKS: Final = {PASSED: "ok", FAILED: "!!", SKIPPED: "--"}
NOTHING_TO_REPORT: Final = "measured"

# How a check ended on one worker.
RIGHT: Final = "right"
WRONG: Final = "wrong"  # the check ran and its result is not right
ERROR: Final = "error"  # the check raised, so the group may be gone
LOST: Final = "lost"  #   no answer in time, or the process has ended

_IPV4: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


@dataclass(frozen=True)
class Outcome:
    """The result on one worker: a text for people, values for the tables."""

    state: str
    text: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def right(text: str = "", **values: Any) -> Outcome:
    return Outcome(RIGHT, text, values)


def wrong(text: str, **values: Any) -> Outcome:
    return Outcome(WRONG, text, values)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check on all workers."""

    section: str
    name: str
    title: str
    state: str
    text: str
    seconds: float
    meaning: str = ""  # of a check that failed
    advice: str = ""


@dataclass
class SelftestReport:
    """All of a self-test. Rates are in bytes per second, times in seconds."""

    device: str
    workers: int
    quick: bool
    began: str = ""
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    results: list[CheckResult] = field(default_factory=list)
    confidential: str = "unknown"  # "yes", "no" or "unclear"
    reasons: list[str] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    all_reduce: list[dict[str, Any]] = field(default_factory=list)  # size, device, host, ratio

    @property
    def failed(self) -> list[CheckResult]:
        return [result for result in self.results if result.state == FAILED]

    @property
    def passed(self) -> bool:
        return all(result.state == PASSED for result in self.results)

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        count = len(self.results)
        if self.passed:
            return f"PASSED: {count} checks with {self.workers} workers on {self.device}"
        failed, skipped = len(self.failed), sum(result.state == SKIPPED for result in self.results)
        rest = f", {skipped} skipped" if skipped else ""
        return f"FAILED: {failed} of {count} checks with {self.workers} workers on {self.device}{rest}"

    def as_json(self) -> str:
        """Return the report for programs, and for an issue."""
        document = {"schema": SCHEMA, "passed": self.passed, "verdict": self.verdict, **asdict(self)}
        return json.dumps(document, indent=2)


def statement_of(report: SelftestReport) -> Statement:
    """Return what is signed of a self-test, for others to verify with `ringfence audit`."""
    from ringfence.record import code, selftest  # needs cryptography

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


def anonymous(text: str, folder: Path, names: Mapping[str, str] | None = None) -> str:
    """Replace the folder of the test, home, the names of the user and of the host, and addresses."""
    known = _names() if names is None else names
    text = text.replace(str(folder), "<folder>")
    for name, instead in known.items():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, text)
    return _IPV4.sub("<address>", text)


def _names() -> dict[str, str]:
    found = {str(Path.home()): "~", socket.gethostname(): "<host>"}
    with contextlib.suppress(KeyError, OSError):
        found[getpass.getuser()] = "<user>"
    return {name: instead for name, instead in found.items() if len(name) > 1}


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
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


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
