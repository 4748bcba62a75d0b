"""The Work that a collective returns, and the future that DDP uses.

It follows two rules of torch 2.13. A future must fail through a callback that raises: DDP treats a future that holds an
exception as a success, and then crashes. The thread that completes a future runs its callbacks, which may wait for further
collectives: so futures complete on their own thread, in order, never on the progress thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ringfence.dataplane.request import Request
from ringfence.device.device_thread import thread_of
from ringfence.errors import CollectiveTimeoutError, RingfenceError
from ringfence.log import LOGGER as _log
from ringfence.runtime.progress import ProgressLoop


class _Futures:
    """The thread on which futures complete."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete(self, callback: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ringfence-futures", daemon=True)
            self._thread.start()
        self._queue.put(callback)

    def forget(self) -> None:
        """Reset in a forked child, which has neither the thread nor futures to complete."""
        self._queue = queue.SimpleQueue()
        self._thread = None

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            try:
                self._queue.get()()
            except Exception:  # without this thread later futures would hang
                _log.exception("a callback of a ringfence future failed")


_futures = _Futures()
os.register_at_fork(after_in_child=_futures.forget)


def fresh(error: RingfenceError) -> RingfenceError:
    """Copy an error in order to raise it: several threads may raise the same failure."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


class RingfenceWork(dist.Work):  # type: ignore[misc]  # torch is untyped here
    """One or several requests that complete together, and their output tensors."""

    def __init__(self, loop: ProgressLoop, requests: Sequence[Request], outputs: list[Any]) -> None:
        super().__init__()
        self._loop = loop
        self.requests = requests
        self.outputs = outputs
        self._future: Any = None
        self._device_error: Exception | None = None  # of the completion of the future

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        limit = time.monotonic() + seconds if seconds > 0 else float("inf")
        if limit == float("inf"):
            self._begin_to_wait()
        for request in self.requests:
            if not self._loop.wait(request, limit - time.monotonic()):
                raise CollectiveTimeoutError(f"{request.describe()} is not finished after {seconds} s")
            if request.error is not None:
                raise fresh(request.error)
        for request in self.requests:
            if request.staging is not None:
                request.staging.order_current_stream()
        return True

    def _begin_to_wait(self) -> bool:
        """Start the timeouts of sends and recvs that have not started. Returns whether there were any."""
        engine = self._loop.engine
        begun = False
        for request in self.requests:
            if request.wait_timeout < float("inf") and not request.done:
                timeout, request.wait_timeout = request.wait_timeout, float("inf")
                self._loop.call_soon_threadsafe(
                    partial(engine.requests.set_deadline, request, engine.clock() + timeout, timeout)
                )
                begun = True
        return begun

    def get_future(self) -> Any:
        if self._future is None:
            if self._begin_to_wait():
                self._loop.wake()
            if _futures.is_current():
                self._settle()
            self._future = self._make_future()
        return self._future

    def _settle(self) -> None:
        """Wait for the requests: in a callback, a future that completes later would wait for this thread."""
        for request in self.requests:
            self._loop.wait(request)

    def _make_future(self) -> Any:
        devices = sorted({request.staging.device for request in self.requests if request.staging}, key=str)
        base: Any = Future(devices=devices) if devices else Future()
        ended = itertools.count(1)  # atomic; a lock could be held by the code that a signal handler interrupted
        settled = all(request.done for request in self.requests)

        def one_ended() -> None:
            last = next(ended) == len(self.requests)
            if last and settled:
                self._complete(base, devices)
            elif last:
                _futures.complete(lambda: self._complete(base, devices))

        def outcome(_: Any) -> list[Any]:
            self._raise()
            return self.outputs or [torch.empty(0, device="cpu")]  # DDP crashes on an empty list

        result = base.then(outcome)
        if not self.requests:
            base.set_result(None)
        for request in self.requests:
            request.when_done(one_ended)
        return result

    def _complete(self, base: Any, devices: Sequence[torch.device]) -> None:
        """Complete a future. torch orders its callbacks after the streams that are current here, and only for the devices
        of tensors in the value: so these streams follow the copies to the device, and the value holds the outputs."""
        try:
            with contextlib.ExitStack() as streams:
                for device in devices:
                    streams.enter_context(thread_of(device).completion)
                for request in self.requests:
                    if request.staging is not None:
                        request.staging.order_current_stream()
                base.set_result(self.outputs if devices else None)
        except Exception as error:  # of the device: a future that never completes would hang its waiters
            if base.done():
                raise
            self._device_error = error
            base.set_result(None)

    def _raise(self) -> None:
        for request in self.requests:
            if request.error is not None:
                raise fresh(request.error)
        if self._device_error is not None:
            raise RingfenceError(f"the device failed after a collective: {self._device_error}") from self._device_error

    def is_completed(self) -> bool:
        return all(request.done and _is_on_device(request) for request in self.requests)

    def is_success(self) -> bool:
        return all(request.done and request.error is None for request in self.requests)

    def exception(self) -> Any:
        return next((request.error for request in self.requests if request.error is not None), None)

    def result(self) -> list[Any]:
        self.wait()
        return self.outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.requests[0].source

    _source_rank = source_rank


def _is_on_device(request: Request) -> bool:
    """Whether the results are in the tensors of their device; true for host tensors."""
    return request.staging is None or request.staging.is_finished_on_device()
