"""Initialise as torchtitan does, then train a small sharded model and save it, over sealed links.

    pip install --no-deps "torchtitan==0.3.0" "spmd_types==0.2.3" tyro docstring_parser
    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_torchtitan.py

torchtitan's init_distributed() returns early if there is a group. Its trainer itself needs an accelerator.
So the model is sharded on the CPU here, as torchtitan shards one, with a Gloo group as its checkpointer asks for.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.config import CommConfig
from torchtitan.distributed.utils import dist_mean, init_distributed

import ringfence


def main() -> None:
    ringfence.init()  # before init_distributed()
    world_size = init_distributed(CommConfig())
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    checkpoint_group = dist.new_group(backend="gloo")  # torchtitan's checkpointer does this: it becomes a sealed group
    ringfence.assert_sealed()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    torch.manual_seed(dist.get_rank())
    for step in range(31):
        points = torch.empty(64, 2).uniform_(-1.5, 1.5)
        inside = (points.norm(dim=1, keepdim=True) < 1).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean = dist_mean(loss.detach(), mesh)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean:.6f}", flush=True)

    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    dcp.async_save(model.state_dict(), checkpoint_id=folders[0], process_group=checkpoint_group).result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
