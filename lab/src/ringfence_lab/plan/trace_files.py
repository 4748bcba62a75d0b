"""Reads a trace of one rank that torch.profiler wrote: what it exports as a Chrome trace, or an execution trace.

A Chrome trace (Kineto) has operators, Gloo's and NCCL's collectives, kernels and steps:

Gloo    "gloo:all_reduce" is a user annotation from the start to the end on Gloo's thread, with the input's shape and type if
        record_shapes was set. The operator "c10d::allreduce_" that handed it over began before and has a tensor of that size.
NCCL    The kernel's arguments say what the call "record_param_comms" recorded: "Collective name", "In msg nelems",
        "Out msg nelems", "dtype", "Group size". Kernels without them are looked up by "External id".

The JSON of ExecutionTraceObserver is the graph of operators in Chakra's schema. It names every collective with its size and
has no times. Computing has to be given, or comes from a Chrome trace of the run.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections import deque
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.json_stream import MOST_BYTES, JsonStream, inflated
from ringfence_lab.plan.recorded import (
    LONGEST_NAME,
    MOST_CALLS,
    MOST_NUMBER,
    MOST_SPANS,
    MOST_WORKERS,
    Recording,
    Window,
    elements_of,
    is_collective,
    listed,
    mapping,
    operation_of,
    seconds,
    whole_number,
)

_EVENTS: Final = "traceEvents"
_NODES: Final = "nodes"
_STEP: Final = "ProfilerStep#"
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_GROUPS: Final = "## process_group:init ##"
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_PARAMETERS: Final = "record_param_comms"
_MOST_INPUTS: Final = 64
_MOST_SKIPPED: Final = 100
_MOST_NODES: Final = 10_000_000


def read(file: Any, name: str, most: int = MOST_BYTES) -> Recording:
    """Return what the open binary file of one rank says. Raises ConfigurationError, with what to do, if it cannot be used.

    `most`: bytes of the file, after decompression.
    """
    kineto, graph = KinetoReader(name), ExecutionTraceReader(name)
    events = nodes = 0
    for key, value in JsonStream(inflated(file, name, most), name).members((_EVENTS, _NODES), _EVENTS):
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
    return graph.finish() if nodes else kineto.finish()


class _Meta(NamedTuple):
    """What NCCL's calls say about themselves."""

    name: str | None
    elements: int | None
    dtype: str
    group: int


class _Event(NamedTuple):
    """The little of an event that is kept."""

    name: str
    start: float
    end: float
    sizes: tuple[int, ...]  # elements of its first inputs
    dtype: str


class KinetoReader:
    """Takes the members of a Chrome trace one by one, keeps what matters, and makes a `Recording` of it."""

    def __init__(self, name: str) -> None:
        self._found = Recording(name, timed=True)
        self._gloo: list[_Event] = []
        self._gloo_threads: set[int] = set()
        self._calls: list[_Event] = []
        self._kernels: list[tuple[float, float, int, _Meta]] = []  # start, end, external id
        self._parameters: dict[int, _Meta] = {}
        self._steps: dict[bool, dict[int, Window]] = {False: {}, True: {}}  # by whether they are on the device
        self._threads, self._starts, self._ends = array("q"), array("d"), array("d")  # of operators

    def take(self, key: str, value: object) -> None:
        """Take one member of the document, or one event."""
        match key:
            case "traceEvents":
                self._event(mapping(value))
            case "distributedInfo":
                info = mapping(value)
                self._found.backend = str(info.get("backend") or "")[:32]
                self._found.rank = whole_number(info.get("rank"), MOST_WORKERS)
                self._found.workers = whole_number(info.get("world_size"), MOST_WORKERS)

    def _event(self, event: dict[str, Any]) -> None:
        start, length = seconds(event.get("ts")), seconds(event.get("dur"))
        name, category, args = event.get("name"), event.get("cat"), mapping(event.get("args"))
        if event.get("ph") != "X" or start is None or length is None or length < 0 or not isinstance(name, str):
            return
        end, thread = start + length, whole_number(event.get("tid"), 1 << 62) or 0
        if name.startswith(_STEP) and category in ("user_annotation", "gpu_user_annotation"):
            number = name.removeprefix(_STEP)
            if number.isascii() and number.isdigit() and len(number) < 10:
                self._steps[category == "gpu_user_annotation"][int(number)] = Window(int(number), start, end)
        elif category in _ON_DEVICE:
            self._on_device(name, start, end, args)
        elif category == "user_annotation" and name.startswith("gloo:"):
            self._gloo_threads.add(thread)
            self._found.keep(self._gloo, _kept(name, start, end, args))
        elif category == "cpu_op":
            self._operator(name, start, end, args, thread)

    def _on_device(self, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._found.on_device = True
        if name.lower().startswith(("nccl", "rccl")):
            identifier = whole_number(args.get("External id"), MOST_NUMBER)
            self._found.keep(self._kernels, (start, end, -1 if identifier is None else identifier, _meta(args)))
        else:
            self._found.compute(start, end)

    def _operator(self, name: str, start: float, end: float, args: dict[str, Any], thread: int) -> None:
        if len(self._starts) >= MOST_SPANS:
            raise ConfigurationError(f"{self._found.name} has more than {MOST_SPANS:,} operators: record fewer steps")
        self._threads.append(thread)
        self._starts.append(start)
        self._ends.append(end)
        if name == _PARAMETERS:
            identifier = whole_number(args.get("External id"), MOST_NUMBER)
            if identifier is not None and len(self._parameters) < MOST_CALLS:
                self._parameters[identifier] = _meta(args)
        elif name.startswith("c10d::") and is_collective(name):
            self._found.keep(self._calls, _kept(name, start, end, args))
        elif name == _ACCUMULATE:
            self._found.add_gradient(start, listed(args.get("Input Dims")))

    def finish(self) -> Recording:
        """Return what was found, in the order of time."""
        found = self._found
        if self._kernels:
            self._of_nccl()
        else:
            self._of_gloo()
        found.events = array("d", sorted(self._starts))
        if not found.on_device:
            for thread, start, end in zip(self._threads, self._starts, self._ends, strict=True):
                if thread not in self._gloo_threads:
                    found.compute(start, end)
        steps = self._steps[True] if found.on_device and self._steps[True] else self._steps[False]
        found.windows = sorted(steps.values(), key=lambda window: window.start)
        return found.checked()

    def _of_gloo(self) -> None:
        found = self._found
        waiting = deque(sorted(self._calls, key=lambda call: call.start))
        for event in sorted(self._gloo, key=lambda event: event.start):
            call = _handed_over(waiting, event)
            elements: int | None = sum(event.sizes) or None
            if operation_of(call.name) == "all_gather" and elements:
                elements = elements * found.workers if found.workers else None
            found.add(call.name, elements, event.dtype, found.workers, (call.start, event.start, event.end))

    def _of_nccl(self) -> None:
        found = self._found
        found.backend = found.backend or "nccl"
        for start, end, identifier, meta in self._kernels:
            said = meta if meta.name is not None else self._parameters.get(identifier, meta)
            if said.name is None:
                found.without_size += 1
                continue
            found.add(said.name, said.elements, said.dtype, said.group, (start, start, end))


def _kept(name: str, start: float, end: float, args: dict[str, Any]) -> _Event:
    shapes, types = (listed(args.get(key)) for key in ("Input Dims", "Input type"))
    sizes = tuple(elements_of(shape) or 0 for shape in shapes[:_MOST_INPUTS])
    return _Event(name[:LONGEST_NAME], start, end, sizes, str(types[0])[:32] if types else "")


def _handed_over(waiting: deque[_Event], event: _Event) -> _Event:
    """Take the first operator that can have handed over what Gloo began; the event itself if there is none.

    Gloo's threads take collectives in the order in which they are handed over, and may begin two in the other order.
    """
    for at, call in enumerate(waiting):
        if call.start > event.start or at > _MOST_SKIPPED:
            break
        if operation_of(call.name) is not None and (not event.sizes or sum(event.sizes) in call.sizes):
            del waiting[at]
            return call
    return event


def _meta(args: dict[str, Any]) -> _Meta:
    name = args.get("Collective name")
    sizes = [whole_number(args.get(key), MOST_NUMBER) for key in ("In msg nelems", "Out msg nelems")]
    return _Meta(
        name[:LONGEST_NAME] if isinstance(name, str) else None,
        None if None in sizes else max(each or 0 for each in sizes),
        str(args.get("dtype"))[:32],
        whole_number(args.get("Group size"), MOST_WORKERS) or 0,
    )


class _Node(NamedTuple):
    """A collective."""

    number: int
    name: str
    elements: int | None
    dtype: str
    group: int


class ExecutionTraceReader:
    """Takes the nodes one by one. A node's number stands for its time: numbers are given in the order of calls."""

    def __init__(self, name: str) -> None:
        self._found = Recording(name, timed=False)
        self._said: list[_Node] = []
        self._calls: list[_Node] = []
        self._steps: list[int] = []  # the nodes that begin a step
        self._count = 0

    def take(self, node: dict[str, Any]) -> None:
        """Take one node."""
        name, number = node.get("name"), whole_number(node.get("id"), MOST_NUMBER)
        self._count += 1
        if self._count > _MOST_NODES:
            raise ConfigurationError(f"{self._found.name} has more than {_MOST_NODES:,} nodes: record fewer steps")
        if not isinstance(name, str) or number is None:
            return
        if name == _GROUPS:
            self._groups(listed(mapping(node.get("inputs")).get("values")))
        elif name.startswith(_STEP) and name.removeprefix(_STEP).isdigit():
            self._steps.append(number)
        elif name == _ACCUMULATE:
            self._found.add_gradient(float(number), listed(mapping(node.get("inputs")).get("shapes")))
        elif name == _PARAMETERS:
            self._of_parameters(number, node)
        elif name.startswith("c10d::") and is_collective(name):
            self._of_c10d(number, node)

    def _groups(self, values: list[Any]) -> None:
        """The groups are JSON within a string; the largest is the whole job."""
        for value in values:
            with contextlib.suppress(ValueError, RecursionError):
                for group in listed(json.loads(value) if isinstance(value, str) else None):
                    size = whole_number(mapping(group).get("group_size"), MOST_WORKERS) or 0
                    self._found.workers = max(size, self._found.workers or 0) or None
                    backend = str(mapping(group).get("backend_config") or "")
                    self._found.backend = "nccl" if "nccl" in backend else "gloo" if "gloo" in backend else ""

    def _of_parameters(self, number: int, node: dict[str, Any]) -> None:
        attributes = {str(each.get("name")): each.get("value") for each in map(mapping, listed(node.get("attrs")))}
        name = attributes.get("collective_name")
        if not isinstance(name, str) or name in ("wait", "init"):
            return
        sizes = [whole_number(attributes.get(key), MOST_NUMBER) for key in ("in_msg_nelems", "out_msg_nelems")]
        elements = None if None in sizes else max(each or 0 for each in sizes)
        group = whole_number(attributes.get("pg_size"), MOST_WORKERS) or 0
        self._found.keep(
            self._said, _Node(number, name[:LONGEST_NAME], elements, str(attributes.get("dtype"))[:32], group)
        )

    def _of_c10d(self, number: int, node: dict[str, Any]) -> None:
        """The largest tensor among the first two arguments is the whole, which is what a gather returns."""
        inputs = mapping(node.get("inputs"))
        shapes, types = listed(inputs.get("shapes")), listed(inputs.get("types"))
        tensors = [
            (elements_of(shape) or 0, kind[-32:])
            for shape, kind in list(zip(shapes, types, strict=False))[:2]
            if isinstance(kind, str) and "Tensor(" in kind
        ]
        elements, kind = max(tensors, default=(0, ""))
        dtype = kind.rpartition("Tensor(")[2].partition(")")[0]
        self._found.keep(self._calls, _Node(number, node["name"][:LONGEST_NAME], elements or None, dtype, 0))

    def finish(self) -> Recording:
        """Return what was found. Where there are nodes of `record_param_comms`, which say most, those of c10d are left out."""
        found = self._found
        for node in self._said or self._calls:
            at = float(node.number)
            found.add(node.name, node.elements, node.dtype, node.group or found.workers, (at, at, at))
        bounds = [*sorted(self._steps), MOST_NUMBER]
        found.windows = [Window(step, float(start), float(end)) for step, (start, end) in enumerate(pairwise(bounds))]
        return found.checked()
