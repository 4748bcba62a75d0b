"""`ringfence doctor`: checks whether this machine is ready, what is missing, and how fast it seals."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ringfence.cli import terminal
from ringfence.cli.checks import configuration, device, hardware, software
from ringfence.cli.checks.check import Check, bad
from ringfence.cli.checks.group import group

DESCRIPTION = """\
Check the software, the CPU, the accelerator and the configuration that a worker started from this shell would use, and form
a group of one worker on the loopback interface with a temporary secret.

Faults are marked with !!, and the command that repairs each is printed at the end. Doctor collects no evidence and fetches
no token.
"""

EXAMPLES = """\
examples:
  ringfence doctor
  ringfence doctor --json | python -m json.tool

exit codes:
  0  ready
  1  a check found a fault
"""


def add_to(commands: terminal.Commands) -> None:
    """Add `doctor` to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="check this machine: versions, speed, configuration",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run all checks and print the findings."""
    found = everything(os.environ, Path("/"))
    print(as_json(found) if options.json else as_text(found))
    return 1 if bad(found) else 0


def everything(environ: Mapping[str, str], root: Path) -> list[Check]:
    """Return all findings, in the order in which faults are best repaired. `root` is /; tests pass a folder."""
    first = software.checks(environ)
    there = [*hardware.checks(root), *device.checks()]
    return [*first, group(environ, first), *there, *configuration.checks(environ)]


def as_json(checks: Sequence[Check]) -> str:
    """Return the findings as JSON: {"ready": …, "checks": [{"name", "text", "value", "good", "fix"}, …]}."""
    return json.dumps({"ready": not bad(checks), "checks": [asdict(check) for check in checks]}, indent=2)


def as_text(checks: Sequence[Check]) -> str:
    """Return the findings as text: a paragraph for each, then how to repair the faults."""
    marks = {True: "ok", False: "!!", None: "  "}
    lines = [terminal.wrap(check.text, f"{marks[check.good]:2}  {check.name:13} ") for check in checks]
    missing = bad(checks)
    lines.append("")
    if missing:
        lines.append("Not ready. To repair:")
        lines.extend(terminal.layout_line(f"  {fix}") for fix in dict.fromkeys(check.fix for check in missing))
    else:
        lines.append("Ready.")
    return "\n".join(lines)
