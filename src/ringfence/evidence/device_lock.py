"""Serializes requests to an attestation device, which answers one at a time while a worker collects for several connections.

Skips the request if the requester disconnected while it was queued: others are waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from ringfence.errors import ConfigurationError

# Set by the thread that collects. A context variable, so that the provers in between need not pass it on.
still_wanted: Final[ContextVar[Callable[[], bool]]] = ContextVar("still_wanted", default=lambda: True)


@contextmanager
def exclusive(device: threading.Lock) -> Iterator[None]:
    """Hold `device`. Raises ConfigurationError if the requester has disconnected by the time the lock is acquired."""
    with device:
        if not still_wanted.get()():
            raise ConfigurationError("the evidence was not collected: its requester has disconnected")
        yield
