"""Outages: the network between two machines goes away and comes back, and the run goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.pool import Pool, values
from tests.process.bell import Bell
from tests.process.hosts import ADDRESSES, PLACES, Hosts

SOON = 5.0  # seconds from the return of the network to the next step
SIDES = ("near", "far")  # where ranks 0 and 1 live
STEPS = 25  # on each worker between two cuts


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


def train(bell: str, stop: str, steps: int) -> list[tuple[float, float]]:
    """Loss and time of every step; `steps` of them, or as many as are made until the file `stop` exists."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    done, ended = [], torch.zeros(1)
    with Bell(bell) as step_made:
        while len(done) < steps or (not steps and not ended.item()):
            inputs = torch.randn(8, 512, generator=draw)
            loss = (parallel(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended.fill_(os.path.exists(stop))
            dist.all_reduce(ended)
            done.append((loss.item(), time.monotonic()))
            step_made.ring()
    return done


def run_through(pair: Pool, hosts: Hosts, folder: Path, cuts: Sequence[Cut]) -> list[float]:
    """Train through these cuts, compare with an undisturbed run; how soon after each cut both workers had made a step."""
    pair.join("ringfence", 2, env=interfaces(), seconds=600, renew=True)
    moments, stop = [], folder / "stop"
    with Bell(folder / "bell") as step_made:
        training = pair.start(train, 2, (step_made.path, str(stop), 0))
        for cut in cuts:
            step_made.hear(2 * STEPS)
            pulled = hosts.pull(cut.place)
            time.sleep(cut.seconds)  # the network is away for so long
            step_made.silence()
            moments.append((pulled, hosts.plug(cut.place)))
            step_made.hear(2 * STEPS, seconds=60)
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
def test_training_goes_on_soon_after_an_outage(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """5, 30 and 120 s, at either machine and between them; in short, 2 s at each place."""
    cuts = [Cut(place, seconds) for seconds in ((5.0, 30.0, 120.0) if full else (2.0,)) for place in PLACES]
    waits = run_through(pair, hosts, tmp_path, cuts)
    report(cuts, waits)
    assert max(waits) < SOON


@pytest.mark.long
def test_training_goes_on_after_random_outages(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """50 of 0.1 to 20 s; in short, 4 of at most 1 s."""
    draw = random.Random(12)
    count, longest = (50, 20.0) if full else (4, 1.0)
    cuts = [Cut(draw.choice(PLACES), draw.uniform(0.1, longest)) for _ in range(count)]
    waits = run_through(pair, hosts, tmp_path, cuts)
    report(cuts, waits)
    assert max(waits) < SOON
