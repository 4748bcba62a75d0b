"""Train with Lightning, keep its checkpoints sealed, and go on from the newest one.

    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/checkpoint_lightning.py --folder checkpoints --key ck.key --newest newest.json

`ModelCheckpoint` decides when to save, as ever; `SealedFiles` writes the files and reads them. They have all that Lightning
saves, so `fit(ckpt_path=...)` goes on with the next step. A plain DataLoader begins anew then, as with Lightning's own files;
the data of this example depend on the step alone. A sealed file has no anchor: the step, which is kept outside of the storage,
is what refuses an older file.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import ringfence
from ringfence.checkpoint import sealed_open


class SealedFiles(CheckpointIO):
    """Lightning's checkpoints as sealed files. `newest` is a file that is not on their storage."""

    def __init__(self, key: str, newest: Path) -> None:
        self.key, self.newest = key, newest

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with sealed_open(path, "wb", key=self.key) as file:
            torch.save(checkpoint, file)
        self.newest.write_text(json.dumps({"path": str(path), "step": checkpoint["global_step"]}))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        with sealed_open(path, key=self.key) as file:
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
        if checkpoint["global_step"] != (expected := json.loads(self.newest.read_text())["step"]):
            raise ringfence.errors.CheckpointError(f"{path} is of step {checkpoint['global_step']}, not {expected}")
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        os.unlink(path)


class Circles(lightning.LightningModule):
    """Says whether a point lies in the unit circle."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.global_step + self.global_rank)
        points = torch.empty(16, 2).uniform_(-1.5, 1.5, generator=generator)
        inside = (points.norm(dim=1, keepdim=True) < 1).float()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(points), inside)
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1}: loss {loss.item():.9f}", flush=True)
        return loss

    def on_fit_start(self) -> None:
        ringfence.assert_sealed()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--newest", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="ringfence"),
        plugins=[SealedFiles(options.key, options.newest)],
        callbacks=[ModelCheckpoint(options.folder, "{step}", every_n_train_steps=4, save_top_k=-1)],
        max_steps=options.steps,
        logger=False,
        enable_progress_bar=False,
    )
    newest = json.loads(options.newest.read_text())["path"] if options.newest.exists() else None
    trainer.fit(Circles(), DataLoader(torch.arange(1000)), ckpt_path=newest)


if __name__ == "__main__":
    main()
