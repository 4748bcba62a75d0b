"""The `ringfence` command: say who may join, look at this machine, see the protection at work, measure its price."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ringfence import __version__
from ringfence.cli import bench, certificate, demo, doctor, evidence, plan, policy, report, secret, study
from ringfence.errors import RingfenceError

EXIT_CODES = """\
exit codes:
  0  done, and all was well
  1  it ran, and what it looked at is not in order (the output says what)
  2  it could not run: wrong arguments, files or environment
"""

EXAMPLES = """\
examples:
  ringfence demo                                    see what a network sees, with and without ringfence
  ringfence doctor                                  is this machine ready, and how fast does it seal?
  ringfence bench collectives --workers 2           what does sealing cost here?
  ringfence study --list                            and for whole models, workers and networks?
  ringfence report                                  what a study found, as a page with figures
  ringfence plan --model gpt2-xl --workers 64       and elsewhere, at scales you do not have?
  ringfence secret new run.secret                   what the workers of a run prove knowledge of
  export RINGFENCE_SECRET_FILE=$PWD/run.secret      then train with backend="ringfence"
  ringfence certificate new site node-0 node-1      certificates in place of a secret, and
  ringfence policy new site/policy.toml             a policy that asks for them
  ringfence policy explain site/policy.toml         whom does it admit?

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the returned value is the process's exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except RingfenceError as error:
        print(f"ringfence: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringfence",
        description="A torch.distributed backend for networks and clouds you do not trust.",
        epilog=EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ringfence {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, doctor, secret, policy, certificate, evidence, bench, study, report, plan):
        command.add_to(commands)
    return parser
