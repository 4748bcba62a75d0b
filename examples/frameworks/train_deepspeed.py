"""Train a small model with DeepSpeed's ZeRO over sealed links.

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1 DS_ACCELERATOR=cpu
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_deepspeed.py

deepspeed.initialize() creates a group of the accelerator's backend, Gloo on CPUs, unless a group exists.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ringfence

CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    ringfence.init()  # before deepspeed.initialize()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    ringfence.assert_sealed()

    torch.manual_seed(dist.get_rank())
    for step in range(31):
        points = torch.empty(64, 2).uniform_(-1.5, 1.5)
        inside = (points.norm(dim=1, keepdim=True) < 1).float()
        loss = nn.functional.binary_cross_entropy_with_logits(engine(points), inside)
        engine.backward(loss)
        engine.step()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
