"""What was asked of the runtime: an operation, its deadline, how it ended, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ringfence.collectives import Collective, Schedule
from ringfence.collectives.schedule import Buffer
from ringfence.dataplane.buffers import Lease, address_of
from ringfence.dataplane.program import Program, program
from ringfence.errors import RingfenceError
from ringfence.keys import SEGMENT_BYTES
from ringfence.link.frames import Call

if TYPE_CHECKING:
    import torch

    from ringfence.dataplane.execution import Combine

NEVER = float("inf")
WAIT_WARNING_SECONDS = 60.0  # what an operation waits before people are told, or half its timeout if that is shorter
POINT_TO_POINT = 64  # the operation code of send and recv

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

# Where ciphertext is kept to be passed on, or sums stand in scratch, a large collective is run in passes over slices of
# its parts, so that what is kept stays small. All ranks cut alike: the rule looks only at what they share.
PASS_BYTES = 8 * SEGMENT_BYTES
_SEGMENTS_OF_A_PASS = 16
_IN_PASSES = (*_REDUCING, Collective.ALL_GATHER, Collective.BROADCAST)


def describe_call(call: Call, sequence: int) -> str:
    """A call in words, for error messages on any rank."""
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
    """After how many seconds the engine looks at an operation with this timeout."""
    return WAIT_WARNING_SECONDS if timeout > 2 * WAIT_WARNING_SECONDS else timeout / 2


class Request:
    """One call, from submission to its end. Ended exactly once, by the thread that drives the loop."""

    __slots__ = (
        "_callbacks",
        "_ended",
        "after",
        "call",
        "communicator",
        "deadline",
        "done",
        "ending",
        "error",
        "keep",
        "next_check",
        "sequence",
        "source",
        "timeout",
        "wait_timeout",
    )

    def __init__(self, call: Call, deadline: float, keep: Any = None) -> None:
        self.call = call
        self.deadline = deadline
        self.timeout = NEVER  # seconds before its deadline that it began; without any, nobody waits for it yet
        self.next_check = deadline  # when the engine looks at it again
        self.wait_timeout = NEVER  # seconds that whoever waits for it gives it, where it has no deadline before that
        self.keep = keep  # the tensors behind the memory, alive until the end
        self.communicator: Any = None
        self.sequence = 0
        self.source = -1
        self.done = False
        self.error: RingfenceError | None = None
        self.ending: Callable[[], None] | None = (
            None  # however it ends, before anybody is told: ends a profiler's range
        )
        self.after: Callable[[], None] | None = None  # on success, before anybody is told: copies back
        self._ended = threading.Lock()
        self._ended.acquire()
        self._callbacks: list[Callable[[], None]] = []

    def describe(self) -> str:
        return describe_call(self.call, self.sequence)

    def memory_changed(self, lease: Lease) -> NoReturn:
        """The storage of a tensor has other memory than when the call was made: nothing more of it is touched."""
        raise lease.changed(f"worker {self.communicator.engine.rank}: {self.describe()}")

    def finish(self, error: RingfenceError | None = None) -> None:
        """End it; wake whoever waits. Done again it does the rest, in case an interrupt came in between."""
        if error is None and self.after is not None and not self.done:
            try:
                self.after()
            except Exception as mistake:
                error = RingfenceError(f"the result of {self.describe()} could not be copied back: {mistake}")
        if self.ending is not None:
            self.ending()
        if not self.done:
            # No lock: only who drives comes here, or a signal handler that interrupts it and leaves, which would wait for
            # itself. Handlers run when a call has returned or a function begins, so none comes between the question and
            # the release. One that comes before ends it in this one's place; one that comes after it does the rest.
            self.error = error
            self.done = True
            self._ended.release()
        self.keep = self.after = None
        if self._callbacks:
            self._call_back()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back at the end, from the loop; at once if it has ended."""
        if self.done:
            callback()
            return
        self._callbacks.append(callback)
        if self.done:  # since a moment ago, and who ended it may not have seen this one
            self._call_back()

    def _call_back(self) -> None:
        """Each is taken in one step, and so called once: others may be here too, in another thread or in a handler."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # somebody else took the last one
                return
            callback()

    def block(self, seconds: float) -> bool:
        """Wait for the end in the calling thread; signals arrive meanwhile."""
        if self._ended.acquire(timeout=seconds if seconds < threading.TIMEOUT_MAX else -1):
            self._ended.release()
            return True
        return False


class CollectiveRequest(Request):
    """A collective bound to memory: the schedule, the bytes of each part, and the slices they are worked on in."""

    __slots__ = ("_cut", "_extents", "before", "combine", "dtype", "next_pass", "parts", "passes", "program", "running")

    def __init__(
        self,
        call: Call,
        deadline: float,
        keep: Any,
        schedule: Schedule,
        parts: dict[Buffer, list[memoryview]],
        dtype: torch.dtype,
        combine: Combine | None,
    ) -> None:
        super().__init__(call, deadline, keep)
        self.before: Callable[[], None] | None = None  # when it begins: copies in
        self.program: Program = program(schedule)
        self.parts = parts
        self.dtype = dtype
        self.combine = combine
        self.next_pass = 0
        self.running = 0
        self.passes = 1
        if schedule.size > 2 and call.operation in _IN_PASSES:
            longest = max((len(part) for buffer in parts.values() for part in buffer), default=0)
            self.passes = max(1, -(-longest // PASS_BYTES))
        self._cut = self.passes > 1
        self._extents: list[tuple[bool, int, int]] | None = None

    def slices(self, index: int) -> dict[Buffer, list[memoryview]]:
        """The parts' slices of one pass."""
        if not self._cut:
            return self.parts
        start, stop = index * PASS_BYTES, (index + 1) * PASS_BYTES
        return {buffer: [part[start:stop] for part in parts] for buffer, parts in self.parts.items()}

    def follows(self, earlier: CollectiveRequest) -> bool:
        """Whether it reads what the earlier one writes, or writes what that one touches: then it must wait for it."""
        if self.before or self.after or earlier.before or earlier.after:
            return True  # copies touch memory that the parts do not show
        return any(
            (writes or wrote) and start < its_end and its_start < end
            for writes, start, end in self._memory()
            for wrote, its_start, its_end in earlier._memory()
        )

    def _memory(self) -> list[tuple[bool, int, int]]:
        """Of each buffer whether it is written, and where it begins and ends; what lies between its parts included."""
        if self._extents is None:
            self._extents = []
            for buffer, parts in self.parts.items():
                places = [(address_of(part), len(part)) for part in parts if len(part)]
                if places:
                    end = max(address + length for address, length in places)
                    self._extents.append((buffer is not Buffer.INPUT, min(places)[0], end))
        return self._extents

    def first_segment(self, index: int) -> int:
        """Where a pass begins to count its segments: no two segments of a part have one number."""
        return index * _SEGMENTS_OF_A_PASS
