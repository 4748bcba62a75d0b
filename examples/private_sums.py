"""Three clinics train a model. Each sees the mean of their updates, and no other clinic's (docs/guides/private-sums.md).

Every step draws a new batch from the system's entropy: a step that failed may have left a sum with some workers, and is never
repeated with the same samples.
"""

import torch
import torch.distributed as dist
from torch import nn

import ringfence

SAMPLES = (
    3000,
    1500,
    500,
)  # of each clinic, and no secret: as weights they are public in effect. Each makes up its own


def samples_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in a square, and whether each lies in the unit circle."""
    points = torch.empty(SAMPLES[rank], 2).uniform_(-1.5, 1.5, generator=torch.Generator().manual_seed(rank))
    return points, (points.norm(dim=1, keepdim=True) < 1).float()


def main() -> None:
    dist.init_process_group("ringfence")
    torch.manual_seed(0)  # the model is the same on all workers
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    points, inside = samples_of(dist.get_rank())
    batches = torch.Generator()
    batches.seed()

    for step in range(1, 151):
        batch = torch.randint(len(points), (64,), generator=batches)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(points[batch]), inside[batch])
        loss.backward()
        ringfence.private_mean(model.parameters(), len(points), clip=1.0, largest_share=0.5)
        optimizer.step()
        if step % 50 == 0:
            mean = ringfence.private_sum(loss.detach().clamp(max=10), bound=10) / dist.get_world_size()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
