"""The report of a self-test: its checks, speeds and environment, without anything that identifies the machine or the user."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = 1
PASSED: Final = "passed"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"
ISSUES: Final = "https://github.com/ringfence/ringfence/issues"

_IPV4: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


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
        return not self.failed and all(result.state == PASSED for result in self.results)

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        count = len(self.results)
        if self.passed:
            return f"PASSED: {count} checks with {self.workers} workers on {self.device}"
        failed, skipped = len(self.failed), sum(result.state == SKIPPED for result in self.results)
        rest = f", {skipped} skipped" if skipped else ""
        return f"FAILED: {failed} of {count} checks with {self.workers} workers on {self.device}{rest}"

    def document(self) -> dict[str, Any]:
        """Return the report for programs, and for an issue."""
        return {"schema": SCHEMA, "passed": self.passed, "verdict": self.verdict, **asdict(self)}

    def as_json(self) -> str:
        return json.dumps(self.document(), indent=2)


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


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
