"""What a file of a profiler says about one rank: its collectives, its steps, and when it computed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ringfence.errors import ConfigurationError

MOST_CALLS: Final = 1_000_000
MOST_NUMBER: Final = 1 << 44  # of elements, or of an event
LONGEST_NAME: Final = 200
MOST_SPANS: Final = 5_000_000
MOST_WORKERS: Final = 1 << 14

# The beginning of a collective's name, without underscores, and what it is here. The first that fits counts.
_OPERATIONS: Final = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("broadcast", "broadcast"),
    ("alltoall", "all_to_all"),
    ("barrier", "barrier"),
)
_NOT_COVERED: Final = ("reduce", "gather", "scatter", "send", "recv", "isend", "irecv", "sparse", "coalesced", "batch")
_WIDTHS: Final = {
    "double": 8, "long": 8, "longint": 8, "int64": 8, "complexfloat": 8, "float": 4, "float32": 4, "int": 4, "int32": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "shortint": 2, "byte": 1, "char": 1, "bool": 1, "unsignedchar": 1,
    "signedchar": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "unsignedint": 4, "unsignedlong": 8,
}  # fmt: skip


class Call(NamedTuple):
    """One collective on one rank. Times are seconds of the file's clock, and 0 if it has none."""

    operation: str
    bytes: int  #    of the whole: what is summed, gathered on all ranks, or scattered from
    width: int  #    bytes of an element
    group: int  #    ranks that take part; 0 if the file does not say
    issued: float  # when it was handed over
    begun: float
    ended: float

    @property
    def key(self) -> tuple[str, int, int]:
        """What has to be equal on all ranks and in all steps."""
        return self.operation, self.bytes, self.group


class Window(NamedTuple):
    """One training step. Its number is the profiler's."""

    number: int
    start: float
    end: float


class Gradient(NamedTuple):
    """A parameter's gradient when it was accumulated."""

    at: float
    elements: int


@dataclass
class Recording:
    """One file."""

    name: str
    timed: bool  # an execution trace has no times
    backend: str = ""
    rank: int | None = None
    workers: int | None = None
    on_device: bool = False  # whether an accelerator computed
    calls: list[Call] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    starts: array[float] = field(default_factory=lambda: array("d"))  # of spans in which the rank computed
    ends: array[float] = field(default_factory=lambda: array("d"))
    events: array[float] = field(default_factory=lambda: array("d"))  # when the profiler recorded an operator
    not_covered: dict[str, int] = field(default_factory=dict)  # collectives that the model does not cover
    without_size: int = 0

    def compute(self, start: float, end: float) -> None:
        """Note a span of computing."""
        if len(self.starts) >= MOST_SPANS:
            raise ConfigurationError(
                f"{self.name} has more than {MOST_SPANS:,} operators: record fewer steps, such as schedule(active=3)"
            )
        self.starts.append(start)
        self.ends.append(end)

    def add(self, name: str, elements: object, dtype: object, group: object, times: tuple[float, float, float]) -> None:
        """Note a collective of so many elements in all, or that it has no size or is not covered."""
        operation = operation_of(name)
        if operation is None:
            if len(self.not_covered) < 100 or name in self.not_covered:
                self.not_covered[name] = self.not_covered.get(name, 0) + 1
            return
        width = width_of(dtype)
        if operation == "barrier":
            elements, width = 1, 4
        if whole_number(elements, MOST_NUMBER) is None or width is None:
            self.without_size += 1
            return
        assert isinstance(elements, int)
        if elements:
            found = Call(operation, elements * width, width, whole_number(group, MOST_WORKERS) or 0, *times)
            self.keep(self.calls, found)

    def keep(self, where: list[Any], found: object) -> None:
        """Keep something of a collective."""
        if len(where) >= MOST_CALLS:
            raise ConfigurationError(f"{self.name} has more than {MOST_CALLS:,} collectives: record fewer steps")
        where.append(found)

    def add_gradient(self, at: float, shapes: list[Any]) -> None:
        """Note a gradient, the first of these tensors."""
        if elements := elements_of(shapes[0]) if shapes else None:
            self.gradients.append(Gradient(at, elements))

    def checked(self) -> Recording:
        """Return the recording in the order of time if it can be used. Raises ConfigurationError with what to do otherwise."""
        if self.not_covered:
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(self.not_covered.items())[:5])
            raise ConfigurationError(
                f"{self.name} has communication that the model does not cover ({listed}): it covers all-reduce, all-gather, "
                "reduce-scatter, broadcast, all-to-all and barrier"
            )
        if self.without_size:
            raise ConfigurationError(
                f"{self.name}: {self.without_size} collectives have no size. Record with "
                "torch.profiler.profile(record_shapes=True); for NCCL, record CPU activities beside CUDA's, without coalesced "
                "calls"
            )
        if not self.calls:
            raise ConfigurationError(
                f"{self.name} has no collectives: record a step of the distributed run, with ProfilerActivity.CPU, after the "
                "process group is initialised"
            )
        if self.workers is None:
            self.workers = max(call.group for call in self.calls) or None
        self.calls.sort(key=lambda call: call.issued)
        self.gradients.sort()
        return self


def operation_of(name: str) -> str | None:
    """Return the collective that a name of c10d, Gloo or NCCL stands for, or None if the model does not cover it."""
    short = plain(name)
    return next((operation for prefix, operation in _OPERATIONS if short.startswith(prefix)), None)


def is_collective(name: str) -> bool:
    """Return whether a name of c10d, Gloo or NCCL stands for a collective or a point-to-point operation."""
    return operation_of(name) is not None or plain(name).startswith(_NOT_COVERED)


def plain(name: str) -> str:
    """Return the name of a collective without its namespace, in lower case and without underscores."""
    return name.rpartition(":")[2].replace("_", "").lower()


def width_of(dtype: object) -> int | None:
    """Return the bytes of an element, or None for a type that is not known."""
    if not isinstance(dtype, str):
        return None
    return _WIDTHS.get(dtype.removeprefix("c10::").replace(" ", "").lower())


def whole_number(value: object, most: int) -> int | None:
    """Return a whole number from 0 to `most`, or None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= most else None


def elements_of(shape: object, depth: int = 0) -> int | None:
    """Return the elements of a tensor of that shape, or of all tensors of a list of shapes; None if it is none."""
    if not isinstance(shape, list) or depth > 3:
        return None
    if all(whole_number(each, MOST_NUMBER) is not None for each in shape):
        product = 1
        for each in shape:
            product *= each
            if product > MOST_NUMBER:
                return None
        return product
    parts = [elements_of(each, depth + 1) for each in shape]
    return None if any(part is None for part in parts) else sum(part or 0 for part in parts)


def mapping(value: object) -> dict[str, Any]:
    """Return an object of JSON, or an empty one if it is something else."""
    return value if isinstance(value, dict) else {}


def listed(value: object) -> list[Any]:
    """Return a list of JSON, or an empty one if it is something else."""
    return value if isinstance(value, list) else []


def seconds(value: object) -> float | None:
    """Return microseconds as seconds, or None if they are not a usable time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e18 < value < 1e18:
        return None
    return value * 1e-6
