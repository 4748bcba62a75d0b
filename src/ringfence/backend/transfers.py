"""Point-to-point operations, and the monitored barrier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import profiler

from ringfence.backend import ranges
from ringfence.backend.base import GroupBase, one
from ringfence.backend.binding import CallMemory, bytes_of, dtype_code
from ringfence.backend.work import RingfenceWork
from ringfence.dataplane.buffers import as_bytes
from ringfence.dataplane.request import POINT_TO_POINT
from ringfence.device.call import caller_event
from ringfence.device.device_thread import thread_of
from ringfence.device.transfer import StagedTransfer
from ringfence.errors import CollectiveTimeoutError
from ringfence.link.frames import Call
from ringfence.runtime.point_to_point import Transfer

_BARRIER_ARRIVE, _BARRIER_GO, _EXCHANGE = -1, -2, -6  # users' tags are not negative; -3 to -5 are taken


class TransferMethods(GroupBase):
    """send, recv and the monitored barrier."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> RingfenceWork:
        (tensor,) = one(tensors)
        self._expect_peer(destination)
        _expect_tag(tag)
        stage = CallMemory()
        transfer = self._bound_transfer(stage, stage.input(tensor), tag, tensor)
        if stage.before is not None:
            stage.before()
        if profiler._is_profiler_enabled:
            ranges.record(self, "send", transfer, [tensor], [])
        return self._post(self._session.engine.send, transfer, destination, tensor)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> RingfenceWork:
        self._expect_peer(source)
        _expect_tag(tag)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> RingfenceWork:
        _expect_tag(tag)
        return self._receive(tensors, None, tag)

    recvAnysource = recv_anysource  # the name that torch's C++ code uses from 2.14 on

    def _receive(self, tensors: list[torch.Tensor], source: int | None, tag: int) -> RingfenceWork:
        (tensor,) = one(tensors)
        stage = CallMemory()
        transfer = self._bound_transfer(stage, stage.output(tensor), tag, tensor)
        transfer.copy_out = stage.after
        if profiler._is_profiler_enabled:
            ranges.record(self, "recv", transfer, [tensor], [tensor])
        return self._post(self._session.engine.receive, transfer, source, tensor)

    def _post(
        self, start: Callable[..., None], transfer: Transfer, peer: int | None, tensor: torch.Tensor
    ) -> RingfenceWork:
        """Have the engine's `send` or `receive` start a transfer with a peer; None: with any."""
        communicator = self._communicator
        self._loop.call_soon_threadsafe(lambda: start(communicator(), transfer, peer))
        return self._work([transfer], [tensor], wake=True)

    def _bound_transfer(self, stage: CallMemory, memory: torch.Tensor, tag: int, tensor: torch.Tensor) -> Transfer:
        """A transfer of host memory, or staged from or to a device."""
        if stage.device is None:
            return self._transfer(memory, tag, tensor)
        (bound,) = stage.device_tensors
        ready, thread = caller_event(stage.device), thread_of(stage.device)
        transfer = StagedTransfer(_call_of(memory, tag), float("inf"), None, bytes_of(memory), bound.reads)
        transfer.wait_timeout = self._timeout.total_seconds()
        transfer.stage(thread, bound, self._reports(transfer, transfer.resume), ready)
        return transfer

    def _transfer(self, memory: torch.Tensor, tag: int, keep: Any, deadline: float | None = None) -> Transfer:
        view = as_bytes(memory)
        limit = float("inf") if deadline is None else deadline
        transfer = Transfer(_call_of(memory, tag), limit, (keep, memory), view)
        if deadline is None:  # as with Gloo, the timeout starts with wait(): a recv may be posted long before its send
            transfer.wait_timeout = self._timeout.total_seconds()
        return transfer

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not arrive: every rank reports to rank 0, which then releases all."""
        limit = self._session.engine.clock() + float((timeout or self._timeout).total_seconds())
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._group_rank:
            self._plain_send(empty, 0, _BARRIER_ARRIVE, limit).wait()
            self._plain_receive(empty, 0, _BARRIER_GO, limit + 1).wait()
            return
        peers = range(1, self._group_size)
        arrivals = {peer: self._plain_receive(empty, peer, _BARRIER_ARRIVE, float("inf")) for peer in peers}
        missing = [peer for peer, work in arrivals.items() if not self._arrived(work, limit)]
        if missing:
            names = ", ".join(str(self._ranks[peer]) for peer in missing)
            error = CollectiveTimeoutError(f"monitored_barrier: worker {names} did not arrive in time")
            self._loop.call_soon_threadsafe(lambda: self._session.engine.fail(error, self._ranks[missing[0]]))
            self._loop.wake()
            raise error
        for peer in peers:
            self._plain_send(empty, peer, _BARRIER_GO, limit + 1).wait()

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send bytes to other ranks of this group and return what each of them sends, of the same length.

        Each message travels on the link of its two ranks, and nobody forwards it. Between workers on one machine that link is
        sealed only if the policy says so (`same_host`).
        """
        limit = self._session.engine.clock() + float(self._timeout.total_seconds())
        received = {rank: torch.empty(len(data), dtype=torch.uint8, device="cpu") for rank, data in messages.items()}
        works = [self._plain_receive(tensor, rank, _EXCHANGE, limit) for rank, tensor in received.items()]
        for rank, data in messages.items():
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            works.append(self._plain_send(sent, rank, _EXCHANGE, limit))
        for work in works:
            work.wait()
        return {rank: bytes(tensor.numpy()) for rank, tensor in received.items()}

    def _arrived(self, work: RingfenceWork, limit: float) -> bool:
        (request,) = work.requests
        self._loop.wait(request, max(0.0, limit - self._session.engine.clock()))
        if request.done:
            work.wait()
        return request.done

    def _plain_send(self, tensor: torch.Tensor, peer: int, tag: int, deadline: float) -> RingfenceWork:
        return self._post(self._session.engine.send, self._transfer(tensor, tag, tensor, deadline), peer, tensor)

    def _plain_receive(self, tensor: torch.Tensor, peer: int | None, tag: int, deadline: float) -> RingfenceWork:
        return self._post(self._session.engine.receive, self._transfer(tensor, tag, tensor, deadline), peer, tensor)


def _call_of(memory: torch.Tensor, tag: int) -> Call:
    return Call(POINT_TO_POINT, dtype=dtype_code(memory.dtype), elements=memory.numel(), tag=tag)


def _expect_tag(tag: int) -> None:
    if tag < 0:
        raise ValueError(f"tag {tag} is negative")
