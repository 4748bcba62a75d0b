"""Shared by all strategies: the device they run on, a data loader with forked workers, a small model, a training loop, a
guard against Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, Dataset

FEATURES = 16
STEPS = 4
BATCH = 4

Batch = tuple[Tensor, Tensor]
Strategy = Callable[[], list[float]]
AnyModule = TypeVar("AnyModule", bound=nn.Module)

_device = torch.device("cpu")


def current_device() -> torch.device:
    """Return the device that strategies run on."""
    return _device


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run the strategies of this block on a device."""
    global _device
    before, _device = _device, device
    try:
        yield
    finally:
        _device = before


def placed(module: AnyModule) -> AnyModule:
    """Move a module to the device. It is made on the host, so that its weights are those of a run on the CPU."""
    return module.to(_device)


class Samples(Dataset[Batch]):
    """One rank's share of a seeded data set."""

    def __init__(self, count: int, rank: int, world: int) -> None:
        self.count, self.rank, self.world = count, rank, world

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        random = torch.Generator().manual_seed(index * self.world + self.rank)
        inputs = torch.randn(FEATURES, generator=random)
        return inputs, inputs.flip(0).cumsum(0) / FEATURES


def batches(steps: int = STEPS, batch: int = BATCH, same_on_all_ranks: bool = False) -> Iterator[Batch]:
    """Yield batches from two forked loader workers, which run during the collectives."""
    rank, world = (0, 1) if same_on_all_ranks else (dist.get_rank(), dist.get_world_size())
    samples = Samples(steps * batch, rank, world)
    for inputs, targets in DataLoader(samples, batch, num_workers=2, multiprocessing_context="fork"):
        yield inputs.to(_device), targets.to(_device)


class Model(nn.Module):
    """Two layers with a norm between them; the same on every rank."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.norm = nn.LayerNorm(2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)
        placed(self)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(inputs))))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    # torch's default on a device, foreach, refuses a model whose parameters are DTensors in part.
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return (module(inputs) - targets).pow(2).mean()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, feed: Iterator[Batch]) -> list[float]:
    """Train one step for each batch; return the losses."""
    losses = []
    for batch in feed:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class GlooForbidden(RuntimeError):
    """A plaintext group was created where none may be."""


class Forbidden:
    """Replaces ProcessGroupGloo."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        raise GlooForbidden("a Gloo group was created")

    def __getattr__(self, name: str) -> NoReturn:
        raise GlooForbidden(name)


@contextlib.contextmanager
def no_gloo() -> Iterator[None]:
    """Make ProcessGroupGloo fail in this block, in every module that exports it."""
    places = (dist, distributed_c10d, torch._C._distributed_c10d)
    originals = [place.ProcessGroupGloo for place in places]
    for place in places:
        place.ProcessGroupGloo = Forbidden
    try:
        yield
    finally:
        for place, original in zip(places, originals, strict=True):
            place.ProcessGroupGloo = original
