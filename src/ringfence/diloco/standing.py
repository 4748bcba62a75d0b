"""What workers tell each other before they average, and the checks of it: each raises on all workers, or on none."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ringfence.errors import MismatchError

LOST: Final = -1  # in place of a number of outer steps: the outer optimizer has failed within one


class Standing(NamedTuple):
    """Where a worker stands. It travels as int64."""

    rank: int
    every: int
    outer_steps: int
    steps: int  # of the inner optimizer since the last outer step
    contributes: bool  # False: it came in the middle of the round
    finite: bool
    change: int  # checksum of its pseudo-gradient, where the workers of a site hold it alike
    # Checksums of the agreed parameters and of their state in the outer optimizer:
    replicas: int  # of those that all workers hold alike
    shards: int  # of those of which it holds a shard
    average: int  # the random number of an average of which it has not taken the outer step; 0: of none
    taken: int  # that of the last outer step that it has taken: two sites may have taken different ones

    @property
    def history(self) -> tuple[int, int]:
        """Which outer steps have led to its agreed parameters and its outer optimizer."""
        return self.outer_steps, self.taken


Table = list[list[Standing]]  # by site, then by worker of the site

_DIFFERENT: Final = {
    "change": "the workers of a site hold different models; is `site` the group of one site, and `group` across sites?",
    "every": "the workers have different numbers of inner steps in a round",
    "outer_steps": "the workers have taken different numbers of outer steps",
    "replicas": "the agreed parameters or the outer optimizers differ (their checksums follow); begin with one seed or "
    "one checkpoint",
    "shards": "the shards of the agreed parameters or of the outer optimizers differ (their checksums follow); begin with one "
    "seed or one checkpoint",
    "steps": "the workers have taken different numbers of inner steps in this round",
}


def exchange(standing: Standing, device: torch.device, group: Any, site: Any) -> Table:
    """Return the standings of all workers: gathered over the sites, then within each."""
    column = _gathered(torch.tensor(standing, dtype=torch.int64, device=device), group)
    table = column[:, None] if site is None else _gathered(column, site).transpose(0, 1)
    return [[Standing(*worker) for worker in row] for row in table.tolist()]


def _gathered(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    found = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather(list(found.unbind()), tensor, group=group)
    return found


# -- checks ----------------------------------------------------------------------------------------------------------


def require_equal(workers: Iterable[Standing], *fields: str) -> None:
    """Raise MismatchError if workers differ in one of these fields."""
    workers = list(workers)
    for field in fields:
        found = [getattr(worker, field) for worker in workers]
        if len(set(found)) > 1:
            each = ", ".join(f"{value} on worker {worker.rank}" for value, worker in zip(found, workers, strict=True))
            raise MismatchError(f"DiLoCo: {_DIFFERENT[field]}: {each}. No parameter was changed")


def require_state(table: Table) -> None:
    """Raise MismatchError if a worker's outer optimizer has failed."""
    if lost := [worker.rank for worker in all_of(table) if worker.outer_steps == LOST]:
        raise MismatchError(f"DiLoCo: the outer optimizer has failed on worker {lost}: catch up, or load a checkpoint")


def require_one_model(table: Table) -> None:
    """Raise MismatchError if workers hold other agreed parameters than their counterparts."""
    require_equal(all_of(table), "outer_steps", "replicas")
    for column in zip(*table, strict=True):
        require_equal(column, "shards")


def require_finite(table: Table, what: str) -> None:
    """Raise FloatingPointError if a worker has NaN or Inf. It is no RuntimeError: to rejoin does not help."""
    if bad := [worker.rank for worker in all_of(table) if not worker.finite]:
        raise FloatingPointError(f"DiLoCo: {what} has NaN or Inf on worker {bad}. No parameter was changed")


def all_of(table: Table) -> list[Standing]:
    return [worker for row in table for worker in row]


def missed_the_step(table: Table) -> list[int]:
    """Return the ranks that have an average and not taken its step, while another worker has: so all had the average."""
    taken = {worker.history for worker in all_of(table)}
    return [
        worker.rank for worker in all_of(table) if worker.average and (worker.outer_steps + 1, worker.average) in taken
    ]


# -- checksums -------------------------------------------------------------------------------------------------------


def checksums(tensors: Iterable[tuple[str, torch.Tensor]], before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the checksums of named tensors: of those that workers hold alike, and of those of which each holds a shard.

    They are CRC-32, which finds mistakes and is fast. Admitted workers are trusted not to forge them.
    """
    found = list(before)
    for name, tensor in tensors:
        kind = isinstance(tensor, DTensor)
        found[kind] = named_checksum(name, tensor, found[kind])
    return found[0], found[1]


def named_checksum(name: str, tensor: torch.Tensor, before: int) -> int:
    """Return the CRC-32 of a tensor's name, dtype, shape and bytes, after those that `before` is of."""
    described = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode(), before)
    return checksum(local(tensor), described)


def checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, after those that `before` is of."""
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy(), before)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this worker holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
