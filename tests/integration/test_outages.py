"""Outages: the network between two machines fails and returns, and the run continues with the same results."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringfence.errors import RingfenceError
from ringfence.transport.outage import TcpState
from tests.integration.netns import ADDRESSES, PLACES, Hosts
from tests.integration.process_signal import ProcessSignal
from tests.pool import Pool, values

SOON = 5.0  # seconds from the return of the network to the next step
SIDES = ("near", "far")  # the machines of ranks 0 and 1
STEPS = 5  # on each worker between two cuts
LARGE = 1 << 24  # elements: more than the kernel's buffers hold


class Cut(NamedTuple):
    place: str
    seconds: float


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as machines:
        yield machines


@pytest.fixture(scope="module")
def pair(hosts: Hosts) -> Iterator[Pool]:
    with Pool([hosts.prefix(side) for side in SIDES]) as workers:
        yield workers


def interfaces(**variables: str) -> list[dict[str, str]]:
    return [{"RINGFENCE_INTERFACE": ADDRESSES[side], **variables} for side in SIDES]


def train(signal_path: str, stop: str, steps: int) -> list[tuple[float, float]]:
    """Loss and time of every step; `steps` of them, or as many as are made until the file `stop` exists."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.25)  # four buckets
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    done: list[Any] = []
    ended = torch.zeros(1)
    with ProcessSignal(signal_path) as step_made:
        while len(done) < steps or (not steps and not ended.item()):
            inputs = torch.randn(8, 256, generator=draw)
            loss = (parallel(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended.fill_(os.path.exists(stop))
            dist.all_reduce(ended)
            done.append((loss.item(), time.monotonic()))
            step_made.notify()
    return done


def run_through(pair: Pool, hosts: Hosts, folder: Path, cuts: Sequence[Cut]) -> list[float]:
    """Train through these cuts, compare with an undisturbed run; how soon after each cut both workers had made a step."""
    pair.join("ringfence", 2, env=interfaces(), seconds=600, renew=True)
    moments, stop = [], folder / "stop"
    with ProcessSignal(folder / "signal") as step_made:
        training = pair.start(train, 2, (step_made.path, str(stop), 0))
        for cut in cuts:
            step_made.wait(2 * STEPS)
            pulled = hosts.cut(cut.place)
            time.sleep(cut.seconds)  # the network is away for so long
            step_made.clear()
            moments.append((pulled, hosts.restore(cut.place)))
            try:
                step_made.wait(2 * STEPS, seconds=30)
            except AssertionError:
                raise AssertionError(f"after {cut}: {training.wait(timeout=1)}") from None
        stop.touch()
        disturbed = values(training.wait(timeout=60))
        steps = len(disturbed[0])
        undisturbed = values(pair.start(train, 2, (step_made.path, "", steps)).wait(timeout=240))
    for rank in range(2):
        assert [loss for loss, _ in disturbed[rank]] == [loss for loss, _ in undisturbed[rank]]
    waits = []
    for (pulled, plugged), cut in zip(moments, cuts, strict=True):
        ends = [[moment for _, moment in done] for done in disturbed]
        if cut.seconds >= 2:
            assert not any(pulled + 1 < moment < plugged for each in ends for moment in each), "the cut did not cut"
        waits.append(max(min(moment for moment in each if moment > plugged) - plugged for each in ends))
    return waits


def report(cuts: Sequence[Cut], waits: Sequence[float]) -> None:
    for cut, seconds in zip(cuts, waits, strict=True):
        print(f"outage of {cut.seconds:6.2f} s at {cut.place:6}: next step {seconds:.2f} s after its end")
    print(f"{len(cuts)} outages, {sum(cut.seconds for cut in cuts):.0f} s; worst {max(waits):.2f} s")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_resumes_soon_after_an_outage(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """Outages of 5, 30 and 120 s, at either machine and between them; in the short form 2 s at two places."""
    lengths, places = ((5.0, 30.0, 120.0), PLACES) if full else ((2.0,), PLACES[1:])
    cuts = [Cut(place, seconds) for seconds in lengths for place in places]
    waits = run_through(pair, hosts, tmp_path, cuts)
    report(cuts, waits)
    assert max(waits) < SOON


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_resumes_after_random_outages(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """50 outages of 0.1 to 20 s; in the short form 4 of at most 1 s."""
    draw = random.Random(12)
    count, longest = (50, 20.0) if full else (4, 1.0)
    cuts = [Cut(draw.choice(PLACES), draw.uniform(0.1, longest)) for _ in range(count)]
    waits = run_through(pair, hosts, tmp_path, cuts)
    report(cuts, waits)
    assert max(waits) < SOON


def broadcast_to_a_late_worker(under_way: str, begin: str) -> tuple[float, float]:
    """Worker 1 does not read before `begin` rings, so that worker 0's kernel may send no more. The sum, and the time."""
    tensor = torch.full((LARGE,), 1.0 - dist.get_rank())
    if dist.get_rank() == 0:
        work = dist.broadcast(tensor, 0, async_op=True)
        engine = dist.group.WORLD._loop.engine  # type: ignore[union-attr]
        while not any(TcpState.of(link.stream).probing for link in list(engine.blocked)):
            os.sched_yield()
        with ProcessSignal(under_way) as ready:
            ready.notify()
        work.wait()
    else:
        with ProcessSignal(begin) as ready:
            ready.wait()
        dist.broadcast(tensor, 0)
    return tensor.sum().item(), time.monotonic()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_outage_may_begin_while_a_worker_does_not_read(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """The news that it reads again is lost, and TCP sends only a few probes: 15 by default, and here 6 in the short form."""
    seconds, places = (60.0, PLACES) if full else (7.0, ("far",))
    try:
        hosts.limit_retries(15 if full else 6)
        for place in places:
            wait = broadcast_through(pair, hosts, tmp_path, Cut(place, seconds))
            print(f"outage of {seconds:g} s at {place} while a worker did not read: done {wait:.2f} s after its end")
            assert wait < SOON
    finally:
        hosts.limit_retries(15)


def broadcast_through(pair: Pool, hosts: Hosts, folder: Path, cut: Cut) -> float:
    """How soon after the cut the broadcast was done."""
    pair.check(warm_up, 2, env=interfaces(), seconds=600, renew=True)
    with (
        ProcessSignal(folder / f"under way {cut.place}") as under_way,
        ProcessSignal(folder / f"begin {cut.place}") as begin,
    ):
        call = pair.start(broadcast_to_a_late_worker, 2, (under_way.path, begin.path))
        under_way.wait()
        hosts.cut(cut.place)
        begin.notify()
        time.sleep(cut.seconds)  # the network is away for so long
        plugged = hosts.restore(cut.place)
        results = values(call.wait(timeout=60))
    assert [total for total, _ in results] == [LARGE, LARGE]
    return max(moment for _, moment in results) - plugged


def warm_up() -> None:
    dist.all_reduce(torch.ones(1))


def first_collective() -> tuple[float, float]:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item(), time.monotonic()


@pytest.mark.long
def test_links_dialled_during_an_outage_open_after_it(pair: Pool, hosts: Hosts, full: bool) -> None:
    for place in PLACES if full else ("far",):
        pair.join("ringfence", 2, env=interfaces(), seconds=600, renew=True)
        hosts.cut(place)
        call = pair.start(first_collective, 2)
        time.sleep(20 if full else 1)  # the network is away for so long
        plugged = hosts.restore(place)
        for total, moment in values(call.wait(timeout=60)):
            assert total == 2.0
            assert 0 < moment - plugged < SOON


def wait_for_two_seconds() -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
    try:
        warm_up()
    except RingfenceError as error:
        return type(error).__name__
    return ""


def test_collective_timeout_applies_during_an_outage(pair: Pool, hosts: Hosts) -> None:
    pair.check(warm_up, 2, env=interfaces(), seconds=600, renew=True)
    hosts.cut("switch")
    try:
        assert values(pair.start(wait_for_two_seconds, 2).wait(timeout=60)) == ["CollectiveTimeoutError"] * 2
    finally:
        hosts.restore("switch")


def die_or_wait() -> tuple[str, float]:
    warm_up()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        warm_up()
    except RingfenceError as error:
        return str(error), time.monotonic()
    return "", 0.0


def test_worker_killed_on_another_machine_is_named_at_once(pair: Pool) -> None:
    """With default settings: a closed connection is not an outage."""
    pair.join("ringfence", 2, env=interfaces(), seconds=600, renew=True)
    began = time.monotonic()
    (message, moment), killed = pair.start(die_or_wait, 2).wait(timeout=60)
    assert killed.message == "killed by SIGKILL"
    assert "worker 1" in message and moment - began < SOON
