"""Outages: the network between two machines fails and returns, and the run continues with the same results."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
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
from ringfence.link.frames import Type
from ringfence.runtime.links import Inbox
from ringfence.transport.outage import TcpState
from tests.integration.netns import ADDRESSES, PLACES, Hosts
from tests.integration.process_signal import ProcessSignal
from tests.limits import FAR, FAR_OUTAGE, HANG
from tests.pool import Pool, values

SIDES = ("near", "far")  # the machines of ranks 0 and 1
STEPS = 5  # on each worker between two cuts
LARGE = 1 << 24  # elements: more than the kernel's buffers hold


PAUSE = 1.0  # seconds between two retransmissions at most, so that a run resumes soon
RETRANSMITS_OFFSET = 2  # in struct tcp_info: of what is in flight
RTO_OFFSET = 8  # in microseconds
RTO_MAX_MS = 44  # an option of TCP from Linux 6.15 on; older kernels double the pause


class Cut(NamedTuple):
    """An outage: until each worker has found so often, once in a second, that the other machine does not answer."""

    place: str
    checks: int


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


class Overdue:
    """What the outage watches of both workers find: how often an answer was overdue, and the longest pause of TCP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._signals = [ProcessSignal(folder / f"overdue{rank}") for rank in range(2)]

    def __enter__(self) -> Overdue:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._signals:
            each.__exit__(*exception)

    def wait(self, checks: int) -> None:
        """Wait until each worker has found so often that an answer is overdue."""
        for each in self._signals:
            each.clear()
        for each in self._signals:
            each.wait(checks, HANG + checks)

    def longest_pause(self) -> float:
        return max(float(file.read_text()) for file in self.folder.glob("pause*"))


def watch_connections(folder: str) -> None:
    """Tell the test's Overdue what the outage watch of this worker finds. It checks all connections once in a second."""
    watch = dist.group.WORLD._loop._outages  # type: ignore[union-attr]
    connections, rank, longest = watch._connections, dist.get_rank(), 0.0

    def noted() -> Any:
        nonlocal longest
        found, overdue = connections(), False
        for _, _, stream in found:
            with contextlib.suppress(OSError):  # closed meanwhile
                state = TcpState.of(stream)
                overdue |= state.unanswered
                if state.unanswered and state.in_flight:
                    longest = max(longest, retransmission_pause(stream))
        if overdue:
            Path(folder, f"pause{rank}").write_text(str(longest))
            with ProcessSignal(Path(folder, f"overdue{rank}")) as found_overdue:
                found_overdue.notify()
        return found

    watch._connections = noted


def retransmission_pause(stream: socket.socket) -> float:
    """Return the seconds until TCP sends again what it has sent again already; 0 if it has not.

    Before, it waits as long as answers took: seconds, if a packet lay in a queue during the last outage.
    """
    raw = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RTO_OFFSET + 4)
    pause: int = struct.unpack_from("=I", raw, RTO_OFFSET)[0]
    return pause / 1e6 if raw[RETRANSMITS_OFFSET] else 0.0


def can_limit_pauses() -> bool:
    with socket.socket() as stream:
        try:
            stream.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS)
        except OSError:
            return False
    return True


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
    pair.check(watch_connections, 2, args=(str(folder),), env=interfaces(), seconds=FAR, renew=True)
    restored, stop = [], folder / "stop"
    with ProcessSignal(folder / "signal") as step_made, Overdue(folder) as overdue:
        training = pair.start(train, 2, (step_made.path, str(stop), 0))
        for cut in cuts:
            step_made.wait(2 * STEPS, HANG)
            hosts.cut(cut.place)
            overdue.wait(cut.checks)
            step_made.clear()
            restored.append(time.monotonic())
            hosts.restore(cut.place)
            try:
                step_made.wait(2 * STEPS, HANG)
            except AssertionError:
                raise AssertionError(f"after {cut}: {training.wait(timeout=1)}") from None
        stop.touch()
        disturbed = values(training.wait(HANG))
        if can_limit_pauses():
            assert overdue.longest_pause() <= PAUSE
        steps = len(disturbed[0])
        undisturbed = values(pair.start(train, 2, (step_made.path, "", steps)).wait(HANG))
    for rank in range(2):
        assert [loss for loss, _ in disturbed[rank]] == [loss for loss, _ in undisturbed[rank]]
    ends = [[moment for _, moment in done] for done in disturbed]
    return [max(min(end for end in each if end > moment) - moment for each in ends) for moment in restored]


def report(cuts: Sequence[Cut], waits: Sequence[float]) -> None:
    for cut, seconds in zip(cuts, waits, strict=True):
        print(f"outage of {cut.checks:3} checks at {cut.place:6}: next step {seconds:.2f} s after its end")
    print(f"{len(cuts)} outages, {sum(cut.checks for cut in cuts)} checks; worst {max(waits):.2f} s")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_resumes_after_an_outage(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """Outages of 5, 30 and 120 checks, at either machine and between them; in the short form of 3 at two places."""
    lengths, places = ((5, 30, 120), PLACES) if full else ((3,), PLACES[1:])
    cuts = [Cut(place, checks) for checks in lengths for place in places]
    report(cuts, run_through(pair, hosts, tmp_path, cuts))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_resumes_after_random_outages(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """50 outages of at most 20 checks; in the short form 4 of at most one. Those of none end at once."""
    draw = random.Random(10)
    count, longest = (50, 20) if full else (4, 1)
    cuts = [Cut(draw.choice(PLACES), draw.randint(0, longest)) for _ in range(count)]
    report(cuts, run_through(pair, hosts, tmp_path, cuts))


def broadcast_to_a_late_worker(under_way: str, begin: str) -> tuple[float, float, int]:
    """Worker 1 does not read before `begin` rings, so that worker 0's kernel may send no more.

    Return the sum, the time, and how many NOP frames this worker sent.
    """
    nops = count_nops()
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
            ready.wait(seconds=HANG)
        dist.broadcast(tensor, 0)
    return tensor.sum().item(), time.monotonic(), len(nops)


def count_nops() -> list[int]:
    """Return a list that grows with every NOP frame."""
    nops: list[int] = []
    control_frame = Inbox.control_frame

    def counted(link: Inbox, kind: Type, *rest: Any) -> Any:
        nops.extend([kind] * (kind is Type.NOP))
        return control_frame(link, kind, *rest)

    Inbox.control_frame = counted  # type: ignore[method-assign, assignment]
    return nops


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_outage_may_begin_while_a_worker_does_not_read(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    """The news that it reads again is lost, and TCP sends only a few probes: 15 by default, and here 6 in the short form."""
    checks, places = (60, PLACES) if full else (7, ("far",))
    try:
        hosts.limit_retries(15 if full else 6)
        for place in places:
            folder = tmp_path / place
            folder.mkdir()
            wait = broadcast_through(pair, hosts, folder, Cut(place, checks))
            print(f"outage of {checks} checks at {place} while a worker did not read: done {wait:.2f} s after its end")
    finally:
        hosts.limit_retries(15)


def broadcast_through(pair: Pool, hosts: Hosts, folder: Path, cut: Cut) -> float:
    """How soon after the cut the broadcast was done. The receiver's NOP frames tell the sender that it may send."""
    pair.check(warm_up, 2, env=interfaces(), seconds=FAR, renew=True)
    values(pair.start(watch_connections, 2, (str(folder),)).wait(HANG))
    with (
        ProcessSignal(folder / "under way") as under_way,
        ProcessSignal(folder / "begin") as begin,
        Overdue(folder) as overdue,
    ):
        call = pair.start(broadcast_to_a_late_worker, 2, (under_way.path, begin.path))
        under_way.wait(seconds=HANG)
        hosts.cut(cut.place)
        begin.notify()
        overdue.wait(cut.checks)
        restored = time.monotonic()
        hosts.restore(cut.place)
        results = values(call.wait(HANG))
    assert [total for total, _, _ in results] == [LARGE, LARGE]
    assert [nops > 0 for _, _, nops in results] == [False, True]
    return max(moment for _, moment, _ in results) - restored


def warm_up() -> None:
    dist.all_reduce(torch.ones(1))


def first_collective(path: str) -> tuple[float, float]:
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    with ProcessSignal(path) as called:
        called.notify()
    work.wait()
    return tensor.item(), time.monotonic()


@pytest.mark.long
def test_links_dialled_during_an_outage_open_after_it(pair: Pool, hosts: Hosts, tmp_path: Path, full: bool) -> None:
    for place in PLACES if full else ("far",):
        pair.check(watch_connections, 2, args=(str(tmp_path),), env=interfaces(), seconds=FAR, renew=True)
        with ProcessSignal(tmp_path / "called") as called, Overdue(tmp_path) as overdue:
            hosts.cut(place)
            call = pair.start(first_collective, 2, (called.path,))
            called.wait(2, HANG)
            overdue.wait(20 if full else 1)
            restored = time.monotonic()
            hosts.restore(place)
            for total, moment in values(call.wait(HANG)):
                assert total == 2.0
                assert moment > restored


def wait_for_two_seconds() -> str:
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # type: ignore[union-attr]
    try:
        warm_up()
    except RingfenceError as error:
        return type(error).__name__
    return ""


def test_collective_timeout_applies_during_an_outage(pair: Pool, hosts: Hosts) -> None:
    pair.check(warm_up, 2, env=interfaces(), seconds=FAR, renew=True)
    hosts.cut("switch")
    try:
        assert values(pair.start(wait_for_two_seconds, 2).wait(HANG)) == ["CollectiveTimeoutError"] * 2
    finally:
        hosts.restore("switch")


def die_or_wait() -> tuple[str, str]:
    warm_up()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        warm_up()
    except RingfenceError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_worker_killed_on_another_machine_is_named(pair: Pool) -> None:
    """A closed connection is not an outage: neither its timeout nor that of the group ends the wait."""
    pair.join("ringfence", 2, env=interfaces(**FAR_OUTAGE), seconds=FAR, renew=True)
    survivor, killed = pair.start(die_or_wait, 2).wait(HANG)
    assert killed.message == "killed by SIGKILL"
    ((kind, message),) = values([survivor])
    assert kind == "PeerLostError" and "worker 1" in message and "no answer" not in message
