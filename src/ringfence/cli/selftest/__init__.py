"""`ringfence selftest`: tests collectives on this machine's accelerator: right numbers, order of streams, failure, speed.

catalogue.py                            every check, with its meaning
workers.py, worker.py, runner.py        the workers, and the order in which they check
conformance.py, order.py, load.py       the checks
device.py, confidential.py              what is known of the device
report.py                               outcomes and the report, as data, as text and to be signed
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.cli import requirements, terminal
from ringfence.cli.selftest import catalogue
from ringfence.cli.selftest.report import SelftestReport, ask_for_report, statement_of, step, summary
from ringfence.cli.selftest.workers import Plan
from ringfence.errors import ConfigurationError
from ringfence.release import PAGES

if TYPE_CHECKING:
    from ringfence.cli.signed_file import SignedFile

MOST_WORKERS = 8

DESCRIPTION = """\
Test ringfence on this machine's accelerator. Local workers, which may share one GPU, form a group on the loopback interface
with a temporary secret, and check:

  collectives  their results against the same computed on the host
  order        that they wait for streams where they must, with long kernels
  memory       that many random calls leave no memory behind
  speed        copies, sealing, an all-reduce on the device and on the host
  failure      that the loss of a worker raises an error on the others

It also detects confidential mode. It takes a minute or two and 1 GB of device memory for each worker. The report holds
versions and the names of device and CPU; no names of hosts or users, no addresses, no keys.

With --record the results are signed as well: others verify them with `ringfence audit`, and the project lists them
once they are handed in. The signature shows that the holder of the key vouches for the record; it proves no hardware.
"""

EXAMPLES = """\
examples:
  ringfence selftest                           the accelerator that torch finds
  ringfence selftest --device cuda:1 --quick   a certain GPU, in half a minute
  ringfence selftest --report selftest.json    a file to attach to an issue
  ringfence selftest --record h100.json        a signed record, to hand in
  ringfence selftest --only order              the order of streams alone
  ringfence selftest --device sim              a simulated device, without a GPU

exit codes:
  0  all checks passed
  1  a check failed
  2  the test could not run: no accelerator, wrong arguments
"""


def add_to(commands: terminal.Commands) -> None:
    """Add `selftest` to the command line."""
    selftest = commands.add_parser(
        "selftest", help="test collectives on this machine's GPU", description=DESCRIPTION, epilog=EXAMPLES
    )
    selftest.add_argument(
        "--device", default="", metavar="NAME", help="cuda, xpu, cuda:1, sim, ... (default: the one that torch finds)"
    )
    selftest.add_argument(
        "--workers",
        type=terminal.number(2, MOST_WORKERS),
        default=2,
        metavar="N",
        help=f"2 to {MOST_WORKERS}; devices are shared (default: 2)",
    )
    selftest.add_argument("--quick", action="store_true", help="fewer cases, smaller tensors")
    selftest.add_argument(
        "--only",
        action="append",
        choices=catalogue.CHOICES,
        metavar="SECTION",
        help=f"run this section: {', '.join(catalogue.CHOICES)}; may be given several times",
    )
    selftest.add_argument("--report", type=Path, metavar="FILE", help="write the report as JSON, to attach to an issue")
    selftest.add_argument(
        "--record", type=Path, metavar="FILE.json", help="write a signed record, and its public key to FILE.pem"
    )
    selftest.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the Ed25519 key that signs it (default: record.key beside it); made if there is none",
    )
    selftest.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the self-test."""
    requirements.workers()
    requirements.backend()
    recording = _recording(options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends workers and removes files as on Ctrl-C
    report = execute(Plan(options.device, options.workers, options.quick), options.only)
    if options.report:
        options.report.write_text(report.as_json() + "\n", encoding="utf-8")
    if recording:
        recording.write(statement_of(report))
    print(summary(report))
    print()
    if options.report:
        print(f"report: {options.report}")
    if recording:
        print(recording.description())
        terminal.say(f"To hand it in: {PAGES}/contributing.html#hand-in-a-self-test")
    if not (recording and report.passed):
        print(ask_for_report(report, str(options.report or "")))
    return 0 if report.passed else 1


def _recording(options: argparse.Namespace) -> SignedFile | None:
    from ringfence.cli.signed_file import SignedFile  # needs cryptography

    if options.record is None and options.key is not None:
        raise ConfigurationError("--key signs a record: name the record with --record FILE.json")
    return None if options.record is None else SignedFile(options.record, options.key)


def execute(plan: Plan, sections: Sequence[str] | None) -> SelftestReport:
    """Run the checks of some sections, or of all, and print each result when it is there."""
    from ringfence.cli.selftest.runner import Runner  # needs cryptography

    terminal.say(f"ringfence selftest: {plan.count} workers on {plan.device or 'the accelerator that torch finds'}")
    with tempfile.TemporaryDirectory(prefix="ringfence-selftest-") as folder:
        return Runner(
            plan, sections or catalogue.CHOICES, Path(folder), lambda found: print(step(found), flush=True)
        ).run()
