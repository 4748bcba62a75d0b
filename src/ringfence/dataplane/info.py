"""What can be said about this machine's data plane without torch: whether it is the compiled one, and if not, why."""

from __future__ import annotations

import os
from importlib.util import find_spec

from ringfence.errors import ConfigurationError


def is_compiled() -> bool:
    """Whether a worker that is started from here has the compiled data plane. Importing it would import torch."""
    return os.environ.get("RINGFENCE_CORE") != "python" and find_spec("ringfence.dataplane._core") is not None


def wanted() -> str:
    """Which one RINGFENCE_CORE asks for: "python", "compiled", or "" for the best there is; what is neither is refused."""
    asked = os.environ.get("RINGFENCE_CORE", "")
    if asked not in ("", "python", "compiled"):
        raise ConfigurationError(f"RINGFENCE_CORE is {asked!r}; it may be 'compiled' or 'python', or not set")
    if asked == "compiled" and not is_compiled():
        raise ConfigurationError(
            "RINGFENCE_CORE asks for the compiled data plane, which this installation does not have: "
            "install a C compiler and Python's headers, then ringfence again"
        )
    return asked


def why_not() -> str:
    """Why it is the one in Python, and what to do about it."""
    if os.environ.get("RINGFENCE_CORE") == "python":
        return "RINGFENCE_CORE asks for the one in Python, which is slower; unset it"
    return (
        "this installation has the one in Python only, which is slower: install a C compiler and Python's headers, then "
        "ringfence again (in its clone: python -m pip install --force-reinstall --no-deps .)"
    )
