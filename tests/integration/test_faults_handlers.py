"""Signal handlers of a script that destroy the group: the worker leaves, wherever the signal arrives.

No timeout is near, and none limits how long a worker that leaves drains its links: what waits for either hangs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from tests.limits import FAR, FAR_OUTAGE, HANG
from tests.pool import Pool

WORLD = 2
VICTIM = 0
MOMENTS = ["before a collective is driven", "while it is driven", "after it was driven"]


class End(NamedTuple):
    kind: str
    message: str


class Left(Exception):
    pass


class Rings:
    """A lock that raises the signal when the main thread has acquired it to drive."""

    def __init__(self, lock: Any, ring: Callable[[], None]) -> None:
        self.release, self._acquire, self._ring = lock.release, lock.acquire, ring

    def acquire(self, blocking: bool = True) -> bool:
        taken: bool = self._acquire(blocking)
        if taken and not blocking:
            self._ring()
        return taken


def ring_at(moment: str) -> None:
    """Raise SIGALRM once, at this moment of the next collective. The handler runs as soon as the call has returned."""
    loop = dist.group.WORLD._loop  # type: ignore[union-attr]
    rung = False

    def ring() -> None:
        nonlocal rung
        if not rung and threading.current_thread() is threading.main_thread():
            rung = True
            signal.raise_signal(signal.SIGALRM)

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            result = function(*arguments)
            ring()
            return result

        return called

    match moment:
        case "before a collective is driven":
            loop._lock = Rings(loop._lock, ring)
        case "while it is driven":
            loop.network.poll = after(loop.network.poll)
        case "after it was driven":
            loop._gil_switch.end = after(loop._gil_switch.end)


def until_it_ends() -> None:
    tensor = torch.ones(4)
    while True:
        dist.all_reduce(tensor)


def interrupted(moment: str, handler: Callable[[], None]) -> End:
    """Return the outcome of the worker whose handler is called, or of the other one."""
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == VICTIM:
        signal.signal(signal.SIGALRM, lambda *_: handler())
        ring_at(moment)
    try:
        until_it_ends()
    except (RingfenceError, Left, KeyboardInterrupt) as error:
        return End(type(error).__name__, str(error))
    return End("", "")


def leave(moment: str) -> End:
    def handler() -> None:
        dist.destroy_process_group()
        raise Left

    return interrupted(moment, handler)


def wait(moment: str) -> End:
    return interrupted(moment, lambda: dist.all_reduce(torch.ones(4)))


def interrupt(moment: str) -> End:
    """After Ctrl-C, this thread and another one can drive the progress loop."""

    def handler() -> None:
        raise KeyboardInterrupt

    end = interrupted(moment, handler)
    later = threading.Thread(target=lambda: dist.destroy_process_group(), daemon=True)
    later.start()
    later.join()
    return end


def ends(pool: Pool, function: Callable[[str], End], moment: str) -> list[End]:
    """Return the outcome of the worker that was interrupted, and of the other one."""
    return pool.check(function, WORLD, args=(moment,), seconds=FAR, env=FAR_OUTAGE, timeout=HANG, renew=True)


@pytest.mark.parametrize("moment", MOMENTS)
def test_destroying_the_group_in_a_handler_leaves_the_run(pool: Pool, moment: str) -> None:
    mine, theirs = ends(pool, leave, moment)
    assert mine.kind == "Left"
    assert theirs.kind == "PeerLostError" and f"worker {VICTIM} left the run" in theirs.message


@pytest.mark.parametrize("moment", MOMENTS)
def test_waiting_for_a_collective_in_a_handler_raises(pool: Pool, moment: str) -> None:
    mine, theirs = ends(pool, wait, moment)
    assert mine.kind == "ProtocolError" and "a signal handler cannot wait for a collective" in mine.message
    assert theirs.kind == "AbortedError" and f"worker {VICTIM} was interrupted" in theirs.message


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_progress_loop_can_be_driven_after_ctrl_c(pool: Pool, moment: str) -> None:
    mine, theirs = ends(pool, interrupt, moment)
    assert mine.kind == "KeyboardInterrupt"
    assert theirs.kind == "AbortedError" and f"worker {VICTIM} was interrupted" in theirs.message
