"""Apply seeded faults to a copy of the tree, one at a time, and print which required test catches each.

    scripts/mutants              all faults of scripts/mutants.toml
    scripts/mutants NAME ...     only these
    scripts/mutants --list       their names, files and descriptions

A fault is a mutant: a text of one source file that occurs there exactly once, and its replacement. The tests listed for it must
pass without the mutant, and one must fail with it. Required are all tests but those marked nightly. The exit code is 1 if a
mutant survived, and 2 if one could not be tried: its text is not there exactly once, it does not compile, or its tests fail
without it.

The copy lies in a temporary folder, which PYTHONPATH names, so that the tests and all processes that they start import it and
not an installed package. The tree itself is never changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TABLE: Final = ROOT / "scripts" / "mutants.toml"
REQUIRED: Final = "not nightly"
SLOWEST_SECONDS: Final = 900  # of the tests of one mutant: some faults make a test hang
_COMPILED: Final = (".c", ".h")
_NO_TESTS: Final = 5  # exit code of pytest


class Untested(Exception):
    """A mutant that cannot be tried: neither caught nor survived."""


@dataclass(frozen=True)
class Mutant:
    """One fault. `dataplane` selects the data plane of the tests; by default it is the compiled one."""

    name: str
    file: str
    find: str = field(repr=False)
    replace: str = field(repr=False)
    fault: str  # what it does, in a sentence
    tests: tuple[str, ...]  # node ids or files
    dataplane: str = "compiled"

    def applied(self, text: str) -> str:
        """Return the text of its file with the fault. Raises Untested."""
        count = text.count(self.find)
        if count != 1:
            raise Untested(f"its text occurs {count} times in {self.file}: bring scripts/mutants.toml up to date")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "caught", "SURVIVED" or "ERROR"; `text` is the test that failed first, or the reason."""

    name: str
    result: str
    text: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Tests:
    """The tests that pytest ran: its exit code, and the node ids by result."""

    code: int
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    output: str

    def ran(self, listed: str) -> bool:
        """Whether a test that a mutant lists has passed."""
        return any(each == listed or each.startswith((f"{listed}::", f"{listed}[")) for each in self.passed)

    @property
    def first_failure(self) -> str:
        """The first test that failed, or how pytest ended without a result."""
        last = next((line for line in reversed(self.output.splitlines()) if line.strip()), "no output")
        ended = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return self.failed[0] if self.failed else f"pytest ended with {ended}: {last}"


def read(path: Path = TABLE) -> list[Mutant]:
    """Return the mutants of a table."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def parsed(code: int, output: str) -> Tests:
    """Read pytest's short summary."""
    found: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": []}
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word in found and rest.startswith("tests/"):
            found[word].append(rest.partition(" - ")[0])
    return Tests(code, tuple(found["PASSED"]), tuple(found["FAILED"] + found["ERROR"]), output)


class Tree:
    """A copy of the files that git knows, or would add, with a data plane that is compiled from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._changes = 0
        for name in _git_files():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (f"{folder / 'src'}", os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process would compile all modules

    def build(self) -> None:
        """Compile the data plane. Raises Untested."""
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = self._run(command, {**self._environment, "RINGFENCE_BUILD": "compiled"})
        if done.returncode:
            raise Untested(f"the data plane does not compile: {done.stderr[-2000:]}")

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant. Each change has a time of its own, so that no process uses a stale file of bytecode."""
        path = self.folder / mutant.file
        text, status = path.read_text(), path.stat()
        changed = mutant.applied(text)
        self._changes += 1
        path.write_text(changed)
        os.utime(path, (status.st_atime, status.st_mtime + self._changes))
        try:
            with self._rebuilt() if path.suffix in _COMPILED else nullcontext():
                yield
        finally:
            path.write_text(text)
            os.utime(path, (status.st_atime, status.st_mtime))

    @contextmanager
    def _rebuilt(self) -> Iterator[None]:
        """Compile the data plane, and put the one without a fault back afterwards."""
        shutil.rmtree(self.folder / "build", ignore_errors=True)
        (library,) = (self.folder / "src" / "ringfence" / "dataplane").glob("_core*.so")
        kept = library.rename(self.folder / library.name)
        try:
            self.build()
            yield
        finally:
            kept.rename(library)

    def test(self, tests: Sequence[str], dataplane: str, *options: str) -> Tests:
        """Run tests but those marked nightly. A test that hangs fails."""
        command = [sys.executable, "-m", "pytest", "-q", "-rpfE", "--tb=line", "-m", REQUIRED, *options, *tests]
        try:
            done = self._run(command, {**self._environment, "RINGFENCE_DATAPLANE": dataplane})
        except subprocess.TimeoutExpired:
            return Tests(1, (), (f"{tests[0]} or one after it, which hangs",), "")
        return parsed(done.returncode, done.stdout + done.stderr)

    def _run(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SLOWEST_SECONDS,
        )


def _git_files() -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def baseline(tree: Tree, mutants: Sequence[Mutant]) -> dict[str, Outcome]:
    """Run all listed tests without a mutant; return the outcomes of those that cannot be tried, by name."""
    found: dict[str, Outcome] = {}
    for dataplane in sorted({mutant.dataplane for mutant in mutants}):
        own = [mutant for mutant in mutants if mutant.dataplane == dataplane]
        tests = tree.test(list(dict.fromkeys(test for mutant in own for test in mutant.tests)), dataplane)
        for mutant in own:
            bad = [test for test in mutant.tests if any(each.startswith(test) for each in tests.failed)]
            missing = [test for test in mutant.tests if not tests.ran(test)]
            reason = None
            if bad:
                reason = f"{bad[0]} fails without it"
            elif missing and not tests.passed:
                reason = f"its tests do not run: {tests.first_failure}"
            elif missing:
                reason = f"{missing[0]} did not run without it: it is marked nightly, or skipped"
            if reason is not None:
                found[mutant.name] = Outcome(mutant.name, "ERROR", reason)
    return found


def tried(tree: Tree, mutant: Mutant) -> Outcome:
    """Apply a mutant and run its tests."""
    try:
        with tree.mutated(mutant):
            tests = tree.test(mutant.tests, mutant.dataplane, "-x")
    except Untested as error:
        return Outcome(mutant.name, "ERROR", str(error))
    if tests.code == _NO_TESTS:
        return Outcome(mutant.name, "ERROR", "none of its tests is required")
    if tests.code == 0:
        return Outcome(mutant.name, "SURVIVED", mutant.fault)
    return Outcome(mutant.name, "caught", f"by {tests.first_failure}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants; return the exit code."""
    options = _parser().parse_args(arguments)
    known = {mutant.name: mutant for mutant in read()}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(f"there is no mutant {unknown[0]!r}: see scripts/mutants --list", file=sys.stderr)
        return 2
    mutants = [known[name] for name in options.names] or list(known.values())
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  ({mutant.file})\n    {mutant.fault}")
        return 0
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="ringfence-mutants-") as folder:
        try:
            for outcome in _outcomes(Path(folder).resolve(), mutants):
                outcomes.append(outcome)
                print(f"{outcome.result:8}  {outcome.name:34} {outcome.seconds:6.1f} s  {outcome.text}", flush=True)
        except Untested as error:
            print(f"without a mutant, {error}", file=sys.stderr)
            return 2
    results = [outcome.result for outcome in outcomes]
    counts = ", ".join(f"{results.count(kind)} {kind}" for kind in ("caught", "SURVIVED", "ERROR") if kind in results)
    print(f"{len(results)} mutants: {counts}")
    return 1 if "SURVIVED" in results else 2 if "ERROR" in results else 0


def _outcomes(folder: Path, mutants: Sequence[Mutant]) -> Iterator[Outcome]:
    tree = Tree(folder)
    start = time.monotonic()
    tree.build()
    bad = baseline(tree, mutants)
    print(f"The tests of {len(mutants)} mutants ran without them in {time.monotonic() - start:.1f} s.", flush=True)
    for mutant in mutants:
        start = time.monotonic()
        outcome = bad.get(mutant.name) or tried(tree, mutant)
        yield replace(outcome, seconds=round(time.monotonic() - start, 1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; without any: all")
    parser.add_argument("--list", action="store_true", help="print names, files and descriptions, and try nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
