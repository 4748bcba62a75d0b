"""Train on data that are named in the record, and save sealed checkpoints. examples/audit/run.sh starts it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringfence
from ringfence import checkpoint

MANIFEST, KEY = sys.argv[1:]


def main() -> None:
    dist.init_process_group("ringfence")
    ringfence.record_data(MANIFEST)  # which data this run uses
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    given = torch.randn(256, 8)
    for _ in range(50):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(given), given.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    anchor = checkpoint.save({"model": model.module.state_dict()}, "checkpoint", key=KEY, step=50)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}, checkpoint {anchor}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
