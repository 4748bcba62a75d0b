"""`ringfence secret new | check | rotate FILE`: the secret that the workers of a run prove knowledge of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

NEW = """\
Write 32 random bytes, as 64 hexadecimal digits and a newline, to a new file that only you can read.

Every worker of a run needs the same file. Copy it by a way you trust (scp, a secret store, a sealed volume);
whoever has it can join the run. An existing file is never overwritten.
"""

CHECK = """\
Say whether workers would take this file, and print the fingerprint of the secret in it.

Compare fingerprints to see that two machines have the same secret, or which of them still has the old one. A fingerprint
may be shown to anybody: it says nothing of the secret.
"""

ROTATE = """\
Put a new secret in the place of the one in this file, in one step: a worker that starts meanwhile reads the old one or
the new one, never half of each. The file no longer holds the old secret; copies, backups and unused blocks of the disk
may.

Runs under way are not disturbed: they have their keys. Workers that start with the new secret and workers that start
with the old one refuse each other, so give the new file to every machine before the next start.
"""

EXAMPLES = """\
examples:
  ringfence secret new run.secret
  export RINGFENCE_SECRET_FILE=$PWD/run.secret
  ringfence secret check run.secret
  ringfence secret rotate run.secret
"""


def add_to(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `secret new`, `secret check` and `secret rotate` to the command line."""
    secret = commands.add_parser("secret", help="make, compare and replace the secret that admits workers to a run")
    actions = secret.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, what, description, run in (
        ("new", "write a new secret to a new file", NEW, run_new),
        ("check", "is this a secret that workers take, and the same as elsewhere?", CHECK, run_check),
        ("rotate", "replace the secret in a file by a new one", ROTATE, run_rotate),
    ):
        parser = actions.add_parser(
            name,
            help=what,
            description=description,
            epilog=EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        where = "where to write it; must not exist" if name == "new" else "a file that `ringfence secret new` wrote"
        parser.add_argument("file", type=Path, metavar="FILE", help=where)
        parser.add_argument("--json", action="store_true", help="print the result as JSON")
        parser.set_defaults(run=run)


def run_new(options: argparse.Namespace) -> int:
    """Make the file and say how to use it. The secret itself is never printed."""
    from ringfence.private_files import new_secret_file  # late, so that `doctor` starts where cryptography is missing

    new_secret_file(options.file)
    path = options.file.absolute()
    if options.json:
        print(json.dumps({"file": str(path), "fingerprint": _fingerprint(path)}))
    else:
        print(f"Wrote a new secret to {path} (mode 0600, fingerprint {_fingerprint(path)}).")
        print("Give every worker the same file, and set:")
        print(f"  export RINGFENCE_SECRET_FILE={path}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Read the file as a worker does."""
    path, fingerprint = options.file.absolute(), _fingerprint(options.file)
    if options.json:
        print(json.dumps({"file": str(path), "fingerprint": fingerprint}))
    else:
        print(f"{path} holds a secret that only its owner can read; fingerprint {fingerprint}")
    return 0


def run_rotate(options: argparse.Namespace) -> int:
    """Replace one secret by another, and nothing else by a secret: what is no secret file is left alone."""
    from ringfence.private_files import replace_secret_file

    old = _fingerprint(options.file)
    path = options.file.resolve()  # behind a symbolic link, the file itself
    replace_secret_file(path)
    new = _fingerprint(path)
    if options.json:
        print(json.dumps({"file": str(path), "fingerprint": new, "replaced": old}))
    else:
        print(f"Replaced the secret in {path}: fingerprint {old} is gone, {new} is in its place.")
        print(
            "Copy the file to every machine of the run before its next start; `ringfence secret check` shows which have it."
        )
    return 0


def _fingerprint(path: Path) -> str:
    from ringfence.keys import secret_fingerprint
    from ringfence.private_files import load_secret

    return secret_fingerprint(load_secret(path))
