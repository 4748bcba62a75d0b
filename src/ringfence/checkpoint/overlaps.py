"""Tensors of a state that share memory: tied weights are loaded once, any others are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringfence.errors import CheckpointError


@dataclass(frozen=True)
class Target:
    """A tensor that is loaded into, and the memory from its first element to its last."""

    name: str
    tensor: torch.Tensor
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Target:
        """Return the target of a tensor that has elements."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        return cls(name, tensor, start, start + (last + 1) * tensor.element_size())

    @property
    def device(self) -> str:
        return str(self.tensor.device)

    @property
    def is_dense(self) -> bool:
        """Whether every byte from start to end is of an element."""
        expected = 1
        for stride, size in sorted(zip(self.tensor.stride(), self.tensor.shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def form(self) -> tuple[Any, ...]:
        """What two targets have in common that are the same tensor."""
        tensor = self.tensor
        signs = tensor.is_conj(), tensor.is_neg()
        return self.device, self.start, tensor.dtype, tuple(tensor.shape), tensor.stride(), signs


def tied(targets: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[int, int]]:
    """Return the places of targets that are the same tensor as an earlier one, each with the place of the first of them.

    Raises CheckpointError, naming two targets, if some share memory in another way.
    """
    first: dict[tuple[Any, ...], int] = {}
    same: list[tuple[int, int]] = []
    distinct: list[Target] = []
    for place, (name, tensor) in enumerate(targets):
        if tensor.layout is not torch.strided or not tensor.numel() or not tensor.data_ptr():
            continue
        target = Target.of(name, tensor)
        if first.setdefault(target.form, place) == place:
            distinct.append(target)
        else:
            same.append((place, first[target.form]))
    _refuse_overlaps(distinct)
    return same


def _refuse_overlaps(targets: list[Target]) -> None:
    """Raise CheckpointError if two of these targets share memory."""
    group: list[Target] = []
    end = 0
    for target in sorted(targets, key=lambda each: (each.device, each.start, each.end)):
        if group and (target.device != group[0].device or target.start >= end):
            _refuse_overlaps_within(group)
            group = []
        end = max(end, target.end) if group else target.end
        group.append(target)
    _refuse_overlaps_within(group)


def _refuse_overlaps_within(group: list[Target]) -> None:
    """The same, for targets whose ranges of memory overlap: columns of a matrix have such ranges and share no memory."""
    if len(group) < 2:
        return
    if all(target.is_dense for target in group):
        _refuse(group[0], group[1])
    start, end = group[0].start, max(target.end for target in group)
    unit = math.gcd(*(target.tensor.element_size() for target in group), *(target.start - start for target in group))

    def flags() -> torch.Tensor:
        return torch.zeros((end - start) // unit, dtype=torch.bool)

    used = flags()
    for place, target in enumerate(group):
        if _part(used, target, start, unit).any():
            for other in group[:place]:
                alone = flags()
                _part(alone, other, start, unit).fill_(True)
                if _part(alone, target, start, unit).any():
                    _refuse(other, target)
        _part(used, target, start, unit).fill_(True)


def not_equal(one: str, other: str) -> CheckpointError:
    """Return the error for tied tensors that the checkpoint has two values for."""
    return CheckpointError(
        f"{one} and {other} are one tensor in the state and two different ones in the checkpoint: give each memory of its own"
    )


def _refuse(one: Target, other: Target) -> None:
    first, second = sorted((one.name, other.name))
    raise CheckpointError(
        f"{first} and {second} share memory in the state and are not the same tensor, so they cannot both be loaded: "
        "give each memory of its own"
    )


def _part(used: torch.Tensor, target: Target, start: int, unit: int) -> torch.Tensor:
    """Return the flags of the memory of a target, one for each `unit` bytes from `start` on."""
    width = target.tensor.element_size() // unit
    shape, strides = (*target.tensor.shape, width), (*(each * width for each in target.tensor.stride()), 1)
    return used.as_strided(shape, strides, (target.start - start) // unit)
