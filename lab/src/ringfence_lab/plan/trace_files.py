"""Reads a trace of one rank, whichever of the two formats of torch.profiler it has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Final

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.execution_trace import ExecutionTraceReader
from ringfence_lab.plan.json_stream import MOST_BYTES, JsonStream, inflated
from ringfence_lab.plan.kineto import KinetoReader
from ringfence_lab.plan.recorded import Recording, mapping

_EVENTS: Final = "traceEvents"
_NODES: Final = "nodes"
_BLOCK: Final = 1 << 20


def read_file(file: IO[bytes], name: str) -> Recording:
    """Return what an open file says about its rank, as `read` does."""
    return read(iter(lambda: file.read(_BLOCK), b""), name)


def read(blocks: Iterable[bytes], name: str, most: int = MOST_BYTES) -> Recording:
    """Return what a file says about its rank, from the bytes of the file in blocks of any size.

    Raises ConfigurationError if it is not a trace, is truncated, or larger than `most` bytes after decompression; and if
    there is no collective in it whose size is known.
    """
    kineto, graph = KinetoReader(name), ExecutionTraceReader(name)
    events = nodes = 0
    for key, value in JsonStream(inflated(blocks, name, most), name).members((_EVENTS, _NODES), _EVENTS):
        if key == _NODES:
            nodes += 1
            graph.take(mapping(value))
        else:
            events += key == _EVENTS
            kineto.take(key, value)
    if not events and not nodes:
        raise ConfigurationError(
            f"{name} has neither traceEvents nor nodes: give what torch.profiler's export_chrome_trace() wrote, or the JSON "
            "of ExecutionTraceObserver"
        )
    return checked(graph.finish() if nodes else kineto.finish())


def checked(found: Recording) -> Recording:
    """Return the recording if it can be used. Raises ConfigurationError with what to do otherwise."""
    name = found.name
    if found.not_covered:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(found.not_covered.items())[:5])
        raise ConfigurationError(
            f"{name} has communication that the model does not cover ({listed}): it covers all-reduce, all-gather, "
            "reduce-scatter, broadcast, all-to-all and barrier"
        )
    if found.without_size:
        raise ConfigurationError(
            f"{name}: {found.without_size} collectives have no size. Record with torch.profiler.profile(record_shapes=True); "
            "for NCCL, record CPU activities beside CUDA's, without coalesced calls"
        )
    if not found.calls:
        raise ConfigurationError(
            f"{name} has no collectives: record a step of the distributed run, with ProfilerActivity.CPU, after the process "
            "group is initialised"
        )
    return found
