"""Reads what torch.profiler exports: a Chrome trace of operators, Gloo's and NCCL's collectives, kernels and steps.

Gloo    "gloo:all_reduce" is a user annotation from the start to the end on Gloo's thread, with the input's shape and type if
        record_shapes was set. The operator "c10d::allreduce_" that handed it over began before and has a tensor of that size.
NCCL    The kernel's arguments say what the call "record_param_comms" recorded: "Collective name", "In msg nelems",
        "Out msg nelems", "dtype", "Group size". Kernels without them are looked up by "External id".
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any, Final, NamedTuple

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.recorded import (
    MOST_CALLS,
    MOST_SPANS,
    MOST_WORKERS,
    Gradient,
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

_STEP: Final = "ProfilerStep#"
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_PARAMETERS: Final = "record_param_comms"
_MOST: Final = 1 << 44
_LONGEST_NAME: Final = 200
_MOST_INPUTS: Final = 64
_MOST_SKIPPED: Final = 100


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
            case "record_shapes":
                self._found.shapes = value == 1

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
            self._keep(self._gloo, _kept(name, start, end, args))
        elif category == "cpu_op":
            self._operator(name, start, end, args, thread)

    def _on_device(self, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._found.on_device = True
        if name.lower().startswith(("nccl", "rccl")):
            identifier = whole_number(args.get("External id"), _MOST)
            self._keep(self._kernels, (start, end, -1 if identifier is None else identifier, _meta(args)))
        else:
            self._found.compute(start, end)

    def _operator(self, name: str, start: float, end: float, args: dict[str, Any], thread: int) -> None:
        if len(self._starts) >= MOST_SPANS:
            raise ConfigurationError(f"{self._found.name} has more than {MOST_SPANS:,} operators: record fewer steps")
        self._threads.append(thread)
        self._starts.append(start)
        self._ends.append(end)
        if name == _PARAMETERS:
            identifier = whole_number(args.get("External id"), _MOST)
            if identifier is not None and len(self._parameters) < MOST_CALLS:
                self._parameters[identifier] = _meta(args)
        elif name.startswith("c10d::") and is_collective(name):
            self._keep(self._calls, _kept(name, start, end, args))
        elif name == _ACCUMULATE:
            shapes = listed(args.get("Input Dims"))
            elements = elements_of(shapes[0]) if shapes else None
            if elements:
                self._found.gradients.append(Gradient(start, elements))

    def _keep(self, where: list[Any], event: object) -> None:
        if len(where) >= MOST_CALLS:
            raise ConfigurationError(f"{self._found.name} has more than {MOST_CALLS:,} collectives: record fewer steps")
        where.append(event)

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
        found.calls.sort(key=lambda call: call.issued)
        found.gradients.sort()
        steps = self._steps[True] if found.on_device and self._steps[True] else self._steps[False]
        found.windows = sorted(steps.values(), key=lambda window: window.start)
        return found

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
        if found.workers is None:
            found.workers = max((call.group for call in found.calls), default=0) or None


def _kept(name: str, start: float, end: float, args: dict[str, Any]) -> _Event:
    shapes, types = (listed(args.get(key)) for key in ("Input Dims", "Input type"))
    sizes = tuple(elements_of(shape) or 0 for shape in shapes[:_MOST_INPUTS])
    return _Event(name[:_LONGEST_NAME], start, end, sizes, str(types[0])[:32] if types else "")


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
    sizes = [whole_number(args.get(key), _MOST) for key in ("In msg nelems", "Out msg nelems")]
    return _Meta(
        name[:_LONGEST_NAME] if isinstance(name, str) else None,
        None if None in sizes else max(each or 0 for each in sizes),
        str(args.get("dtype"))[:32],
        whole_number(args.get("Group size"), MOST_WORKERS) or 0,
    )
