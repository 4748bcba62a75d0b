"""Train a small model with DistributedDataParallel over sealed links.

    ringfence secret new run.secret
    export RINGFENCE_SECRET_FILE=$PWD/run.secret
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 examples/ddp.py

On several machines: the same secret file on each, --nnodes N, --node-rank 0 to N-1, --master-addr of the first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def circles(samples: int) -> TensorDataset:
    """Points in a square, and whether each lies in the unit circle."""
    points = torch.empty(samples, 2).uniform_(-1.5, 1.5)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main() -> None:
    dist.init_process_group("ringfence")  # the only line that differs from a script for Gloo
    torch.manual_seed(0)
    data = circles(4096)
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for points, inside in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
