"""Futures and training, for lab/tests/integration/test_accelerator.py: run in a process with the simulated accelerator."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist

from lab.tests.integration.accelerator_order import SIZE, loaded, recorded, release_late
from ringfence_lab import accelerator


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)]
    return torch.nn.Sequential(*layers)


def train(network: torch.nn.Module, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(4):
        inputs = torch.randn(8, 16, generator=generator).to(device)
        loss = torch.nn.functional.mse_loss(network(inputs), inputs[:, :4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def future() -> None:
    """A future with devices makes its callbacks wait for the stream that completed it."""
    with loaded():
        side, promise = torch.Stream("sim"), torch.futures.Future(devices=["sim:0"])
        tensor = torch.zeros(SIZE, device="sim")
        doubled = promise.then(lambda done: done.value()[0] * 2)
        torch.accelerator.synchronize()
        with side:
            kernel = accelerator.hold()
            tensor.fill_(7)
            promise.set_result([tensor])
        result = doubled.wait()[0]
        release_late(kernel)
        assert result.item() == 14


def alone() -> None:
    """Make a process group of this process alone. Torch's fake one computes what a group of one process would."""
    from torch._C._distributed_c10d import FakeProcessGroup

    if "alone" not in dist.Backend.backend_list:

        def create(options: object, _: object) -> object:
            return FakeProcessGroup._create_internal(options.group_rank, options.group_size)  # type: ignore[attr-defined]

        dist.Backend.register_backend("alone", create, extended_api=True, devices=["cpu", "sim"])
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("alone", store=store, rank=0, world_size=1)


def reduce_later(side, bucket):  # type: ignore[no-untyped-def] # torch does not understand them as strings
    """An all-reduce of one process whose result is there later, in another stream."""
    done = torch.futures.Future(devices=["sim:0"])
    gradients, ready = bucket.buffer(), recorded()
    result = torch.empty_like(gradients)
    side.wait_event(ready)
    with side:
        accelerator.sleep(0.01)
        result.copy_(gradients)
        done.set_result(result)
    return done


def training(strategy: str) -> tuple[list[float], list[float]]:
    """Return the losses on the CPU and on the device."""
    accelerator.load()  # before the first backward pass
    expected = train(model(), "cpu")
    with loaded(kernel=0.0005, jitter=0.0005):
        network = model().to("sim")
        if strategy == "none":
            return expected, train(network, "sim")
        alone()
        try:
            if strategy == "DDP":
                network = torch.nn.parallel.DistributedDataParallel(network, device_ids=[0], bucket_cap_mb=0.001)
                network.register_comm_hook(torch.Stream("sim"), reduce_later)
            elif strategy == "FSDP2":
                from torch.distributed.fsdp import fully_shard

                mesh = dist.init_device_mesh("sim", (1,))
                for layer in network:  # type: ignore[attr-defined]
                    fully_shard(layer, mesh=mesh)
                fully_shard(network, mesh=mesh)
            else:
                from torch.distributed.tensor import DTensor, distribute_module, randn

                mesh = dist.init_device_mesh("sim", (1,))
                assert randn(8, device_mesh=mesh).to_local().device.type == "sim"
                network = distribute_module(
                    network,
                    mesh,
                    input_fn=lambda _, inputs, mesh: (DTensor.from_local(inputs[0], mesh),),
                    output_fn=lambda _, out, __: out.full_tensor(),
                )
            return expected, train(network, "sim")
        finally:
            dist.destroy_process_group()
