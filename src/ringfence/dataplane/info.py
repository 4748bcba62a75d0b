"""Which data plane this process shall use, and whether it is installed. Does not import torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

from ringfence.errors import ConfigurationError

SLOWER: Final = "RINGFENCE_DATAPLANE asks for the one in Python, which is slower; unset it"


def missing(why: str = "") -> ConfigurationError:
    """The error of an installation without the compiled data plane: it says what to do."""
    return ConfigurationError(
        f"this installation lacks the compiled data plane{why}: install a C compiler and Python's headers, then ringfence "
        "again (in its clone: python -m pip install --force-reinstall --no-deps .). RINGFENCE_DATAPLANE=python does "
        "without it, many times slower"
    )


def wanted() -> str:
    """Return which data plane RINGFENCE_DATAPLANE asks for: "compiled", also if it is not set, or "python".

    Raises ConfigurationError for any other value, and if the compiled data plane is wanted and not installed.
    """
    asked = os.environ.get("RINGFENCE_DATAPLANE") or "compiled"
    if asked not in ("python", "compiled"):
        raise ConfigurationError(f"RINGFENCE_DATAPLANE is {asked!r}; it may be 'compiled' or 'python', or not set")
    if asked == "compiled" and find_spec("ringfence.dataplane._core") is None:
        raise missing()
    return asked
