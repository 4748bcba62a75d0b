"""A signed record that a command writes: the file, its public key beside it, and the key that signs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ringfence.cli import terminal
from ringfence.config.private_files import write_new
from ringfence.errors import ConfigurationError
from ringfence.record import envelope, signing_key
from ringfence.record.statement import Statement

KEY_NAME: Final = "record.key"


class SignedFile:
    """The files of a record. Made before what takes long, so that no mistake shows only after it."""

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

    def write(self, statement: Statement) -> None:
        """Write the record and the public key. Raises ConfigurationError; RecordError if the record would be too large."""
        content = envelope.sign(statement.encode(), self._key)
        write_new(self._public, signing_key.public_pem(self._key.public_key()), 0o644, "a public key")
        write_new(self._file, content, 0o644, "a record")

    def description(self) -> str:
        """Return what was written, and how to verify it."""
        made = "made for it; keep it to sign further records" if self._new else "the one that was there"
        text = f"Wrote {self._file}, signed with {self._key_file} ({made}), and the public key. To verify it:"
        return f"{terminal.wrap(text)}\n{terminal.command(f'ringfence audit {self._file} --key {self._public}')}"
