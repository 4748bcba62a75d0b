"""examples/private_sums.py with differential privacy by Opacus: each clinic clips and adds noise for every sample of its own.

Opacus keeps the account. Its epsilon is that of one clinic's samples against everybody, also against the other clinics, for
batches of Opacus's sampler (Poisson: each sample is in a batch with the same probability, independently of the others).
"""

import copy

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringfence

SAMPLES = (2000, 1500, 1000)  # of each clinic
BATCHES = 10  # in an epoch: a sample is in each of them with a probability of one in ten
DELTA = 1e-5


def train(epochs: int, noise: float, most: float) -> tuple[float, int, str]:
    """Train while the account allows a step; return epsilon of what was released, steps, and the sampler it is for."""
    rank = dist.get_rank()
    points = torch.empty(SAMPLES[rank], 2).uniform_(-1.5, 1.5, generator=torch.Generator().manual_seed(rank))
    data = TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())
    torch.manual_seed(0)  # the model is the same on all workers
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    torch.seed()  # batches and noise are not
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        data_loader=DataLoader(data, batch_size=SAMPLES[rank] // BATCHES),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=True,
    )
    steps = 0
    for _ in range(epochs):
        for batch, inside in loader:
            ahead = copy.deepcopy(engine.accountant)
            ahead.step(noise_multiplier=noise, sample_rate=1 / len(loader))
            if ahead.get_epsilon(DELTA) > most:  # the same on all workers: it depends on rate, noise and steps
                return engine.get_epsilon(DELTA), steps, type(loader.batch_sampler).__name__
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(private(batch), inside).backward()
            if optimizer.pre_step():  # clips each sample's gradient and adds the noise
                ringfence.private_mean(model.parameters(), SAMPLES[rank], clip=1.0)
                optimizer.original_optimizer.step()
            steps += 1
    return engine.get_epsilon(DELTA), steps, type(loader.batch_sampler).__name__


def main() -> None:
    dist.init_process_group("ringfence")
    epsilon, steps, sampler = train(epochs=2, noise=1.0, most=8.0)
    if dist.get_rank() == 0:
        print(f"epsilon {epsilon:.2f} at delta {DELTA} after {steps} batches of {sampler}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
