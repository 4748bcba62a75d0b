"""Every strategy trains over ringfence as over Gloo, with forked loader workers and without a Gloo group."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.integration import strategies_checkpoint, strategies_replicated, strategies_sharded
from tests.integration.strategies import Strategy, no_gloo
from tests.pool import Failure, Pool, values

REPLICATED = strategies_replicated
SHARDED = strategies_sharded
STRATEGIES: dict[Strategy, int] = {  # with the world size
    REPLICATED.ddp: 2,
    REPLICATED.ddp_several_buckets: 4,
    REPLICATED.ddp_static_graph: 2,
    REPLICATED.ddp_bucket_view: 2,
    REPLICATED.ddp_find_unused: 2,
    REPLICATED.ddp_join: 2,
    REPLICATED.ddp_no_sync: 2,
    REPLICATED.ddp_sparse_embeddings: 2,
    REPLICATED.ddp_batch_norm_buffers: 2,
    REPLICATED.ddp_fp16_hook: 2,
    REPLICATED.ddp_python_hook: 2,
    REPLICATED.ddp_power_sgd: 2,
    REPLICATED.ddp_compiled: 2,
    REPLICATED.ddp_compiled_by_inductor: 2,
    REPLICATED.zero: 2,
    REPLICATED.averaged_periodically: 2,
    REPLICATED.averaged_in_a_hierarchy: 4,
    REPLICATED.post_local_sgd: 4,
    SHARDED.fsdp2: 2,
    SHARDED.fsdp2_own_divisor: 2,
    SHARDED.fsdp2_compiled: 2,
    SHARDED.fsdp1: 2,
    SHARDED.tensor_parallel: 2,
    SHARDED.tensor_parallel_of_shards: 2,
    SHARDED.dtensor: 2,
    SHARDED.hsdp: 4,
    SHARDED.mesh_of_data_and_tensor_parallel: 4,
    SHARDED.pipeline_gpipe: 4,
    SHARDED.pipeline_1f1b: 4,
    SHARDED.pipeline_interleaved: 2,
}
MARKS = {
    REPLICATED.ddp_compiled_by_inductor: pytest.mark.nightly
}  # runs a C++ compiler; `ddp_compiled` traces the same
TIMEOUT = 600  # a C++ compiler takes minutes on a machine with other work; none of these limits is the subject
GROUP_TIMEOUT = 300  # one worker may wait for another's compiler
RELATIVE = 1e-3  # the order of additions differs between backends, and training amplifies it

pytestmark = pytest.mark.timeout(2 * TIMEOUT + 60)


def guarded(function: Any, *args: Any) -> Any:
    """Run a function in a worker in which no Gloo group can be created."""
    assert dist.group.WORLD.name() == "ringfence"
    with no_gloo():
        return function(*args)


def train_over(pool: Pool, backend: str, strategy: Any, world: int, *args: Any) -> list[Any]:
    """The results of a strategy on each rank; over ringfence without Gloo."""
    if backend == "ringfence":
        return pool.run(guarded, world, backend, (strategy, *args), TIMEOUT, seconds=GROUP_TIMEOUT)
    return pool.run(strategy, world, backend, args, TIMEOUT, seconds=GROUP_TIMEOUT)


@pytest.fixture(scope="session")
def gloo_losses() -> dict[Strategy, list[list[float]]]:
    """The results over Gloo, each run once."""
    return {}


@pytest.mark.promise("Beside a ringfence default group, a script that asks for a Gloo group gets a ringfence group.")
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(each, id=each.__name__, marks=MARKS.get(each, ())) for each in STRATEGIES],
)
def test_losses_equal_those_on_gloo(
    pool: Pool, backend: str, strategy: Strategy, gloo_losses: dict[Strategy, list[list[float]]]
) -> None:
    world = STRATEGIES[strategy]
    if strategy not in gloo_losses:
        gloo_losses[strategy] = values(train_over(pool, "gloo", strategy, world))
    reference = gloo_losses[strategy]
    assert all(math.isfinite(loss) for losses in reference for loss in losses)
    assert len(set(reference[-1])) > 1
    if backend != "gloo":
        for losses, expected in zip(values(train_over(pool, backend, strategy, world)), reference, strict=True):
            assert losses == pytest.approx(expected, rel=RELATIVE)


def test_power_sgd_with_several_buckets_works_or_raises_on_every_rank(pool: Pool) -> None:
    # Stock Gloo hangs here, so there is nothing to compare with.
    results = train_over(pool, "ringfence", REPLICATED.ddp_power_sgd_several_buckets, 2)
    assert not any(isinstance(result, Failure) and result.type in ("Hang", "Death") for result in results)
    assert len({isinstance(result, Failure) for result in results}) == 1


@pytest.mark.parametrize("asynchronously", [False, True], ids=["save", "async_save"])
def test_checkpoint_of_four_workers_loads_on_two(
    pool: Pool, backend: str, tmp_path: Path, asynchronously: bool
) -> None:
    saved = values(train_over(pool, backend, strategies_checkpoint.save, 4, str(tmp_path), asynchronously))
    loaded = values(train_over(pool, backend, strategies_checkpoint.load, 2, str(tmp_path)))
    for weights, losses in loaded:
        assert weights == pytest.approx(saved[0], rel=1e-12)
        assert losses[0] == pytest.approx(loaded[0][1][0], rel=RELATIVE)


def ask_for(backend: str) -> list[str]:
    """Request a group of another backend in every way; return the groups."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",), backend_override={"all": backend})
    groups = [dist.new_group(backend=backend), dist.new_subgroups(2, backend=backend)[0], mesh.get_group("all")]
    for group in groups:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0] * 3
    return [str(group.name()) for group in groups]


@pytest.mark.promise("Beside a ringfence default group, a script that asks for a Gloo group gets a ringfence group.")
@pytest.mark.parametrize("asked", ["gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:ringfence"])
def test_no_group_of_a_script_uses_gloo(pool: Pool, asked: str) -> None:
    assert pool.check(guarded, 2, "ringfence", (ask_for, asked), renew=True) == [["ringfence"] * 3] * 2


def by_new_group() -> None:
    dist.new_group()


DIST2 = "torch.distributed._dist2"  # an experiment that torch 2.13 removed


def by_dist2() -> None:
    import_module(DIST2)._gloo_factory(dist.HashStore(), 0, 1, timedelta(seconds=5), torch.device("cpu"))


def by_the_binding() -> None:
    torch._C._distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))


WAYS = (by_new_group, by_the_binding, *((by_dist2,) if find_spec(DIST2) else ()))


def make_group_under_guard(make: Callable[[], None]) -> None:
    with no_gloo():
        make()


@pytest.mark.promise("Beside a ringfence default group, a script that asks for a Gloo group gets a ringfence group.")
@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_check_for_gloo_detects_gloo(pool: Pool, make: Callable[[], None]) -> None:
    results = pool.run(make_group_under_guard, 2, "gloo", (make,))
    assert [result.type for result in results] == ["GlooForbidden"] * 2
