"""The data plane that this process uses: the compiled one if the package was built with it, otherwise the one in Python.

Both speak the same bytes, so workers may differ. `RINGFENCE_CORE=python` asks for the slower one, `compiled` refuses to go
on without the faster one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ringfence.collectives.schedule import Buffer
from ringfence.dataplane import endpoint, execution, info
from ringfence.dataplane.buffers import Pool as PythonPool
from ringfence.dataplane.buffers import scratch
from ringfence.errors import ConfigurationError
from ringfence.keys import KEY_PHASE_SHIFT, TAG_BYTES
from ringfence.link.frames import FRAME_BYTES, HEADER_BYTES, HOP_BYTES

if TYPE_CHECKING:
    from ringfence.dataplane.program import Program
    from ringfence.runtime.communicator import Communicator

# What the compiled plane adds by itself; all else it leaves to torch. The numbers are those of _core.c.
_ADDERS = {torch.float32: 1, torch.float64: 2, torch.int32: 3, torch.int64: 4, torch.bfloat16: 5}
_INTERFACE = 3
_LAYOUT = (_INTERFACE, HEADER_BYTES, HOP_BYTES, TAG_BYTES, 40, KEY_PHASE_SHIFT, FRAME_BYTES)


def _load() -> Any:
    wanted = info.wanted()
    if wanted == "python":
        return None
    try:
        from ringfence.dataplane import _core
    except ImportError as error:
        if wanted == "compiled":
            raise ConfigurationError(
                f"RINGFENCE_CORE asks for the compiled data plane, which cannot be loaded ({error}): "
                "install a C compiler and Python's headers, then ringfence again"
            ) from error
        return None
    if tuple(_core.LAYOUT) != _LAYOUT:
        raise ConfigurationError(
            f"the compiled data plane was built for another version of ringfence ({_core.__file__}): install again"
        )
    return _core


_compiled = _load()
COMPILED = _compiled is not None

if TYPE_CHECKING or not COMPILED:
    Endpoint = endpoint.Endpoint
    Pool = PythonPool
    Execution = execution.Execution
    send = endpoint.send
    receive = endpoint.receive
else:
    Endpoint = _compiled.End
    Pool = _compiled.Pool
    Execution = _compiled.Run
    send = _compiled.send
    receive = _compiled.receive


def compile_program(*parts: Any) -> Any:
    """A program as the compiled plane wants it."""
    return _compiled.compile(*parts) if COMPILED else None


def stages(on: bool) -> dict[str, int]:
    """Nanoseconds by stage since it was last asked; switches the clocks on or off. Only the compiled plane has them."""
    found: dict[str, int] = _compiled.stages(on) if COMPILED else {}
    return found


def events(on: bool) -> list[tuple[str, int, int, int]]:
    """What was done when since it was last asked: stage, start, end (monotonic nanoseconds) and the worker at the other end."""
    found: list[tuple[str, int, int, int]] = _compiled.events(on) if COMPILED else []
    return found


def make_execution(
    communicator: Communicator,
    program: Program,
    sequence: int,
    call: bytes,
    parts: dict[Buffer, list[memoryview]],
    dtype: torch.dtype,
    combine: execution.Combine | None,
    base: int,
    finished: Callable[[], None],
    keep: Any = None,
) -> Execution:
    """One pass of a collective over its memory. `keep` owns that memory: the run holds it for as long as it may touch it."""
    views, scratched = _bind(program, parts)
    keeper = (scratched, keep)
    if not COMPILED:
        return Execution(communicator, program, sequence, call, views, keeper, dtype, combine, base, finished)
    add = _ADDERS.get(dtype, 0) if combine is torch.add else 0
    made: Any = _compiled.Run(
        communicator,
        program.compiled,
        sequence,
        call,
        views,
        keeper,
        dtype,
        combine,
        base,
        finished,
        add,
        communicator.instance,
        communicator.pool,
        communicator.size,
    )
    return made  # type: ignore[no-any-return]


def _bind(program: Program, parts: dict[Buffer, list[memoryview]]) -> tuple[list[memoryview], Any]:
    """The memory of each chunk. Scratch parts lie side by side, so that a run of them is one piece."""
    schedule = program.schedule
    if not schedule.scratch:
        return [parts[place.buffer][place.part] for place in schedule.chunks], None
    offsets = [0]
    for place in schedule.scratch:
        lengths = (len(parts[place.buffer][p]) for p in range(place.part, place.part + place.parts))
        offsets.append(offsets[-1] + sum(lengths))
    memory, keeper = scratch(offsets[-1])
    views = [
        memory[offsets[place.part] : offsets[place.part + place.parts]]
        if place.buffer is Buffer.SCRATCH
        else parts[place.buffer][place.part]
        for place in schedule.chunks
    ]
    return views, keeper
