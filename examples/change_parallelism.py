"""Change the parallelism of a training after a loss: FSDP over all workers before, FSDP and tensor parallelism after.

    ringfence secret new run.secret && ringfence secret new ck.key && export RINGFENCE_SECRET_FILE=$PWD/run.secret
    ringfence run --nproc-per-node 4 --max-restarts 3 examples/change_parallelism.py --key ck.key --kill-at 7

Worker 1 kills itself before step 7. `ringfence run` starts all workers again, in a new session with new keys. They load the
newest sealed checkpoint into another layout, 2 x 2 instead of 4 x 1, and go on with the losses of a run that lost nothing.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ringfence import checkpoint

WORDS, LENGTH, WIDTH, HEAD, BATCH = 64, 16, 64, 16, 24  # sizes; BATCH is what all workers take together
FOLDER, NEWEST = Path("checkpoints"), Path("newest.json")  # NEWEST must not be on the storage of the checkpoints

# Tensor parallelism: each worker of a pair has half of the attention heads and half of the feed-forward layer.
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("output", "down")}


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given = self.norms[0](hidden)  # below, -1: as many heads as this worker has
        heads = [part(given).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.output(seen.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


def build(mesh: DeviceMesh) -> nn.Sequential:
    """The same weights on every worker, then this worker's part of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Layer(), Layer(), nn.Flatten(0, 1), nn.Linear(WIDTH, WORDS))
    for layer in (model[1], model[2]):
        if mesh["tensor"].size() > 1:
            parallelize_module(layer, mesh["tensor"], PLAN)
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def batch(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """This worker's part of a step's sequences, which depend on the step alone: each word is the one before, plus 1 to 3."""
    jumps = torch.randint(1, 4, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return (jumps.cumsum(1) % WORDS).tensor_split(mesh["data"].size())[mesh["data"].get_local_rank()]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Change the parallelism of a training after a loss.")
    parser.add_argument("--key", required=True, help="the key file of the checkpoints")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-at", type=int, help="worker 1 kills itself before this step, once")
    options = parser.parse_args()

    dist.init_process_group("ringfence")
    rank, world = dist.get_rank(), dist.get_world_size()
    goes_on = NEWEST.exists()
    tensor = 2 if goes_on and world % 2 == 0 else 1  # an odd number of workers that are left shards over all
    mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first = 0
    if goes_on:
        newest, state = json.loads(NEWEST.read_text()), state_of(model, optimizer)
        first = checkpoint.load(state, newest["path"], key=options.key, anchor=newest["anchor"]).step or 0
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if rank == 0:
        print(f"{world // tensor} x {tensor} workers go on after step {first}", flush=True)

    for step in range(first + 1, options.steps + 1):
        if step == options.kill_at and rank == 1 and not goes_on:
            os.kill(os.getpid(), signal.SIGKILL)
        words = batch(step, mesh)
        loss = nn.functional.cross_entropy(model(words[:, :-1]), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh.get_group("data"))
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f}", flush=True)
        if step % 4 == 0:
            path = FOLDER / f"step-{step}-of-{os.environ['RINGFENCE_GENERATION']}"  # a round repeats steps
            anchor = checkpoint.save(state_of(model, optimizer), path, key=options.key, step=step)
            if rank == 0:  # in one move: a loss must not leave half of it
                written = NEWEST.with_suffix(".new")
                written.write_text(json.dumps({"path": str(path), "anchor": anchor}))
                written.replace(NEWEST)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
