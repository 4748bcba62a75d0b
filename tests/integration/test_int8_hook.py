"""The communication hook `ringfence.hooks.int8.hook`: nothing of a gradient is lost over steps, whatever DDP does."""

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringfence.hooks import int8
from ringfence.hooks.blocks import BLOCK
from ringfence.hooks.pieces import Piece
from ringfence.hooks.stages import Failure, Result
from tests import device
from tests.integration.strategies import FEATURES, Model, on_device
from tests.integration.strategies_replicated import SMALL_BUCKETS, replicas_agree
from tests.limits import FAR, HANG
from tests.pool import Pool

STEPS = 6
LEFT = 3e-5  # of float32's own rounding, where gradients are about one

CPU = torch.device("cpu")


class Bookkeeping:
    """A model with the hook, and what all ranks together have handed in and taken out."""

    def __init__(self, where: torch.device = CPU, **options: Any) -> None:
        self.where = where
        self.options = options
        with on_device(where):
            self.exact = Model()
        self.balance = torch.zeros(sum(each.numel() for each in self.exact.parameters()), dtype=torch.float64)
        self.model, self.state = self.made()

    def made(self) -> tuple[DistributedDataParallel, int8.State]:
        with on_device(self.where):
            model = DistributedDataParallel(Model(), **{"bucket_cap_mb": SMALL_BUCKETS, **self.options})
        state = int8.State(model)
        model.register_comm_hook(state, int8.hook)
        return model, state

    def step(self, number: int) -> float:
        """One backward pass. Return the largest error of an averaged gradient."""
        inputs = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        inputs = inputs.to(self.where)
        for model in (self.exact, self.model):
            model.zero_grad()
            (model(inputs).pow(2).sum() / 4).backward()
        own = flat(self.exact)
        dist.all_reduce(own)
        taken = flat(self.model.module)
        self.balance += own - dist.get_world_size() * taken
        return float((own / dist.get_world_size() - taken).abs().max())

    def lost(self) -> float:
        """Return the largest amount of a gradient's element that was neither applied nor is kept for the next step."""
        kept = torch.cat([each.flatten() for each in self.state.state_dict().values()]).double().cpu()
        dist.all_reduce(kept)
        return float((self.balance - kept).abs().max())


def flat(module: nn.Module) -> Tensor:
    """The gradients of a module in double precision, on the host."""
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    return torch.cat([each.flatten() for each in gradients]).double().cpu()


def balance(options: dict[str, Any], on: str = "cpu") -> tuple[float, float]:
    """Train some steps; return the largest error of one step, and what is lost over all of them."""
    where = device.load() if on == "sim" else CPU
    with device.behaviour(jitter=1e-4) if on == "sim" else contextlib.nullcontext():
        books = Bookkeeping(where, **options)
        error = max(books.step(number) for number in range(STEPS))
        equal_gradients(books.model)
        return error, books.lost()


def equal_gradients(model: nn.Module) -> None:
    mine = flat(model)
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, each) for each in others)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=lambda options: "".join(options) or "plain",
)
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_lost_over_steps(pool: Pool, world: int, options: dict[str, Any]) -> None:
    """Also where DDP arranges its buckets anew, after the first step."""
    for error, lost in pool.check(balance, world, "ringfence", (options,)):
        assert error > 100 * LEFT and lost < LEFT


def test_nothing_is_lost_over_gloo(pool: Pool) -> None:
    for error, lost in pool.check(balance, 2, "gloo", ({},)):
        assert error > 100 * LEFT and lost < LEFT


def balance_of_small_pieces() -> tuple[float, float]:
    with patch("ringfence.hooks.pieces.PIECE", BLOCK):
        return balance({"bucket_cap_mb": 25})


def test_nothing_is_lost_of_buckets_of_several_pieces(pool: Pool) -> None:
    for error, lost in pool.check(balance_of_small_pieces, 2):
        assert error > 100 * LEFT and lost < LEFT


@pytest.mark.processes
def test_nothing_is_lost_on_a_device(devices: Pool) -> None:
    for error, lost in devices.check(balance, 2, "ringfence", ({}, "sim")):
        assert error > 100 * LEFT and lost < LEFT


# -- checkpoints ----------------------------------------------------------------------------------------------------


def restarted(folder: str, loads: bool) -> float:
    """Save in the middle, go on with another model; return what is lost in all."""
    books = Bookkeeping()
    for number in range(STEPS):
        books.step(number)
    dcp.save({"int8": books.state.state_dict()}, checkpoint_id=folder)
    books.model, books.state = books.made()
    if loads:
        saved = {"int8": {name: torch.empty_like(each) for name, each in books.state.state_dict().items()}}
        dcp.load(saved, checkpoint_id=folder)
        books.state.load_state_dict(saved["int8"])
    for number in range(STEPS):
        books.step(STEPS + number)
    return books.lost()


@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_keeps_what_rounding_lost(pool: Pool, tmp_path: Any, loads: bool) -> None:
    """Each rank loads its own part; without loading, it is missing."""
    for lost in pool.check(restarted, 2, "ringfence", (str(tmp_path), loads)):
        assert lost < LEFT if loads else lost > 100 * LEFT


def wrong_states() -> None:
    books = Bookkeeping()
    books.step(0)
    right = {name: each.clone() for name, each in books.state.state_dict().items()}
    other_rank = {f"{1 - books.state.rank}.{name.partition('.')[2]}": each for name, each in right.items()}
    other_shape = {name: each.flatten() for name, each in right.items()}
    for wrong in ({}, other_rank, other_shape):
        with pytest.raises(ValueError, match="names or shapes differ"):
            books.state.load_state_dict(wrong)
    assert all(torch.equal(each, right[name]) for name, each in books.state.state_dict().items())
    plain = int8.State(books.model, error_feedback=False)
    assert plain.state_dict() == {}
    plain.load_state_dict({})


def test_a_state_of_another_rank_or_model_is_refused(pool: Pool) -> None:
    pool.check(wrong_states, 2)


# -- training -------------------------------------------------------------------------------------------------------


def regression(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches whose targets have noise: no model's loss vanishes."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES))
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(16, FEATURES, generator=random)
        yield inputs, teacher(inputs).detach() + 0.1 * torch.randn(16, FEATURES, generator=random)


def final_loss(quantised: bool, steps: int) -> float:
    """Return the mean loss of the last steps, over all ranks."""
    model = DistributedDataParallel(Model())
    if quantised:
        model.register_comm_hook(int8.State(model), int8.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for inputs, targets in regression(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    replicas_agree(model)
    mean = torch.tensor(sum(losses[-20:]) / 20, dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean < losses[0] / 2
    return mean.item()


def test_a_model_learns_as_with_float32(pool: Pool) -> None:
    exact = pool.check(final_loss, 2, "ringfence", (False, 300))[0]
    quantised = pool.check(final_loss, 2, "ringfence", (True, 300))[0]
    assert quantised != exact and abs(quantised / exact - 1) < 0.01


# -- the order of things --------------------------------------------------------------------------------------------


def return_before_peers_call() -> list[bool]:
    """The hooks of rank 1 begin after all of rank 0 have returned; both sum something else in the same group meanwhile."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
    state, store = int8.State(model), dist.distributed_c10d._get_default_store()
    done: list[bool] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if dist.get_rank() and not done:
            store.get("all hooks have returned")
        future = int8.hook(state, bucket)
        done.append(future.done())
        if bucket.is_last() and not dist.get_rank():
            store.set("all hooks have returned", "")
        return future

    model.register_comm_hook(None, hook)
    for _ in range(2):
        works = [dist.all_reduce(torch.ones(3), async_op=True)]
        loss = model(torch.ones(2, FEATURES)).sum()
        loss.register_hook(lambda _, works=works: works.append(dist.all_reduce(torch.ones(5), async_op=True)))
        loss.backward()
        for work in works:
            work.wait()
    return done


def test_hooks_return_before_their_peers_begin(pool: Pool) -> None:
    """So the backward pass goes on while gradients are on the wire."""
    first, second = pool.check(return_before_peers_call, 2, renew=True)
    assert len(first) == len(second) >= 4 and not any(first[: len(first) // 2])


def threads_after_use() -> list[str]:
    def use() -> None:
        model = DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook(int8.State(model), int8.hook)
        model(torch.ones(1, 4)).sum().backward()
        assert sum("int8" in each.name for each in threading.enumerate()) == 3

    use()
    gc.collect()
    for thread in threading.enumerate():
        if "int8" in thread.name:
            thread.join(HANG)
    return [each.name for each in threading.enumerate() if "int8" in each.name]


def test_the_threads_end_with_the_state(pool: Pool) -> None:
    assert pool.check(threads_after_use, 2) == [[], []]


def alone() -> bool:
    model = DistributedDataParallel(nn.Linear(4, 4))
    model.register_comm_hook(int8.State(model), int8.hook)
    model(torch.ones(1, 4)).sum().backward()
    return torch.equal(model.module.weight.grad, torch.ones(4, 4))


def test_a_model_of_one_worker_keeps_its_gradients(pool: Pool) -> None:
    assert pool.check(alone, 1) == [True]


# -- failures -------------------------------------------------------------------------------------------------------


def backward(model: nn.Module) -> str:
    try:
        model(torch.ones(2, FEATURES)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def a_peer_that_leaves() -> str:
    model = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
    state = int8.State(model)
    model.register_comm_hook(state, int8.hook)
    for _ in range(2):  # DDP itself communicates in the second one
        assert backward(model) == ""
    if dist.get_rank():
        dist.distributed_c10d._get_default_group().abort()
        return "left"
    return backward(model)


def a_peer_with_another_order() -> str:
    """The ranks differ in the hook of one bucket: gradients of other parameters, of another number."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
    state = int8.State(model, error_feedback=False)

    class Shorter:
        def __init__(self, bucket: dist.GradBucket) -> None:
            self.buffer: Callable[[], Tensor] = lambda: bucket.buffer()[1:]
            self.index = bucket.index

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return int8.hook(state, Shorter(bucket) if dist.get_rank() else bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, hook)
    return backward(model)


def test_a_lost_peer_fails_the_backward_pass(pool: Pool) -> None:
    error, other = pool.check(a_peer_that_leaves, 2, seconds=FAR, timeout=HANG, renew=True)
    assert "PeerLostError" in error or "AbortedError" in error, error
    assert other == "left"


def test_buckets_that_differ_fail_the_backward_pass_on_all(pool: Pool) -> None:
    for error in pool.check(a_peer_with_another_order, 2, seconds=FAR, timeout=HANG, renew=True):
        assert "MismatchError" in error or "AbortedError" in error


def equal_layers() -> DistributedDataParallel:
    """A model with a bucket for each of four layers, all of one size. Two steps, in which DDP communicates too, are done."""
    layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4)))
    return DistributedDataParallel(layers, bucket_cap_mb=SMALL_BUCKETS)


def a_rank_that_runs_out_of_memory(method: str, call: int) -> list[str]:
    """Rank 0 fails in one piece, drops the step, and goes on. No rank can save errors that hold half of a gradient."""
    model = equal_layers()
    state = int8.State(model)
    model.register_comm_hook(state, int8.hook)
    assert [backward(model) for _ in range(2)] == ["", ""]
    original, calls = getattr(Piece, method), itertools.count()

    def failing(*arguments: Any) -> None:
        if next(calls) == call:
            raise torch.OutOfMemoryError("no memory on this rank")
        original(*arguments)

    with patch.object(Piece, method, failing) if dist.get_rank() == 0 else contextlib.nullcontext():
        errors = [backward(model) for _ in range(2)]
    for use in (state.state_dict, lambda: state.load_state_dict({})):
        with pytest.raises(RuntimeError, match="no memory on this rank" if dist.get_rank() == 0 else "left the run"):
            use()
    return errors


@pytest.mark.parametrize("method", ["begin", "combine", "finish"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_failure_on_one_rank_fails_all(pool: Pool, world: int, method: str) -> None:
    """No other rank gets a sum of other buckets, or waits."""
    arguments = (method, 1)
    failed, *others = pool.check(
        a_rank_that_runs_out_of_memory, world, "ringfence", arguments, seconds=FAR, timeout=HANG, renew=True
    )
    assert all("no memory on this rank" in error for error in failed), failed
    for first, second in others:
        assert first + second and "worker 0 left the run" in first + second, (first, second)
        assert "worker 0 left the run" in first or method == "finish", first  # its last collective had ended


def a_hook_that_one_rank_skips(refused: bool) -> str:
    """Rank 0 does not sum one bucket. With `refused`, `int8.hook` was called and has raised, on the only bucket."""
    model = DistributedDataParallel(nn.Linear(FEATURES, FEATURES)) if refused else equal_layers()
    state, calls = int8.State(model, error_feedback=False), itertools.count()

    class Integers:
        buffer = staticmethod(lambda: torch.ones(3, dtype=torch.int32))

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if next(calls) != 1 or dist.get_rank():
            return int8.hook(state, bucket)
        if refused:
            with pytest.raises(TypeError):
                int8.hook(state, Integers())  # type: ignore[arg-type]
        skipped: torch.futures.Future[Tensor] = torch.futures.Future()
        skipped.set_result(bucket.buffer())
        return skipped

    model.register_comm_hook(None, hook)
    steps = 3 + (refused and dist.get_rank() == 0)  # so that no call lacks a partner
    return next(filter(None, (backward(model) for _ in range(steps))), "")


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("over", ["ringfence", "gloo"])
def test_a_hook_that_one_rank_skips_fails_all(pool: Pool, over: str, refused: bool) -> None:
    """What others sum next has the same size and dtype; its number and bucket are others."""
    for error in pool.check(a_hook_that_one_rank_skips, 2, over, (refused,), seconds=FAR, timeout=HANG, renew=True):
        assert "MismatchError" in error and "is at another all-reduce" in error, error


class BrokenFuture(torch.futures.Future[Any]):
    """As on a device that has failed: it completes without a tensor only."""

    def set_result(self, value: Any) -> None:
        if value is not None:
            raise RuntimeError("the device is lost")
        super().set_result(value)


def a_result_that_cannot_be_delivered() -> list[str]:
    with patch("ringfence.hooks.stages.Future", BrokenFuture) if dist.get_rank() == 0 else contextlib.nullcontext():
        model = DistributedDataParallel(nn.Linear(FEATURES, FEATURES))
        model.register_comm_hook(int8.State(model), int8.hook)
        return [backward(model) for _ in range(2)]


def test_a_result_that_cannot_be_delivered_fails_all(pool: Pool) -> None:
    failed, other = pool.check(a_result_that_cannot_be_delivered, 2, seconds=FAR, timeout=HANG, renew=True)
    assert "the device is lost" in failed[0] and "left the run" in failed[1], failed
    assert "worker 0 left the run" in "".join(other), other


class BrokenStream:
    def __enter__(self) -> None:
        raise RuntimeError("the device is lost")

    def __exit__(self, *_: object) -> None:
        pass


def test_a_stream_that_cannot_be_entered_fails_the_result() -> None:
    result = Result(torch.ones(3), None, Failure([]))
    result._stream = BrokenStream()  # type: ignore[assignment]
    result.step(lambda: None)()
    with pytest.raises(RuntimeError, match="the device is lost"):
        result.future.wait()
