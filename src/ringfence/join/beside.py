"""Work that may block, in threads beside the loop of a join: the loop takes what they answer, or its own deadline."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from ringfence.transport.fork import closes_in_children

Answer = TypeVar("Answer")


class Beside(Generic[Answer]):
    """Its descriptor is readable when `finished()` has something."""

    def __init__(self) -> None:
        self._finished: deque[Future[Answer]] = deque()
        self._lock = threading.Lock()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        closes_in_children(self)

    def fileno(self) -> int:
        return self._event

    def start(self, name: str, work: Callable[[], Answer]) -> None:
        """Do it, in a thread of its own with this name."""
        threading.Thread(target=self._do, args=(work,), name=name, daemon=True).start()

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
