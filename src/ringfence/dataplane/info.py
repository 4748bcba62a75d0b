"""Whether the compiled data plane is available, and why not. Does not import torch."""

from __future__ import annotations

import os
from importlib.util import find_spec

from ringfence.errors import ConfigurationError


def is_compiled() -> bool:
    """Return whether a worker started in this environment uses the compiled data plane, without importing it (and torch)."""
    return os.environ.get("RINGFENCE_DATAPLANE") != "python" and find_spec("ringfence.dataplane._core") is not None


def wanted() -> str:
    """Return the value of RINGFENCE_DATAPLANE: "python", "compiled", or "" for the best available.

    Raises ConfigurationError for any other value, and for "compiled" if the compiled data plane is not installed.
    """
    asked = os.environ.get("RINGFENCE_DATAPLANE", "")
    if asked not in ("", "python", "compiled"):
        raise ConfigurationError(f"RINGFENCE_DATAPLANE is {asked!r}; it may be 'compiled' or 'python', or not set")
    if asked == "compiled" and not is_compiled():
        raise ConfigurationError(
            "RINGFENCE_DATAPLANE asks for the compiled data plane, which this installation does not have: "
            "install a C compiler and Python's headers, then ringfence again"
        )
    return asked


def why_not() -> str:
    """Return why the data plane in Python is used, and what to do about it."""
    if os.environ.get("RINGFENCE_DATAPLANE") == "python":
        return "RINGFENCE_DATAPLANE asks for the one in Python, which is slower; unset it"
    return (
        "this installation has the one in Python only, which is slower: install a C compiler and Python's headers, then "
        "ringfence again (in its clone: python -m pip install --force-reinstall --no-deps .)"
    )
