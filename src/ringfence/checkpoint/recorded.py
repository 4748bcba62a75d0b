"""What the record of a run says of checkpoints, and what a checkpoint says of the record (spec/record.md, 8)."""

from __future__ import annotations

from typing import Final

from ringfence.backend import sessions

WRITTEN: Final = "written"
READ: Final = "read"


def add(action: str, anchor: str) -> None:
    """Record that this worker wrote or read a checkpoint, if it writes a record."""
    for each in sessions.recorders():
        each.add("checkpoint", {"action": action, "anchor": anchor})


def head() -> bytes:
    """Return the head of this worker's log, or nothing if it writes none, or several."""
    heads = [each.head for each in sessions.recorders()]
    return bytes.fromhex(heads[0]) if len(heads) == 1 else b""
