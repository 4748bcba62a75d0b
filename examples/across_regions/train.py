"""Train a small language model in two regions. Each averages gradients in itself, and models with the other region.

    ringfence secret new run.secret
    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_OUTAGE_TIMEOUT=60
    ringfence run --rejoin --rdzv-conf last_call_timeout=10 --nnodes 1:2 --node-rank 0 --rdzv-endpoint node0:29400 \
        --rdzv-id job1 --nproc-per-node 2 --max-restarts 10 examples/across_regions/train.py   # elsewhere: --node-rank 1

Kill a region, or cut its network for longer than a minute: the other one goes on. When it is back, it takes the agreed
parameters and trains with the other one again.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ringfence

LENGTH, WIDTH, SAMPLES = 64, 128, 8
TEXT = torch.frombuffer(bytearray(Path(torch.nn.functional.__file__).read_bytes()), dtype=torch.uint8)


class Model(nn.Module):
    """Two layers of a transformer, which predict the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.embedding(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this worker's data of a step: texts, and the byte that follows each of their bytes."""
    generator = torch.Generator().manual_seed(1_000_000 + step * 1000 + dist.get_rank())
    starts = torch.randint(len(TEXT) - LENGTH, (SAMPLES,), generator=generator)
    texts = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts]).long()
    return texts[:, :-1], texts[:, 1:]


def groups() -> dict[str, Any]:
    """Return this worker's groups: its counterparts in all sites, and its site, which is one node."""
    workers = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (dist.get_world_size() // workers, workers)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("site", "worker"))
    return {"group": mesh.get_group("site"), "site": mesh.get_group("worker")}


def main(rounds: int = 10, every: int = 50, report: Callable[[ringfence.DiLoCo, float], None] | None = None) -> None:
    dist.init_process_group("ringfence")
    torch.manual_seed(0)  # all workers start from the same parameters
    model = Model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    averaged: ringfence.DiLoCo | None = None
    while True:
        try:
            mine = groups()
            if averaged is None:  # a new worker takes the state of the others here, if they are further
                averaged = ringfence.DiLoCo(model, inner, outer, every, **mine)
            else:
                averaged.catch_up(**mine)
            parallel = DistributedDataParallel(model, process_group=mine["site"])
            while averaged.outer_steps < rounds:
                given, wanted = batch(averaged.outer_steps * every + averaged.steps)
                inner.zero_grad()
                loss = nn.functional.cross_entropy(parallel(given).flatten(0, 1), wanted.flatten())
                loss.backward()
                inner.step()  # once in a round, this averages the models
                if report is not None:
                    report(averaged, loss.item())
                elif dist.get_rank() == 0 and averaged.steps == 0:
                    print(
                        f"round {averaged.outer_steps} of {dist.get_world_size()} workers: loss {loss:.4f}", flush=True
                    )
                if ringfence.round_ended():  # a site waits to join
                    break
            else:
                dist.barrier()  # all have finished: nobody needs this worker's state any more
                return
        except RuntimeError as error:  # of a collective: a worker is lost, or has left for the next round
            print(f"rejoining: {error}", flush=True)
        ringfence.rejoin()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
