"""Runs the checks of the self-test on worker processes, and starts new workers where a check ended the old ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ringfence.cli.checks.hardware import sealing_rate
from ringfence.cli.selftest import catalogue, confidential
from ringfence.cli.selftest.catalogue import Section, SelftestCheck
from ringfence.cli.selftest.report import (
    ERROR,
    FAILED,
    LOST,
    NOTHING_TO_REPORT,
    PASSED,
    RIGHT,
    SKIPPED,
    CheckResult,
    Outcome,
    SelftestReport,
    anonymous,
)
from ringfence.cli.selftest.workers import Plan, Workers
from ringfence.errors import ConfigurationError
from ringfence.keys import SEGMENT_BYTES

START_SECONDS: Final = 300.0  # importing torch, building the simulated device
CHECK_SECONDS: Final = 180.0
SOAK_SECONDS: Final = 600.0
RESTARTS: Final = 3
SEALING: Final = "sealing, AES-256-GCM, one core"

WRONG_OR_NOT: Final = ("collectives", "order", "memory", "speed")  # checks end with wrong numbers, or with an error
ENDED_EARLY: Final = (
    "an error ended the session before there was a result: no number is wrong, but such calls fail here"
)
ASK: Final = "Report the error; it is not known whether this device works."

Progress = Callable[[Section | CheckResult], None]


class Runner:
    """One self-test. `folder` holds the files of workers; `progress` is called with each section and each result."""

    def __init__(self, plan: Plan, sections: Collection[str], folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._sections = [section for section in catalogue.SECTIONS[1:] if section.name in sections]
        self._folder = folder
        self._progress = progress
        self._workers: Workers | None = None
        self._restarts = 0
        self.report = SelftestReport(
            plan.device, plan.count, plan.quick, began=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        )

    def run(self) -> SelftestReport:
        """Run all sections. Raises ConfigurationError if this machine cannot run the test at all."""
        began = time.monotonic()
        try:
            self._section(catalogue.START)
            for section in self._sections:
                self._section(section)
        finally:
            self._end_workers()
            self.report.seconds = time.monotonic() - began
        return self.report

    def _section(self, section: Section) -> None:
        self._progress(section)
        for check in section.checks:
            result = self._check(section, check)
            self.report.results.append(result)
            self._progress(result)
        if section is catalogue.START and self._workers is not None:
            self._ask_confidential(self._workers)

    def _check(self, section: Section, check: SelftestCheck) -> CheckResult:
        began = time.monotonic()
        if section is catalogue.START:
            state, text = self._start()
        elif self._workers is None and self._restarts >= RESTARTS:
            state, text = SKIPPED, "workers failed too often"
        else:
            state, text = self._run(check.name)
        seconds = time.monotonic() - began
        known = ("", "")
        if state == FAILED:
            known = (
                (ENDED_EARLY, ASK)
                if self._workers is None and section.name in WRONG_OR_NOT
                else (check.meaning, section.advice)
            )
        return CheckResult(section.name, check.name, check.title, state, anonymous(text, self._folder), seconds, *known)

    def _start(self) -> tuple[str, str]:
        """Start workers. If that fails, none are left, and checks are skipped."""
        self._workers = Workers(self._plan, self._folder)
        outcomes = self._workers.answers(START_SECONDS)
        for outcome in outcomes:
            if outcome.values.get("kind") == ConfigurationError.__name__:
                raise ConfigurationError(outcome.values["message"])
        if any(outcome.state != RIGHT for outcome in outcomes):
            self._end_workers()
            self._restarts = RESTARTS
            return FAILED, _texts(outcomes)
        self.report.environment = outcomes[0].values["environment"]
        devices = dict.fromkeys(str(outcome.values["device"]) for outcome in outcomes)
        self.report.device = ", ".join(devices)
        kernel = outcomes[0].values["kernel"]
        return PASSED, f"{len(outcomes)} workers on {self.report.device}; a long kernel takes {kernel * 1e3:.0f} ms"

    def _run(self, name: str) -> tuple[str, str]:
        if self._workers is None:
            self._restarts += 1
            state, text = self._start()
            if state != PASSED:
                return FAILED, f"workers did not start again: {text}"
        assert self._workers is not None
        outcomes = self._workers.ask(name, SOAK_SECONDS if name == "soak" else CHECK_SECONDS)
        if name == "killed_worker":  # the last one was to be killed
            self._end_workers()
            outcomes = outcomes[:-1]
        elif any(outcome.state in (ERROR, LOST) for outcome in outcomes):
            self._end_workers()  # the session has ended, or a worker has
        if any(outcome.state != RIGHT for outcome in outcomes):
            return FAILED, _texts(outcomes)
        if name == "copies":
            self.report.rates = {**outcomes[0].values["rates"], SEALING: sealing_rate(SEGMENT_BYTES) * 1e9}
            return PASSED, NOTHING_TO_REPORT
        if name == "staged":
            self._compare_all_reduces(outcomes)
            return PASSED, NOTHING_TO_REPORT
        return PASSED, max((outcome.text for outcome in outcomes), default="")

    def _compare_all_reduces(self, outcomes: Sequence[Outcome]) -> None:
        """In each round the slowest worker counts; the median of the rounds is reported."""
        for size, times in outcomes[0].values["times"].items():
            found = {}
            for kind in times:
                rounds = zip(*(outcome.values["times"][size][kind] for outcome in outcomes), strict=True)
                found[kind] = statistics.median(max(each) for each in rounds)
            self.report.all_reduce.append({"size": size, **found, "ratio": found["device"] / found["host"]})

    def _ask_confidential(self, workers: Workers) -> None:
        outcomes = workers.ask(catalogue.CONFIDENTIAL, CHECK_SECONDS)
        if all(outcome.state == RIGHT for outcome in outcomes):
            signs = confidential.Signs(**outcomes[0].values["signs"])
            self.report.confidential, self.report.reasons = confidential.verdict(signs)
        else:
            self.report.reasons = [anonymous(_texts(outcomes), self._folder)]
            self._end_workers()

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.end(at_once=True)
            self._workers = None


def _texts(outcomes: Sequence[Outcome]) -> str:
    """Return what is wrong on each worker, with equal texts once."""
    by_text: dict[str, list[str]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.state != RIGHT:
            by_text.setdefault(outcome.text, []).append(str(rank))
    return "; ".join(
        f"{'worker' if len(ranks) == 1 else 'workers'} {', '.join(ranks)}: {text}" for text, ranks in by_text.items()
    )
