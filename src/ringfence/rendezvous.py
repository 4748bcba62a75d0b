"""Which rendezvous torchrun used to start this worker: some of them let anybody run code in the launcher."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_log = logging.getLogger("ringfence")

_LAUNCHERS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def warn_of_open_rendezvous() -> None:
    """torchrun's c10d rendezvous unpickles what anybody on the network may write, and tells its workers nothing of it."""
    backend = backend_of(_launcher())
    if backend not in (None, "static"):
        _log.warning(
            "torchrun's %s rendezvous authenticates nobody and listens on all interfaces: whoever reaches its port can run "
            "code in the launcher. Use the static rendezvous (--node-rank, --master-addr and --master-port; on one machine "
            "--master-port alone is enough); see docs/security/limitations.md.",
            backend,
        )


def backend_of(command: Sequence[str]) -> str | None:
    """The rendezvous backend that a command line of torchrun asks for, read by torchrun's own parser.

    Also PET_ variables count, torchrun's defaults, which its workers inherit. None if the command is not torchrun's.
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
        _, machines = run.parse_min_max_nnodes(asked.nnodes)  # what torchrun makes of a single machine, since 2.13
        return "c10d" if machines == 1 else backend
    return backend


def _launcher() -> list[str]:
    """The command line of the process that started this one."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []
