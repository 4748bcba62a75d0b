"""A training step with fully sharded data parallelism (FSDP): collectives of each unit, and how computing hides them.

A unit is one or several blocks of the model, such as transformer layers; all other parameters form the root unit. As in
torch's `fully_shard`, a unit's parameters are all-gathered before its forward pass and again before its backward pass, and its
gradients are reduce-scattered after it. The next unit's all-gather starts with the computing of the one before it. The root's
parameters are gathered once. With `reshard=False` all units keep their parameters from the forward to the backward pass.

No study has measured such steps yet: costs of the collectives are those that are validated, their overlap is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ringfence_lab.plan.models import Model, blocks
from ringfence_lab.plan.traces import FORWARD
from ringfence_lab.plan.work import Cost


class Unit(NamedTuple):
    """Parameters that are gathered together."""

    elements: int
    is_root: bool = False


class Timeline(NamedTuple):
    """A step in time."""

    finished: float  #       when both computing and communication are done
    collectives: tuple[Cost, ...]  # all that were run


@lru_cache(maxsize=64)
def units(model: Model, together: int = 1) -> tuple[Unit, ...]:
    """Return the units of a model, the root first, then the others in the order of the forward pass.

    `together`: how many blocks form a unit. Raises nothing: a model without repeated blocks is one root unit.
    """
    found = blocks(model.parameters)
    sizes = [sum(model.parameters[start:end]) for start, end in found]
    grouped = [sum(sizes[first : first + together]) for first in range(0, len(sizes), together)]
    root = model.elements - sum(sizes)
    return (*([Unit(root, True)] if root else []), *map(Unit, grouped))


def timeline(
    found: Sequence[Unit], gathers: Sequence[Cost], scatters: Sequence[Cost], compute: float, reshard: bool
) -> Timeline:
    """Lay out a step of units whose all-gathers and reduce-scatters cost so much, and that computes for `compute` seconds.

    Collectives run one after the other in the order in which torch issues them, beside computing. A unit computes when its
    parameters are there and the unit before it is done.
    """
    elements = sum(unit.elements for unit in found)
    shares = [unit.elements / elements for unit in found]
    channel = began = computed = 0.0
    done: list[Cost] = []
    for index in range(len(found)):
        channel = max(channel, began) + gathers[index].seconds  # issued when the unit before began to compute
        done.append(gathers[index])
        began = max(computed, channel)
        computed = began + compute * FORWARD * shares[index]
    ready = 0.0
    if reshard and not found[-1].is_root:  # nothing is computed meanwhile
        channel = ready = max(channel, computed) + gathers[-1].seconds
        done.append(gathers[-1])
    for index in reversed(range(len(found))):
        began = max(computed, ready)
        if reshard and index and not found[index - 1].is_root:  # the next one, before this one's gradients
            channel = max(channel, began) + gathers[index - 1].seconds
            done.append(gathers[index - 1])
            ready = channel
        computed = began + compute * (1 - FORWARD) * shares[index]
        channel = max(channel, computed) + scatters[index].seconds
        done.append(scatters[index])
    return Timeline(max(channel, computed), tuple(done))
