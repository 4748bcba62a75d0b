"""Functions to inspect a run: the admitted workers and the counters."""

from __future__ import annotations

from typing import Any

from ringfence import backend
from ringfence.errors import ConfigurationError
from ringfence.runtime.counters import Counters
from ringfence.session import Session


def workers() -> list[Any]:
    """Return the workers of this run in the order of their ranks, from the roster that all workers agree on.

    Each has `rank`, `identity` (the name in its certificate, "" without one), `address` ("host:port" of its links),
    `admitted_by` (the proof that admitted it), `proof_digest` and `public_key` (hexadecimal). They do not change.

    Raises:
        ConfigurationError: This process has no ringfence process group.
    """
    return list(_session().workers)


def counters() -> Counters:
    """Return this worker's counters since its session began: bytes and waits for each peer, completed operations.

    Raises:
        ConfigurationError: This process has no ringfence process group.
    """
    return _session().engine.counters()


def _session() -> Session:
    session = backend._session
    if session is None or session.over:
        raise ConfigurationError(
            'this process has no ringfence process group: call init_process_group(backend="ringfence") first'
        )
    return session
