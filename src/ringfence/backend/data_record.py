"""`ringfence.record_data`: which data a run uses, for its record (spec/record.md, 8)."""

from __future__ import annotations

import os

from ringfence.backend import sessions
from ringfence.record import manifest


def record_data(path: str | os.PathLike[str]) -> str:
    """Record that this worker uses the data of a manifest, which `ringfence record data` wrote, and return its root.

    Call it in each session, after the process group was made. It does not read the data: `ringfence record verify-data` does.

    Raises:
        OSError: The manifest cannot be read.
        RingfenceError: It was changed, or is not a manifest.
    """
    with open(path, "rb") as source:
        found = manifest.check(source)
    for each in sessions.recorders():
        each.add("data", {"root": found.root.hex(), "files": found.files, "bytes": found.size})
    return found.root.hex()
