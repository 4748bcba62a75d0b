"""Every command with its longest line at 80 columns: `python -m tests.cli.longest_lines` prints the table.

Exceptions. A line that holds one word and nothing else (a path, a hash, a URL) may be longer, since it must not be
broken; so may an assignment of one: `export NAME=path`, or a key and a hash in TOML (`evidence measure`). `--json` is for
programs and not laid out at all. What `ringfence demo` prints is measured where it is run: in `test_demo.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from ringfence.cli import _parser
from ringfence.cli import main as command
from ringfence.cli.terminal import table
from tests.cli.command import ringfence
from tests.limits import HANG
from tests.unit import snp_records, tdx_records

COLUMNS = 80
ROOT = Path(__file__).parents[2]
STUDY = str(ROOT / "docs" / "results" / "study")
RECORDS = str(ROOT / "docs" / "records")
SNP, TDX = snp_records.FOLDER, tdx_records.FOLDER
TURIN = (f"{SNP}/oak-turin_report.bin", "--certificate", f"{SNP}/oak-turin_vcek.der", "--at", "2026-01-01")
QUOTE = (f"{TDX}/phala-tdx_quote", "--at", "2025-06-20T12:00:00Z")
COLLATERAL = ("--collateral", f"{TDX}/phala-tdx_quote_collateral.json")

# In this order, in one folder: later ones use files that earlier ones wrote. Some fail, and print an error.
NORMAL: tuple[tuple[str, ...], ...] = (
    ("--version",),
    ("nonsense",),
    ("doctor", "--nonsense"),
    ("doctor",),
    ("secret", "new", "run.secret"),
    ("secret", "new", "run.secret"),
    ("secret", "check", "run.secret"),
    ("secret", "rotate", "run.secret"),
    ("secret", "check", "no/such/folder/of/this/name/with/a/secret/in/it/run.secret"),
    ("certificate", "new", "site", "node-0", "node-1"),
    ("certificate", "new", "site", "node-0"),
    ("policy", "new", "site/policy.toml"),
    ("policy", "check", "site/policy.toml"),
    ("policy", "explain", "site/policy.toml"),
    ("policy", "new", "all.toml", "--admit", "certificate+tdx+nvidia", "--admit", "snp+token", "--admit", "secret"),
    ("policy", "check", "all.toml"),
    ("evidence", "verify", *TURIN),
    ("evidence", "verify", *TURIN, "--report-data", "00" * 64),
    ("evidence", "measure", *TURIN),
    ("evidence", "verify", *QUOTE, *COLLATERAL),
    ("evidence", "verify", *QUOTE),
    ("evidence", "measure", *QUOTE, *COLLATERAL),
    ("evidence", "measure", *QUOTE),
    ("evidence", "collect", "--out", "here.json"),
    ("record", "data", "site"),
    ("record", "data", "site"),
    ("record", "data", "no/such/folder/of/this/name/with/a/data/set/in/it/of/a/long/name", "-o", "other.manifest"),
    ("record", "verify-data", "site.manifest", "site"),
    ("record", "verify-data", "site.manifest", "."),
    ("record", "verify-data", "site.manifest", "site", "--root", "00" * 32),
    ("record", "statement", "site", "-o", "run.json"),
    ("record", "statement", "no/such/folder/of/this/name/with/the/logs/of/a/run/in/it", "-o", "other.json"),
    ("audit", f"{RECORDS}/simulated.json", "--key", f"{RECORDS}/simulated.pem"),
    ("audit", "run.secret", "--key", f"{RECORDS}/simulated.pem"),
    ("audit", "no/such/folder/of/this/name/with/a/record.json", "--key", "run.secret"),
    ("checkpoint", "show", "no/such/folder/with/a/checkpoint/of/a/run/that/has/a/long/name/step-100"),
    ("checkpoint", "convert", "run.secret", "new", "--to", "sealed", "--key", "run.secret"),
    ("plan",),
    ("plan", "--model", "llama-7b", "--hardware", "h100-ppcie", "--workers", "64"),
    ("plan", "--model", "gpt2", "--hardware", "h100-cc", "--workers", "8"),
    ("plan", "--strategy", "ring"),
    ("plan", "--strategy", "fsdp", "--model", "llama-7b", "--hardware", "h100-ppcie"),
    ("plan", "--parameters", "7e9", "--strategy", "fsdp", "--sweep"),
    ("plan", "--config", "no-such-folder/config.json"),
    ("plan", "--model", "gpt2-xl", "--hardware", "h100-ppcie", "--sweep"),
    ("plan", "--model", "gpt5"),
    ("plan", "--hardware", "cray"),
    ("plan", "--workers", "16385"),
    ("plan", "models"),
    ("plan", "hardware"),
    ("plan", "hardware", "h100-ppcie"),
    ("plan", "calibrate", "--study", STUDY),
    ("plan", "--hardware", "here", "--model", "gpt2", "--workers", "8", "--compute", "1.5"),
    ("plan", "validate", "--study", STUDY),
    ("plan", "published"),
    ("study", "--list"),
    ("study", "--grid", "nowhere.toml"),
    ("report", "--study", "nowhere"),
    ("bench", "collectives", "--sizes", "25MiB", "--hosts", "2", "--rate", ".gbit"),
)
APART = (("doctor",),)
ASSIGNMENT = re.compile(r'(# )?\w+ = \[?"[0-9a-f]+"\]?| *export \w+=\S+')


def commands() -> Iterator[tuple[str, ...]]:
    """The help of every command, as the parser has them, and what cheap commands print."""
    yield from ((*names, "--help") for names in _names(_parser()))
    yield from NORMAL


def _names(parser: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    yield ()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from ((name, *rest) for rest in _names(inner))


def longest(text: str) -> str:
    """Return the longest line that could have been broken."""
    lines = (line for line in text.splitlines() if len(line.split()) > 1 and not ASSIGNMENT.fullmatch(line))
    return max(lines, key=len, default="")


def printed(arguments: tuple[str, ...], folder: Path) -> str:
    """Return what a command prints: of this process, or of another where it changes signals or the network."""
    if arguments in APART:
        done = ringfence(*arguments, folder=folder, timeout=HANG, COLUMNS=str(COLUMNS))
        return done.stdout + done.stderr
    output = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=str(COLUMNS)),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.suppress(SystemExit),
    ):
        command(arguments)
    return output.getvalue()


def main() -> int:
    rows = [["command", "longest line"]]
    found = 0
    with tempfile.TemporaryDirectory() as name:
        for arguments in commands():
            line = longest(printed(arguments, Path(name)))
            found = max(found, len(line))
            shown = [part.removeprefix(f"{ROOT}/") for part in arguments]
            rows.append([" ".join(["ringfence", *shown]), str(len(line))])
            if len(line) > COLUMNS:
                print(f"{' '.join(shown)}\n    {line}", file=sys.stderr)
    print(table(rows, shutil.get_terminal_size().columns))
    return int(found > COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
