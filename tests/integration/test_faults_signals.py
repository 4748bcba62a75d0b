"""Ctrl-C: the interrupted worker stops, whatever it does, and no other worker waits for it until a timeout."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from tests.limits import FAR, FAR_OUTAGE, HANG, no_early_blame
from tests.pool import Pool

WORLD = 3
VICTIM = 1
WAITING = "_wait"  # the method of the progress loop in which a thread waits for a collective


class End(NamedTuple):
    kind: str
    message: str


def interrupt_in(function: str) -> None:
    """Send SIGINT to this process once its main thread is in a function of this name."""
    main = threading.get_ident()

    def watch() -> None:
        pause = threading.Event()
        while function not in {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])}:
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def compute() -> NoReturn:
    while True:
        torch.ones(100, 100).sum()


@no_early_blame
def in_a_collective(asynchronous: bool) -> End:
    """All workers wait for rank 0, which waits for the end of the session, while the victim is interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    if dist.get_rank() == VICTIM:
        interrupt_in(WAITING)
    try:
        if dist.get_rank() == 0:
            dist.recv(tensor, src=VICTIM)
        elif asynchronous:
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            dist.all_reduce(tensor)
    except (RingfenceError, KeyboardInterrupt) as error:
        return End(type(error).__name__, str(error))
    return End("", "")


@no_early_blame
def while_computing() -> End:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    try:
        if dist.get_rank() == VICTIM:
            interrupt_in(compute.__name__)
            compute()
        dist.all_reduce(tensor)
    except RingfenceError as error:
        return End(type(error).__name__, str(error))
    except KeyboardInterrupt:
        dist.destroy_process_group()  # what an interpreter that ends does at exit
        return End("KeyboardInterrupt", "")
    return End("", "")


def verify(ends: list[End]) -> None:
    assert ends.pop(VICTIM).kind == "KeyboardInterrupt"
    for end in ends:
        assert end.kind in ("AbortedError", "PeerLostError")
        assert f"worker {VICTIM}" in end.message


def interrupted(pool: Pool, function: Callable[..., End], *args: object) -> list[End]:
    """Return the outcome of each worker; no timeout is near."""
    return pool.check(function, WORLD, args=args, seconds=FAR, env=FAR_OUTAGE, timeout=HANG, renew=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_ctrl_c_in_a_collective_raises_on_every_worker(pool: Pool, asynchronous: bool) -> None:
    verify(interrupted(pool, in_a_collective, asynchronous))


def test_ctrl_c_outside_a_collective_raises_on_waiting_workers(pool: Pool) -> None:
    verify(interrupted(pool, while_computing))


def again() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_interrupted_workers_can_join_again(pool: Pool) -> None:
    interrupted(pool, in_a_collective, False)
    assert pool.check(again, WORLD, renew=True) == [3.0] * WORLD
