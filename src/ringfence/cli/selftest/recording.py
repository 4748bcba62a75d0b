"""`ringfence selftest --record`: signs what a self-test found, for others to verify with `ringfence audit`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import ringfence
from ringfence.cli import terminal
from ringfence.cli.selftest.report import SelftestReport
from ringfence.config.private_files import write_new
from ringfence.errors import ConfigurationError
from ringfence.record import code, envelope, selftest, signing_key
from ringfence.release import PAGES

KEY_NAME: Final = "record.key"


class Recording:
    """The files of a record, and the key that signs it. Made before the test, so that no mistake shows only after it."""

    def __init__(self, file: Path, key: Path | None) -> None:
        """Open the key, or make one. Raises ConfigurationError."""
        if file.suffix != ".json":
            raise ConfigurationError(f"{file} is not a name for a record: one ends in .json, its public key in .pem")
        self._file, self._public = file, file.with_suffix(".pem")
        for path in (self._file, self._public):
            if os.path.lexists(path):
                raise ConfigurationError(f"{path} exists; a record is never overwritten: name a new file")
        if not file.parent.is_dir():
            raise ConfigurationError(f"{file.parent} is not a folder: make it, or name another")
        self._key_file = key or file.with_name(KEY_NAME)
        self._key, self._new = signing_key.load_or_make(self._key_file)

    def write(self, report: SelftestReport) -> None:
        """Write the record and the public key. Raises ConfigurationError."""
        predicate = {
            "began": report.began,
            "device": report.device,
            "workers": report.workers,
            "quick": report.quick,
            "confidential": report.confidential,
            "environment": report.environment,
            "checks": {f"{each.section}/{each.name}": each.state for each in report.results},
            "passed": report.passed,
            "rates": report.rates,
        }
        subjects = code.package_subjects(Path(ringfence.__file__).parent)
        content = envelope.sign(selftest.statement_of(predicate, subjects).encode(), self._key)
        write_new(self._public, signing_key.public_pem(self._key.public_key()), 0o644, "a public key")
        write_new(self._file, content, 0o644, "a record")

    def description(self) -> str:
        """Return what was written, how to verify it and how to hand it in."""
        made = "made for it; keep it to sign further records" if self._new else "the one that was there"
        lines = [
            terminal.wrap(
                f"Wrote {self._file}, signed with {self._key_file} ({made}), and the public key. To verify it:"
            ),
            terminal.command(f"ringfence audit {self._file} --key {self._public}"),
            terminal.wrap(f"To hand it in: {PAGES}/contributing.html#hand-in-a-self-test"),
        ]
        return "\n".join(lines)
