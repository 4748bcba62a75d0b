"""The bytes that a collective moves through each stage, counted in its schedules. Needs no torch."""

from __future__ import annotations

from ringfence.collectives import Buffer, Collective, Table, choose
from ringfence.collectives.schedule import Action, Place, Schedule


def stage_bytes(operation: str, size: int, ranks: int, table: Table | None = None) -> dict[str, int]:
    """Return the bytes that pass through each stage, over all ranks."""
    kind = Collective[operation.upper()]
    total = dict.fromkeys(("seal", "open", "reduce", "send", "receive"), 0)
    for rank in range(ranks):
        schedule = choose(kind, ranks, rank, 0, size, table or Table())
        for step in schedule.steps:
            length = _length(schedule, schedule.chunks[step.chunk], size, operation)
            if step.action is Action.SEND:
                total["send"] += length
                if step.origin in (-1, rank):
                    total["seal"] += length
            elif step.action in (Action.RECV, Action.REDUCE):
                total["receive"] += length
                total["open"] += length
                if step.action is Action.REDUCE:
                    total["reduce"] += length
    return total


def _length(schedule: Schedule, place: Place, size: int, operation: str) -> int:
    if place.buffer is Buffer.SCRATCH:
        inner = schedule.scratch[place.part : place.part + place.parts]
        return sum(_length(schedule, each, size, operation) for each in inner)
    if place.buffer is Buffer.DATA:
        return size * place.parts // schedule.parts(Buffer.DATA)
    if operation == "all_reduce":
        return size * place.parts // schedule.parts(place.buffer)
    return size // schedule.size * place.parts  # one rank's share of the whole
