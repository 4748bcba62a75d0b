"""The threads of a communication hook, and futures that fail as DDP needs it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from ringfence.device.call import caller_event
from ringfence.errors import RingfenceError

_log = logging.getLogger("ringfence")
_Task = Callable[[], None]
Tasks = queue.SimpleQueue[_Task | None]


def stage(name: str) -> Tasks:
    """Start a thread that runs the tasks of a queue in their order, until None comes; return the queue."""
    tasks: Tasks = queue.SimpleQueue()
    threading.Thread(target=_run, args=(tasks,), name=f"ringfence-{name}", daemon=True).start()
    return tasks


def _run(tasks: Tasks) -> None:
    torch.set_grad_enabled(False)
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:  # tasks report their failures; without this thread later ones would hang
            _log.exception("a stage of a communication hook failed")
        task = None  # keep nothing until the next one


class Failure:
    """The first failure of a hook's tasks. It fails what is under way, and all that is submitted later.

    Otherwise this rank's next exchange would be paired with the one that the others have begun.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def set(self, error: Exception) -> None:
        """Keep the first error. If others cannot know of it and would wait, abort the groups before."""
        with self._lock:
            if self._error is None and not isinstance(error, RingfenceError):
                for group in self._groups:
                    with contextlib.suppress(Exception):  # the session has ended; the error itself is raised
                        group.abort()
            self._error = self._error or error

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self._error is not None:
            raise self._error


class Result:
    """The result of a hook: `future` completes with a tensor, or fails through a callback that raises.

    Tasks of the hook run within `steps`: on a device, on a stream that follows what the caller has done so far.
    """

    def __init__(self, tensor: torch.Tensor, stream: torch.Stream | None, failure: Failure) -> None:
        self._tensor = tensor
        self._stream = stream
        self._failure = failure
        self._ready = None if stream is None else caller_event(tensor.device)
        self._lock = threading.Lock()
        self._base: Any = Future() if stream is None else Future(devices=[tensor.device])
        self.future = self._base.then(self._outcome)

    def _outcome(self, _: Any) -> torch.Tensor:
        self._failure.check()
        return self._tensor

    def step(self, task: _Task, last: bool = False) -> _Task:
        """Return a task that is a step to the result, or the last one."""

        def run() -> None:
            try:
                self._failure.check()
                with self._stream or contextlib.nullcontext():
                    if self._stream is not None:
                        self._stream.wait_event(self._ready)
                    task()
                    if last:
                        if self._stream is not None:
                            self._stream.record_event()  # a device that fails does so here: in `set_result` it would hang
                        self._settle(self._tensor)
            except Exception as error:
                self._failure.set(error)
                self._settle(None)

        return run

    def _settle(self, value: torch.Tensor | None) -> None:
        with self._lock:
            if not self._base.done():
                self._base.set_result(value)
