"""Ctrl-C: the interrupted worker stops at once, whatever it does, and no other worker waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from tests.pool import Pool

WORLD = 3
VICTIM = 1
SOON = 5.0


class End(NamedTuple):
    kind: str
    message: str
    seconds: float  # from the signal


def interrupt_soon() -> threading.Timer:
    """Send SIGINT to this process in half a second, when the main thread waits or computes."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def shared_clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def in_a_collective(asynchronous: bool) -> End:
    """All workers wait for rank 0, which waits for the end of the session, while the victim is interrupted."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    started = shared_clock()
    if dist.get_rank() == VICTIM:
        interrupt_soon()
    try:
        if dist.get_rank() == 0:
            dist.recv(tensor, src=VICTIM)
        elif asynchronous:
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            dist.all_reduce(tensor)
    except (RingfenceError, KeyboardInterrupt) as error:
        return End(type(error).__name__, str(error), shared_clock() - started)
    return End("", "", 0.0)


def while_computing() -> End:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    started = shared_clock()
    try:
        if dist.get_rank() == VICTIM:
            interrupt_soon()
            while True:
                torch.ones(100, 100).sum()
        dist.all_reduce(tensor)
    except RingfenceError as error:
        return End(type(error).__name__, str(error), shared_clock() - started)
    except KeyboardInterrupt:
        dist.destroy_process_group()  # what an interpreter that ends does at exit
        return End("KeyboardInterrupt", "", shared_clock() - started)
    return End("", "", 0.0)


def verify(ends: list[End]) -> None:
    victim = ends.pop(VICTIM)
    assert victim.kind == "KeyboardInterrupt"
    assert victim.seconds < SOON
    for end in ends:
        assert end.kind in ("AbortedError", "PeerLostError")
        assert f"worker {VICTIM}" in end.message
        assert end.seconds < SOON


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_ctrl_c_in_a_collective_raises_on_every_worker(pool: Pool, asynchronous: bool) -> None:
    verify(pool.check(in_a_collective, WORLD, args=(asynchronous,), renew=True))


def test_ctrl_c_outside_a_collective_raises_on_waiting_workers(pool: Pool) -> None:
    verify(pool.check(while_computing, WORLD, renew=True))


def again() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_interrupted_workers_can_join_again(pool: Pool) -> None:
    pool.check(in_a_collective, WORLD, args=(False,), renew=True)
    assert pool.check(again, WORLD, renew=True) == [3.0] * WORLD
