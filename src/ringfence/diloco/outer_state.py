"""What the outer optimizer keeps for each parameter: compared between workers, and given to a site that catches up.

Tensors and other values are both state: some optimizers count their steps in a number.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ringfence.diloco.standing import local, named_checksum

State = list[tuple[torch.Tensor, dict[str, Any]]]  # parameters in the optimizer's order, each with its values by name


class Described(NamedTuple):
    """A tensor of the state, for workers that have none yet."""

    shape: tuple[int, ...]  # of the part that a worker holds
    dtype: torch.dtype
    is_shard: bool  # a DTensor that is divided as its parameter is
    on_host: bool


def of(outer: torch.optim.Optimizer) -> State:
    """Return the state; empty for parameters of which the optimizer has none."""
    return [(each, outer.state.get(each, {})) for entry in outer.param_groups for each in entry["params"]]


def tensors(state: State) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor with its parameter before it, in an order that is the same on all workers."""
    for parameter, values in state:
        yield from ((parameter, values[name]) for name in sorted(values) if isinstance(values[name], torch.Tensor))


def described(outer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what `empty` needs. Raises TypeError for a state that cannot be sent."""
    return [{name: _described(value, parameter) for name, value in values.items()} for parameter, values in of(outer)]


def _described(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    is_shard = isinstance(value, DTensor)
    if is_shard and (value.shape != parameter.shape or value.placements != parameter.placements):
        raise TypeError("DiLoCo: the outer optimizer divides its state in another way than its parameters")
    return Described(tuple(local(value).shape), value.dtype, is_shard, value.device.type == "cpu")


def empty(outer: torch.optim.Optimizer, given: list[dict[str, Any]]) -> State:
    """Return a state as described, whose tensors are to be filled."""
    parameters = [parameter for parameter, _ in of(outer)]
    return [
        (parameter, {name: _empty(value, parameter) for name, value in values.items()})
        for parameter, values in zip(parameters, given, strict=True)
    ]


def _empty(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, Described):
        return value
    device = torch.device("cpu") if value.on_host else local(parameter).device
    tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    if not value.is_shard:
        return tensor
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        tensor, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def checksums(outer: torch.optim.Optimizer, before: tuple[int, int]) -> tuple[int, int]:
    """Return the checksums of the state, as `standing.checksums` does: of parameters that workers hold alike, and of shards.

    Raises TypeError for a state of more than tensors, numbers and texts of each parameter: it could differ unnoticed.
    """
    found = list(before)
    if len(outer.state) > sum(parameter in outer.state for parameter, _ in of(outer)):
        raise TypeError("DiLoCo: the outer optimizer keeps state that belongs to no parameter")
    for number, (parameter, values) in enumerate(of(outer)):
        kind = isinstance(parameter, DTensor)
        for name in sorted(values):
            value = values[name]
            if isinstance(value, torch.Tensor):
                found[kind] = named_checksum(f"{number} {name}", value, found[kind])
            elif value is None or isinstance(value, bool | int | float | str):
                found[kind] = zlib.crc32(f"{number} {name} {value!r} ".encode(), found[kind])
            else:
                raise TypeError(
                    f"DiLoCo: the outer optimizer keeps {name!r} of type {type(value).__name__}; it may keep tensors, numbers "
                    "and texts, one for each name"
                )
    return found[0], found[1]
