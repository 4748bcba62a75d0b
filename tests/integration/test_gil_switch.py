"""The switch interval is short while asynchronous requests are in progress, and restored afterwards."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist

from tests.limits import FAR, HANG
from tests.pool import Pool

_SHORT = 51e-6
_USUAL = 0.004


def from_two_threads() -> list[float]:
    """Run asynchronous collectives in two threads; return the switch interval before and after."""
    sys.setswitchinterval(_USUAL)
    groups = [dist.new_group(), dist.new_group()]

    def work(group: dist.ProcessGroup) -> None:
        for size in (10, 100_000, 10, 3_000_000):
            works = [dist.all_reduce(torch.ones(size), group=group, async_op=True) for _ in range(5)]
            for each in works:
                each.wait()

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [_USUAL, _settled()]


def in_flight() -> float:
    """Return the interval after a submission that the other worker has not joined: this worker's loop has work."""
    store, interval = dist.distributed_c10d._get_default_store(), 0.0
    for first in range(dist.get_world_size()):
        dist.barrier()
        _settled()
        if dist.get_rank() != first:
            store.get(f"{first} has submitted")
        sys.setswitchinterval(_USUAL)
        work = dist.all_reduce(torch.ones(3_000_000), async_op=True)
        if dist.get_rank() == first:
            interval = sys.getswitchinterval()
            store.set(f"{first} has submitted", "")
        work.wait()
        _settled()
    return interval


def _settled() -> float:
    """Wait until the background thread has restored the interval, which may be after the last wait."""
    idle = threading.Event()
    while sys.getswitchinterval() < _SHORT:
        idle.wait(0.001)
    return sys.getswitchinterval()


def test_the_switch_interval_is_restored_when_all_is_done(pool: Pool) -> None:
    for before, after in pool.check(from_two_threads, world=2, seconds=FAR, timeout=HANG):
        assert abs(after - before) < 1e-6


def test_the_switch_interval_is_short_once_work_is_submitted(pool: Pool) -> None:
    assert all(interval < _SHORT for interval in pool.check(in_flight, world=2, seconds=FAR, timeout=HANG, renew=True))
