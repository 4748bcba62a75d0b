"""The roots that hardware evidence must lead to, pinned in the package: no policy key can name another.

SOURCES.md says where each comes from and how to check it against what its vendor publishes.
"""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read(name: str) -> bytes:
    """A pinned certificate file of this folder, such as "intel-sgx-root.pem"."""
    return resources.files(__name__).joinpath(name).read_bytes()
