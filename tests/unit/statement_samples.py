"""The logs of a run of two workers, and the statement that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringfence.record import provenance
from ringfence.record.log_file import Blobs, open_folder
from ringfence.record.statement import Statement
from tests.unit.log_samples import Session

ANCHOR, OLDER, ROOT, SCRIPT = "ab" * 32, "cd" * 32, "ef" * 32, "12" * 32
CHECKPOINTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("checkpoint", {"action": "read", "anchor": OLDER}),
    ("data", {"root": ROOT, "files": 3, "bytes": 1000}),
    ("checkpoint", {"action": "written", "anchor": ANCHOR}),
    ("checkpoint", {"action": "read", "anchor": ANCHOR}),
)
LEFT: tuple[str, dict[str, Any]] = ("end", {"how": "left", "text": ""})


def write_logs(folder: Path) -> tuple[Path, Path]:
    """Write the logs of two workers, the second of which was killed, and return their paths."""
    open_folder(folder)
    arguments, packages = Blobs(folder).put(b'["--lr","0.1"]'), Blobs(folder).put(b"{}")
    code = {"script": "train.py", "digest": SCRIPT, "arguments": arguments, "packages": packages}
    entries = (("code", code), *CHECKPOINTS)
    return Session().write(folder, 0, (*entries, LEFT)), Session().write(folder, 1, entries)


def statement(folder: Path) -> Statement:
    write_logs(folder)
    return provenance.statement_of(folder, ())
