"""Blocking work in threads beside the join loop. The loop collects the results and keeps its own deadline."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from ringfence.transport.fork import register_fork_cleanup

Result = TypeVar("Result")

# A thread that returns from C++ (torch's store) while the interpreter shuts down is unwound through C++ frames, which aborts
# the process: a core dump instead of an error message. It happens in practice: all workers of a run have the same deadline,
# and the store ends with one of them. So the process waits this long at exit, in total, for such threads. A call into C++
# cannot be interrupted: one that returns after this wait and before the process has ended (with torch, about half a second
# later) still aborts.
_EXIT_SECONDS: Final = 1.0


def run_with_timeout(
    work: Callable[[], Result],
    *,
    name: str,
    timeout: float,
    warn_after: float,
    warn: Callable[[], None],
) -> Result:
    """Run `work` in a thread called `name` and return its result.

    Calls `warn` after `warn_after` seconds without a result. Raises TimeoutError after `timeout` seconds; the thread is left
    running.
    """
    background: Background[Result] = Background()
    try:
        background.start(name, work)
        with selectors.DefaultSelector() as selector:
            selector.register(background, selectors.EVENT_READ)
            if not selector.select(min(warn_after, timeout)) and warn_after < timeout:
                warn()
                selector.select(timeout - warn_after)
        for result in background.finished():
            return result
        raise TimeoutError
    finally:
        background.close()


class Background(Generic[Result]):
    """Runs functions in threads. Its descriptor is readable when `finished()` has a result."""

    def __init__(self) -> None:
        self._finished: deque[Future[Result]] = deque()
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        register_fork_cleanup(self)

    def fileno(self) -> int:
        return self._event

    def start(self, name: str, work: Callable[[], Result]) -> None:
        """Run `work` in a new thread called `name`."""
        _register_exit_wait()
        _Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def finished(self) -> Iterator[Result]:
        """Yield the results since the last call. An exception raised by the work is raised here, in the caller's thread."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return
        while self._finished:
            yield self._finished.popleft().result()

    def _run(self, work: Callable[[], Result]) -> None:
        future: Future[Result] = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            self._finished.append(future)
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close the descriptor. Threads that still run end by themselves and must not write to a reused descriptor number."""
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """Close the descriptor in a forked child, without the lock: a thread that does not exist there may hold it."""
        event, self._event = self._event, -1
        if event >= 0:
            os.close(event)


class _Thread(threading.Thread):
    """A thread that the process waits for at exit."""


@functools.cache
def _register_exit_wait() -> None:
    """Register the wait once, and only in processes that start a thread."""
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for thread in threading.enumerate():  # a forked child has none of them
        if isinstance(thread, _Thread):
            with contextlib.suppress(RuntimeError):  # another thread is still starting it
                thread.join(max(0.0, end - time.monotonic()))
