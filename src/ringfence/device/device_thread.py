"""The thread that issues all copies of one device, and polls the events that its calls wait for.

It never waits for a single event: a call may become ready only after a later call of another group has completed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch

from ringfence.device.slots import SlotRing
from ringfence.runtime.gil_switch import keep_timers_exact

_SHORTEST_POLL: Final = 100e-6
_LONGEST_POLL: Final = 1e-3
_POLL_SHARE: Final = 4  # an event is polled again after a quarter of the time it has been waited for


class Owner(Protocol):
    """The call that a task belongs to. It is told of an error that the task raises."""

    def fail(self, error: BaseException, /) -> None: ...


class _Task(NamedTuple):
    owner: Owner
    run: Callable[[], None]


class _Pending(NamedTuple):
    event: torch.Event
    since: float
    task: _Task


class DeviceThread:
    """The streams, slots and pending events of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of high priority: they only copy, and the streams that scripts get from torch's pool are others.
        self.down = torch.Stream(device, priority=-1)
        self.up = torch.Stream(device, priority=-1)
        self.completion = torch.Stream(device, priority=-1)  # on which futures complete
        self.slots = SlotRing()
        self.waiting_for_slots: dict[object, _Task] = {}  # called when a slot was returned
        self._tasks: deque[_Task] = deque()
        self._wake = threading.Lock()  # released by `submit`. SimpleQueue.get may miss a timeout as short as these
        self._wake.acquire()
        self._stopping = False
        self._pending: list[_Pending] = []
        self._thread = threading.Thread(target=self._run, name=f"ringfence-{device}", daemon=True)
        self._thread.start()

    # -- for any thread ----------------------------------------------------------------------------------------------

    def submit(self, owner: Owner, run: Callable[[], None]) -> None:
        """Run a task in the device thread, after those submitted before it."""
        self._tasks.append(_Task(owner, run))
        self._release()

    def stop(self) -> None:
        """End the thread, at exit: what it has not begun is not done."""
        self._stopping = True
        self._release()
        self._thread.join(timeout=2.0)

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has not used the last release yet
            self._wake.release()

    # -- for the device thread ---------------------------------------------------------------------------------------

    def when(self, event: torch.Event, owner: Owner, run: Callable[[], None]) -> None:
        """Run a task once the device has reached an event."""
        self._pending.append(_Pending(event, time.monotonic(), _Task(owner, run)))

    def is_wanted(self) -> bool:
        """Return whether other tasks wait for this thread."""
        return bool(self._tasks)

    def record(self, stream: torch.Stream) -> torch.Event:
        """Record an event on a stream."""
        event = torch.Event(self.device)
        event.record(stream)
        return event

    def when_slot_returned(self, key: object, owner: Owner, run: Callable[[], None]) -> None:
        """Run a task once a slot was returned. A later call with the same key replaces it."""
        self.waiting_for_slots[key] = _Task(owner, run)

    def slot_returned(self) -> None:
        """Let the calls that wait for a slot continue."""
        waiting, self.waiting_for_slots = self.waiting_for_slots, {}
        for task in waiting.values():
            _execute(task)

    def _run(self) -> None:
        keep_timers_exact()
        torch.set_grad_enabled(False)
        with torch.inference_mode():  # tensors of inference mode may be written only in it
            torch.accelerator.set_device_index(self.device.index)
            while not self._stopping:
                self._wake.acquire(timeout=self._poll_interval())
                while self._tasks:
                    _execute(self._tasks.popleft())
                self._poll()

    def _poll_interval(self) -> float:
        if not self._pending:
            return -1  # until a task is submitted
        youngest = time.monotonic() - self._pending[-1].since
        return min(_LONGEST_POLL, max(_SHORTEST_POLL, youngest / _POLL_SHARE))

    def _poll(self) -> None:
        """Run the tasks of the events that have been reached. They may add further events."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for each in pending:
            try:
                reached = each.event.query()
            except Exception as error:  # of the device: every later query would raise it again
                each.task.owner.fail(error)
                continue
            if reached:
                _execute(each.task)
            else:
                self._pending.append(each)


def _execute(task: _Task) -> None:
    try:
        task.run()
    except Exception as error:  # without this thread later calls would hang
        task.owner.fail(error)


_threads: dict[torch.device, DeviceThread] = {}
_of_parent: list[DeviceThread] = []
_lock = threading.Lock()


def thread_of(device: torch.device) -> DeviceThread:
    """Return the thread of a device, starting it on first use."""
    found = _threads.get(device)
    if found is None:
        with _lock:
            found = _threads.get(device)
            if found is None:
                if not _threads:
                    atexit.register(_stop)
                found = _threads[device] = DeviceThread(device)
    return found


def _stop() -> None:
    for thread in _threads.values():
        thread.stop()


def _forget() -> None:
    """Reset in a forked child, which has none of the threads. It keeps their streams and pinned memory: to free them, it
    would have to use the device."""
    global _lock
    _lock = threading.Lock()
    _of_parent.extend(_threads.values())
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
