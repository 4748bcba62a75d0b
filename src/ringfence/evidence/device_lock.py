"""One question at a time: a device answers one, and a worker collects for several connections at once.

Who waited for its turn may find that nobody wants the answer any more. Then the device is not asked: others are waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ringfence.errors import ConfigurationError

# Set by whoever starts a thread that collects; a prover is between it and the device, and need not know.
wanted: Final[ContextVar[Callable[[], bool]]] = ContextVar("wanted", default=lambda: True)


@contextmanager
def turn(device: threading.Lock) -> Iterator[None]:
    """Hold `device`, unless by then nobody waits for what it would say."""
    with device:
        if not wanted.get()():
            raise ConfigurationError("nobody waits for this evidence any more")
        yield
