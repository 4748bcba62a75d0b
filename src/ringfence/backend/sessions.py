"""The sessions of this process: which one a process group uses.

The default group's session has every worker as a member, and all groups of the process use it. If the default group is
another backend's, there may be several sessions. A group then uses the session of all workers, if there is one, and
otherwise that of exactly its members, which is opened for the first such group and ends with the last.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ringfence.errors import ConfigurationError
from ringfence.session.members import Members
from ringfence.session.recording import Recorder
from ringfence.session.session import Session

_open: dict[tuple[int, ...], Session] = {}  # by the ranks of the members in the default group, ascending


def session_for(options: Any) -> Session:
    """Return the session for a process group that torch creates; join a new one if there is none.

    Raises AdmissionError and ConfigurationError, as `join` does.
    """
    remove_ended()
    given = tuple(options.global_ranks_in_group)  # empty for the default group
    if not given:
        return _begin(options, tuple(range(options.group_size)), None)
    members, everyone = tuple(sorted(given)), tuple(range(dist.get_world_size()))
    for ranks in (everyone, members):
        if ranks in _open:
            return _open[ranks]
    return _begin(options, members, None if members == everyone else Members(members, str(options.group_id)))


def _begin(options: Any, ranks: tuple[int, ...], members: Members | None) -> Session:
    if _open and os.environ.get("RINGFENCE_ADVERTISE"):
        raise ConfigurationError(
            "RINGFENCE_ADVERTISE names one port, and this group needs a second session, which listens on a port of its own. "
            'Make ringfence the default group (init_process_group("ringfence")): then one session serves all groups'
        )
    given = tuple(options.global_ranks_in_group) or ranks
    rank = ranks.index(given[options.group_rank])
    session = Session(options.store, rank, len(ranks), options.timeout.total_seconds(), members)
    _open[ranks] = session
    return session


def any_open() -> bool:
    """Return whether this process has a session."""
    remove_ended()
    return bool(_open)


def remove_ended() -> None:
    """Release what ended sessions still hold."""
    for ranks in [ranks for ranks, session in _open.items() if session.over]:
        del _open[ranks]


def recorders() -> list[Recorder]:
    """Return what records the sessions of this process."""
    remove_ended()
    return [session.recorder for session in _open.values() if session.recorder is not None]


def only_session() -> Session:
    """Return the session of all workers, or the only one. Raises ConfigurationError if there is none, or several."""
    remove_ended()
    everyone = tuple(range(dist.get_world_size())) if dist.is_initialized() else ()
    if everyone in _open:
        return _open[everyone]
    if not _open:
        raise ConfigurationError(
            'this process has no ringfence process group: call init_process_group(backend="ringfence") first'
        )
    if len(_open) > 1:
        raise ConfigurationError(
            f"this process has {len(_open)} ringfence sessions, because the default process group is not ringfence's: "
            "pass group=, one of their process groups"
        )
    return next(iter(_open.values()))
