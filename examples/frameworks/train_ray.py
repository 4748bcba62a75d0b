"""Train a small model with Ray Train over sealed links. Ray starts the workers:

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1 RINGFENCE_RUN_ID=my-run
    python examples/frameworks/train_ray.py

The links between workers are sealed. Ray's own connections are not: they carry what train.report() sends, and the functions
and arguments that Ray sends to workers.
"""

import tempfile

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_on_worker() -> None:
    import ringfence

    ringfence.assert_sealed()
    torch.manual_seed(0)
    points = torch.empty(1024, 2).uniform_(-1.5, 1.5)
    data = TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())
    loader = prepare_data_loader(DataLoader(data, batch_size=64))
    model = prepare_model(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for epoch in range(3):
        total = torch.zeros(())
        for inputs, inside in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        mean = total.item() / len(loader) / torch.distributed.get_world_size()
        train.report({"loss": mean})
        if train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.6f}", flush=True)


def main() -> None:
    ray.init(num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_on_worker,
            torch_config=TorchConfig(backend="ringfence"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
