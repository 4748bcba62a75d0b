"""Which releases of torch ringfence is tested with: docs/reference/compatibility.md has the results."""

from __future__ import annotations

import re
from typing import Final

OLDEST: Final = (2, 13)  # in 2.12 `new_group(backend="gloo")` makes a plaintext Gloo group
NEWEST: Final = (2, 15)
TESTED: Final = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
INSTALL: Final = f'python -m pip install "torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"'


def release(version: str) -> tuple[int, int]:
    """The release of a version: "2.13.0+cpu" is (2, 13)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"not a version of torch: {version!r}")
    return int(found[1]), int(found[2])


def too_old(version: str) -> bool:
    """Whether ringfence refuses this version."""
    return release(version) < OLDEST


def untested(version: str) -> bool:
    """Whether this version is newer than those that ringfence is tested with."""
    return release(version) > NEWEST
