"""A worker that has reached its limit of open files: all workers report it, and none waits for a timeout."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.join_cluster import World
from tests.limits import FAR, HANG
from tests.pool import Failure, Pool

SHORT = 1  # the worker that is short of descriptors


@contextmanager
def no_more_files() -> Iterator[None]:
    """Leave no free descriptor: lower the limit to the highest number in use and fill the gaps below it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    filling: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                filling.append(os.dup(0))
        yield
    finally:
        for descriptor in filling:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def be_dialled() -> None:
    """Worker 0 dials a worker that has no free descriptor."""
    dist.barrier()
    group = dist.new_group()
    if dist.get_rank() == SHORT:
        with no_more_files():
            dist.barrier()
            dist.broadcast(torch.ones(1), 0, group=group)
    else:
        dist.barrier()
        dist.broadcast(torch.ones(1), 0, group=group)
        dist.barrier()


def dial() -> None:
    """The worker without a free descriptor dials a link."""
    dist.barrier()
    if dist.get_rank() == SHORT:
        with no_more_files():
            dist.barrier()
            dist.send(torch.ones(1), 0)
    else:
        dist.barrier()
        dist.recv(torch.ones(1), SHORT)


@pytest.mark.parametrize("function", [be_dialled, dial])
def test_all_workers_report_that_one_has_too_many_open_files(pool: Pool, function: Callable[..., Any]) -> None:
    results = pool.run(function, 2, "ringfence", seconds=FAR, renew=True, timeout=HANG)
    for result in results:
        assert isinstance(result, Failure)
        assert f"worker {SHORT}: Too many open files. Raise the limit of open files (ulimit -n)" in result.message
    assert [result.type for result in results] == ["AbortedError", "RingfenceError"]


def join_and_be_dialled() -> str:
    """Join while rank 0 has no free descriptor; return the error."""
    world = World(2, timeout=FAR)
    world.start([0])
    _, address = world.store.wait_for_address()
    with socket.socket() as child, no_more_files():
        child.connect(address)
        return world.error(0)


def test_a_joining_parent_reports_too_many_open_files(pool: Pool) -> None:
    """It does not retry until the deadline."""
    (error,) = pool.check(join_and_be_dialled, 1, backend=None, timeout=HANG)
    assert (
        error == "ConfigurationError: rank 0, joining: Too many open files. Raise the limit of open files (ulimit -n)"
    )


def limits_in_a_worker() -> tuple[int, int, int]:
    """Return the limit before and after the group was created, and the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    return min(1024, hard), resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard


def test_a_worker_raises_its_limit_of_open_files() -> None:
    with Pool() as fresh:
        ((before, after, hard),) = fresh.check(limits_in_a_worker, 1, None)
    assert after == min(1 << 16, hard) >= before
