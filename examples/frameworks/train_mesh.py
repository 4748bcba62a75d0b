"""Train a small model whose layers are split over one dimension of a mesh and replicated over the other, over sealed links.

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_mesh.py

init_device_mesh() creates a Gloo group unless a group exists. With two workers the mesh is 1 x 2, with four 2 x 2.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringfence


def main() -> None:
    ringfence.init()  # before init_device_mesh()
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ringfence.assert_sealed()

    torch.manual_seed(mesh["data"].get_local_rank())  # workers that share a layer see the same data
    for step in range(31):
        points = torch.empty(64, 2).uniform_(-1.5, 1.5)
        inside = (points.norm(dim=1, keepdim=True) < 1).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
