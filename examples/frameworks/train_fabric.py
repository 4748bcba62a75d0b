"""Train a small model with Lightning Fabric over sealed links.

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_fabric.py
"""

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringfence


def circles() -> TensorDataset:
    """Points in a square, and whether each lies in the unit circle."""
    points = torch.empty(1024, 2, device="cpu").uniform_(-1.5, 1.5)
    return TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="ringfence"))
    fabric.launch()
    ringfence.assert_sealed()

    fabric.seed_everything(0)
    with fabric.rank_zero_first():  # where data are downloaded, by one worker on each machine
        data = circles()
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64))

    for epoch in range(3):
        losses, correct = [], torch.tensor(0)
        for inputs, inside in loader:
            answers = model(inputs)
            loss = nn.functional.binary_cross_entropy_with_logits(answers, inside)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
            correct += ((answers > 0) == (inside > 0)).sum()
        loss = fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")
        correct = fabric.all_reduce(correct, reduce_op="mean")  # of integers: rounded toward zero
        fabric.print(f"epoch {epoch}: loss {loss.item():.6f}, {correct.item()} right on each worker on average")


if __name__ == "__main__":
    main()
