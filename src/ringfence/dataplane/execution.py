"""A schedule at work: one pass of a collective over its memory, segment by segment. The C of _core.c does the same.

    a SEND's segment     dependencies done -> seal (or take what was received sealed) -> the outbox writes it
    a RECV's segment     the inbox reads it -> open into place -> perhaps keep the ciphertext to pass on
    a REDUCE's segment   the inbox reads it -> open beside -> add to the local operand

Each step counts its finished segments; a step may do segment s when the steps it waits for have done theirs. Finishing a
segment wakes the links of the steps that wait for it. Nothing here blocks and nothing here touches a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringfence.collectives.schedule import Action, Step
from ringfence.dataplane.buffers import Segment, as_tensor, divide, lease_of
from ringfence.errors import AuthenticationError
from ringfence.keys import KEY_PHASE_SHIFT, TAG_BYTES
from ringfence.link.frames import (
    FORWARD_OVERHEAD,
    HEADER_BYTES,
    HOP_BYTES,
    HOP_OVERHEAD,
    NO_ORIGIN,
    Type,
    pack_header,
    pack_header_into,
)
from ringfence.link.segments import segment_bytes, segment_count

if TYPE_CHECKING:
    import torch

    from ringfence.dataplane.program import Program
    from ringfence.dataplane.request import Request
    from ringfence.link.seal import Opener, Sealer
    from ringfence.runtime.communicator import Communicator

_HOP, _FORWARD = int(Type.HOP), int(Type.FORWARD)  # an enum's member costs a look-up for every frame

Combine = Callable[..., Any]  # combine(left, right, out=...)


class Execution:
    """One pass: a program, the memory of each chunk, and how far each step has come."""

    __slots__ = (
        "_base",
        "_call",
        "_combine",
        "_dtype",
        "_each",
        "_finished",
        "_instance",
        "_keep",
        "_kept",
        "_leases",
        "_left",
        "_pool",
        "_route",
        "_tensors",
        "_views",
        "done",
        "links",
        "operation",
        "program",
        "segments",
        "sequence",
    )

    def __init__(
        self,
        communicator: Communicator,
        program: Program,
        sequence: int,
        call: bytes,
        views: list[memoryview],
        keeper: Any,
        dtype: torch.dtype,
        combine: Combine | None,
        base: int,
        finished: Callable[[], None],
    ) -> None:
        self._route = communicator
        self._pool = communicator.pool
        self._instance = communicator.instance
        self.program = program
        self.sequence = sequence
        self._call = call
        self._dtype = dtype
        self._combine = combine
        self._base = base  # segments of earlier passes: positions are counted over the whole collective
        self._finished = finished
        self._views = views
        self._leases = [lease_of(view) for view in views]
        self._keep = keeper
        self._tensors = {chunk: as_tensor(self._views[chunk], dtype) for chunk in program.typed}
        count = len(program.steps)
        self.done = [0] * count
        self._each = [segment_bytes(len(view)) for view in self._views]
        self.segments = [segment_count(len(self._views[step.chunk])) for step in program.steps]
        self._left = count
        self._kept: dict[tuple[int, int], Segment] = {}  # (step, segment) -> ciphertext to pass on
        self.links: list[Any] = [None] * count
        self.operation: Request

    # -- start and progress ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Queue every message on its link, in program order, and do the local steps that can be done."""
        communicator = self._route
        if not self._left:
            self._end()
            return
        local = []
        for index, step in enumerate(self.program.steps):
            if step.action is Action.SEND:
                link: Any = communicator.outbox(step.peer)
            elif step.action is Action.RECV or step.action is Action.REDUCE:
                link = communicator.inbox(step.peer)
            else:
                local.append(index)
                continue
            self.links[index] = link
            link.queue.append((self, index))
            link.wake()
        for index in local:
            self._do_local(index)

    def _end(self) -> None:
        finished, self._finished = self._finished, _nothing  # the callback holds this run: leave no cycle behind
        finished()

    def ready(self, index: int) -> bool:
        """Whether the step's next segment may be done."""
        segment = self.done[index]
        for needed, by_segment in self.program.dependencies[index]:
            if self.done[needed] < (segment + 1 if by_segment else self.segments[needed]):
                return False
        return True

    def _advance(self, index: int) -> None:
        self.done[index] += 1
        if self.done[index] == self.segments[index]:
            self._left -= 1
        for other in self.program.wakes[index]:
            link = self.links[other]
            if link is not None:
                link.wake()
            elif self.program.steps[other].action >= Action.COPY:
                self._do_local(other)
        if not self._left:
            self._left = -1
            self._end()

    def _do_local(self, index: int) -> None:
        step = self.program.steps[index]
        while self.done[index] < self.segments[index] and self.ready(index):
            segment = self.done[index]
            self._check(step.chunk)
            if step.action is Action.COPY:
                self._check(step.other)
                self._bytes(step.chunk, segment)[:] = self._bytes(step.other, segment)
            else:
                divide(self._tensor(step.chunk, segment), self._route.size)
                self._check(step.chunk)
            self._advance(index)

    def _check(self, chunk: int) -> None:
        """Refuse memory that its storage no longer has: before each use, and after each that gave up the lock."""
        lease = self._leases[chunk]
        if lease is not None and not lease.is_intact():
            self.operation.memory_changed(lease)

    def _bytes(self, chunk: int, segment: int) -> memoryview:
        each = self._each[chunk]
        return self._views[chunk][segment * each : (segment + 1) * each]

    def _tensor(self, chunk: int, segment: int) -> torch.Tensor:
        whole = self._tensors[chunk]
        each = self._each[chunk] // whole.element_size()
        return whole[segment * each : (segment + 1) * each]

    def overhead(self, index: int) -> int:
        """What a frame of this step adds to its payload."""
        return HOP_OVERHEAD if self.program.steps[index].origin < 0 else FORWARD_OVERHEAD

    # -- sending -----------------------------------------------------------------------------------------------------

    def seal_next(self, index: int, sealer: Sealer) -> tuple[memoryview, Segment] | None:
        """The next frame of a SEND, sealed and in its segment, or None when it has to wait."""
        if not self.ready(index):
            return None
        step = self.program.steps[index]
        position = self.done[index]
        if step.origin < 0:
            segment = self._pool.take()
            frame = self._seal_for_hop(index, position, segment.view, sealer)
        else:
            kept = self._kept.pop((index, position), None)
            segment = kept or self._pool.take()
            seal = self._seal_as_origin if kept is None else self._forward
            frame = seal(index, position, segment, sealer)
        self._advance(index)
        return frame, segment

    def _seal_for_hop(self, index: int, position: int, view: memoryview, sealer: Sealer) -> memoryview:
        step = self.program.steps[index]
        each = self._each[step.chunk]
        payload = self._views[step.chunk][position * each : (position + 1) * each]
        length = len(payload)
        pack_header_into(
            view,
            0,
            _HOP,
            sealer.counter >> KEY_PHASE_SHIFT,
            self.program.ordinals[index],
            0,
            length,
            step.label,
            self._base + position,
            NO_ORIGIN,
            self.sequence,
            0,
            self._instance,
            self._call,
        )
        end = length + HOP_OVERHEAD
        self._check(step.chunk)
        sealer.seal_into(view[:HEADER_BYTES], payload, view[HEADER_BYTES:end])
        self._check(step.chunk)
        return view[:end]

    def _seal_as_origin(self, index: int, position: int, segment: Segment, sealer: Sealer) -> memoryview:
        step = self.program.steps[index]
        payload = self._bytes(step.chunk, position)
        counter = self._route.origin.take()
        header = self._header(
            _FORWARD, index, position, len(payload), sealer.counter >> KEY_PHASE_SHIFT, step.origin, counter
        )
        end = len(payload) + HOP_OVERHEAD
        segment.view[:HEADER_BYTES] = header
        self._check(step.chunk)
        self._route.origin.seal_into(counter, header[HOP_BYTES:], payload, segment.view[HEADER_BYTES:end])
        self._check(step.chunk)
        return _tag_for_hop(segment.view, end, sealer)

    def _forward(self, index: int, position: int, segment: Segment, sealer: Sealer) -> memoryview:
        """Pass on what was received: the ciphertext stays as it came, the hop's part of the header is written anew."""
        length = len(self._bytes(self.program.steps[index].chunk, position))
        hop = self._header(_FORWARD, index, position, 0, sealer.counter >> KEY_PHASE_SHIFT, 0, 0)[:HOP_BYTES]
        segment.view[:HOP_BYTES] = hop
        return _tag_for_hop(segment.view, length + HOP_OVERHEAD, sealer)

    def _header(
        self, kind: int, index: int, position: int, length: int, key_phase: int, origin: int, counter: int
    ) -> bytes:
        return pack_header(
            kind,
            key_phase,
            self.program.ordinals[index],
            0,
            length,
            self.program.steps[index].label,
            self._base + position,
            origin,
            self.sequence,
            counter,
            self._instance,
            self._call,
        )

    # -- receiving ---------------------------------------------------------------------------------------------------

    def expect(self, index: int, opener: Opener) -> tuple[bytes, int] | None:
        """The header that the next frame must have (its counter aside) and the length of the whole frame, or None when
        its place is not free yet."""
        if not self.ready(index):
            return None
        step = self.program.steps[index]
        position = self.done[index]
        length = len(self._bytes(step.chunk, position))
        key_phase = opener.counter >> KEY_PHASE_SHIFT
        if step.origin < 0:
            return self._header(_HOP, index, position, length, key_phase, NO_ORIGIN, 0), length + HOP_OVERHEAD
        header = self._header(_FORWARD, index, position, length, key_phase, step.origin, 0)
        return header, length + FORWARD_OVERHEAD

    def open_next(self, index: int, header: bytes, frame: memoryview, segment: Segment, opener: Opener) -> bool:
        """Open the frame of a RECV or REDUCE into place. True when the segment is kept here, to be passed on.

        `header` is the expected one, which the frame's is known to equal but for the counter of a forwarded one.
        """
        step = self.program.steps[index]
        position = self.done[index]
        kept = False
        if step.action is Action.REDUCE:
            self._reduce(step, position, header, frame, opener)
        elif step.origin < 0:
            self._check(step.chunk)
            opener.open_into(header, frame[HEADER_BYTES:], self._bytes(step.chunk, position))
            self._check(step.chunk)
        else:
            self._open_forwarded(index, position, bytes(frame[:HEADER_BYTES]), frame, opener)
            kept = self._keep_for_forwarding(index, position, segment)
        self._advance(index)
        return kept

    def _reduce(self, step: Step, position: int, header: bytes, frame: memoryview, opener: Opener) -> None:
        whole = self._tensors[step.chunk]
        each = self._each[step.chunk] // whole.element_size()
        target = whole[position * each : (position + 1) * each]
        beside = self._pool.take()
        opener.open_into(header, frame[HEADER_BYTES:], beside.view[: len(frame) - HOP_OVERHEAD])
        received = beside.typed(self._dtype)[: len(target)]
        operand = target if step.chunk == step.other else self._tensor(step.other, position)
        assert self._combine is not None
        self._check(step.chunk)
        self._check(step.other)
        if step.received_first:
            self._combine(received, operand, out=target)
        else:
            self._combine(operand, received, out=target)
        self._check(step.chunk)
        self._check(step.other)
        self._pool.give(beside)

    def _open_forwarded(self, index: int, position: int, header: bytes, frame: memoryview, opener: Opener) -> None:
        step = self.program.steps[index]
        target = self._bytes(step.chunk, position)
        end = len(frame) - TAG_BYTES
        try:
            opener.check(header + bytes(frame[end - TAG_BYTES : end]), frame[end:])
        except AuthenticationError:
            raise AuthenticationError("a forwarded frame does not authenticate on this hop") from None
        counter = int.from_bytes(header[40:48], "big")
        self._check(step.chunk)
        self._route.origin.open_into(step.origin, counter, header[HOP_BYTES:], frame[HEADER_BYTES:end], target)
        self._check(step.chunk)

    def _keep_for_forwarding(self, index: int, position: int, segment: Segment) -> bool:
        """Hand the segment to the SEND that passes it on; further SENDs get copies, since each rewrites the hop's part."""
        forwarders = self.program.forwarded_by[index]
        if not forwarders:
            return False
        for other in forwarders[1:]:
            copy = self._route.pool.take()
            copy.view[:] = segment.view
            self._kept[other, position] = copy
        self._kept[forwarders[0], position] = segment
        return True


def _nothing() -> None:
    return


def _tag_for_hop(view: memoryview, end: int, sealer: Sealer) -> memoryview:
    """Complete a forwarded frame: a tag for this hop over the header and the origin's tag."""
    view[end : end + TAG_BYTES] = sealer.tag(bytes(view[:HEADER_BYTES]) + bytes(view[end - TAG_BYTES : end]))
    return view[: end + TAG_BYTES]
