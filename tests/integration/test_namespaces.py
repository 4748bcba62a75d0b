"""Two hosts: their workers find each other by the rendezvous alone; and an outage that lasts too long ends the run on both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from ringfence.transport.outage import OutageWatch
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.process_signal import ProcessSignal
from tests.limits import FAR, HANG
from tests.pool import Pool, values

SIDES = {0: "near", 1: "near", 2: "far", 3: "far"}  # where each rank lives
OUTAGE = 4.0  # seconds that an outage may last
TOGETHER = 200  # rounds before a worker says that all is well


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as both:
        yield both


def leave_it_to_the_watch() -> None:
    """Move the kernel's own limit, which is the fallback, far away: the outage watch has to notice the silence."""
    set_options = OutageWatch._set
    OutageWatch._set = lambda watch, stream, options: set_options(  # type: ignore[method-assign, assignment]
        watch, stream, options._replace(user_timeout=round(1000 * FAR))
    )


def reduce_until_it_fails(signal_path: str, idle: bool) -> tuple[str, str, float]:
    """All-reduce on and on, or once and then wait in silence for bad news; what came, and when."""
    tensor = torch.ones(50_000)
    try:
        for _ in range(TOGETHER):
            dist.all_reduce(tensor)
        with ProcessSignal(signal_path) as under_way:
            under_way.notify()
        while not idle:
            dist.all_reduce(tensor)
        dist.recv(tensor, src=(dist.get_rank() + 1) % dist.get_world_size())
    except RingfenceError as error:
        return type(error).__name__, str(error), time.monotonic()
    return "", "", 0.0


@pytest.mark.promise("A machine that is silent for `RINGFENCE_OUTAGE_TIMEOUT` makes every worker raise, on both sides.")
@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
def test_a_pulled_cable_is_noticed_by_every_worker_on_both_sides(hosts: Hosts, tmp_path: Path, idle: bool) -> None:
    """After RINGFENCE_OUTAGE_TIMEOUT and not before."""
    world = len(SIDES)
    prefixes = [hosts.prefix(SIDES[rank]) for rank in range(world)]
    environments = [
        {"RINGFENCE_INTERFACE": ADDRESSES[SIDES[rank]], "RINGFENCE_OUTAGE_TIMEOUT": f"{OUTAGE:g}"}
        for rank in range(world)
    ]
    with Pool(prefixes) as pool, ProcessSignal(tmp_path / "signal") as under_way:
        pool.check(leave_it_to_the_watch, world, None, timeout=HANG)
        values(pool.join("ringfence", world, seconds=FAR, env=environments))
        call = pool.start(reduce_until_it_fails, world, (under_way.path, idle))
        under_way.wait(world, HANG)
        pulled = hosts.cut("far")
        results = values(call.wait(HANG))
    for rank, (kind, message, moment) in enumerate(results):
        others = [other for other in SIDES if SIDES[other] != SIDES[rank]]
        assert kind in ("PeerLostError", "AbortedError")
        assert any(f"worker {other}: no answer for 4 s" in message for other in others), message
        assert "RINGFENCE_OUTAGE_TIMEOUT" in message
        assert moment - pulled > OUTAGE - 1


def meet(url: str, world: int) -> float:
    """As a script does that knows nothing but the place of rank 0."""
    assert "MASTER_ADDR" not in os.environ
    rank, seconds = int(os.environ["RANK"]), timedelta(seconds=FAR)
    dist.init_process_group("ringfence", init_method=url, rank=rank, world_size=world, timeout=seconds)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


@pytest.mark.nightly
def test_workers_that_have_only_the_stores_address_listen_where_others_reach_them(hosts: Hosts) -> None:
    world = len(SIDES)
    prefixes = [[*hosts.prefix(SIDES[rank]), "env", "-u", "MASTER_ADDR", f"RANK={rank}"] for rank in range(world)]
    with Pool(prefixes) as pool:
        url = f"tcp://{ADDRESSES['near']}:29500"
        assert pool.check(meet, world, None, (url, world), HANG) == [float(world)] * world
