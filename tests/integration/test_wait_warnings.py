"""Warnings about long waits, whether the waiting caller or the background thread makes progress."""

from __future__ import annotations

import logging
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ringfence.dataplane import request
from tests.pool import Pool

TIMEOUT = 600.0  # of the group
WARNING_SECONDS = 1.0  # until the first warning: this passes in each case
WARNING = re.compile(
    r"worker 0: all_reduce #2 has waited \d+ s for worker 1 \(shared secret, 127\.0\.0\.1:.*\(3 x float32, sum\); "
    r"it fails after 600 s"
)


class Told(logging.Handler):
    """Releases the late worker when the warning about it is logged."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        dist.distributed_c10d._get_default_store().set(self.key, "told")


def one_is_late(asynchronous: bool) -> list[str]:
    """Worker 1 starts when worker 0 has logged that it waits. Returns the warnings."""
    request.WAIT_WARNING_SECONDS = WARNING_SECONDS  # in workers that this test alone has
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    dist.barrier(group)
    told, logger = Told(f"come {asynchronous}"), logging.getLogger("ringfence")
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().get(told.key)
    logger.addHandler(told)
    try:
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, group=group, async_op=asynchronous)
        if work is not None:
            if dist.get_rank() == 0:
                dist.distributed_c10d._get_default_store().get(told.key)  # this thread makes no progress meanwhile
            work.wait()
    finally:
        logger.removeHandler(told)
    assert float(tensor[0]) == 2.0
    return told.texts


@pytest.mark.parametrize(("plane", "cases"), [("compiled", (False, True)), ("python", (True,))])
def test_a_wait_is_logged_before_it_times_out(pool: Pool, plane: str, cases: tuple[bool, ...]) -> None:
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={plane}"]] * 2) as workers:
        for asynchronous in cases:
            said, silent = workers.check(one_is_late, 2, args=(asynchronous,))
            assert said and all(WARNING.fullmatch(text) for text in said), said  # again if the late one takes longer
            assert silent == []
