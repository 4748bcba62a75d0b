"""`ringfence secret new | check | rotate FILE`: the shared secret by which the workers of a run admit each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ringfence.cli.terminal import Commands, say

NEW = """\
Write a new secret to a new file: 32 random bytes, as 64 hexadecimal digits and a newline. The file has mode 0600.

Every worker of a run needs the same file. Anyone who has it can join the run, so copy it over a trusted channel (scp, a
secret store, an encrypted volume). An existing file is never overwritten.
"""

CHECK = """\
Check that workers accept this file, and print the fingerprint of its secret.

Compare fingerprints to find out whether two machines have the same secret. A fingerprint is safe to publish: it reveals
nothing about the secret.
"""

ROTATE = """\
Replace the secret in a file by a new one. The replacement is atomic: a worker that starts meanwhile reads either the
old secret or the new one. The file no longer contains the old secret; copies, backups and unused disk blocks may.

Running jobs are not affected, because they have their keys already. Workers with different secrets refuse each other, so
copy the new file to every machine before the next start.
"""

EXAMPLES = """\
examples:
  ringfence secret new run.secret
  export RINGFENCE_SECRET_FILE=$PWD/run.secret
  ringfence secret check run.secret
  ringfence secret rotate run.secret
"""


def add_to(commands: Commands) -> None:
    """Add `secret new`, `secret check` and `secret rotate` to the command line."""
    secret = commands.add_parser("secret", help="make, check or replace the shared secret of a run")
    actions = secret.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, what, description, run in (
        ("new", "write a new secret to a new file", NEW, run_new),
        ("check", "check a secret file and print its fingerprint", CHECK, run_check),
        ("rotate", "replace the secret in a file", ROTATE, run_rotate),
    ):
        parser = actions.add_parser(
            name,
            help=what,
            description=description,
            epilog=EXAMPLES,
        )
        what_file = "the file to write; must not exist" if name == "new" else "a file written by `ringfence secret new`"
        parser.add_argument("file", type=Path, metavar="FILE", help=what_file)
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.set_defaults(run=run)


def run_new(options: argparse.Namespace) -> int:
    """Make the file and print how to use it. The secret itself is never printed."""
    from ringfence.config.private_files import (
        new_secret_file,  # imported here, so that `doctor` starts without cryptography
    )

    new_secret_file(options.file)
    path = options.file.absolute()
    if options.json:
        print(json.dumps({"file": str(path), "fingerprint": _fingerprint(path)}))
    else:
        say(f"Wrote a new secret with fingerprint {_fingerprint(path)} to a file of mode 0600:")
        print(f"  {path}")
        say("As the secret of a run, copy the file to every worker, and set on each:")
        print(f"  export RINGFENCE_SECRET_FILE={path}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Read the file as a worker does, and print its fingerprint."""
    path, fingerprint = options.file.absolute(), _fingerprint(options.file)
    if options.json:
        print(json.dumps({"file": str(path), "fingerprint": fingerprint}))
    else:
        say(f"A valid secret that only its owner can read, fingerprint {fingerprint}:")
        print(f"  {path}")
    return 0


def run_rotate(options: argparse.Namespace) -> int:
    """Replace the secret in a file. A file that does not hold a valid secret is not changed."""
    from ringfence.config.private_files import replace_secret_file

    old = _fingerprint(options.file)
    path = options.file.resolve()  # the target of a symbolic link
    replace_secret_file(path)
    new = _fingerprint(path)
    if options.json:
        print(json.dumps({"file": str(path), "fingerprint": new, "replaced": old}))
    else:
        say(f"Replaced the secret with fingerprint {old} by a new one with fingerprint {new}:")
        print(f"  {path}")
        say(
            "Copy the file to every machine of the run before its next start. `ringfence secret check` shows which have it."
        )
    return 0


def _fingerprint(path: Path) -> str:
    from ringfence.config.private_files import load_secret
    from ringfence.keys import secret_fingerprint

    return secret_fingerprint(load_secret(path))
