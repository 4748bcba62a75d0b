"""`ringfence audit`: verifies a signed record, or the logs of a run in a folder, offline and without torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ringfence.cli import terminal
from ringfence.errors import ConfigurationError, RecordError

if TYPE_CHECKING:
    from ringfence.record.statement import Statement

LIMITS: Final = (
    "The signature shows that the holder of this key signed the record and that nobody has changed it since. It shows neither "
    "who that is nor that what follows is true: that is the signer's word."
)

DESCRIPTION = """\
Verify a signed record, which `ringfence selftest --record` or `ringfence record statement` wrote, with the public key of its
signer; or the logs of a run in a folder, which `ringfence run --record` or RINGFENCE_RECORD made. It needs no network and no
torch.

A signature shows that the holder of the key signed the record, and that it is unchanged. It does not show who holds the key, so
take the public key from its owner and not from where the record came from. It does not show that the record is true either:
somebody who signs can sign anything.

Of a folder every log is verified, with what its worker presented as of the time of the run, and whether both ends of each
connection agree on what passed. With --claims, each claim is shown, refuted or not shown; claims.toml may have:

  run = "my-run"                 every log is of this run
  complete = true                no worker's log and no session is missing
  workers = ["spiffe://…"]       nobody else was admitted
  scripts = ["9f86d0…"]          only these scripts ran, by SHA-256
  packages = ["60303a…"]         only with these installed packages
  data = ["2c26b4…"]             only these data: roots of `ringfence record data`
  sealed = true                  nothing left a machine unsealed
  checkpoints = ["fcde2b…"]      this run wrote them, by their anchors
  started_from = ["81b637…"]     and it read no others than its own and these
  [attested]
  kinds = ["tdx", "snp"]         every worker presented one of them
  [attested.measurements]
  measurement = ["5e0dd3…"]      with one of these values
"""

EXAMPLES = """\
examples:
  ringfence audit h100.json --key h100.pem                 what was tested, and by which key it is signed
  ringfence audit h100.json --key h100.pem --json          the same for programs
  ringfence audit run.json --key run.pem                   what a run was
  ringfence audit record/                                  what the logs of a run show
  ringfence audit record/ --claims claims.toml             and whether they show what is claimed
  ringfence audit record/ --claims claims.toml --page audit.html   the same as a page

exit codes:
  0  the record is genuine, whether what it describes passed or failed; all claims are shown
  1  the record is refused: changed, malformed, or signed by another key; or a claim is not shown
  2  the command could not run: wrong arguments or files
"""


def add_to(commands: terminal.Commands) -> None:
    """Add `audit` to the command line."""
    audit = commands.add_parser("audit", help="verify a signed record", description=DESCRIPTION, epilog=EXAMPLES)
    audit.add_argument("record", type=Path, metavar="RECORD", help="the file with the record, or a folder with logs")
    audit.add_argument(
        "--key", type=Path, metavar="FILE", help="the signer's public key, in PEM form; not for a folder"
    )
    audit.add_argument("--claims", type=Path, metavar="FILE", help="of a folder: what it must show")
    audit.add_argument("--page", type=Path, metavar="FILE", help="of a folder: write the result as a page, in HTML")
    audit.add_argument("--json", action="store_true", help="print the result as JSON")
    audit.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify the record and print what it says."""
    if options.record.is_dir():
        if options.key is not None:
            raise ConfigurationError(
                "the keys of logs are in the logs, certified by the roster: omit --key for a folder"
            )
        from ringfence.cli import audit_run

        return audit_run.run(options)
    if options.claims is not None or options.page is not None:
        raise ConfigurationError(f"{options.record} is not a folder: --claims and --page are for the logs of a run")
    if options.key is None:
        raise ConfigurationError(f"{options.record} is not a folder: give the public key of its signer with --key FILE")
    return _run_on_file(options)


def _run_on_file(options: argparse.Namespace) -> int:
    # Imported here, so that `doctor` starts without cryptography.
    from ringfence.config.private_files import read_content
    from ringfence.keys import RECORD_BYTES, RECORD_PROVENANCE
    from ringfence.record import envelope, provenance, selftest, signing_key, statement

    key = signing_key.read_public(read_content(options.key, RECORD_BYTES + 1), str(options.key))
    content = read_content(options.record, RECORD_BYTES + 1)
    try:
        found = statement.parse(envelope.verified_payload(content, key))
        (provenance if found.kind == RECORD_PROVENANCE else selftest).parse(found)
    except RecordError as error:
        if options.json:
            print(json.dumps({"verified": False, "reason": str(error)}))
        else:
            terminal.complain(f"{options.record} is refused: {error}")
        return 1
    name = signing_key.key_id(key)
    if options.json:
        subjects = [each._asdict() for each in found.subjects]
        said = {"kind": found.kind, "subjects": subjects, "predicate": found.predicate}
        print(json.dumps({"verified": True, "key": name, **said}))
    else:
        _print(found, name)
    return 0


def _print(found: Statement, key: str) -> None:
    from ringfence.keys import RECORD_SELFTEST
    from ringfence.record import selftest

    said, is_test = found.predicate, found.kind == RECORD_SELFTEST
    terminal.say(LIMITS)
    print()
    terminal.say(f"Ed25519 key {key}", "  signed by     ")
    print()
    terminal.say(f"The record says: {selftest.verdict(said) if is_test else 'this is what a run made, and how'}.")
    rows: list[tuple[str, Any]] = [(each.algorithm, f"{each.name} {each.digest}") for each in found.subjects]
    for name, value in rows + (_selftest_rows(said) if is_test else _values("", said)):
        terminal.say(terminal.printable(value), f"  {terminal.printable(name):12}  ")


def _selftest_rows(said: dict[str, Any]) -> list[tuple[str, Any]]:
    sections = dict.fromkeys(name.partition("/")[0] for name in said["checks"])
    rows = [("began", said["began"]), ("workers", f"{said['workers']} on {said['device']}")]
    rows += [*said["environment"].items(), ("confidential", said["confidential"]), ("sections", ", ".join(sections))]
    rows += [(f"{rate / 1e9:.2f} GB/s", name) for name, rate in said["rates"].items()]
    return rows + [(state, name) for name, state in said["checks"].items() if state != "passed"]


def _values(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return all values in a JSON document, each with the last name that leads to it."""
    if not isinstance(value, dict | list):
        return [(name, value)]
    pairs = value.items() if isinstance(value, dict) else [(name, each) for each in value]
    return [row for inner, each in pairs for row in _values(inner, each)]
