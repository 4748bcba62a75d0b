"""Strategies in which a rank holds a part of the model: FSDP, tensor parallel, DTensor, pipelines, meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.strategies import FEATURES, STEPS, Model, batches, current_device, placed, sgd, train

MICROBATCHES = 4


def world_mesh() -> DeviceMesh:
    return init_device_mesh(current_device().type, (dist.get_world_size(),))


def _fully_sharded(mesh: DeviceMesh) -> Model:
    model = Model()
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def fsdp2() -> list[float]:
    model = _fully_sharded(world_mesh())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = train(model, optimizer, batches())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    return [*losses, norm.full_tensor().item()]


def fsdp2_own_divisor() -> list[float]:
    """By default torch asks for a sum with a factor in it here, which neither Gloo nor ringfence has."""
    model = _fully_sharded(world_mesh())
    for part in (model.up, model.down, model):
        part.set_gradient_divide_factor(3.0)
        part.set_force_sum_reduction_for_comms(True)
    return train(model, sgd(model), batches())


def hsdp() -> list[float]:
    """Sharded within a row of the mesh, replicated between rows."""
    model = _fully_sharded(init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("replicate", "shard")))
    return train(model, sgd(model), batches())


def fsdp1() -> list[float]:
    model = FullyShardedDataParallel(Model(), device_id=current_device(), use_orig_params=True)
    losses = train(model, sgd(model), batches())
    with FullyShardedDataParallel.summon_full_params(model):
        total = sum(parameter.abs().sum().item() for parameter in model.parameters())
    return [*losses, total]


def fsdp2_compiled() -> list[float]:
    torch._dynamo.reset()
    model = _fully_sharded(world_mesh())
    return train(torch.compile(model, backend="aot_eager"), sgd(model), batches())


PLAN = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}


def tensor_parallel() -> list[float]:
    model = parallelize_module(Model(), world_mesh(), PLAN)
    return train(model, sgd(model), batches(same_on_all_ranks=True))


def tensor_parallel_of_shards() -> list[float]:
    """Activations come in and go out split by rows: all-gather before, reduce-scatter after."""
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.ReLU(), nn.Linear(2 * FEATURES, FEATURES))
    model = parallelize_module(placed(layers), world_mesh(), plan)
    return train(model, sgd(model), batches())


def mesh_of_data_and_tensor_parallel() -> list[float]:
    mesh = init_device_mesh(current_device().type, (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(Model(), mesh["tensor"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    return train(model, sgd(model), batches(same_on_all_ranks=True))


def dtensor() -> list[float]:
    """A linear model by hand: a sharded weight, replicated inputs, results compared with plain tensors on the way."""
    mesh = world_mesh()
    torch.manual_seed(0)
    plain = torch.randn(FEATURES, FEATURES).to(current_device())
    weight = distribute_tensor(plain.clone(), mesh, [Shard(1)]).requires_grad_()
    assert torch.equal(weight.redistribute(mesh, [Shard(0)]).full_tensor(), plain)
    losses = []
    for inputs, targets in batches(same_on_all_ranks=True):
        spread = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (inputs, targets)]
        loss: Any = (spread[0] @ weight - spread[1]).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        losses.append(loss.full_tensor().item())
    return [*losses, weight.full_tensor().abs().sum().item()]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def _pipeline(schedule: type[Any], stages_each: int) -> list[float]:
    """Layers in a row over the ranks; losses are known to the last one only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * stages_each
    torch.manual_seed(0)
    layers = [placed(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())) for _ in range(count)]
    mine = [PipelineStage(layers[index], index, count, current_device()) for index in range(rank, count, world)]
    pipeline = schedule(mine if stages_each > 1 else mine[0], MICROBATCHES, loss_fn=mean_square)
    optimizers = [sgd(layers[stage.stage_index]) for stage in mine]
    means = []
    for inputs, targets in batches(STEPS, 2 * MICROBATCHES, same_on_all_ranks=True):
        losses: list[Tensor] = []
        ends: dict[str, Any] = {"target": targets, "losses": losses} if rank == world - 1 else {}
        pipeline.step(*([inputs] if rank == 0 else []), **ends)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        means.append(torch.stack(losses).mean().item() if losses else 0.0)
    weights = sum(p.detach().abs().sum().item() for stage in mine for p in layers[stage.stage_index].parameters())
    return [*means, weights]


def pipeline_gpipe() -> list[float]:
    return _pipeline(ScheduleGPipe, 1)


def pipeline_1f1b() -> list[float]:
    return _pipeline(Schedule1F1B, 1)


def pipeline_interleaved() -> list[float]:
    return _pipeline(ScheduleInterleaved1F1B, 2)
