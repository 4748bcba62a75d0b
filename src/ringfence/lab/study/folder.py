"""The folder of a study: its paths, who is using it, and files that are replaced whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from ringfence.errors import ConfigurationError
from ringfence.lab.bench.machine import now

_BLOCK: Final = 1 << 20


class Folder:
    """Where a study keeps what it has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = path / "raw"
        self.tidy = path / "tidy" / "samples.parquet"
        self.summary = path / "summary" / "cells.parquet"
        self.summary_json = path / "summary" / "cells.json"
        self.machines = path / "summary" / "machines.json"
        self._lock = path / "lock"

    def make(self) -> None:
        try:
            for folder in (self.raw, self.tidy.parent, self.summary.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot use the study folder {self.path}: {error.strerror}") from error

    def raw_files(self) -> list[Path]:
        """One for each cell, in the order of their names."""
        return sorted(self.raw.glob("*.jsonl"))

    @contextmanager
    def held(self, command: str) -> Iterator[None]:
        """Nobody else writes here meanwhile. The kernel lets go of it however this process ends."""
        self.make()
        with self._lock.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(self._taken()) from None
            file.truncate(0)
            holder = {"process": os.getpid(), "host": socket.gethostname(), "since": now(), "command": command}
            file.write(json.dumps(holder) + "\n")
            file.flush()
            yield
            file.truncate(0)

    def _taken(self) -> str:
        try:
            who = json.loads(self._lock.read_text(encoding="utf-8"))
            holder = f"process {who['process']} on {who['host']} since {who['since']}: {who['command']}"
        except (ValueError, KeyError, TypeError):
            holder = "another process, which has not said its name yet"
        return f"{self.path} is in use by {holder}. Wait for it to end, or give --results another folder"


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write in place of `path`, which stays as it was until all of the new one is on the disk.

    What a killed process left half-written has a fixed name, so the next one overwrites it.
    """
    aside = path.with_name(f".{path.name}.part")
    with aside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def digest_of(files: list[Path]) -> str:
    """Names what is in these files, in this order."""
    state = hashlib.sha256()
    for path in files:
        state.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
        state.update(b"\0")
    return state.hexdigest()
