"""examples/rejoin.py with the log of the chaos harness.

ringfence run --rejoin ... -m tests.integration.rejoin_training BACKEND FOLDER STEPS
"""

from __future__ import annotations

import ctypes
import gc
import runpy
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tests.integration.chaos_training import FOLDER, PACE, digest, log, replace

TRIM_EVERY = 5  # steps
EXAMPLE = Path(__file__).parents[2] / "examples" / "rejoin.py"


def report(step: int) -> None:
    log("step", step=step)
    if step % TRIM_EVERY == 0:  # what malloc and the garbage collector keep for later is not counted as held (soak.py)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    time.sleep(PACE)


if __name__ == "__main__":
    model = runpy.run_path(str(EXAMPLE))["main"](int(sys.argv[3]), report)
    if dist.get_rank() == 0:
        replace(FOLDER / "digest", digest(model))
    dist.destroy_process_group()
