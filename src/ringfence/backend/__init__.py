"""The door from torch.distributed: the process group.

Each method says what memory a collective is about and hands it to the runtime. Every group of the process, also one that
asks for "gloo", is made here over the session's sealed links.
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
            _session = None  # what it still held is nobody's any more


def create(options: Any, backend_options: Any) -> RingfenceProcessGroup:
    """What init_process_group calls. The first group of a process is admitted; the others live in its session.

    Others come here only beside a default group of another backend. Then none of them is the run: the last one ends it.
    """
    global _session
    _check_torch()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    first = not options.global_ranks_in_group or _session is None or _session.over
    if first:
        _warn_of_untested_torch()
        if ranks != tuple(range(options.group_size)):
            raise ConfigurationError(f"the first ringfence group must hold every worker; this one holds {ranks}")
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
        raise ConfigurationError("TORCH_DISTRIBUTED_USE_TORCHCOMMS bypasses process groups, and ringfence: unset it")


def _warn_of_untested_torch() -> None:
    """Once for each machine, where a launcher says which worker is its first."""
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
