"""What can be said about this machine's data plane without torch: whether it is the compiled one, and if not, why."""

from __future__ import annotations

import os
from importlib.util import find_spec


def is_compiled() -> bool:
    """Whether a worker that is started from here has the compiled data plane. Importing it would import torch."""
    return os.environ.get("RINGFENCE_CORE") != "python" and find_spec("ringfence.runtime._core") is not None


def why_not() -> str:
    """Why it is the one in Python, and what to do about it."""
    if os.environ.get("RINGFENCE_CORE") == "python":
        return "RINGFENCE_CORE asks for the one in Python, which is slower; unset it"
    return (
        "this installation has the one in Python only, which is slower: install a C compiler and Python's headers, then "
        "ringfence again (in its clone: python -m pip install --force-reinstall --no-deps .)"
    )
