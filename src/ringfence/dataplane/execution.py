"""The execution of a schedule: one pass of a collective over its memory, segment by segment.

    segment of a SEND     dependencies done -> seal, or reuse the received ciphertext -> the outbox writes it
    segment of a RECV     the inbox reads it -> open in place -> keep the ciphertext if it is forwarded
    segment of a REDUCE   the inbox reads it -> open into a buffer -> reduce into the local operand

Each step counts its finished segments. A step may process segment s when the steps it depends on have finished theirs.
Finishing a segment wakes the links of the dependent steps. Nothing here blocks or uses a socket. The compiled data plane
implements the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ringfence.collectives.passes import Views
from ringfence.collectives.schedule import Action, Buffer, Step
from ringfence.dataplane.buffers import Combine, Pool, Segment, as_tensor, divide, lease_of
from ringfence.dataplane.regions import Region
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import KEY_PHASE_SHIFT, SHARED_FROM_BYTES, TAG_BYTES
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

    from ringfence.dataplane.endpoint import Endpoint
    from ringfence.dataplane.program import Program
    from ringfence.dataplane.request import Request
    from ringfence.link.seal import OriginKeys
    from ringfence.link.unsealed import AnyOpener, AnySealer

# Looking up an enum member would cost time on every frame.
_HOP, _FORWARD, _SHARED = int(Type.HOP), int(Type.FORWARD), int(Type.SHARED)


class Route(Protocol):
    """The endpoints of a communicator, and what its frames carry."""

    @property
    def size(self) -> int: ...
    @property
    def instance(self) -> bytes: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def origin(self) -> OriginKeys: ...
    def outbox(self, peer: int, /) -> Endpoint: ...
    def inbox(self, peer: int, /) -> Endpoint: ...


class Pass(NamedTuple):
    """One pass of a collective: the call, the slices of its buffers, and the reduction."""

    sequence: int  # number of the call in its communicator
    call: bytes  #   the packed call, carried by every header
    parts: Mapping[Buffer, Views]
    dtype: torch.dtype
    combine: Combine | None
    first_segment: int = 0  # segments of earlier passes: segments are numbered over the whole collective
    keep: Any = None  #       owner of the memory of `parts`


class Execution:
    """A program, the memory of each chunk, and the progress of each step."""

    def __init__(
        self,
        route: Route,
        program: Program,
        work: Pass,
        views: list[memoryview],
        keeper: Any,
        finished: Callable[[], None],
    ) -> None:
        self._route = route
        self._pool = route.pool
        self._instance = route.instance
        self.program = program
        self.sequence = work.sequence
        self._call = work.call
        self._dtype = dtype = work.dtype
        self._combine = work.combine
        self._first_segment = work.first_segment
        self._finished = finished
        self._views = views
        self._leases = [lease_of(view) for view in views]
        self._keep = keeper
        self._tensors = {chunk: as_tensor(self._views[chunk], dtype) for chunk in program.typed}
        count = len(program.steps)
        self.done = [0] * count
        self._segment_bytes = [segment_bytes(len(view)) for view in self._views]
        self.segments = [segment_count(len(self._views[step.chunk])) for step in program.steps]
        self._steps_left = count
        self._ciphertexts: dict[tuple[int, int], Segment] = {}  # (step, segment) -> ciphertext to forward
        self.links: list[Any] = [None] * count
        self.operation: Request

    # -- start and progress ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Queue every message on its link, in program order, and execute the local steps that are ready."""
        route = self._route
        if not self._steps_left:
            self._end()
            return
        local = []
        for index, step in enumerate(self.program.steps):
            if step.action is Action.SEND:
                link: Any = route.outbox(step.peer)
            elif step.action is Action.RECV or step.action is Action.REDUCE:
                link = route.inbox(step.peer)
            else:
                local.append(index)
                continue
            self.links[index] = link
            link.queue.append((self, index))
            link.wake()
        for index in local:
            self._do_local(index)

    def _end(self) -> None:
        finished, self._finished = self._finished, lambda: None  # the callback refers to this object: break the cycle
        finished()

    def ready(self, index: int) -> bool:
        """Return whether the next segment of a step can be processed."""
        segment = self.done[index]
        for needed, by_segment in self.program.dependencies[index]:
            if self.done[needed] < (segment + 1 if by_segment else self.segments[needed]):
                return False
        return True

    def _advance(self, index: int) -> None:
        self.done[index] += 1
        if self.done[index] == self.segments[index]:
            self._steps_left -= 1
        for other in self.program.wakes[index]:
            link = self.links[other]
            if link is not None:
                link.wake()
            elif self.program.steps[other].action >= Action.COPY:
                self._do_local(other)
        if not self._steps_left:
            self._steps_left = -1
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
        """Raise TensorChangedError if the storage of a chunk was resized or moved.

        Called before each use of the memory, and after each use that released the interpreter's lock.
        """
        lease = self._leases[chunk]
        if lease is not None and not lease.is_intact():
            self.operation.memory_changed(lease)

    def _bytes(self, chunk: int, segment: int) -> memoryview:
        each = self._segment_bytes[chunk]
        return self._views[chunk][segment * each : (segment + 1) * each]

    def _tensor(self, chunk: int, segment: int) -> torch.Tensor:
        whole = self._tensors[chunk]
        each = self._segment_bytes[chunk] // whole.element_size()
        return whole[segment * each : (segment + 1) * each]

    def overhead(self, index: int) -> int:
        """Return the bytes that a frame of this step adds to its payload."""
        return HOP_OVERHEAD if self.program.steps[index].origin < 0 else FORWARD_OVERHEAD

    # -- sending -----------------------------------------------------------------------------------------------------

    def seal_next(self, index: int, sealer: AnySealer) -> tuple[memoryview, Segment] | None:
        """Return the next frame of a SEND, sealed, with its segment; None if the step is not ready."""
        if not self.ready(index):
            return None
        step = self.program.steps[index]
        position = self.done[index]
        if step.origin < 0:
            segment = self._pool.take()
            frame = self._seal_for_hop(index, position, segment.view, sealer)
        else:
            kept = self._ciphertexts.pop((index, position), None)
            segment = kept or self._pool.take()
            seal = self._seal_as_origin if kept is None else self._forward
            frame = seal(index, position, segment, sealer)
        self._advance(index)
        return frame, segment

    def _seal_for_hop(self, index: int, position: int, view: memoryview, sealer: AnySealer) -> memoryview:
        step = self.program.steps[index]
        payload = self._bytes(step.chunk, position)
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
            self._first_segment + position,
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

    def _seal_as_origin(self, index: int, position: int, segment: Segment, sealer: AnySealer) -> memoryview:
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

    def _forward(self, index: int, position: int, segment: Segment, sealer: AnySealer) -> memoryview:
        """Forward received ciphertext unchanged; only the hop's part of the header is rewritten."""
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
            self._first_segment + position,
            origin,
            self.sequence,
            counter,
            self._instance,
            self._call,
        )

    # -- receiving ---------------------------------------------------------------------------------------------------

    def is_shared(self, index: int) -> bool:
        """Return whether the next segment of a step passes through shared memory, where there is some."""
        step = self.program.steps[index]
        return step.origin < 0 and len(self._bytes(step.chunk, self.done[index])) >= SHARED_FROM_BYTES

    def share_next(self, index: int, slot: int, target: memoryview, sealer: AnySealer) -> bytes:
        """Copy the next segment of a SEND to shared memory; return its frame, which is a header."""
        step, position = self.program.steps[index], self.done[index]
        payload = self._bytes(step.chunk, position)
        self._check(step.chunk)
        target[: len(payload)] = payload
        header = self._header(
            _SHARED, index, position, len(payload), sealer.counter >> KEY_PHASE_SHIFT, NO_ORIGIN, slot
        )
        self._advance(index)
        return header

    def open_shared(self, index: int, region: Region, slot: int) -> int:
        """Copy a segment from the peer's shared memory, or add it. Return its length."""
        if slot >= region.count:
            raise ProtocolError("a peer named a part of its shared memory that does not exist")
        step, position = self.program.steps[index], self.done[index]
        target = self._bytes(step.chunk, position)
        received = region.slot(slot, len(target))
        self._check(step.chunk)
        if step.action is Action.REDUCE:
            beside = self._pool.take()
            beside.view[: len(target)] = received
            self._combine_received(step, position, beside)
            self._pool.give(beside)
        else:
            target[:] = received
        self._advance(index)
        return len(target)

    def expect(self, index: int, opener: AnyOpener, shared: bool = False) -> tuple[bytes, int] | None:
        """Return the expected header of the next frame (its counter aside) and the frame's length; None if not ready."""
        if not self.ready(index):
            return None
        step = self.program.steps[index]
        position = self.done[index]
        length = len(self._bytes(step.chunk, position))
        key_phase = opener.counter >> KEY_PHASE_SHIFT
        if shared and self.is_shared(index):
            return self._header(_SHARED, index, position, length, key_phase, NO_ORIGIN, 0), HEADER_BYTES
        if step.origin < 0:
            return self._header(_HOP, index, position, length, key_phase, NO_ORIGIN, 0), length + HOP_OVERHEAD
        header = self._header(_FORWARD, index, position, length, key_phase, step.origin, 0)
        return header, length + FORWARD_OVERHEAD

    def open_next(self, index: int, header: bytes, frame: memoryview, segment: Segment, opener: AnyOpener) -> bool:
        """Open the frame of a RECV or REDUCE in place. Return True if the segment is kept for forwarding.

        `header` is the expected header. The frame's header equals it, except for the counter of a forwarded frame.
        """
        step = self.program.steps[index]
        position = self.done[index]
        kept = False
        if step.action is Action.REDUCE:
            beside = self._pool.take()
            opener.open_into(header, frame[HEADER_BYTES:], beside.view[: len(frame) - HOP_OVERHEAD])
            self._combine_received(step, position, beside)
            self._pool.give(beside)
        elif step.origin < 0:
            self._check(step.chunk)
            opener.open_into(header, frame[HEADER_BYTES:], self._bytes(step.chunk, position))
            self._check(step.chunk)
        else:
            self._open_forwarded(index, position, bytes(frame[:HEADER_BYTES]), frame, opener)
            kept = self._keep_for_forwarding(index, position, segment)
        self._advance(index)
        return kept

    def _combine_received(self, step: Step, position: int, beside: Segment) -> None:
        target = self._tensor(step.chunk, position)
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

    def _open_forwarded(self, index: int, position: int, header: bytes, frame: memoryview, opener: AnyOpener) -> None:
        step = self.program.steps[index]
        target = self._bytes(step.chunk, position)
        end = len(frame) - TAG_BYTES
        try:
            opener.check(frame[:end], frame[end:])
        except AuthenticationError:
            raise AuthenticationError("a forwarded frame does not authenticate on this hop") from None
        counter = int.from_bytes(header[40:48], "big")
        self._check(step.chunk)
        self._route.origin.open_into(step.origin, counter, header[HOP_BYTES:], frame[HEADER_BYTES:end], target)
        self._check(step.chunk)

    def _keep_for_forwarding(self, index: int, position: int, segment: Segment) -> bool:
        """Give the segment to the SEND that forwards it; further SENDs get copies, since each rewrites the hop's part."""
        forwarders = self.program.forwarded_by[index]
        if not forwarders:
            return False
        for other in forwarders[1:]:
            copy = self._route.pool.take()
            copy.view[:] = segment.view
            self._ciphertexts[other, position] = copy
        self._ciphertexts[forwarders[0], position] = segment
        return True


def _tag_for_hop(view: memoryview, end: int, sealer: AnySealer) -> memoryview:
    """Complete a forwarded frame with this hop's tag."""
    view[end : end + TAG_BYTES] = sealer.tag(view[:end])
    return view[: end + TAG_BYTES]
