"""Which keys a process holds: a walk over everything that is alive in it."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from functools import cache
from typing import Any, get_args

from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from OpenSSL import SSL

from ringfence.keys import Secret

_KEYS = (*get_args(PrivateKeyTypes), AESGCM, SSL.Connection, SSL.Context)
CONTROL = {"Connection", "Context"}  # of TLS


@cache
def _is_key(kind: type) -> bool:
    return issubclass(kind, _KEYS)


def keys_held() -> Counter[str]:
    """How many keys of each kind; an emptied Secret is none, and a constant of a test's module is not this process's.

    Ciphers and the like are found through those who hold them.
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
            waiting.extend(gc.get_referents(each))
    return found
