"""Finds the keys that a process holds, by a walk over all live Python objects."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from OpenSSL import SSL

from ringfence.keys import Secret

_KEYS = (*get_args(PrivateKeyTypes), AESGCM, SSL.Connection, SSL.Context)
CONTROL = {"Connection", "Context"}  # TLS objects of the control connections
KEY_BYTES = 32
LONGEST = 128  # bytes; longer objects are not searched for keys


@cache
def _is_key(kind: type) -> bool:
    return issubclass(kind, _KEYS)


def fingerprints(material: Iterable[bytes]) -> frozenset[int]:
    """Return hashes by which `keys_held` recognises keys in plain bytes, without holding the keys."""
    found = frozenset(hash(bytes(each)) for each in material if len(each) == KEY_BYTES)
    assert found
    return found


def _holds(data: bytes | bytearray, known: frozenset[int]) -> bool:
    """Return whether the data contains one of these keys."""
    if len(data) > LONGEST:
        return False
    return any(hash(bytes(data[start : start + KEY_BYTES])) in known for start in range(len(data) - KEY_BYTES + 1))


def keys_held(known: frozenset[int] = frozenset()) -> Counter[str]:
    """Return how many keys of each type the process holds.

    A wiped Secret does not count, and neither do module-level constants of tests. Objects that the garbage collector does
    not track are found through their referrers. Plain bytes are searched for the keys with the fingerprints `known`.
    Copies in C memory are not found.
    """
    gc.collect()
    found: Counter[str] = Counter()
    pending: list[Any] = [*gc.get_objects(), sys.modules]
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("tests.")]
    seen = {id(pending), *(id(value) for module in modules for value in module.values() if type(value) is Secret)}
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen.add(id(each))
            if _is_key(type(each)) or (type(each) is Secret and each.reveal()):  # type: ignore[arg-type]
                found[type(each).__name__] += 1
            if known and type(each) in (bytes, bytearray) and _holds(each, known):
                found["bytes"] += 1
            pending.extend(gc.get_referents(each))
    return found
