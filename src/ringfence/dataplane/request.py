"""Requests: what a process group submits to the runtime, with its deadline, its outcome and its waiters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ringfence.collectives import Collective, Passes, Schedule
from ringfence.collectives.passes import SEGMENTS_PER_PASS, Views, in_pass
from ringfence.collectives.schedule import Buffer
from ringfence.dataplane.buffers import Combine, Lease, address_of
from ringfence.dataplane.program import Program, program
from ringfence.errors import RingfenceError
from ringfence.link.frames import Call

if TYPE_CHECKING:
    import torch

NEVER = float("inf")
WAIT_WARNING_SECONDS = 60.0  # wait until the first warning; half the timeout if that is shorter
POINT_TO_POINT = 64  # operation code of send and recv

REDUCTIONS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg")
DTYPES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

_REDUCING = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)
_ROOTED = (Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER)


def describe_call(call: Call, sequence: int) -> str:
    """Return a call as text for error messages, such as "all_reduce #3 (10 x float32, sum)"."""
    dtype = DTYPES[call.dtype] if call.dtype < len(DTYPES) else f"dtype {call.dtype}"
    if call.operation == POINT_TO_POINT:
        return f"send/recv #{sequence} with tag {call.tag} ({call.elements} x {dtype})"
    try:
        name = Collective(call.operation).name.lower()
    except ValueError:
        name = f"operation {call.operation}"
    details = [f"{call.elements} x {dtype}"] if call.elements else [dtype]
    if call.operation in _REDUCING and call.reduction < len(REDUCTIONS):
        details.append(REDUCTIONS[call.reduction])
    if call.operation in _ROOTED:
        details.append(f"root {call.root}")
    return f"{name} #{sequence} ({', '.join(details)})"


def first_check(timeout: float) -> float:
    """Return the seconds until the engine first checks a request with this timeout."""
    return WAIT_WARNING_SECONDS if timeout > 2 * WAIT_WARNING_SECONDS else timeout / 2


class DeviceCopies(Protocol):
    """The copies between the host and the device that a request's tensors are on."""

    @property
    def device(self) -> torch.device: ...
    def order_current_stream(self) -> None: ...
    def is_finished_on_device(self) -> bool: ...
    def abandon(self) -> None: ...


class PassCopies(DeviceCopies, Protocol):
    """The same for a collective, whose passes are copied one by one."""

    def views(self, index: int, /) -> Mapping[Buffer, Views] | None: ...
    def pass_done(self, index: int, /) -> None: ...


class Request:
    """One call, from submission to completion. The thread that drives the progress loop completes it exactly once."""

    __slots__ = (
        "_callbacks",
        "_done_lock",
        "call",
        "copy_out",
        "deadline",
        "done",
        "error",
        "keep",
        "next_check",
        "on_end",
        "sequence",
        "source",
        "staging",
        "timeout",
        "wait_timeout",
        "worker",
    )

    def __init__(self, call: Call, deadline: float, keep: Any = None) -> None:
        self.call = call
        self.deadline = deadline
        self.timeout = NEVER  # deadline minus the start; infinite until the deadline is set
        self.next_check = deadline  # when the engine checks it for a warning or the deadline
        self.wait_timeout = NEVER  # the timeout that starts when a caller waits for it
        self.keep = keep  # owner of the memory, referenced until completion
        self.worker = -1  # rank of this worker, for error messages
        self.sequence = 0
        self.source = -1
        self.done = False
        self.error: RingfenceError | None = None
        self.on_end: Callable[[], None] | None = None  # called before waiters are woken: ends a profiler's range
        self.copy_out: Callable[[], None] | None = None  # called on success, before waiters are woken
        self.staging: DeviceCopies | None = None  # of device tensors
        self._done_lock = threading.Lock()
        self._done_lock.acquire()
        self._callbacks: list[Callable[[], None]] = []

    def describe(self) -> str:
        return describe_call(self.call, self.sequence)

    def memory_changed(self, lease: Lease) -> NoReturn:
        """Raise TensorChangedError: the storage of a tensor was resized or moved since the call."""
        raise lease.changed(f"worker {self.worker}: {self.describe()}")

    def finish(self, error: RingfenceError | None = None) -> None:
        """Complete the request and wake its waiters. Idempotent: a second call completes an interrupted first one."""
        if error is None and self.copy_out is not None and not self.done:
            try:
                self.copy_out()
            except Exception as mistake:
                error = RingfenceError(f"the result of {self.describe()} could not be copied back: {mistake}")
        if self.on_end is not None:
            self.on_end()
        if not self.done:
            # No lock: only the driving thread calls this, or a signal handler that interrupts it, which would deadlock on
            # a lock. CPython runs handlers when a call returns or a function begins, so none runs between the test and the
            # release. A handler that runs earlier completes the request; one that runs later does the rest.
            self.error = error
            self.done = True
            if error is not None and self.staging is not None:
                self.staging.abandon()
            self._done_lock.release()
        self.keep = self.copy_out = None
        if self._callbacks:
            self._call_back()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` on completion, from the driving thread; immediately if the request is done."""
        if self.done:
            callback()
            return
        self._callbacks.append(callback)
        if self.done:  # completed meanwhile, perhaps without seeing this callback
            self._call_back()

    def _call_back(self) -> None:
        """Call the callbacks. `pop` is atomic, so each is called once, even if another thread or a handler is here too."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            callback()

    def block(self, seconds: float) -> bool:
        """Wait for completion in the calling thread; signals are delivered meanwhile. Return whether it is done."""
        if self._done_lock.acquire(timeout=seconds if seconds < threading.TIMEOUT_MAX else -1):
            self._done_lock.release()
            return True
        return False


class CollectiveRequest(Request):
    """A collective bound to memory: the schedule, the bytes of its tensors, and the passes it is executed in."""

    __slots__ = (
        "_extents",
        "_passes",
        "combine",
        "copy_in",
        "dtype",
        "next_pass",
        "pass_staging",
        "passes",
        "program",
        "running",
        "tensors",
    )

    def __init__(
        self,
        call: Call,
        deadline: float,
        keep: Any,
        schedule: Schedule,
        passes: Passes,
        tensors: Mapping[Buffer, list[memoryview]],
        dtype: torch.dtype,
        combine: Combine | None,
    ) -> None:
        super().__init__(call, deadline, keep)
        self.copy_in: Callable[[], None] | None = None  # called when the first pass starts
        self.program: Program = program(schedule)
        self.tensors = tensors
        self.dtype = dtype
        self.combine = combine
        self.next_pass = 0
        self.running = 0
        self.pass_staging: PassCopies | None = None
        self.passes = passes.number
        self._passes = passes
        self._extents: list[tuple[bool, int, int]] | None = None

    def stage(self, staging: PassCopies) -> None:
        """Take the memory of the passes from a device."""
        self.staging = self.pass_staging = staging

    def channel(self, index: int) -> int:
        """Return the channel that executes a pass."""
        return index % self._passes.channels

    def slices(self, index: int) -> Mapping[Buffer, Views] | None:
        """Return the memory of the parts in one pass; None if it has not been copied from the device yet."""
        if self.pass_staging is not None:
            return self.pass_staging.views(index)
        start, stop = index * self._passes.each, (index + 1) * self._passes.each
        schedule, kind = self.program.schedule, self.call.operation
        return {
            buffer: in_pass(kind, tensors, schedule.parts(buffer), self.dtype.itemsize, start, stop)
            for buffer, tensors in self.tensors.items()
        }

    def follows(self, earlier: CollectiveRequest) -> bool:
        """Return whether the memory of both overlaps and one of them writes it: then this one waits for the earlier one."""
        if self.copy_in or self.copy_out or earlier.copy_in or earlier.copy_out:
            return True  # copies use memory that is not among the parts
        return any(
            (writes or wrote) and start < its_end and its_start < end
            for writes, start, end in self._memory()
            for wrote, its_start, its_end in earlier._memory()
        )

    def _memory(self) -> list[tuple[bool, int, int]]:
        """Return (written, start, end) of each buffer, gaps between its tensors included."""
        if self._extents is None:
            self._extents = []
            for buffer, tensors in self.tensors.items():
                places = [(address_of(tensor), len(tensor)) for tensor in tensors if len(tensor)]
                if places:
                    end = max(address + length for address, length in places)
                    self._extents.append((buffer is not Buffer.INPUT, min(places)[0], end))
        return self._extents

    def first_segment(self, index: int) -> int:
        """Return the number of the first segment of a pass; segment numbers are unique within a part."""
        return index * SEGMENTS_PER_PASS
