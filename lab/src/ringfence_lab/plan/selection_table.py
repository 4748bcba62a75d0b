"""The runtime's table of thresholds as the model would set it: from which size on a schedule is cheaper.

The table travels with the roster, so all ranks choose alike. This makes one for a profile and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ringfence.collectives import Collective, ScheduleId, Thresholds, choose
from ringfence_lab.plan.cost import collective_cost
from ringfence_lab.plan.hardware import Hardware
from ringfence_lab.plan.work import VARIANTS

DEFAULT: Final = Thresholds()  # what the runtime has
GROUPS: Final = (2, 3, 4, 8, 16, 64, 256, 1024)
SIZES: Final = tuple(4096 << (2 * power) for power in range(9))  # 4 KiB to 256 MiB
_OF: Final = {
    Collective.ALL_REDUCE: (
        ScheduleId.ALL_REDUCE_RING, ScheduleId.ALL_REDUCE_DOUBLING, ScheduleId.ALL_REDUCE_HALVING,
        ScheduleId.ALL_REDUCE_HALVING_APART,
    ),
    Collective.REDUCE: (ScheduleId.REDUCE_BINOMIAL, ScheduleId.REDUCE_CHAIN, ScheduleId.REDUCE_TREE),
    Collective.BROADCAST: (ScheduleId.BROADCAST_BINOMIAL, ScheduleId.BROADCAST_CHAIN, ScheduleId.BROADCAST_TREE),
    Collective.ALL_GATHER: (
        ScheduleId.ALL_GATHER_RING, ScheduleId.ALL_GATHER_DOUBLING, ScheduleId.ALL_GATHER_DOUBLING_APART,
    ),
    Collective.REDUCE_SCATTER: (
        ScheduleId.REDUCE_SCATTER_RING, ScheduleId.REDUCE_SCATTER_HALVING, ScheduleId.REDUCE_SCATTER_HALVING_APART,
    ),
    Collective.GATHER: (ScheduleId.GATHER_BINOMIAL, ScheduleId.GATHER_DIRECT),
    Collective.ALL_TO_ALL: (ScheduleId.ALL_TO_ALL_BRUCK, ScheduleId.ALL_TO_ALL_DIRECT),
}  # fmt: skip
# Which threshold decides for which collectives, in the order in which they are found.
_DECIDES: Final[dict[str, tuple[Collective, ...]]] = {
    "small": (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    "ring_group": (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    "apart_bytes": (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    "chain_slice": (Collective.BROADCAST, Collective.REDUCE),
    "chain_group": (Collective.BROADCAST, Collective.REDUCE),
    "direct_group": (Collective.GATHER,),
    "direct_part": (Collective.GATHER,),
    "bruck_group": (Collective.ALL_TO_ALL,),
    "bruck_part": (Collective.ALL_TO_ALL,),
}  # fmt: skip
_BYTES: Final = tuple(1024 << power for power in range(15))  # 1 KiB to 16 MiB
_COUNTS: Final = tuple(2 << power for power in range(12))  # 2 to 4,096
_ROUNDS: Final = 2  # thresholds that depend on each other are found again once

CostGrid = dict[tuple[Collective, int, int], dict[ScheduleId, float]]


@dataclass(frozen=True)
class Difference:
    """A collective for which another table chooses another schedule, and the gain that the model predicts."""

    collective: str
    workers: int
    bytes: int
    default: str
    proposed: str
    gain: float  # the share of the time that is saved; below zero where another size was worth more


def table(hardware: Hardware, groups: Sequence[int] = GROUPS) -> Thresholds:
    """Return the thresholds with which the choices cost least over all sizes and groups."""
    costs = _cost_grid(hardware, groups)
    found = DEFAULT
    for _ in range(_ROUNDS):
        for name, kinds in _DECIDES.items():
            choices = _COUNTS if name.endswith("_group") else _BYTES
            started = getattr(found, name)
            # The value that is there already wins a tie: nothing is changed without a reason.
            ordered = sorted(choices, key=lambda value: abs(math.log(value / started)))
            best = min(
                [found, *(replace(found, **{name: value}) for value in ordered)],
                key=lambda tried: round(_regret(costs, kinds, tried), 9),
            )
            found = best
    return found


def differences(
    hardware: Hardware, groups: Sequence[int] = GROUPS, proposed: Thresholds | None = None
) -> list[Difference]:
    """Return where the model's table and the default one choose different schedules."""
    costs, mine = _cost_grid(hardware, groups), proposed or table(hardware, groups)
    result = []
    for (kind, size, whole), each in costs.items():
        one, other = _choice(kind, size, whole, DEFAULT), _choice(kind, size, whole, mine)
        if one != other:
            names = [identifier.name.lower().removeprefix(f"{kind.name.lower()}_") for identifier in (one, other)]
            result.append(Difference(kind.name.lower(), size, whole, names[0], names[1], 1 - each[other] / each[one]))
    return result


def _cost_grid(hardware: Hardware, groups: Sequence[int]) -> CostGrid:
    variant = VARIANTS["ringfence"]
    return {
        (kind, size, whole): {each: collective_cost(hardware, variant, each, size, whole).seconds for each in _OF[kind]}
        for kind, size, whole in _grid(groups)
    }


def _grid(groups: Sequence[int]) -> Iterator[tuple[Collective, int, int]]:
    for kind in _OF:
        for size in groups:
            for whole in SIZES:
                yield kind, size, whole


def _regret(costs: CostGrid, kinds: tuple[Collective, ...], tried: Thresholds) -> float:
    """Return how much slower than the best choices those of a table are: the mean logarithm."""
    total = count = 0.0
    for (kind, size, whole), each in costs.items():
        if kind in kinds:
            total += math.log(each[_choice(kind, size, whole, tried)] / min(each.values()))
            count += 1
    return total / count


def _choice(kind: Collective, size: int, whole: int, chosen: Thresholds) -> ScheduleId:
    return ScheduleId(choose(kind, size, 0, 0, whole, chosen).identifier)
