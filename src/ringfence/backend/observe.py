"""What a program may ask about its run: who was admitted, and what was counted."""

from __future__ import annotations

from typing import Any

from ringfence import backend
from ringfence.errors import ConfigurationError
from ringfence.runtime.counters import Counters
from ringfence.session import Session


def workers() -> list[Any]:
    """Everybody in this run, in the order of ranks, from the roster that all workers agree on.

    Each has `rank`, `identity` (the name in its certificate, "" where none was asked for), `address` ("host:port" of its
    links), `admitted_by` (the proof that admitted it), `proof_digest` and `public_key` (hexadecimal). They do not change.
    Raises ConfigurationError where this process has no process group of ringfence's.
    """
    return list(_session().workers)


def counters() -> Counters:
    """What this worker has counted since its session began: bytes and waits for each other worker, operations that ended.

    Raises ConfigurationError where this process has no process group of ringfence's.
    """
    return _session().engine.counters()


def _session() -> Session:
    session = backend._session
    if session is None or session.over:
        raise ConfigurationError(
            'this process has no process group of ringfence\'s: call init_process_group(backend="ringfence") first'
        )
    return session
