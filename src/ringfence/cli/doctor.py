"""`ringfence doctor`: is this machine ready, what is missing, and how fast does it seal?"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli import checks
from ringfence.cli.checks import Check, bad
from ringfence.cli.group_check import group

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DESCRIPTION = """\
Look at the software, the CPU and the configuration that a worker started from here would meet,
and form a group of one worker on the loopback, with a secret of its own.
What stands in the way is marked, with the command that repairs it.
"""

EXAMPLES = """\
examples:
  ringfence doctor
  ringfence doctor --json | python -m json.tool

exit codes: 0 if nothing that doctor checks is missing, 1 otherwise. It collects no evidence and fetches no token.
"""


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine: versions, speed, what is missing",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check everything and print it."""
    found = everything(os.environ, Path("/"))
    print(as_json(found) if options.json else as_text(found))
    return 1 if bad(found) else 0


def everything(environ: Mapping[str, str], root: Path) -> list[Check]:
    """All checks, in the order in which a person would repair them. `root` is / but in tests."""
    software = checks.software(environ)
    return [*software, group(environ, software), *checks.hardware(root), *checks.configuration(environ)]


def as_json(checks: Sequence[Check]) -> str:
    """For scripts: {"ready": …, "checks": [{"name", "text", "value", "good", "fix"}, …]}."""
    return json.dumps({"ready": not bad(checks), "checks": [asdict(check) for check in checks]}, indent=2)


def as_text(checks: Sequence[Check]) -> str:
    """For people: a line for each finding, then what to do."""
    marks = {True: "ok", False: "!!", None: "  "}
    lines = [f"{marks[check.good]:2}  {check.name:13} {check.text}" for check in checks]
    missing = bad(checks)
    lines.append("")
    if missing:
        lines.append("Not ready. To repair:")
        lines.extend(f"  {fix}" for fix in dict.fromkeys(check.fix for check in missing))
    else:
        lines.append("Ready.")
    return "\n".join(lines)
