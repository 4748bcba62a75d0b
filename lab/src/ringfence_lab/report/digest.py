"""The digest of the numbers of a figure. The file of the figure contains it, so that a stale one is found without drawing."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(series: dict[str, Any]) -> str:
    """Changes with any number."""
    return hashlib.sha256(json.dumps(series, sort_keys=True).encode()).hexdigest()[:16]
