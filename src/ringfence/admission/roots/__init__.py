"""The root certificates of hardware vendors, pinned in the package. A policy cannot set others.

SOURCES.md lists the source of each, and how to compare it with what its vendor publishes.
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read(name: str) -> bytes:
    """Return the content of a certificate file of this folder, such as "intel-sgx-root.pem"."""
    return resources.files(__name__).joinpath(name).read_bytes()
