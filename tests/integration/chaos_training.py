"""A DDP training that survives restarts: checkpoints every few steps, resumes from the newest, logs what it does.

    torchrun ... tests/integration/chaos_training.py BACKEND FOLDER STEPS

Nothing in it is particular to ringfence or to the chaos harness. The data of a step depend on the step and the rank alone, so
an undisturbed training and one that was restarted end with the same bits if the world size is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[2])
EVERY = 5  # steps between checkpoints
PACE = 0.05  # seconds that a step takes at least
TIMEOUT = timedelta(seconds=60)


def log(event: str, **more: object) -> None:
    """Append an event to the log of all workers, in one write."""
    facts = {"event": event, "time": time.time(), "pid": os.getpid(), "rank": int(os.environ["RANK"])}
    facts |= {"world": int(os.environ["WORLD_SIZE"]), "round": os.environ.get("RINGFENCE_GENERATION", ""), **more}
    with open(FOLDER / "events", "ab", buffering=0) as file:
        file.write(json.dumps(facts).encode() + b"\n")


log("start")

import torch  # noqa: E402 - the log has the moment before this import
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as checkpoint  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def replace(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or the one before."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of this rank's step."""
    generator = torch.Generator().manual_seed(1_000_000 + step * 1000 + dist.get_rank())
    return torch.randn(16, 64, generator=generator), torch.randn(16, 64, generator=generator)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"weights": weights, "moments": moments, "step": step}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint. The file `newest` names it once all workers have written their part."""
    checkpoint.save(state_of(model, optimizer, step), checkpoint_id=FOLDER / f"step-{step}")
    if dist.get_rank() == 0:
        replace(FOLDER / "newest", str(step))


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint, the one that rank 0 sees. Return the first step to do."""
    newest = FOLDER / "newest"
    found: list[str | None] = [newest.read_text() if dist.get_rank() == 0 and newest.exists() else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    state = state_of(model, optimizer, 0)
    checkpoint.load(state, checkpoint_id=FOLDER / f"step-{found[0]}")
    set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    return int(state["step"]) + 1


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of all weights."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    backend, steps = sys.argv[1], int(sys.argv[3])
    dist.init_process_group(None if backend == "none" else backend, timeout=TIMEOUT)
    log("joined")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 128), nn.Tanh(), nn.Linear(128, 64))
    # DDP orders its buckets anew after the first step unless it looks for unused parameters. A training that resumes would do
    # so at another step, and sums would be rounded in another order.
    model = DistributedDataParallel(layers, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = resume(model, optimizer)
    log("resumed", step=first)
    for step in range(first, steps):
        began = time.monotonic()
        given, wanted = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(given), wanted).backward()
        optimizer.step()
        time.sleep(max(0.0, began + PACE - time.monotonic()))
        log("step", step=step)
        if step % EVERY == EVERY - 1:
            save(model, optimizer, step)
    if dist.get_rank() == 0:
        replace(FOLDER / "digest", digest(model))
    log("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
