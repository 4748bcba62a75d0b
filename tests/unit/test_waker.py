"""The eventfd that wakes the progress loop: nothing is written to its descriptor number after it was closed."""

from __future__ import annotations

import os
import threading

import pytest

from ringfence.runtime.progress import _Waker
from tests.limits import HANG


def test_a_waker_is_not_closed_during_a_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    waker, genuine = _Waker(), os.eventfd_write
    descriptor, closed = waker.descriptor, threading.Event()
    closing = threading.Thread(target=lambda: (waker.close(), closed.set()))

    def write(number: int, value: int) -> None:
        closing.start()
        assert not closed.wait(0.2), "its number may be another file's now"
        genuine(number, value)

    monkeypatch.setattr(os, "eventfd_write", write)
    waker.wake()
    assert closed.wait(HANG)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_closed_waker_wakes_nothing() -> None:
    waker = _Waker()
    number = waker.descriptor
    waker.close()
    with open(os.devnull) as another:
        assert another.fileno() == number, "the lowest number that is free"
        waker.wake()
        waker.close()
        os.fstat(number)


@pytest.mark.processes
def test_a_forked_child_closes_a_waker_without_its_lock() -> None:
    waker, held, done = _Waker(), threading.Event(), threading.Event()

    def hold() -> None:
        with waker._lock:
            held.set()
            done.wait(HANG)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(HANG)
    child = os.fork()
    if not child:
        waker.forget()
        os._exit(0 if waker.descriptor == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()
    waker.close()
