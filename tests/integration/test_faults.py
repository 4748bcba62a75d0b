"""Faults of one worker: every other worker raises an error that names it, and does not wait for a timeout."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import ringfence
from ringfence.admission.tree import children_of
from ringfence.errors import RingfenceError
from tests.integration.process_signal import ProcessSignal
from tests.limits import FAR, FAR_OUTAGE, HANG, no_early_blame
from tests.pool import Failure, Pool, values
from tests.progress_thread import between_steps

WORLD = 4
DEEP = 7  # workers: the fewest with which two of them have a parent that is not worker 0


def raised(results: list[Any], kinds: set[str]) -> list[Failure]:
    """Return the results, all of which must be failures of these kinds."""
    for result in results:
        assert isinstance(result, Failure), result
        assert result.type in kinds, result
    return results


def hurry(seconds: float) -> None:
    """Set a short timeout for collectives. The join keeps a long one, because workers may have to start first."""
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


def all_reduce(elements: int = 1000) -> float:
    tensor = torch.ones(elements)
    dist.all_reduce(tensor)
    return tensor[0].item()


# -- different collectives ------------------------------------------------------------------------------------------


def different_collectives() -> None:
    if dist.get_rank() == 0:
        dist.all_gather_into_tensor(torch.ones(10 * dist.get_world_size()), torch.ones(10))
    else:
        dist.all_reduce(torch.ones(10))


def broadcast_against_all_reduce() -> None:
    """The root of a broadcast only sends and completes before a peer can object, so its next collective raises."""
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(10), src=0)
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(10))


def different_sizes() -> None:
    dist.all_reduce(torch.ones(10 + dist.get_rank()))


@pytest.mark.promise("Workers that call different collectives in one group get an error that names both calls.")
@pytest.mark.parametrize("world", [2, 4])
def test_different_collectives_raise_an_error_naming_both(pool: Pool, world: int) -> None:
    results = raised(
        pool.run(different_collectives, world, seconds=FAR, timeout=HANG, renew=True), {"MismatchError", "AbortedError"}
    )
    assert any(result.type == "MismatchError" for result in results)
    for result in results:
        assert f"all_gather #1 ({10 * world} x float32)" in result.message
        assert "all_reduce #1 (10 x float32, sum)" in result.message


def test_a_sending_root_gets_the_mismatch_at_its_next_call(pool: Pool) -> None:
    for result in raised(
        pool.run(broadcast_against_all_reduce, 3, seconds=FAR, timeout=HANG, renew=True),
        {"MismatchError", "AbortedError"},
    ):
        assert (
            "broadcast #1 (10 x float32, root 0)" in result.message or "barrier #2" in result.message
        )  # the worker that noticed it first
        assert "all_reduce #1 (10 x float32, sum)" in result.message


def test_different_sizes_raise_an_error_naming_both(pool: Pool) -> None:
    for result in raised(
        pool.run(different_sizes, 2, seconds=FAR, timeout=HANG, renew=True), {"MismatchError", "AbortedError"}
    ):
        assert "all_reduce #1 (10 x float32, sum)" in result.message
        assert "all_reduce #1 (11 x float32, sum)" in result.message


def receive_from_each_other(path: str) -> tuple[str, str]:
    """Each rank waits for a message of the other, so no frame reveals the mismatch."""
    return how_it_ends(path, lambda: dist.irecv(torch.ones(1), src=1 - dist.get_rank()))


def receive_against_all_reduce(path: str) -> tuple[str, str]:
    if dist.get_rank() == 0:
        return how_it_ends(path, lambda: dist.irecv(torch.ones(10), src=1))
    return how_it_ends(path, lambda: dist.all_reduce(torch.ones(10), async_op=True))


def all_reduce_in_two_groups(path: str) -> tuple[str, str]:
    """Both groups have both workers as members; each worker waits in another group."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=FAR if rank else 2)) for _ in range(2)]
    return how_it_ends(path, lambda: dist.all_reduce(torch.ones(10 + rank), group=groups[rank], async_op=True))


def how_it_ends(path: str, call: Callable[[], Any]) -> tuple[str, str]:
    """Rank 1 calls first and can wait for long; the call of rank 0 times out."""
    hurry(FAR if dist.get_rank() else 2)
    with ProcessSignal(path) as called:
        if dist.get_rank() == 0:
            called.wait(seconds=HANG)
        work = call()
        if dist.get_rank() == 1:
            called.notify()
        try:
            work.wait()
        except RingfenceError as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.promise("Workers that call different collectives in one group get an error that names both calls.")
@pytest.mark.parametrize(
    ("work", "calls"),
    [
        (receive_from_each_other, ("send/recv #0 with tag 0 (1 x float32)", "send/recv #0 with tag 0 (1 x float32)")),
        (receive_against_all_reduce, ("send/recv #0 with tag 0 (10 x float32)", "all_reduce #1 (10 x float32, sum)")),
        (all_reduce_in_two_groups, ("all_reduce #1 (10 x float32, sum)", "all_reduce #1 (11 x float32, sum)")),
    ],
    ids=["two receives", "receive against all-reduce", "two groups"],
)
def test_unmatched_calls_time_out_naming_the_awaited_worker(
    pool: Pool, tmp_path: Path, work: Callable[[str], tuple[str, str]], calls: tuple[str, str]
) -> None:
    with ProcessSignal(tmp_path / "signal") as called:
        mine, theirs = pool.check(work, 2, args=(called.path,), seconds=FAR, timeout=HANG, renew=True)
    assert mine[0] == "CollectiveTimeoutError" and calls[0] in mine[1] and "it waits for worker 1" in mine[1]
    assert theirs[0] == "AbortedError" and calls[0] in theirs[1] and calls[1] in theirs[1]
    assert "it waits for worker 1" in theirs[1]


# -- deadlines ------------------------------------------------------------------------------------------------------


def one_never_calls(absent: int, path: str) -> tuple[str, str, float]:
    """The absent worker calls after the other has timed out; its own timeout is not what ends the call."""
    hurry(FAR if dist.get_rank() == absent else 2)
    with ProcessSignal(path) as ready:
        if dist.get_rank() == absent:
            ready.wait(seconds=HANG)
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(10))
        except RingfenceError as error:
            return type(error).__name__, str(error), time.monotonic() - started
        finally:
            if dist.get_rank() != absent:
                ready.notify()
    return "", "", 0.0


@pytest.mark.parametrize("absent", [0, 1])
def test_a_timeout_names_the_absent_worker(pool: Pool, tmp_path: Path, absent: int) -> None:
    with ProcessSignal(tmp_path / "signal") as ready:
        results = pool.check(one_never_calls, 2, args=(absent, ready.path), seconds=FAR, timeout=HANG, renew=True)
    kind, message, seconds = results[1 - absent]
    assert kind == "CollectiveTimeoutError"
    assert f"waits for worker {absent}" in message
    assert seconds >= 2
    kind, message, _ = results[absent]
    assert kind == "AbortedError"
    assert "CollectiveTimeoutError" in message and f"worker {1 - absent}" in message


def send_to_nobody(path: str) -> tuple[str, str]:
    """Rank 1 never receives; it waits for another message."""
    rank = dist.get_rank()
    return how_it_ends(path, lambda: dist.irecv(torch.ones(10), 0, tag=7) if rank else dist.isend(torch.ones(10), 1))


def test_an_unmatched_send_names_its_receiver(pool: Pool, tmp_path: Path) -> None:
    with ProcessSignal(tmp_path / "signal") as called:
        args = (called.path,)
        sender, receiver = pool.check(send_to_nobody, 2, args=args, seconds=FAR, timeout=HANG, renew=True)
    assert sender[0] == "CollectiveTimeoutError"
    assert "send/recv #0 with tag 0 (10 x float32)" in sender[1] and "waits for worker 1" in sender[1]
    assert receiver[0] == "AbortedError"
    assert "with tag 0" in receiver[1] and "with tag 7" in receiver[1]


# -- errors that torch wraps ----------------------------------------------------------------------------------------


def fail_within_ddp() -> tuple[str, str, bool]:
    """Rank 1 calls another collective than DDP's. Return what rank 0 catches, and what the session ended with."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    assert ringfence.failure() is None
    try:
        if dist.get_rank():
            dist.barrier()
        else:
            model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        found = ringfence.failure()
        return type(error).__name__, type(found).__name__, str(found) in str(error)
    return "", "", False


def test_the_error_that_ddp_wraps_can_be_asked_for(pool: Pool) -> None:
    wrapped, own = pool.check(fail_within_ddp, 2, seconds=FAR, timeout=HANG, renew=True)
    assert wrapped == ("RuntimeError", "MismatchError", True)
    assert own[1] in ("MismatchError", "AbortedError")


# -- tensors that change --------------------------------------------------------------------------------------------


def resize_under_way(change: str, path: str) -> tuple[str, str]:
    """Rank 0 resizes the tensor during its call, before rank 1 has called."""
    all_reduce()
    tensor = torch.ones(1 << 20)
    with ProcessSignal(path) as ready:
        try:
            if dist.get_rank():
                ready.wait(seconds=HANG)
                dist.all_reduce(tensor)
            else:
                work = dist.all_reduce(tensor, async_op=True)
                between_steps(lambda: CHANGES[change](tensor))  # another thread could free memory while it is sealed
                ready.notify()
                work.wait()
        except RingfenceError as error:
            return type(error).__name__, str(error)
    return "", ""


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "made larger": lambda tensor: tensor.resize_(1 << 22),
}


@pytest.mark.promise("A tensor that is resized or moved during a call fails the call on every worker.")
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_resized_during_a_collective_fails_all_ranks(pool: Pool, tmp_path: Path, change: str) -> None:
    with ProcessSignal(tmp_path / "signal") as ready:
        args = change, ready.path
        culprit, other = pool.check(resize_under_way, 2, args=args, seconds=FAR, timeout=HANG, renew=True)
    assert_resize_is_reported(culprit, other)


def assert_resize_is_reported(culprit: Sequence[Any], other: Sequence[Any]) -> None:
    """Both ranks raised; the type and the message of each come first."""
    assert culprit[0] == "TensorChangedError" and other[0] == "AbortedError"
    assert (
        "worker 0: all_reduce #2 (1048576 x float32, sum): the storage of one of its tensors was resized" in culprit[1]
    )
    assert "Wait for the call to end (work.wait()) before resizing" in culprit[1]
    assert "worker 0 reported RingfenceError: worker 0: all_reduce #2" in other[1]


# -- death ----------------------------------------------------------------------------------------------------------


class Busy(IterableDataset[int]):
    """Keeps a worker of a data loader busy, so that it notices the death of its parent late."""

    def __iter__(self) -> Iterator[int]:
        yield 0
        while True:
            sum(range(100_000))


def loaders(wanted: bool) -> Any:
    """Return a data loader whose forked workers are busy."""
    if not wanted:
        return None
    batches = iter(DataLoader(Busy(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
    next(batches)
    return batches


@no_early_blame
def die_in_a_collective(victim: int, note: str, with_children: bool) -> tuple[str, str]:
    """Survivors are in an all-reduce that the victim never calls. The victim leaves a note: a process that outlives it."""
    batches = loaders(with_children and dist.get_rank() == victim)
    try:
        for _ in range(5):
            all_reduce()
        if dist.get_rank() == victim:
            outliving = multiprocessing.active_children()[0].pid if with_children else os.getppid()
            Path(note).write_text(str(outliving))
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # a survivor may hear of it before it has its last result
            all_reduce(100_000)
    except RingfenceError as error:
        assert batches is None
        assert Path("/proc", Path(note).read_text()).exists()
        return type(error).__name__, str(error)


@pytest.mark.promise("A killed worker makes every other worker raise, and the error names it.")
@pytest.mark.parametrize("with_children", [False, True], ids=["alone", "with_busy_loader_children"])
@pytest.mark.parametrize("victim", range(WORLD))
def test_every_survivor_names_a_killed_worker(pool: Pool, tmp_path: Path, victim: int, with_children: bool) -> None:
    kill_and_look(pool, tmp_path, WORLD, victim, with_children)


@pytest.mark.promise("A killed worker makes every other worker raise, and the error names it.")
@pytest.mark.parametrize("victim", [1, 6], ids=["between the levels", "on the second level"])
def test_a_killed_worker_is_reported_over_two_levels_of_the_tree(pool: Pool, tmp_path: Path, victim: int) -> None:
    """In a world of seven, workers 5 and 6 are children of worker 1. The abort reaches all workers through the tree."""
    assert list(children_of(1, DEEP)) == [5, 6]
    kill_and_look(pool, tmp_path, DEEP, victim, with_children=False)


def kill_and_look(pool: Pool, folder: Path, world: int, victim: int, with_children: bool) -> None:
    note = str(folder / "note")
    args = victim, note, with_children
    results = pool.run(die_in_a_collective, world, args=args, seconds=FAR, env=FAR_OUTAGE, timeout=HANG)
    assert results[victim].message == "killed by SIGKILL"
    for rank, result in enumerate(results):
        if rank != victim:
            assert not isinstance(result, Failure), f"worker {rank}: {result}"
            kind, message = result
            assert kind in ("PeerLostError", "AbortedError")
            assert f"worker {victim}" in message


def die_at_once(victim: int) -> None:
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)


def next_collective() -> tuple[str, str]:
    try:
        all_reduce()
    except RingfenceError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_the_next_collective_raises_after_an_idle_worker_died(pool: Pool) -> None:
    victim = WORLD - 1
    results = pool.run(die_at_once, WORLD, args=(victim,), seconds=FAR, env=FAR_OUTAGE, renew=True)
    assert results[victim].message == "killed by SIGKILL"
    for kind, message in values(pool.start(next_collective, victim).wait(HANG)):
        assert kind in ("PeerLostError", "AbortedError")
        assert f"worker {victim}" in message


def leave_early(leaver: int) -> tuple[str, str]:
    if dist.get_rank() == leaver:
        dist.destroy_process_group()
        return "", "left"
    try:
        all_reduce()
    except RingfenceError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_worker_that_leaves_while_needed_is_named(pool: Pool, leaver: int) -> None:
    results = pool.check(leave_early, 3, args=(leaver,), seconds=FAR, env=FAR_OUTAGE, timeout=HANG, renew=True)
    pool.leave()
    assert results.pop(leaver) == ("", "left")
    for kind, message in results:
        assert kind in ("PeerLostError", "AbortedError")
        assert f"worker {leaver}" in message
