"""Train with DistributedDataParallel, and rejoin in place when workers are lost: no step is repeated while one worker is left.

    ringfence secret new run.secret
    export RINGFENCE_SECRET_FILE=$PWD/run.secret
    ringfence run --rejoin --spares --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400 --rdzv-id job1 \
        --max-restarts 10 examples/rejoin.py      # on the other machine: --node-rank 1

Kill a worker: the other one stays, waits for the new one and gives it its state.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringfence


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's data of a step. They depend on the step alone, so a new worker needs no other state."""
    generator = torch.Generator().manual_seed(1_000_000 + step * 1000 + dist.get_rank())
    return torch.randn(16, 64, generator=generator), torch.randn(16, 64, generator=generator)


def agree(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give all workers the state of the one that has come furthest. Return the next step."""
    steps = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    source = steps.index(max(steps))
    state = [model.state_dict(), optimizer.state_dict()] if dist.get_rank() == source else [None, None]
    dist.broadcast_object_list(state, source)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return max(steps)


def main(steps: int = 200, report: Callable[[int], None] | None = None) -> nn.Module:
    dist.init_process_group("ringfence")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    while True:
        try:
            step = agree(model, optimizer, step)
            # Without the flag, DDP orders its buckets anew after its first step, and sums would be rounded otherwise.
            parallel = DistributedDataParallel(model, find_unused_parameters=True)
            while step < steps:
                given, wanted = batch(step)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(parallel(given), wanted)
                loss.backward()
                optimizer.step()
                if report is not None:
                    report(step)
                elif dist.get_rank() == 0 and step % 20 == 0:
                    print(f"step {step} of {dist.get_world_size()} workers: loss {loss.item():.4f}", flush=True)
                step += 1
                if step % 5 == 0 and ringfence.round_ended():  # a node waits to join
                    break
            else:
                dist.barrier()  # all have finished: nobody needs this worker's state any more
                return model
        except RuntimeError as error:  # of a collective: a worker is lost, or has left for the next round
            print(f"rejoining: {error}", flush=True)
        ringfence.rejoin()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
