"""The process group that torch.distributed sees.

Each method binds the tensors of a collective to its schedule and submits it to the runtime. Every group of the process,
also one that asks for "gloo", uses sealed links of a session.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ringfence import guard
from ringfence.backend import inside, sessions, torch_versions
from ringfence.backend.dynamo import outside_dynamo
from ringfence.backend.sealed_group import SealedGroup
from ringfence.backend.work import RingfenceWork
from ringfence.errors import ConfigurationError
from ringfence.log import LOGGER as _log


class RingfenceProcessGroup(SealedGroup):
    """A process group over sealed links."""

    def _permitted(self, group: SealedGroup, backend: str | None) -> Any:
        """Return a group of the backend that the script asks for, inside one machine and where the policy permits it."""
        if not self._session.terms.inside_machine:
            return group
        # torch passes the backend from 2.14 on; before that, the guard knows it
        return inside.inside_or_sealed(group, backend or guard.asked_backend(), group._timeout)

    @property
    def registered_as(self) -> str | None:
        """The backend under which torch shall list this group, if not under the one that the script asked for."""
        return "ringfence" if self._session.terms.inside_machine else None

    def shutdown(self) -> None:
        super().shutdown()
        sessions.remove_ended()


def is_ours(group: Any) -> bool:
    """Whether a process group that torch created is ringfence's."""
    return isinstance(group, RingfenceProcessGroup)


def create(options: Any, backend_options: Any) -> RingfenceProcessGroup:
    """Create a process group; torch calls this for the default group, and for others if the default is another backend's.

    Its members are admitted to a session, unless they have one (`sessions.session_for`). Without a ringfence default group
    a session ends with the last group that uses it. From the first one on, torch is guarded in this process.
    """
    _check_torch()
    guard.install(is_ours)
    if not sessions.any_open():
        _warn_of_untested_torch()
    try:
        session = sessions.session_for(options)
    except BaseException:
        if not dist.is_initialized():
            # torch numbers groups, this one too. At the next attempt, a worker that is new would use another number.
            dist.distributed_c10d._world.group_count = 0
        raise
    given = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    name = str(options.group_id)
    return RingfenceProcessGroup(
        session, session.ranks_of(given), options.timeout, name, options.store, holds_session=True
    )


def _check_torch() -> None:
    if torch_versions.too_old(torch.__version__):
        oldest = ".".join(map(str, torch_versions.OLDEST))
        raise ConfigurationError(
            f"ringfence needs torch {oldest} or newer; this is {torch.__version__}: {torch_versions.INSTALL}"
        )
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0"):
        raise ConfigurationError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS bypasses process groups and thus ringfence: unset it"
        )


def _warn_of_untested_torch() -> None:
    """Warn once per machine, if the launcher sets LOCAL_RANK."""
    if torch_versions.untested(torch.__version__) and os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning(
            "torch %s is newer than the releases that ringfence is tested with (%s). If it fails: %s",
            torch.__version__,
            torch_versions.TESTED,
            torch_versions.INSTALL,
        )


for _class in (*RingfenceProcessGroup.__mro__, RingfenceWork):
    if _class.__module__.startswith("ringfence."):
        outside_dynamo(_class)
