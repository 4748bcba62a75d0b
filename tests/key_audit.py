"""Which keys a process holds: a walk over everything that is alive in it."""

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
CONTROL = {"Connection", "Context"}  # of TLS
KEY_BYTES = 32
LONGEST = 128  # bytes in which a key is looked for: a few keys, a nonce, a label


@cache
def _is_key(kind: type) -> bool:
    return issubclass(kind, _KEYS)


def fingerprints(material: Iterable[bytes]) -> frozenset[int]:
    """By these `keys_held` knows keys that lie somewhere as plain bytes, and they are none themselves."""
    found = frozenset(hash(bytes(each)) for each in material if len(each) == KEY_BYTES)
    assert found
    return found


def _holds(data: bytes | bytearray, known: frozenset[int]) -> bool:
    """Whether a key is in it, alone or between other bytes."""
    if len(data) > LONGEST:
        return False
    return any(hash(bytes(data[start : start + KEY_BYTES])) in known for start in range(len(data) - KEY_BYTES + 1))


def keys_held(known: frozenset[int] = frozenset()) -> Counter[str]:
    """How many keys of each kind; an emptied Secret is none, and a constant of a test's module is not this process's.

    Ciphers and the like are found through those who hold them. Plain bytes are looked at for the keys that `known` are
    the fingerprints of; what C code has copied is not seen.
    """
    gc.collect()
    found: Counter[str] = Counter()
    waiting: list[Any] = [*gc.get_objects(), sys.modules]
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith("tests.")]
    seen = {id(waiting), *(id(value) for module in modules for value in module.values() if type(value) is Secret)}
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            if _is_key(type(each)) or (type(each) is Secret and each.reveal()):
                found[type(each).__name__] += 1
            if known and type(each) in (bytes, bytearray) and _holds(each, known):
                found["bytes"] += 1
            waiting.extend(gc.get_referents(each))
    return found
