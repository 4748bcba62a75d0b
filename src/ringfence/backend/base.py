"""Base of the process group: the properties that torch queries, and the submission of requests."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ringfence.backend import ranges
from ringfence.backend.binding import CallMemory, bytes_of, dtype_code, reduction_of
from ringfence.backend.default_backend import register_default_backend
from ringfence.backend.work import RingfenceWork
from ringfence.collectives import Buffer, Collective, Passes, Schedule, chooser
from ringfence.dataplane.buffers import as_bytes
from ringfence.dataplane.request import CollectiveRequest, Request, first_check
from ringfence.device.call import Reports, caller_event
from ringfence.device.collective import CallQueue, StagedCollective
from ringfence.device.device_thread import thread_of
from ringfence.errors import UnsupportedError
from ringfence.link.frames import Call
from ringfence.machines import within
from ringfence.session.session import Session


class GroupBase(dist.ProcessGroup):  # type: ignore[misc]  # torch is untyped here
    """A process group of one session."""

    def __init__(
        self,
        session: Session,
        ranks: tuple[int, ...],
        timeout: timedelta,
        name: str,
        store: Any = None,
        holds_session: bool = False,
    ) -> None:
        engine = session.engine
        super().__init__(ranks.index(engine.rank), len(ranks))
        register_default_backend(self)
        self._session = session
        self._loop = session.loop
        self._ranks = ranks
        self._timeout = timeout
        self._name = name
        self._wire_name = session.wire_name(name, ranks)
        self._description = "undefined"
        self._store = store
        self._coalescing: list[RingfenceWork] | None = None
        self._call_queues: dict[torch.device, CallQueue] = {}
        self._in_order = threading.RLock()
        # The driving thread adds the group when the first operation reaches it.
        self._communicator = functools.cache(lambda: engine.add_communicator(self._wire_name, ranks))
        self._group_rank = ranks.index(engine.rank)
        self._group_size = len(ranks)
        machines = within(engine.context.machines, ranks)
        self._choice = chooser(self._group_size, self._group_rank, engine.table, machines)
        self._holds_session = holds_session
        if holds_session:
            session.hold()

    # -- properties that torch queries -------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "ringfence"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    supports_splitting = False  # by torch's split_group; the method `split_group` works

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator()
        return [torch.device("cpu"), *([] if accelerator is None else [torch.device(accelerator.type)])]

    def _get_backend(self, device: torch.device) -> GroupBase:
        return self

    get_backend = _get_backend  # the public name from torch 2.14 on

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        """Create a group for `torch.distributed.new_group`; None if this worker is not a member.

        Its links are sealed, whatever backend a script asks for, except where `_permitted` returns another group.
        """
        members = tuple(range(self._session.engine.world_size)) if ranks is None else tuple(ranks)
        if self._session.engine.rank not in members:
            return None
        group = type(self)(self._session, members, timeout or self._timeout, group_name or "")
        group.setGroupDesc(group_desc or "undefined")
        return self._permitted(group, backend)

    def _permitted(self, group: Any, backend: str | None) -> Any:
        """Return the group that a script gets: the sealed one."""
        return group

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Create a group of some ranks of this group."""
        return self.new_group([self._ranks[rank] for rank in ranks], timeout, opts, group_name, group_desc)

    def abort(self) -> None:
        """End the group without waiting for collectives in progress."""
        self._end(self._session.engine.remove_communicator, lambda: self._session.leave(seconds=0.0))

    def shutdown(self) -> None:
        """End the group after the collectives in progress."""
        self._end(self._session.engine.destroy_communicator, lambda: self._session.leave(finish=True))

    def _end(self, end: Callable[[Any], None], leave: Callable[[], None]) -> None:
        """End the session with the last group that holds it; any other group only closes its own links."""
        last = self._holds_session and self._session.let_go()
        self._holds_session = False
        if last:
            leave()
        elif not self._session.over:  # also if it was never used: later connections to it are refused
            self._loop.call_soon_threadsafe(lambda: end(self._communicator()))
            self._loop.wake()

    # -- submitting --------------------------------------------------------------------------------------------------

    def _seconds(self, options: Any) -> float:
        """The timeout of a call in seconds."""
        timeout = getattr(options, "timeout", None)
        seconds = 0.0 if timeout is None else timeout.total_seconds()
        return float(seconds if seconds > 0 else self._timeout.total_seconds())

    def _submit(
        self,
        kind: Collective,
        stage: CallMemory,
        parts: dict[Buffer, list[torch.Tensor]],
        options: Any,
        outputs: list[Any],
        *,
        reduction: Any = None,
        root: int = 0,
        elements: int = 0,
        nbytes: int = 0,
        even: bool = True,
    ) -> RingfenceWork:
        """Select the schedule, bind it to memory and submit it."""
        # Without generators where C does the same: a call of 4 KiB is little but Python.
        first = next(itertools.chain.from_iterable(parts.values()), None)
        dtype = torch.uint8 if first is None else first.dtype
        code, combine, average = reduction_of(reduction, dtype) if reduction is not None else (0, None, False)
        engine, size = self._session.engine, self._group_size
        whole, longest = set(map(len, parts.values())) <= {1}, _longest(kind, size, parts)
        schedule, passes = self._choice(kind, root, nbytes, longest, average, even, whole, stage.device is not None)
        call = Call(kind, code, dtype_code(dtype), schedule.identifier, root, elements)
        timeout, now = self._seconds(options), engine.clock()
        if stage.device is None:
            bound = {buffer: list(map(as_bytes, tensors)) for buffer, tensors in parts.items()}
            request = CollectiveRequest(call, now + timeout, (parts, outputs), schedule, passes, bound, dtype, combine)
            request.copy_in, request.copy_out = stage.before, stage.after
        else:
            request = CollectiveRequest(call, now + timeout, None, schedule, passes, {}, dtype, combine)
        request.timeout, request.next_check = timeout, now + first_check(timeout)
        if profiler._is_profiler_enabled:
            ranges.record(self, kind.name.lower(), request, stage.given, outputs)
        communicator = self._communicator
        staged = None if stage.device is None else self._stage_collective(request, stage, parts, schedule, passes)
        if staged is None:
            self._loop.call_soon_threadsafe(lambda: engine.submit(communicator(), request))
        else:
            with self._in_order:  # the calls of several threads have one order in both queues
                self._loop.call_soon_threadsafe(lambda: engine.submit(communicator(), request))
                staged.submit(self._call_queues.setdefault(staged.device, CallQueue()))
        return self._work([request], outputs, wake=staged is None and getattr(options, "asyncOp", True))

    def _stage_collective(
        self,
        request: CollectiveRequest,
        stage: CallMemory,
        parts: dict[Buffer, list[torch.Tensor]],
        schedule: Schedule,
        passes: Passes,
    ) -> StagedCollective:
        """Bind a collective on device tensors to passes that the device's thread copies."""
        assert stage.device is not None
        ready, thread = caller_event(stage.device), thread_of(stage.device)
        slices = {buffer: stage.slices_of(outlines) for buffer, outlines in parts.items()}
        engine, communicator = self._session.engine, self._communicator
        kind = Collective(request.call.operation)
        reports = self._reports(request, lambda: engine.call_soon(communicator().resume))
        staged = StagedCollective(thread, stage.device_tensors, reports, ready, kind, schedule, passes, slices)
        request.stage(staged)
        return staged

    def _reports(self, request: Request, resume: Callable[[], None]) -> Reports:
        loop, engine = self._loop, self._session.engine
        return Reports(
            describe=lambda: f"worker {engine.rank}: {request.describe()}",
            wake=loop.wake,
            available=lambda: loop.call_unless_leaving(resume),
            complete=lambda: loop.call_unless_leaving(lambda: engine.finish(request)),
            failed=lambda error: loop.call_unless_leaving(lambda: engine.fail(error(), engine.rank)),
        )

    def _work(self, requests: list[Any], outputs: list[Any], wake: bool) -> RingfenceWork:
        if wake:
            self._loop.wake()
        work = RingfenceWork(self._loop, requests, outputs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _finished(self, outputs: list[Any]) -> RingfenceWork:
        """The Work of a call that is already complete."""
        return self._work([], outputs, wake=False)

    def _together(self, works: Sequence[RingfenceWork]) -> RingfenceWork:
        requests = [request for work in works for request in work.requests]
        return RingfenceWork(self._loop, requests, [tensor for work in works for tensor in work.outputs])

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> RingfenceWork:
        works, self._coalescing = self._coalescing or [], None
        return self._together(works)

    # The names that torch's C++ code uses from 2.14 on.
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing

    # -- checks ------------------------------------------------------------------------------------------------------

    def _expect_one_per_rank(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self._group_size:
            raise ValueError(f"expected one {what} tensor for each of the {self._group_size} ranks, got {len(tensors)}")

    def _expect_peer(self, rank: int) -> None:
        if not 0 <= rank < self._group_size or rank == self._group_rank:
            raise ValueError(f"rank {rank} is not another rank of this group of {self._group_size}")


_WHOLE: Final = {Collective.REDUCE_SCATTER: Buffer.INPUT, Collective.ALL_GATHER: Buffer.OUTPUT}


def _longest(kind: Collective, size: int, parts: dict[Buffer, list[torch.Tensor]]) -> int:
    """The bytes of a collective's tensor, or of its longest part, as they are reduced and sent."""
    whole, longest = _WHOLE.get(kind), 0
    for buffer, tensors in parts.items():
        divided = size if buffer is whole and len(tensors) == 1 else 1
        longest = max(longest, max(map(bytes_of, tensors), default=0) // divided)
    return longest


def one(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if len(tensors) != 1:
        raise UnsupportedError(f"one tensor per call is supported, {len(tensors)} were given")
    return tensors
