"""Work for the thread that drives a worker's session, done between two of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tests.limits import HANG

T = TypeVar("T")


def between_steps(work: Callable[[], T]) -> T:
    """Return what `work` returns there: no frame is half written or written and not counted, no memory is being sealed."""
    loop, done, results = dist.group.WORLD._loop, threading.Event(), list[T]()  # type: ignore[union-attr]
    loop.call_soon_threadsafe(lambda: (results.append(work()), done.set()))
    loop.wake()
    assert done.wait(HANG)
    return results[0]
