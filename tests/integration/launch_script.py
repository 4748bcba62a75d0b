"""A script in the style of PyTorch's tutorial on DDP, which knows nothing of ringfence.

It trains, sends a tensor and an object, writes the weights of rank 0 to the file it is given, and waits for a line of input.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SENTENCE = b"These are weights that nobody should read. " * 100
OBJECT = "An object that nobody should read. " * 100


def main(path: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(256, 20), torch.randn(256, 1))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    tensor = torch.frombuffer(bytearray(SENTENCE), dtype=torch.uint8) if dist.get_rank() == 0 else None
    tensor = torch.zeros(len(SENTENCE), dtype=torch.uint8) if tensor is None else tensor
    dist.broadcast(tensor, src=0)
    assert bytes(tensor.tolist()) == SENTENCE
    objects = [OBJECT if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(objects, src=0)
    assert objects == [OBJECT]
    if dist.get_rank() == 0:
        torch.save([each.detach() for each in model.parameters()], path)
        print("trained", flush=True)
        sys.stdin.readline()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
