"""The folder of a record: the logs of all sessions that workers of this machine, or of several, wrote there."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ringfence import keys
from ringfence.admission.entry import Listing
from ringfence.config.cores import usable_cores
from ringfence.errors import RecordError
from ringfence.record import begin, heads, log
from ringfence.record.log import Log, LogEntry
from ringfence.record.log_file import Blobs, log_name

COMPLETE, CUT, REFUSED = "complete", "cut", "refused"
_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9]{1,7}\.jsonl")
_SEVERAL: Final = 8  # logs that are worth further processes
_SUFFIX: Final = ".jsonl"
_TAIL_BYTES: Final = 2 * keys.RECORD_LINE_BYTES  # of a log, in which its last signature is


def previous_head(folder: Path, run_id: str, rank: int) -> str:
    """Return the head of the newest log of a rank of a run, or an empty text.

    It is not verified here: the folder is this user's own, and an auditor verifies both logs.
    """
    found: list[tuple[int, str]] = []
    for path in folder.glob(f"*-{rank}.jsonl"):
        try:
            with path.open("rb") as file:
                entry = log.parse(file.readline(keys.RECORD_LINE_BYTES)[:-1])
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                head = log.last_signature(file.read(_TAIL_BYTES))
        except (OSError, RecordError):
            continue
        if entry.kind == log.BEGIN and entry.fields["run"] == run_id and head is not None:
            found.append((entry.at, head.hex()))
    return max(found, default=(0, ""))[1]


@dataclass(frozen=True)
class LogState:
    """What an audit finds of one log. `log` is None if it is refused."""

    name: str
    state: str
    reason: str = ""
    log: Log | None = None
    listings: tuple[Listing, ...] = ()  # of its roster


def audit(folder: Path) -> list[LogState]:
    """Verify every log in a folder by itself, with the files that it refers to. Raises RecordError if there is none."""
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(_SUFFIX))
    if not names:
        raise RecordError(f"there is no log in {folder}")
    state_of = partial(_state_of, folder)
    if len(names) < _SEVERAL:
        return [state_of(name) for name in names]
    with ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("spawn")) as processes:
        return list(processes.map(state_of, names))


def _state_of(folder: Path, name: str) -> LogState:
    if not _NAME.fullmatch(name):
        return LogState(ascii(name)[1:-1], REFUSED, "its file does not have the name of a log")
    try:
        found, listings = _verified(folder, name)
    except RecordError as error:
        return LogState(name, REFUSED, str(error))
    except OSError as error:
        return LogState(name, REFUSED, f"it cannot be read: {error.strerror}")
    if found.is_complete and not found.tail:
        return LogState(name, COMPLETE, "", found, listings)
    why = "its worker did not record the end of the session" if not found.is_complete else "bytes follow its end"
    return LogState(name, CUT, f"{why}; {found.tail:,} bytes without a signature were cut", found, listings)


def _verified(folder: Path, name: str) -> tuple[Log, tuple[Listing, ...]]:
    blobs = Blobs(folder)
    with (folder / name).open("rb") as stream:
        found = log.read(stream)
    said = found.begin.fields
    with _named(found.begin):
        listings = begin.verify(found.begin, blobs)
        if name != log_name(bytes.fromhex(said["roster"]), said["rank"]):
            raise RecordError("its file has the name of another log")
    for entry in found.entries:
        with _named(entry):
            contents = [blobs.get(each) for each in _files(entry)]
            if entry.kind == "heads":
                content = contents[0] if contents else heads.encode({})
                right = heads.decode(content, bytes.fromhex(said["roster"]), listings)
                if heads.encode(right) != content or entry.fields["missing"] != len(listings) - len(right):
                    raise RecordError(
                        "a head in its list was not signed by the worker that it names, or is not counted"
                    )
    return found, listings


@contextlib.contextmanager
def _named(entry: LogEntry) -> Iterator[None]:
    """Name an entry in errors."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"entry {entry.number}: {error}") from None


def _files(entry: LogEntry) -> list[str]:
    """Return the names of the files that an entry refers to."""
    said = entry.fields
    match entry.kind:
        case log.BEGIN:
            return begin.files_of(entry)
        case "code":
            return [said["arguments"], said["packages"]]
        case "heads":
            return [said["list"]] if said["list"] else []
    return []
