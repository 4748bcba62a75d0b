"""Functions to inspect a run: the admitted workers and the counters."""

from __future__ import annotations

from typing import Any

from ringfence.backend import process_group
from ringfence.backend.inside import session_of
from ringfence.backend.sessions import only_session
from ringfence.errors import ConfigurationError, RingfenceError
from ringfence.runtime.counters import Counters
from ringfence.session.session import Session


def workers(group: Any = None) -> list[Any]:
    """Return the workers of a session in the order of their ranks, from the roster that all its workers agree on.

    Each has `rank`, `identity` (the name in its certificate, "" without one), `address` ("host:port" of its links),
    `admitted_by` (the proof that admitted it), `proof_digest` and `public_key` (hexadecimal), and `member` (of private sums; ""
    without one). They do not change.

    Args:
        group: A ringfence process group, to select its session. Default: the session of all workers, or the only one. In a
            session of some workers, which exists only if the default group is another backend's, `rank` is the rank
            among them.

    Raises:
        ConfigurationError: This process has no ringfence process group, or several sessions and no `group` was given.
    """
    return list(_session(group).workers)


def counters(group: Any = None) -> Counters:
    """Return this worker's counters since its session began: bytes and waits for each peer, completed operations.

    They count all groups of the session.

    Args:
        group: A ringfence process group, to select its session; as for `workers`.

    Raises:
        ConfigurationError: This process has no ringfence process group, or several sessions and no `group` was given.
    """
    return _session(group).engine.counters()


def failure(group: Any = None) -> RingfenceError | None:
    """Return the error that ended a session on this worker, or None while it goes on.

    DDP raises a RuntimeError of its own, which has only the text of the error that its collective raised.

    Args:
        group: A ringfence process group, to select its session; as for `workers`.

    Raises:
        ConfigurationError: This process has no ringfence process group, or several sessions and no `group` was given.
    """
    return _session(group).engine.failure


def _session(group: Any) -> Session:
    if group is None:
        return only_session()
    session: Session | None = session_of(group)
    if isinstance(group, process_group.RingfenceProcessGroup):
        session = group._session
    if session is None:
        raise ConfigurationError(f"group= is a {type(group).__name__}: pass a ringfence process group")
    if session.over:
        raise ConfigurationError("this process group was destroyed, and its session has ended")
    return session
