"""examples/across_regions/train.py with the log of the chaos harness.

ringfence run --rejoin ... -m tests.integration.diloco_training BACKEND FOLDER ROUNDS
"""

from __future__ import annotations

import hashlib
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ringfence
from tests.integration.chaos_training import PACE, log

EVERY = 10
EXAMPLE = Path(__file__).parents[2] / "examples" / "across_regions" / "train.py"


def digest(averaged: ringfence.DiLoCo) -> str:
    """Return the SHA-256 of the agreed parameters and the momentum."""
    found = hashlib.sha256()
    for each in torch.utils._pytree.tree_leaves(averaged.state_dict()):
        found.update(each.numpy().tobytes() if isinstance(each, torch.Tensor) else repr(each).encode())
    return found.hexdigest()


def report(averaged: ringfence.DiLoCo, loss: float) -> None:
    if averaged.steps == 0:
        log("round", step=averaged.outer_steps, digest=digest(averaged), loss=loss)
    else:
        log("step", step=averaged.outer_steps * EVERY + averaged.steps)
    time.sleep(PACE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runpy.run_path(str(EXAMPLE))["main"](int(sys.argv[3]), EVERY, report)
    log("done")
    dist.destroy_process_group()
