"""What a site runs: `ringfence run` starts it as the workers of the site, which train the global model together.

Worker 0 alone talks to NVFlare. It gives the model to the others, and sends back what all have trained, over ringfence.
"""

from zlib import crc32

import nvflare.client as flare
import torch
import torch.distributed as dist
from net import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringfence

STEPS = 60


def next_round(model: nn.Module) -> flare.FLModel | None:
    """Give every worker of the site the global model that worker 0 receives; None after the last round."""
    box = [flare.receive() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        model.load_state_dict(box[0].params)
    return box[0]


def train(model: nn.Module, data: torch.Generator) -> float:
    """Train for a few steps, each worker on points of its own; return the mean loss of all workers."""
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total = torch.zeros(())
    for _ in range(STEPS):
        points = torch.empty(64, 2).uniform_(-1.5, 1.5, generator=data)
        inside = (points.norm(dim=1, keepdim=True) < 1).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / STEPS / dist.get_world_size()


def main() -> None:
    dist.init_process_group("ringfence")
    ringfence.assert_sealed()
    rank = dist.get_rank()
    flare.init(rank=rank)
    site = [flare.get_site_name() if rank == 0 else ""]
    dist.broadcast_object_list(site, src=0)
    data = torch.Generator().manual_seed(crc32(f"{site[0]}, worker {rank}".encode()))  # another for each worker
    model = Net()
    while received := next_round(model):
        loss = train(model, data)
        if rank == 0:
            print(f"{site[0]}, round {received.current_round}: loss {loss:.6f}", flush=True)
            steps = {"NUM_STEPS_CURRENT_ROUND": STEPS}  # the weight of this site in the average
            flare.send(flare.FLModel(params=model.state_dict(), metrics={"loss": loss}, meta=steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
