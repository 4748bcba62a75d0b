"""Train a small model with Accelerate over sealed links.

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_accelerate.py

On CPUs Accelerate creates a Gloo group unless a group exists.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringfence


def main() -> None:
    ringfence.init()  # before Accelerator()
    accelerator = Accelerator(cpu=True)

    torch.manual_seed(0)
    points = torch.empty(1024, 2).uniform_(-1.5, 1.5)
    data = TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64))
    ringfence.assert_sealed()

    for epoch in range(3):
        losses = []
        for inputs, inside in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), inside)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.gather(torch.stack(losses)).mean()
        accelerator.print(f"epoch {epoch}: loss {mean.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
