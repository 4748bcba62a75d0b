"""The classes and functions of the data plane that this process uses: compiled if available (see native.py), else Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ringfence.collectives.passes import Parts, Views
from ringfence.collectives.schedule import Buffer, Place
from ringfence.dataplane import endpoint, execution, regions
from ringfence.dataplane.buffers import Pool as PythonPool
from ringfence.dataplane.buffers import scratch
from ringfence.dataplane.execution import Pass, Route
from ringfence.dataplane.native import COMPILED, CORE
from ringfence.dataplane.program import Program

# The reductions that the compiled data plane computes itself; torch computes the others. The numbers are those of the C code.
_ADDERS = {torch.float32: 1, torch.float64: 2, torch.int32: 3, torch.int64: 4, torch.bfloat16: 5}

if TYPE_CHECKING or not COMPILED:
    Endpoint = endpoint.Endpoint
    Pool = PythonPool
    Execution = execution.Execution
    Region = regions.Region
    send = endpoint.send
    receive = endpoint.receive
    serve = endpoint.serve
else:
    Endpoint = CORE.Endpoint
    Pool = CORE.Pool
    Execution = CORE.Execution
    Region = CORE.Region
    send = CORE.send
    receive = CORE.receive
    serve = CORE.serve


def make_execution(route: Route, program: Program, work: Pass, finished: Callable[[], None]) -> Execution:
    """Bind one pass of a collective to its memory.

    `finished` is called once, when every step is done. The execution keeps a reference to `work.keep`, the owner of the
    memory, for as long as it may touch it.
    """
    views, scratched = _bind(program, work.parts)
    keeper = (scratched, work.keep)
    if not COMPILED:
        return Execution(route, program, work, views, keeper, finished)
    add = _ADDERS.get(work.dtype, 0) if work.combine is torch.add else 0
    made: Any = CORE.Execution(
        route,
        program.compiled,
        work.sequence,
        work.call,
        views,
        keeper,
        work.dtype,
        work.combine,
        work.first_segment,
        finished,
        add,
        route.instance,
        route.pool,
        route.size,
    )
    return made  # type: ignore[no-any-return]


def _bind(program: Program, parts: Mapping[Buffer, Views]) -> tuple[list[memoryview], Any]:
    """Return the memory of each chunk and the owner of scratch memory.

    Scratch parts are adjacent, so that a chunk of several parts is contiguous.
    """
    schedule = program.schedule
    if not schedule.scratch:
        return [_view(place, parts) for place in schedule.chunks], None
    offsets = [0]
    for place in schedule.scratch:
        lengths = (len(parts[place.buffer][p]) for p in range(place.part, place.part + place.parts))
        offsets.append(offsets[-1] + sum(lengths))
    memory, keeper = scratch(offsets[-1])
    views = [
        memory[offsets[place.part] : offsets[place.part + place.parts]]
        if place.buffer is Buffer.SCRATCH
        else _view(place, parts)
        for place in schedule.chunks
    ]
    return views, keeper


def _view(place: Place, parts: Mapping[Buffer, Views]) -> memoryview:
    views = parts[place.buffer]
    if place.parts == 1:
        return views[place.part]
    if not isinstance(views, Parts):
        raise ValueError("a chunk has several parts of a buffer whose parts are not adjacent")
    return views.span(place.part, place.parts)
