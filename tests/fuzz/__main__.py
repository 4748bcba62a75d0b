"""Fuzz the parsers: `python -m tests.fuzz --list`, `python -m tests.fuzz spdm --inputs 1000000`, or `all`.

Coverage guides it where `atheris` is installed (`pip install atheris`); otherwise seeds are changed at random, the same way
for the same --number. `--cpu` searches for the input that costs the most CPU time instead (tests/fuzz/cpu.py).
Each target gets a process of its own. A find is written to the folder that is named at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tests.fuzz.target import Target

SLOW_SECONDS = 10  # of CPU time on one input: a hang. A busy machine makes everything slow by the clock on the wall


class Progress:
    """Counts, and says now and then how far it is."""

    def __init__(self, name: str, inputs: int, folder: Path) -> None:
        self.name = name
        self.inputs = inputs
        self.folder = folder
        self.done = self.accepted = 0
        self.slowest = 0.0
        self._start = self._said = 0.0

    def attempt(self, target: Target, data: bytes) -> None:
        """One input. Whatever escapes is a find."""
        signal.setitimer(signal.ITIMER_PROF, SLOW_SECONDS)
        if not self._start:  # importing and instrumenting took a while
            self._start = self._said = time.monotonic()
        before = time.process_time()
        try:
            self.accepted += target.attempt(data)
        except BaseException as error:
            self._find(data, error)
            raise
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.slowest = max(self.slowest, time.process_time() - before)
        self.done += 1
        now = time.monotonic()
        if now - self._said >= 5:
            self._said = now
            self.say()

    def say(self) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        print(
            f"{self.name}: {self.done:,} of {self.inputs:,} inputs, {self.done / seconds:,.0f}/s, {self.accepted:,} accepted, "
            f"slowest {1000 * self.slowest:.0f} ms",
            flush=True,
        )

    def _find(self, data: bytes, error: BaseException) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.name}-{hashlib.sha256(data).hexdigest()[:16]}"
        path.write_bytes(data)
        print(f"{self.name}: FOUND {type(error).__name__} after {self.done:,} inputs: {path}", flush=True)


def hang(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"more than {SLOW_SECONDS} s on one input")


def mutate(target: Target, progress: Progress, number: int) -> None:
    from tests.fuzz.mutate import inputs

    for data in inputs(target.seeds(), target.longest, target.words, number):
        progress.attempt(target, data)
        if progress.done == progress.inputs:
            return


def guided(name: str, progress: Progress, number: int) -> NoReturn:
    """libFuzzer, with the package's own bytecode instrumented. It never returns."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["ringfence"]):
        target: Target = importlib.import_module("tests.fuzz.all_targets").TARGETS[name]
    folder = Path(tempfile.mkdtemp(prefix="ringfence-fuzz-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    for place, seed in enumerate(target.seeds()):
        (corpus / str(place)).write_bytes(seed)
    options = [f"-max_len={target.longest}", f"-seed={number + 1}", "-verbosity=0", "-rss_limit_mb=2048"]
    options.append(f"-artifact_prefix={folder}/")
    if target.words:
        words = folder / "words"
        escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in target.words if word)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        options.append(f"-dict={words}")

    def one(data: bytes) -> None:
        progress.attempt(target, data)
        if progress.done == progress.inputs:
            progress.say()
            shutil.rmtree(folder)
            os._exit(0)  # libFuzzer would run on

    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()
    raise AssertionError("the fuzzer came back")


def run(name: str, arguments: argparse.Namespace) -> None:
    faulthandler.enable()
    signal.signal(signal.SIGPROF, hang)
    progress = Progress(name, arguments.inputs, arguments.finds)
    if arguments.engine == "atheris":
        guided(name, progress, arguments.number)
    target = importlib.import_module("tests.fuzz.all_targets").TARGETS[name]
    mutate(target, progress, arguments.number)
    progress.say()


def parse_arguments() -> argparse.Namespace:
    engine = "atheris" if importlib.util.find_spec("atheris") else "mutate"
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", default="all", help="one of --list, or all (default)")
    parser.add_argument("--list", action="store_true", help="the names of the targets")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target (default: %(default)s)")
    parser.add_argument("--engine", choices=("atheris", "mutate"), default=engine, help="default here: %(default)s")
    parser.add_argument("--number", type=int, default=0, help="another one gives other inputs (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="search for the input that costs the most CPU time")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each search with --cpu (default: %(default)s)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print what --cpu wrote to FILE as a table")
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"), help="folder for inputs that broke something")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.cpu:
        cpu = importlib.import_module("tests.fuzz.cpu")
        known = list(cpu.TARGETS)
        if arguments.list:
            print("\n".join(known))
        elif arguments.table:
            print(cpu.table(arguments.table))
        else:
            names = known if arguments.target == "all" else [arguments.target]
            cpu.run(names, arguments.seconds, arguments.number, arguments.finds)
        return 0
    if arguments.target != "all" and not arguments.list:
        run(arguments.target, arguments)
        return 0
    names = list(importlib.import_module("tests.fuzz.all_targets").TARGETS)
    if arguments.list:
        print("\n".join(names))
        return 0
    failed = []
    for name in names:
        options = ["--inputs", arguments.inputs, "--engine", arguments.engine, "--number", arguments.number]
        command = [sys.executable, "-m", "tests.fuzz", name, *map(str, options), "--finds", str(arguments.finds)]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    print(
        "failed: " + ", ".join(failed) if failed else f"{len(names)} targets, {arguments.inputs:,} inputs each, no find"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
