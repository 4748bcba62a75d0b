"""Train with FSDP2, save sealed checkpoints, and go on from the newest one, with any number of workers.

    ringfence secret new run.secret && ringfence secret new ck.key
    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/checkpoint_fsdp2.py --folder checkpoints --key ck.key --newest newest.json --steps 8

Run it again with more steps: it goes on where it ended. `newest.json` must not be on the storage of the checkpoints: its
anchor is what tells the newest checkpoint from an older one.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringfence
from ringfence import checkpoint


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--newest", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    ringfence.init()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ringfence.assert_sealed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first = 0
    if options.newest.exists():
        newest = json.loads(options.newest.read_text())
        state = state_of(model, optimizer)
        info = checkpoint.load(state, newest["path"], key=options.key, anchor=newest["anchor"])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = info.step

    for step in range(first + 1, options.steps + 1):
        torch.manual_seed(step)  # the data of a step, the same on all workers
        inputs = torch.randn(8, 16)
        loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)
        if step % 4 == 0:
            path = f"{options.folder}/step-{step}"
            anchor = checkpoint.save(state_of(model, optimizer), path, key=options.key, step=step)
            if dist.get_rank() == 0:
                options.newest.write_text(json.dumps({"path": path, "anchor": anchor}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
