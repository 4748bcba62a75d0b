"""The folder of a study: its paths and its lock."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.machine import now


class Folder:
    """The paths of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw = path / "raw"
        self.summary = path / "summary" / "cells.json"
        self.machines = path / "summary" / "machines.json"
        self._lock = path / "lock"

    def make(self) -> None:
        try:
            for folder in (self.raw, self.summary.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot use the study folder {self.path}: {error.strerror}") from error

    def raw_files(self) -> list[Path]:
        """Return the raw files, one for each cell, ordered by name."""
        return sorted(self.raw.glob("*.jsonl"))

    @contextmanager
    def held(self, command: str) -> Iterator[None]:
        """Hold the lock of the folder. The kernel releases it however this process ends.

        Raises ConfigurationError if another process holds it.
        """
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
            owner = json.loads(self._lock.read_text(encoding="utf-8"))
            holder = f"process {owner['process']} on {owner['host']} since {owner['since']}: {owner['command']}"
        except (ValueError, KeyError, TypeError):
            holder = "another process"
        return f"{self.path} is in use by {holder}. Wait for it to end, or give --results another folder"
