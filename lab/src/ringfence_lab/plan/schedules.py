"""Which schedule a variant runs for a collective."""

from __future__ import annotations

from typing import Final

from ringfence.collectives import Collective, ScheduleId, Table, choose
from ringfence_lab.plan.work import machines_of

GLOO: Final = {
    "all_reduce": ScheduleId.ALL_REDUCE_RING,
    "all_gather": ScheduleId.ALL_GATHER_RING,
    "reduce_scatter": ScheduleId.ALL_REDUCE_RING,  # torch's Gloo reduces a copy of everything, and keeps its part
    "broadcast": ScheduleId.BROADCAST_BINOMIAL,
    "all_to_all": ScheduleId.ALL_TO_ALL_DIRECT,
}
HOP_BY_HOP: Final = {  # each worker has two neighbours and no other peer
    **GLOO,
    "reduce_scatter": ScheduleId.REDUCE_SCATTER_RING,
    "broadcast": ScheduleId.BROADCAST_CHAIN,
}
STAGED: Final = ("all_gather", "reduce_scatter")  # for which torch's Gloo allocates a tensor in each call


def schedule_of(variant: str, operation: str, workers: int, size: int, per_machine: int = 0) -> ScheduleId:
    """Return the schedule of a collective of `size` bytes: ringfence's own table chooses, other variants have one.

    `per_machine`: how many workers share a machine.
    """
    if variant == "gloo":
        return GLOO[operation]
    if variant == "hop-by-hop":
        return HOP_BY_HOP[operation]
    machines = machines_of(workers, per_machine)
    return ScheduleId(choose(Collective[operation.upper()], workers, 0, 0, size, Table(), machines=machines).identifier)
