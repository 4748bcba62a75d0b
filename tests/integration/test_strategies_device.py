"""Every strategy trains on the simulated device as on the CPU, with random delays of its kernels and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ringfence
from tests import device
from tests.integration import strategies_checkpoint
from tests.integration.strategies import BATCH, Model, Samples, Strategy, batches, no_gloo, on_device, sgd, train
from tests.integration.test_strategies import REPLICATED, SHARDED, STRATEGIES, TIMEOUT
from tests.pool import Failure, Pool

RELATIVE = 1e-6  # the device runs some layers by other kernels than the CPU, whose last bits differ
JITTER = 1e-4
LEFT_OUT = {
    REPLICATED.ddp_sparse_embeddings,  # refused: test_sparse_gradients_are_refused
    REPLICATED.ddp_compiled_by_inductor,  # torch's Inductor has no code generator for this device ("assert scheduling_ctor")
}
ON_DEVICE = {strategy: world for strategy, world in STRATEGIES.items() if strategy not in LEFT_OUT}
MODES = ("normal", "confidential")
FAMILIES: dict[str, tuple[Strategy, Strategy]] = {  # by how they call collectives: one of each for each mode
    "buckets": (REPLICATED.ddp_bucket_view, REPLICATED.ddp_several_buckets),
    "hooks": (REPLICATED.ddp_power_sgd, REPLICATED.ddp_python_hook),
    "compiled": (REPLICATED.ddp_compiled, SHARDED.fsdp2_compiled),
    "shards": (SHARDED.fsdp1, SHARDED.fsdp2),
    "tensor parallel": (SHARDED.tensor_parallel_of_shards, SHARDED.tensor_parallel),
    "meshes": (SHARDED.hsdp, SHARDED.mesh_of_data_and_tensor_parallel),
    "pipelines": (SHARDED.pipeline_interleaved, SHARDED.pipeline_1f1b),
}
Cell = tuple[Strategy, str]
# Compiled ones take 20 s each.
GATE: list[Cell] = [
    (FAMILIES[name][MODES.index(mode)], mode)
    for name, mode in AllPairs([[name for name in FAMILIES if name != "compiled"], MODES])
]
NIGHTLY: list[Cell] = [
    cell
    for cell in (
        *((strategy, "normal") for strategy in ON_DEVICE),
        (REPLICATED.ddp_power_sgd, "confidential"),
        (SHARDED.fsdp2_compiled, "confidential"),
    )
    if cell not in GATE
]


def on_sim(confidential: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the device as the strategies' device."""
    mine = device.load()
    with no_gloo(), on_device(mine), device.behaviour(jitter=JITTER, confidential=confidential):
        return function(*args)


def on_both(strategy: Strategy, confidential: bool) -> tuple[list[float], list[float]]:
    """The results of a strategy on the CPU and on the device."""
    device.load()
    with no_gloo():
        expected = strategy()
    return expected, on_sim(confidential, strategy)


def compare(pool: Pool, strategy: Strategy, world: int, confidential: bool) -> None:
    for expected, losses in pool.check(on_both, world, "ringfence", (strategy, confidential), TIMEOUT):
        assert all(math.isfinite(loss) for loss in expected)
        assert losses == pytest.approx(expected, rel=RELATIVE)


def parameter(cell: Cell, *marks: pytest.MarkDecorator) -> Any:
    strategy, mode = cell
    return pytest.param(strategy, mode, id=f"{strategy.__name__}-{mode}", marks=marks)


@pytest.mark.parametrize(
    ("strategy", "mode"), [*map(parameter, GATE), *(parameter(cell, pytest.mark.nightly) for cell in NIGHTLY)]
)
def test_losses_equal_those_on_the_cpu(devices: Pool, strategy: Strategy, mode: str) -> None:
    compare(devices, strategy, ON_DEVICE[strategy], confidential=mode == "confidential")


def test_sparse_gradients_are_refused(devices: Pool) -> None:
    for rank, result in enumerate(devices.run(on_sim, 2, args=(False, REPLICATED.ddp_sparse_embeddings))):
        assert isinstance(result, Failure) and result.type == "UnsupportedError"
        assert f"sparse tensors can only be reduced on the CPU; this one is on sim:{rank}" in result.message


def test_power_sgd_with_several_buckets_works_or_raises_on_every_rank(devices: Pool) -> None:
    results = devices.run(on_sim, 2, args=(False, REPLICATED.ddp_power_sgd_several_buckets), timeout=TIMEOUT)
    assert not any(isinstance(result, Failure) and result.type in ("Hang", "Death") for result in results)
    assert len({isinstance(result, Failure) for result in results}) == 1


def usual_script() -> tuple[list[float], list[float]]:
    """DDP as scripts for GPUs have it: `device_ids`, and batches that a thread pins while loader workers are forked."""
    mine = device.load()
    expected = train(DistributedDataParallel(model := Model()), sgd(model), batches())
    with no_gloo(), on_device(mine), device.behaviour(jitter=JITTER):
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        samples = Samples(len(expected) * BATCH, rank, world)
        loader = DataLoader(samples, BATCH, num_workers=2, multiprocessing_context="fork", pin_memory=True)
        pinned = []

        def feed() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for inputs, targets in loader:
                pinned.append(inputs.is_pinned() and targets.is_pinned())
                yield inputs.to(mine, non_blocking=True), targets.to(mine, non_blocking=True)

        module = DistributedDataParallel(Model(), device_ids=[mine.index])
        losses = train(module, sgd(module), feed())
        assert pinned == [True] * len(expected)
    return expected, losses


def test_ddp_with_device_ids_and_pinned_batches(devices: Pool) -> None:
    for expected, losses in devices.check(usual_script, 2):
        assert losses == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize(
    "asynchronously", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["save", "async_save"]
)
def test_checkpoint_of_four_devices_loads_on_two_and_on_the_cpu(
    devices: Pool, tmp_path: Path, asynchronously: bool
) -> None:
    of_device, of_cpu = str(tmp_path / "device"), str(tmp_path / "cpu")
    save, load = strategies_checkpoint.save, strategies_checkpoint.load
    saved = devices.check(on_sim, 4, args=(False, save, of_device, asynchronously), timeout=TIMEOUT)
    expected = devices.check(save, 4, args=(of_cpu, asynchronously), timeout=TIMEOUT)
    assert saved[0] == pytest.approx(expected[0], rel=RELATIVE)
    on_two = devices.check(on_sim, 2, args=(False, load, of_device), timeout=TIMEOUT)
    on_cpu = devices.check(load, 2, args=(of_device,), timeout=TIMEOUT)
    for (weights, losses), (cpu_weights, cpu_losses) in zip(on_two, on_cpu, strict=True):
        assert weights == pytest.approx(saved[0], rel=1e-12)
        assert cpu_weights == pytest.approx(saved[0], rel=1e-12)
        assert losses == pytest.approx(cpu_losses, rel=RELATIVE)


def diloco() -> list[float]:
    """Rounds of two steps; the agreed parameters are on the device too."""
    module = Model()
    optimizer, outer = sgd(module), torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with ringfence.DiLoCo(module, optimizer, outer, every=2) as averaged:
        losses = train(module, optimizer, batches())
    assert (averaged.outer_steps, averaged.steps) == (len(losses) // 2, 0)
    REPLICATED.replicas_agree(module)
    return losses


def test_diloco_trains_as_on_the_cpu(devices: Pool) -> None:
    compare(devices, diloco, 2, confidential=False)
