"""The raw samples: JSON lines in a file, appended round by round, found again by their settings.

{"run": id, "machine": {…}, "command": "…", "date": "…"}        once at the start of each run
{"run": id, "case": {…}, "round": n, "samples": {variant: {"seconds", "cpu", "sent", …}}}
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ringfence.errors import ConfigurationError

FILE: Final = "samples.jsonl"

Case = Mapping[str, Any]
Round = dict[str, dict[str, Any]]


class Samples:
    """The samples of one file."""

    def __init__(self, folder: Path, file: str = FILE) -> None:
        self.path = folder / file
        self.run = secrets.token_hex(4)
        self._rounds: dict[str, list[Round]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._load()
        except OSError as error:
            raise ConfigurationError(f"cannot use the results folder {folder}: {error.strerror}") from error

    def _load(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):  # a line that was being written when its run was ended
            os.truncate(self.path, content.rfind(b"\n") + 1)
        for number, record in records(self.path):
            if "case" in record and not isinstance(record.get("samples"), dict):
                raise ConfigurationError(f"{self.path}, line {number}: not a line of samples; move the file away")
            if "case" in record:
                self._rounds.setdefault(key(record["case"]), []).append(record["samples"])

    def begin(self, machine: Mapping[str, Any], command: str, date: str) -> None:
        """Record the machine, command and date of the rounds that follow."""
        append(self.path, {"run": self.run, "machine": machine, "command": command, "date": date})

    def rounds(self, case: Case) -> list[Round]:
        """Return the rounds that were measured with exactly these settings."""
        return self._rounds.get(key(case), [])

    def add(self, case: Case, samples: Round) -> None:
        rounds = self._rounds.setdefault(key(case), [])
        append(self.path, {"run": self.run, "case": case, "round": len(rounds), "samples": samples})
        rounds.append(samples)


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a file with their numbers, without a last incomplete line, which a killed run left.

    Raises ConfigurationError, which names the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                raise ConfigurationError(f"{path}, line {number}: not JSON; move the file away") from None
            if not isinstance(record, dict):
                raise ConfigurationError(f"{path}, line {number}: not a record; move the file away")
            yield number, record


def append(path: Path, record: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}; what was measured before is kept") from error


def key(case: Case) -> str:
    """Return a key that is equal for equal settings, in any order."""
    return json.dumps(case, sort_keys=True)
