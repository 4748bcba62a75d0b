"""Writes the log of one worker in one session, and the files that it refers to by digest (spec/record.md, 6 and 7).

Every call may block for as long as the disk does. Not safe for several threads.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence import keys
from ringfence.config.private_files import replace_file, sync_folder
from ringfence.errors import ConfigurationError, RecordError
from ringfence.record import log
from ringfence.record.json_object import SHA_256, Json

BLOBS: Final = "blobs"
_RESERVED_LINES: Final = 4  # for the end, and for signatures


def open_folder(folder: Path) -> None:
    """Make the folder of a record, if there is none. Raises ConfigurationError if others can open it."""
    for each in (folder, folder / BLOBS):
        try:
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = each.stat()
        except OSError as error:
            raise ConfigurationError(f"cannot make the folder of a record, {each}: {error.strerror}") from error
        if found.st_uid != os.geteuid():
            raise ConfigurationError(f"the folder of a record, {each}, belongs to another user: name one of your own")
        if found.st_mode & 0o077:
            raise ConfigurationError(f"others can open the folder of a record, {each}: run `chmod 700 {each}`")


def log_name(roster_digest: bytes, rank: int) -> str:
    """Return the name of a worker's log of one session."""
    return f"{roster_digest[:8].hex()}-{rank}.jsonl"


class Blobs:
    """Files named by the SHA-256 of their content. Equal content is written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / BLOBS

    def put(self, content: bytes) -> str:
        """Write a file, whole or not at all, and return its name. Raises ConfigurationError or RecordError."""
        if len(content) > keys.RECORD_BLOB_BYTES:
            raise RecordError(f"{len(content):,} bytes; a record refers to files of at most {keys.RECORD_BLOB_BYTES:,}")
        name = hashlib.sha256(content).hexdigest()
        path = self._folder / name
        if not path.exists():
            replace_file(path, content, 0o600)
        return name

    def get(self, name: object) -> bytes:
        """Return the content of a file. Raises RecordError if it is missing or is not what its name says."""
        if not isinstance(name, str) or not SHA_256.fullmatch(name):
            raise RecordError(f"{str(name)[:80]!r} is not the name of a file that a record refers to")
        try:
            with (self._folder / name).open("rb") as file:
                content = file.read(keys.RECORD_BLOB_BYTES + 1)
        except OSError as error:
            raise RecordError(f"the file {BLOBS}/{name} cannot be read: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != name:
            raise RecordError(f"the file {BLOBS}/{name} was changed: it has another digest")
        return content


class LogFile:
    """A log that is being written. A process that is killed leaves what was signed before."""

    def __init__(self, folder: Path, name: str, key: Ed25519PrivateKey) -> None:
        """Create the file. Raises OSError, also if it exists."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._key: Ed25519PrivateKey | None = key
        self._file = os.open(folder / name, flags, 0o600)
        os.fchmod(self._file, 0o600)
        sync_folder(folder)
        self._number = 0
        self._size = 0
        self._unsigned = b""
        self.head = log.FIRST  # the digest of the last line, which may not be signed yet

    def append(self, kind: str, fields: Json) -> None:
        """Add an entry, which `sign` writes. Raises RecordError if a reader would refuse it."""
        entry = log.LogEntry(kind, self._number, self.head.hex(), _milliseconds(), fields)
        log.parse(entry.encode())
        is_last = kind == log.END
        if not is_last and (
            self._number + _RESERVED_LINES > keys.RECORD_LINES
            or self._size + len(self._unsigned) + _RESERVED_LINES * keys.RECORD_LINE_BYTES > keys.RECORD_LOG_BYTES
        ):
            raise RecordError(f"the log is full: it has {self._number:,} lines and {self._size:,} bytes")
        self._unsigned += self._take(entry)

    def sign(self) -> None:
        """Write the entries and a signature that covers them, if there are any, and wait for the disk. Raises OSError."""
        if not self._unsigned:
            return
        assert self._key is not None
        # In this order on the disk too: a signature after lines that are missing would be refused, not cut.
        self._write(self._unsigned)
        self._unsigned = b""
        self._write(self._take(log.sign(self._number, self.head, _milliseconds(), self._key)))

    def _take(self, entry: log.LogEntry) -> bytes:
        line = entry.encode()
        self._number += 1
        self.head = log.digest_of(line)
        return line + b"\n"

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.write(self._file, view)
            self._size += written
            view = view[written:]
        os.fdatasync(self._file)

    def close(self) -> None:
        """Drop the key and close the file. Also for a forked child, which must not write."""
        self._key = None
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _milliseconds() -> int:
    return time.time_ns() // 1_000_000
