"""`ringfence record`: signs what a run was, writes manifests of data sets and compares folders with them, without torch."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ringfence.cli import terminal
from ringfence.errors import ConfigurationError, RecordError

if TYPE_CHECKING:
    from ringfence.record.manifest import Summary

DATA = """\
Hash every file of a data set, and write a manifest: a list of names, sizes and digests that ends with a root, one digest that
stands for all of them. Anyone who has the root can tell later whether a folder holds the same data.

If the command is interrupted, run it again: it goes on where it was. Symbolic links are refused. Modes, times and empty folders
are not recorded.
"""

VERIFY = """\
Compare every byte of a folder with a manifest. A manifest is not signed: give --root, from a record or from the owner of the
data, or compare the root that is printed.
"""

STATEMENT = """\
Verify the logs of a run, and sign a statement of what they say: the checkpoints that it wrote, the script, packages and data
that it used, its policy and times, and the digest of each log. It is SLSA provenance, which other tools read as well.

Collect the logs of all machines in one folder first. If one of them is refused, nothing is signed. While the run goes on, the
statement covers each log up to its last signature. What the logs say is the workers' word; the holder of the key adopts it.
"""

EXAMPLES = """\
examples:
  ringfence record data corpus                        write corpus.manifest
  ringfence record verify-data corpus.manifest other  is this the same data?
  ringfence record statement logs -o run.json         sign run.json; run.pem
  ringfence record statement logs -o run.json --key owner.key --model export
  ringfence audit run.json --key run.pem              what it says

exit codes:
  0  the file was written, or the folder has exactly the data
  1  a folder, a log or the manifest is refused, and the output says why
  2  the command could not run: wrong arguments, files or environment
"""

_SHOWN: Final = 20  # differences


def add_to(commands: terminal.Commands) -> None:
    """Add `record` and its actions to the command line."""
    record = commands.add_parser("record", help="record what a run was, and which data it uses", epilog=EXAMPLES)
    actions = record.add_subparsers(title="actions", metavar="ACTION", required=True)
    data = actions.add_parser("data", help="write a manifest of a data set", description=DATA, epilog=EXAMPLES)
    data.add_argument("folder", type=Path, metavar="DIR", help="the data set")
    data.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="(default: NAME.manifest in the current folder)"
    )
    data.set_defaults(run=run_data)
    summary = "compare a folder with a manifest"
    verify = actions.add_parser("verify-data", help=summary, description=VERIFY, epilog=EXAMPLES)
    verify.add_argument("manifest", type=Path, metavar="MANIFEST", help="the file that `record data` wrote")
    verify.add_argument("folder", type=Path, metavar="DIR", help="the folder to compare")
    verify.add_argument("--root", metavar="DIGEST", help="refuse a manifest with another root")
    verify.set_defaults(run=run_verify)
    made = actions.add_parser("statement", help="sign what a run was", description=STATEMENT, epilog=EXAMPLES)
    made.add_argument("folder", type=Path, metavar="DIR", help="the logs, which `ringfence run --record` wrote")
    made.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="the statement; its public key is FILE.pem",
    )
    made.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="the Ed25519 key that signs it (default: record.key beside it); made if there is none",
    )
    made.add_argument("--model", type=Path, metavar="DIR", help="a model that the run exported; needs model-signing")
    made.set_defaults(run=run_statement)


def run_data(options: argparse.Namespace) -> int:
    """Write the manifest, with progress."""
    from ringfence.record import manifest_files

    output = options.output or Path(f"{options.folder.resolve().name or 'data'}.manifest")
    began = time.monotonic()
    try:
        size = sum(file.size for file in manifest_files.files_in(options.folder))
        with terminal.Progress("hashing", size) as progress:
            summary = manifest_files.write_manifest(options.folder, output, progress.add)
    except RecordError as error:
        terminal.complain(f"{options.folder} is refused: {error}")
        return 1
    took = time.monotonic() - began
    rate = terminal.size_text(round(summary.size / max(took, 1e-3)))
    _print(f"{output}: {_amount(summary)}, in {took:.1f} s ({rate}/s).", summary)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Verify the manifest, then the folder, with progress."""
    from ringfence.record import manifest, manifest_files

    try:
        with options.manifest.open("rb") as source:
            summary = manifest.check(source)
            if options.root not in (None, summary.root.hex()):
                raise RecordError(f"the root is {summary.root.hex()}, and not the one that was given")
            source.seek(0)
            with terminal.Progress("verifying", summary.size) as progress:
                differences = manifest_files.compare(source, summary, options.folder, progress.add)
    except RecordError as error:
        terminal.complain(f"{options.folder} is not known to be the data of {options.manifest}: {error}")
        return 1
    except OSError as error:
        raise ConfigurationError(f"cannot read {options.manifest}: {error.strerror}") from error
    if differences:
        more = len(differences) - _SHOWN
        lines = [f"{options.folder} is not the data of {options.manifest}. Files that differ: {len(differences):,}"]
        lines += [f"  {each}" for each in differences[:_SHOWN]] + [f"  and {more:,} more"] * (more > 0)
        terminal.complain("\n".join(lines))
        return 1
    _print(f"{options.folder} is the data of {options.manifest}: {_amount(summary)}.", summary)
    if options.root is None:
        terminal.say("Compare the root with one from elsewhere: anyone who changes data can write a manifest of it.")
    return 0


def run_statement(options: argparse.Namespace) -> int:
    """Verify the logs, and sign the statement."""
    from ringfence.cli.signed_file import SignedFile
    from ringfence.record import code, provenance

    signed = SignedFile(options.output, options.key)
    try:
        models = [] if options.model is None else [code.model_subject(options.model)]
        made = provenance.statement_of(options.folder, models)
        signed.write(made)
    except RecordError as error:
        terminal.complain(f"nothing was signed: {error}")
        return 1
    except OSError as error:
        raise ConfigurationError(f"cannot read {options.folder}: {error.strerror}") from error
    for each in made.subjects:
        terminal.say(f"{each.name} {each.digest}", "  subject  ")
    print(signed.description())
    return 0


def _amount(summary: Summary) -> str:
    return f"{summary.files:,} file{'s' * (summary.files != 1)}, {terminal.size_text(summary.size)}"


def _print(text: str, summary: Summary) -> None:
    terminal.say(text)
    print(f"  root  {summary.root.hex()}")
