"""The c10d Backend that torch from 2.14 on expects behind every process group.

torch 2.15 attaches a flight recorder to each group of `init_process_group`. It queries the hooks of the group's default
backend, and fails if there is none. Collectives do not use it: torch calls the group's own methods. The base class
implements no collective, so an operator that bypasses the group raises.
"""

from __future__ import annotations

import torch
from torch._C import _distributed_c10d as c10d


class DefaultBackend(c10d.Backend):
    """A backend with a name, a rank and a size, and no collectives. (torch's documentation calls the base `BackendBase`.)"""

    def getBackendName(self) -> str:
        return "ringfence"


def register_default_backend(group: c10d.ProcessGroup) -> None:
    """Register a group's default backend, if torch has the recorder. In 2.13 Python cannot create a Backend."""
    if hasattr(c10d, "FlightRecorderHook"):
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device("cpu"), kind, DefaultBackend(group.rank(), group.size()))
        group._set_default_backend(kind)
