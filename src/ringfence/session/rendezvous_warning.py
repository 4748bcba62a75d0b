"""Warning about torchrun rendezvous backends that let anyone on the network run code in the launcher."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringfence.log import LOGGER as _log

_LAUNCHERS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def warn_of_open_rendezvous() -> None:
    """Log a warning if torchrun used its c10d rendezvous, which unpickles unauthenticated data from the network."""
    if os.environ.get("RINGFENCE_AGENT"):  # the rendezvous is ours
        return
    backend = backend_of(_launcher())
    if backend not in (None, "static"):
        _log.warning(
            "torchrun's %s rendezvous has no authentication and listens on all interfaces: anyone who can reach its port "
            "can run code in the launcher. Use ringfence run in place of torchrun, or torchrun --rdzv-backend=ringfence; "
            "see SECURITY.md.",
            backend,
        )


def backend_of(command: Sequence[str]) -> str | None:
    """Return the rendezvous backend of a torchrun command line, or None if the command is not torchrun.

    torchrun's own parser reads it, with the PET_ variables, which hold defaults and which its workers inherit.
    """
    start = next((at for at, word in enumerate(command[:4]) if os.path.basename(word) in _LAUNCHERS), None)
    if start is None:
        return None
    from torch.distributed import run

    try:
        asked = run.parse_args(list(command[start + 1 :]))
    except (SystemExit, argparse.ArgumentError):
        return None
    if asked.standalone:
        return "c10d"
    backend = str(asked.rdzv_backend)
    if backend == "static" and not asked.rdzv_endpoint and asked.master_port is None:
        _, machines = run.parse_min_max_nnodes(asked.nnodes)  # torchrun's default on a single machine, since 2.13
        return "c10d" if machines == 1 else backend
    return backend


def _launcher() -> list[str]:
    """The command line of the process that started this one."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []
