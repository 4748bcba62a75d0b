"""Runs tests of processes a second time, once and alone, if they failed as a busy machine can make them fail.

Reads what `pytest --failures FILE` wrote. A test is run again only if it starts processes and its failure says of each rank
that failed that it did not answer or was killed. A wrong result, an attack that succeeded, a unit test, a fourth failure and a
test that needed this in the last two weeks are never tried again. What passes the second time is printed as FLAKY and appended
to a file, with the text of its first failure.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
MOST: Final = 3  # failures in all; more are not bad luck
# Not conformance and attack: their failures are wrong results.
FOLDERS: Final = ("tests/cli/", "tests/integration/", "lab/tests/cli/", "lab/tests/integration/")
WEEKS: Final = timedelta(weeks=2)
# How a failure begins that load can cause: see `Failure` in tests/pool.py, subprocess, and pytest-timeout.
CAUSED_BY_LOAD: Final = re.compile(r"(\w+\.)*(Hang: |Death: killed by SIGKILL|TimeoutExpired: |Failed: Timeout)")
# A line for each rank that failed.
RANK: Final = re.compile(r"^(?:E +)?(?:(?:\w+\.)*WorkersFailed: )?rank \d+: (.*)$", re.M)
RAISED: Final = re.compile(r"^E +(.*)$", re.M)
CHAINED: Final = re.compile(r"^(?:During handling of|The above exception was).*$", re.M)


class Failed(NamedTuple):
    """A test that failed, and the text of its failure."""

    test: str
    text: str


def read_failures(file: Path) -> list[Failed]:
    """Return the failures of a run. A test may have several: its own, and one of its fixture."""
    return [Failed(**json.loads(line)) for line in file.read_text().splitlines()]


def is_by_load(text: str) -> bool:
    """Return whether load can have caused a failure: its last exception, of every rank that it names."""
    last = CHAINED.split(text)[-1]
    raised = RANK.findall(last) or RAISED.findall(last)[:1]
    return bool(raised) and all(CAUSED_BY_LOAD.match(each) for each in raised)


def flaky_before(file: Path) -> set[str]:
    """Return the tests that passed the second time in the last two weeks."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {each["test"] for each in lines if datetime.now(UTC) - datetime.fromisoformat(each["time"]) < WEEKS}


def reason_against(failures: Sequence[Failed], before: Collection[str] = ()) -> str:
    """Return why these failures must not be tried again; empty if they may. `before` were, not long ago."""
    tests = {failed.test for failed in failures}
    if not tests:
        return "pytest failed and no test did"
    if len(tests) > MOST:
        return f"{len(tests)} tests failed; at most {MOST} are tried again"
    for failed in failures:
        if not failed.test.startswith(FOLDERS):
            return f"{failed.test} is not a test of processes"
        if not is_by_load(failed.text):
            return f"{failed.test} failed for another reason than a process that did not answer"
        if failed.test in before:
            return f"{failed.test} has failed before and passed alone: mend it"
    return ""


def record(file: Path, failures: Sequence[Failed]) -> None:
    """Append the tests that passed the second time."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for failed in failures:
            lines.write(json.dumps({"time": now, **failed._asdict()}) + "\n")


def main() -> int:
    """Exit code 0 if all that failed passed the second time."""
    parser = argparse.ArgumentParser(prog="python -m scripts.retry", description=__doc__)
    parser.add_argument("failures", type=Path, help="what `pytest --failures FILE` wrote")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "flaky.jsonl", help="the file to append to")
    options = parser.parse_args()
    failures = read_failures(options.failures)
    if reason := reason_against(failures, flaky_before(options.record)):
        print(f"Not tried again: {reason}.")
        return 1
    tests = sorted({failed.test for failed in failures})
    print(f"Trying {len(tests)} again, alone:", flush=True)
    command = [str(ROOT / "scripts" / "test"), "-q", *tests]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:  # noqa: S603
        return 1
    record(options.record, failures)
    for test in tests:
        print(f"FLAKY: {test} failed once and passed alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
