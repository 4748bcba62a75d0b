"""The threads of a communication hook, and futures that fail as DDP needs it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from ringfence.device.call import caller_event

_log = logging.getLogger("ringfence")
_Task = Callable[[], None]


class Stage:
    """A thread that runs tasks in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._queue,), name=f"ringfence-{name}", daemon=True).start()

    def submit(self, task: _Task) -> None:
        self._queue.put(task)

    def stop(self) -> None:
        """End the thread after the tasks submitted so far."""
        self._queue.put(None)


def _run(tasks: queue.SimpleQueue[_Task | None]) -> None:
    torch.set_grad_enabled(False)
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # tasks report their failures; without this thread later ones would hang
            _log.exception("a stage of a communication hook failed")
        task = None  # keep nothing until the next one


class Result:
    """The result of a hook: `future` completes with a tensor, or fails through a callback that raises.

    Tasks of the hook run within `steps`: on a device, on a stream that follows what the caller has done so far. A failed
    task fails the result, and further tasks of it do nothing.
    """

    def __init__(self, tensor: torch.Tensor, stream: torch.Stream | None) -> None:
        self._tensor = tensor
        self._stream = stream
        self._ready = None if stream is None else caller_event(tensor.device)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._base: Any = Future() if stream is None else Future(devices=[tensor.device])
        self.future = self._base.then(self._outcome)

    def _outcome(self, _: Any) -> torch.Tensor:
        if self._error is not None:
            raise self._error
        return self._tensor

    def step(self, task: _Task, last: bool = False) -> _Task:
        """Return a task that is a step to the result, or the last one."""

        def run() -> None:
            if self._error is not None:
                return
            with self._stream or contextlib.nullcontext():
                error = None
                try:
                    if self._stream is not None:
                        self._stream.wait_event(self._ready)
                    task()
                except Exception as failure:
                    error = failure
                if last or error is not None:
                    self._settle(error)

        return run

    def _settle(self, error: Exception | None) -> None:
        with self._lock:
            if not self._base.done():
                self._error = error
                self._base.set_result(self._tensor)
