"""A call on device tensors: the event it waits for, its tensors, and the event that its results follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringfence.device.device_thread import DeviceThread
from ringfence.device.tensors import DeviceTensor, MemoryChanged, Region
from ringfence.errors import RingfenceError, UnsupportedError
from ringfence.runtime.staging_times import CallTimes


class Reports(NamedTuple):
    """What a call reports to the progress loop; the device thread calls these."""

    describe: Callable[[], str]  #   the worker and the call, for messages
    wake: Callable[[], None]  #      the progress loop has a request to watch; waking it would delay the caller
    available: Callable[[], None]  # a pass or a piece has been copied to the host
    complete: Callable[[], None]  #  the last copy to the device has been issued
    failed: Callable[[Callable[[], RingfenceError]], None]  # with a function for the progress loop that makes the error


def caller_event(device: torch.device) -> torch.Event:
    """Record an event on the caller's current stream: the call's copies follow it.

    Raises:
        UnsupportedError: The stream is being captured into a graph. The network cannot be part of a graph.
    """
    stream = torch.accelerator.current_stream(device)
    if stream.is_capturing():
        raise UnsupportedError(
            f"a collective cannot be captured into a graph: the current stream of {device} is being captured. "
            "Call it outside of the capture"
        )
    event = torch.Event(device)
    event.record(stream)
    return event


class StagedCall:
    """The state that collectives and transfers share. Methods run in the device thread unless they say otherwise."""

    def __init__(
        self, thread: DeviceThread, tensors: Sequence[DeviceTensor], reports: Reports, ready: torch.Event
    ) -> None:
        self.thread = thread
        self.tensors = tensors
        self.uploaded: torch.Event | None = None  # after it the results are in the tensors; None: nothing is written
        self._reports = reports
        self._ready: torch.Event | None = ready  # None: reached
        self._begun = False
        self._abandoned = False
        self._last_up: torch.Event | None = None  # after the call's last copy to the device
        self._on_ready: list[Callable[[], None]] = []
        self._times: CallTimes | None = None

    @property
    def device(self) -> torch.device:
        return self.thread.device

    @property
    def reads(self) -> bool:
        """Whether the call copies anything to the host, or has no tensors and only waits for the caller's stream."""
        return not self.tensors or any(tensor.reads for tensor in self.tensors)

    # -- for any thread ----------------------------------------------------------------------------------------------

    def order_current_stream(self) -> None:
        """Let the current stream of the calling thread wait for the results."""
        if self.uploaded is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.uploaded)

    def is_finished_on_device(self) -> bool:
        """Return whether the results are in the tensors."""
        return self.uploaded is None or bool(self.uploaded.query())

    def abandon(self) -> None:
        """Stop after a failure: nothing further is copied. Memory that a copy in progress uses is kept until its end."""
        self._abandoned = True
        self.thread.submit(self, self._drop)

    # -- for the device thread ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Report an error of the device or of the tensors, which ends the session."""
        if not self._abandoned:
            self._abandoned = True
            self._reports.failed(lambda: self._known_error(error))

    def _known_error(self, error: BaseException) -> RingfenceError:
        """Name the worker and the call. For the progress loop."""
        if isinstance(error, RingfenceError):
            return error
        if isinstance(error, MemoryChanged):
            return error.lease.changed(self._reports.describe())
        made = RingfenceError(f"{self._reports.describe()}: a copy between the host and {self.device} failed: {error}")
        made.__cause__ = error
        return made

    def watch_caller(self) -> None:
        """Note when the caller's stream has reached the call."""
        assert self._ready is not None
        if self._ready.query():
            self._on_reached()
        else:
            self.thread.when(self._ready, self, self._on_reached)

    def _on_reached(self) -> None:
        self._ready = None
        if self._times is not None:
            self._times.reached()
        waiting, self._on_ready = self._on_ready, []
        for task in waiting:
            task()

    def caller_reached(self, continuation: Callable[[], None]) -> bool:
        """Return whether the caller's stream has reached the call; if not, continue when it has."""
        if self._ready is None:
            return True
        self._on_ready.append(continuation)
        return False

    def begin(self) -> None:
        """Make the flat memory of the tensors. Temporary copies belong to `down`, so `up` waits for their allocation."""
        if self._begun:
            return
        self._begun = True
        with self.thread.down:
            for tensor in self.tensors:
                tensor.begin()
        if any(tensor.is_copied for tensor in self.tensors):
            self.order_up_after_down()

    def order_up_after_down(self) -> None:
        """Let the stream `up` wait for what is queued on `down`."""
        self.thread.up.wait_event(self.thread.record(self.thread.down))

    def copy_down(self, regions: Sequence[Region], then: Callable[[], None]) -> None:
        """Copy regions to host memory, and continue when they are there."""
        if not regions:
            then()
            return
        with self.thread.down:
            for region in regions:
                region.to_host()

        def copied() -> None:
            for region in regions:  # memory that was freed meanwhile may have been another tensor's during the copy
                region.check()
            then()

        event = self.thread.record(self.thread.down)
        if event.query():  # in confidential mode a copy blocks this thread, so it has ended
            copied()
        else:
            self.thread.when(event, self, copied)

    def copy_up(self, regions: Sequence[Region], then: Callable[[], None]) -> None:
        """Copy host memory to regions, and continue when the host memory is no longer read."""
        if not regions:
            then()
            return
        with self.thread.up:
            for region in regions:
                region.to_device()
        self._last_up = self.thread.record(self.thread.up)
        self.thread.when(self._last_up, self, then)

    def end(self) -> None:
        """Record the event that the results follow, and report completion. The tensors are kept until it is reached."""
        written = [tensor for tensor in self.tensors if tensor.writes]
        if not written:
            self.release()
        else:
            copied = [tensor for tensor in written if tensor.is_copied]
            with self.thread.up:
                for tensor in copied:
                    tensor.copy_back()
            last = None if copied else self._last_up
            self.uploaded = self.thread.record(self.thread.up) if last is None else last
            self.thread.when(self.uploaded, self, self.release)
        self._reports.complete()

    def release(self) -> None:
        """Drop the references to the tensors."""
        self.tensors = ()

    def _drop(self) -> None:
        """Keep the tensors until the copies in progress have ended."""
        thread = self.thread
        thread.when(thread.record(thread.down), self, lambda: thread.when(thread.record(thread.up), self, self.release))
