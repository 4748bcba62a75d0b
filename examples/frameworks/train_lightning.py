"""Train and validate a small model with Lightning's Trainer over sealed links.

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_lightning.py
"""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringfence


class Circles(lightning.LightningModule):
    """Says whether a point lies in the unit circle."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        points, inside = batch
        return nn.functional.binary_cross_entropy_with_logits(self.model(points), inside)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("loss", self.training_step(batch), sync_dist=True)

    def on_fit_start(self) -> None:
        ringfence.assert_sealed()

    def on_validation_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"].item()
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}: loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(0)
    points = torch.empty(1100, 2).uniform_(-1.5, 1.5)
    data = TensorDataset(points, (points.norm(dim=1, keepdim=True) < 1).float())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="ringfence"),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Circles(), DataLoader(data, batch_size=64), DataLoader(data, batch_size=48))


if __name__ == "__main__":
    main()
