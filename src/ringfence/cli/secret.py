"""`ringfence secret new FILE`: make the secret that the workers of a run prove knowledge of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DESCRIPTION = """\
Write 32 random bytes, as 64 hexadecimal digits and a newline, to a new file that only you can read.

Every worker of a run needs the same file. Copy it by a way you trust (scp, a secret store, a sealed volume);
whoever has it can join the run. An existing file is never overwritten.
"""

EXAMPLES = """\
examples:
  ringfence secret new run.secret
  export RINGFENCE_SECRET_FILE=$PWD/run.secret
"""


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `secret new` to the command line."""
    secret = commands.add_parser("secret", help="make the secret that admits workers to a run")
    actions = secret.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="write a new secret to a new file",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("file", type=Path, metavar="FILE", help="where to write it; must not exist")
    new.add_argument("--json", action="store_true", help="print the result as JSON")
    new.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make the file and say how to use it. The secret itself is never printed."""
    from ringfence.settings import new_secret_file  # late, so that `doctor` starts where cryptography is missing

    new_secret_file(options.file)
    path = options.file.absolute()
    if options.json:
        print(json.dumps({"file": str(path)}))
    else:
        print(f"Wrote a new secret to {path} (mode 0600). Give every worker the same file, and set:")
        print(f"  export RINGFENCE_SECRET_FILE={path}")
    return 0
