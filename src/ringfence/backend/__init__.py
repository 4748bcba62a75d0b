"""The process group that torch.distributed sees.

Each method binds the tensors of a collective to its schedule and submits it to the runtime. Every group of the process,
also one that asks for "gloo", uses the sealed links of the session.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from ringfence import torch_versions
from ringfence.backend.collective import CollectiveMethods
from ringfence.backend.dynamo import outside_dynamo
from ringfence.backend.transfers import TransferMethods
from ringfence.backend.work import RingfenceWork
from ringfence.errors import ConfigurationError
from ringfence.session import Session

_log = logging.getLogger("ringfence")

_session: Session | None = None


class RingfenceProcessGroup(CollectiveMethods, TransferMethods):
    """A process group over sealed links."""

    def shutdown(self) -> None:
        global _session
        super().shutdown()
        if _session is not None and _session.left:
            _session = None  # release what it still holds


def create(options: Any, backend_options: Any) -> RingfenceProcessGroup:
    """Create a process group; init_process_group calls this. The first one is admitted, others share its session.

    There are others only if the default group has another backend. Then the session ends with the last of them.
    """
    global _session
    _check_torch()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    first = not options.global_ranks_in_group or _session is None or _session.over
    if first:
        _warn_of_untested_torch()
        if ranks != tuple(range(options.group_size)):
            raise ConfigurationError(
                f"the first ringfence group must have every worker as a member; this one has {ranks}"
            )
        _session = Session(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
    assert _session is not None
    name = str(options.group_id)
    return RingfenceProcessGroup(_session, ranks, options.timeout, name, options.store, holds_session=True)


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
