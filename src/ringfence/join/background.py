"""Work that may block, in threads beside the loop of a join: the loop takes what they answer, or its own deadline."""

from __future__ import annotations

import atexit
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

Answer = TypeVar("Answer")

# A thread that comes back from C++ (torch's store) while the interpreter ends is unwound through C++ frames, and that aborts
# the process: a core dump in place of an error. It is no rare case: all workers of a run have one deadline, and the store
# ends with one of them. So an exit gives such threads this long, in all. A call into C++ cannot be interrupted: one that
# comes back after this wait, and before the process is gone (with torch about half a second later), still aborts.
_EXIT_SECONDS: Final = 1.0


def within(
    seconds: float, name: str, work: Callable[[], Answer], patience: float, complain: Callable[[], None]
) -> Answer:
    """What this work answers, done in a thread with this name. TimeoutError if that takes longer; the thread is left to it.

    `complain` is called when `patience` has run out.
    """
    beside: Background[Answer] = Background()
    try:
        beside.start(name, work)
        with selectors.DefaultSelector() as selector:
            selector.register(beside, selectors.EVENT_READ)
            if not selector.select(min(patience, seconds)) and patience < seconds:
                complain()
                selector.select(seconds - patience)
        for answer in beside.finished():
            return answer
        raise TimeoutError
    finally:
        beside.close()


class Background(Generic[Answer]):
    """Its descriptor is readable when `finished()` has something."""

    def __init__(self) -> None:
        self._finished: deque[Future[Answer]] = deque()
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        register_fork_cleanup(self)

    def fileno(self) -> int:
        return self._event

    def start(self, name: str, work: Callable[[], Answer]) -> None:
        """Do it, in a thread of its own with this name."""
        _wait_at_exit()
        _Thread(target=self._do, args=(work,), name=name, daemon=True).start()

    def finished(self) -> Iterator[Answer]:
        """What has been answered since; what work raised is raised here, in the loop's own thread."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return
        while self._finished:
            yield self._finished.popleft().result()

    def _do(self, work: Callable[[], Answer]) -> None:
        answer: Future[Answer] = Future()
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        with self._lock:
            self._finished.append(answer)
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Threads that still work end by themselves; the descriptor's number will be somebody else's."""
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """In a forked child the lock may be held for ever, by a thread that is not there. What was answered is not its."""
        event, self._event = self._event, -1
        if event >= 0:
            os.close(event)


class _Thread(threading.Thread):
    """One that is waited for at exit."""


@functools.cache
def _wait_at_exit() -> None:
    """Once, and not for those who only import this."""
    atexit.register(_let_threads_end)


def _let_threads_end() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for thread in threading.enumerate():  # in a forked child none of them
        if isinstance(thread, _Thread):
            thread.join(max(0.0, end - time.monotonic()))
