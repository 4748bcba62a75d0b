"""`scripts/torch-versions`: the same bounded set of tests on several releases of torch, as a table."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts import generated

ROOT: Final = Path(__file__).parents[1]
SET: Final[dict[str, tuple[str, ...]]] = {
    "`examples/ddp.py`": ("tests/integration/test_readme.py::test_the_first_commands_train_a_model[ddp.py]",),
    "`examples/fsdp2.py`": ("tests/integration/test_readme.py::test_the_first_commands_train_a_model[fsdp2.py]",),
    "`doctor`": ("tests/cli/test_doctor.py::test_a_ready_machine_is_exit_code_0",),
    "conformance": (
        "tests/conformance/test_collectives.py",
        "tests/conformance/test_diloco.py",
        "tests/conformance/test_diloco_state.py",
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
    "int8": ("tests/conformance/test_int8.py", "tests/integration/test_int8_hook.py"),
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
    "(test_timeout_ and [gloo])",  # Gloo of torch 2.15 keeps the timeout that its group was made with
    "test_large",
    *(f"[ringfence-{world}" for world in (5, 6, 7, 8)),
    "(contract and [5])",
)
VERSIONS: Final = "import platform, torch; print(torch.__version__, platform.python_version())"
SECONDS: Final = 1700.0  # of one part


def main() -> int:
    """Exit code 0 if every test of the set passed on every torch."""
    parser = argparse.ArgumentParser(prog="scripts/torch-versions", description=__doc__)
    parser.add_argument("virtualenvs", nargs="+", type=Path, metavar="VIRTUALENV")
    results = [result_of(folder) for folder in parser.parse_args().virtualenvs]
    print(as_table(results))
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
    choice = " and ".join(f"not {each}" for each in LEFT_OUT)
    parts, failures = {}, []
    for name, tests in SET.items():
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", choice, *tests]
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
        )
        passed, count = parts[name] = counts(done.stdout)
        if done.returncode or not 0 < passed == count:
            failures.append(f"{name}, exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return {"torch": torch, "python": interpreter, "parts": parts, "failures": failures}


def counts(output: str) -> tuple[int, int]:
    """How many tests passed, and how many there were, by the last line of pytest. One that was skipped has not passed."""
    summary = output.rstrip().rpartition("\n")[2]
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", summary)}
    return found.get("passed", 0), sum(found.values())


def as_table(results: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown: a row for each torch."""
    rows = []
    for result in results:
        cells = [f"{passed} of {count}" for passed, count in result["parts"].values()]
        cells = [{"1 of 1": "passed", "0 of 1": "**failed**"}.get(cell, cell) for cell in cells]
        rows.append([result["torch"], result["python"], *cells])
    return generated.table(["torch", "Python", *SET], rows)


if __name__ == "__main__":
    sys.exit(main())
