"""`scripts/torch-versions`: the same bounded set of tests on several releases of torch, as a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[1]
SET: Final[dict[str, tuple[str, ...]]] = {
    "`examples/ddp.py`": ("tests/integration/test_readme.py::test_the_first_commands_train_a_model[ddp.py]",),
    "`examples/fsdp2.py`": ("tests/integration/test_readme.py::test_the_first_commands_train_a_model[fsdp2.py]",),
    "`doctor`": ("tests/cli/test_doctor.py::test_a_ready_machine_is_exit_code_0",),
    "conformance": (
        "tests/conformance/test_collectives.py",
        "tests/conformance/test_direct.py",
        "tests/conformance/test_functional.py",
        "tests/conformance/test_groups.py",
        "tests/conformance/test_objects.py",
        "tests/conformance/test_refusals.py",
        "tests/conformance/test_timeouts.py",
    ),
    "`ringfence run`": (
        "tests/integration/test_launch.py::test_an_unmodified_script_is_sealed",
        "tests/integration/test_launch.py::test_spares_take_the_places_of_workers_that_failed",
    ),
    "strategies": ("tests/integration/test_strategies.py",),
    "device": (
        "tests/conformance/test_device.py::test_every_view_and_way_to_wait",
        "tests/integration/test_device_order.py",
    ),
}
# Gloo alone is torch's to test; strategies are compared with it all the same. More than four workers say nothing more of torch.
LEFT_OUT: Final = (
    "[gloo-",
    "(contract and [gloo])",
    "test_large",
    *(f"[ringfence-{world}" for world in (5, 6, 7, 8)),
    "(contract and [5])",
)
VERSIONS: Final = "import platform, torch; print(torch.__version__, platform.python_version())"
SECONDS: Final = 1700.0  # of one virtualenv


def main() -> int:
    """Exit code 0 if every test of the set passed on every torch."""
    parser = argparse.ArgumentParser(prog="scripts/torch-versions", description=__doc__)
    parser.add_argument("virtualenvs", nargs="+", type=Path, metavar="VIRTUALENV")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    results = [result_of(folder) for folder in options.virtualenvs]
    print(json.dumps(results, indent=2) if options.json else as_table(results))
    for result in results:
        for failure in result["failures"]:
            print(f"\ntorch {result['torch']}: {failure}", file=sys.stderr)
    return 1 if any(result["failures"] for result in results) else 0


def result_of(virtualenv: Path) -> dict[str, Any]:
    """Run the set with a virtualenv's interpreter: how many of each part passed, of how many; what failed."""
    python = str(virtualenv.absolute() / "bin" / "python")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True, timeout=120)  # noqa: S603
    torch, interpreter = found.stdout.split()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [test for part in SET.values() for test in part]
        choice = " and ".join(f"not {each}" for each in LEFT_OUT)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", choice, *tests]
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
        if not report.exists():
            raise SystemExit(f"pytest made no report with torch {torch}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))  # noqa: S314 (pytest wrote it just now)
    parts = {name: counts(cases, tests) for name, tests in SET.items()}
    failures = [f"{case.get('name')}: {text}" for case in cases if (text := failure_of(case))]
    failures += [f"{name}: no test was found" for name, (_, count) in parts.items() if not count]
    if done.returncode and not failures:
        failures.append(f"pytest ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    return {
        "torch": torch,
        "python": interpreter,
        "date": datetime.now(UTC).date().isoformat(),
        "system": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "parts": parts,
        "seconds": round(time.monotonic() - began),
        "failures": failures,
    }


def counts(cases: Sequence[ElementTree.Element], tests: Sequence[str]) -> tuple[int, int]:
    """How many tests of a part passed, and how many ran."""
    own = [case for case in cases if any(belongs(case, test) for test in tests)]
    return sum(not failure_of(case) for case in own), len(own)


def belongs(case: ElementTree.Element, test: str) -> bool:
    """Whether a test case is a test, with any parameters unless they are named, or lies in a file, of that name."""
    file, _, name = test.partition("::")
    here = case.get("classname") == file.removesuffix(".py").replace("/", ".")
    found = case.get("name", "")
    return here and (not name or name in (found, found.partition("[")[0]))


def failure_of(case: ElementTree.Element) -> str:
    """What went wrong in a test; empty if it passed. A test that was skipped has not passed."""
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            return f"{kind}: {found.get('message', '')}\n{(found.text or '')[-2000:]}"
    return ""


def as_table(results: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown: a row for each torch."""
    heads = ["torch", "Python", *SET]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for result in results:
        cells = [f"{passed} of {count}" for passed, count in result["parts"].values()]
        cells = [{"1 of 1": "passed", "0 of 1": "**failed**"}.get(cell, cell) for cell in cells]
        lines.append("| " + " | ".join([result["torch"], result["python"], *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
