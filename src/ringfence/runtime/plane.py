"""What can be said about this machine's data plane without torch: whether it is the compiled one, and if not, why."""

from __future__ import annotations

import contextlib
import os


def is_compiled() -> bool:
    """Whether a worker that is started from here has the compiled data plane; core.py is what loads it."""
    if os.environ.get("RINGFENCE_CORE") != "python":
        with contextlib.suppress(ImportError):
            from ringfence.runtime import _core  # noqa: F401

            return True
    return False


def why_not() -> str:
    """Why it is the one in Python, and what to do about it."""
    if os.environ.get("RINGFENCE_CORE") == "python":
        return "RINGFENCE_CORE asks for the one in Python, which is slower; unset it"
    return (
        "this installation has the one in Python only, which is slower: install a C compiler and Python's headers, then "
        "ringfence again (in its clone: python -m pip install --force-reinstall --no-deps .)"
    )
