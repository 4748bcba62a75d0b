"""The c10d Backend that torch from 2.14 on expects behind every process group.

torch 2.15 attaches a flight recorder to each group that `init_process_group` makes. It asks the group's default backend
which hooks it has, and fails where there is none. Collectives do not come here: torch calls the group's own methods. An
operator that goes around those is refused by the base class, which has no collective either.
"""

from __future__ import annotations

import torch
from torch._C import _distributed_c10d as c10d


class DefaultBackend(c10d.Backend):
    """A backend with a name, a rank, a size and nothing else. (torch's documentation calls the base `BackendBase`.)"""

    def getBackendName(self) -> str:
        return "ringfence"


def register_default_backend(group: c10d.ProcessGroup) -> None:
    """Give a group its default backend, if this torch has the recorder. In 2.13 Python cannot make a Backend."""
    if hasattr(c10d, "FlightRecorderHook"):
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device("cpu"), kind, DefaultBackend(group.rank(), group.size()))
        group._set_default_backend(kind)
