"""Strategies in which every rank holds the whole model: DDP in its variants, and ZeRO."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.integration.strategies import FEATURES, STEPS, Model, batches, loss_of, placed, sgd, train

SMALL_BUCKETS = 1e-4  # MB: a bucket for each parameter or two


def replicas_agree(module: nn.Module) -> None:
    """After training, every rank has bitwise equal weights."""
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(weights, other) for other in everyone)


def _ddp(**options: Any) -> list[float]:
    module = DistributedDataParallel(Model(seed=dist.get_rank()), **options)
    losses = train(module, sgd(module), batches())
    replicas_agree(module)
    return losses


def ddp() -> list[float]:
    return _ddp()


def ddp_several_buckets() -> list[float]:
    return _ddp(bucket_cap_mb=SMALL_BUCKETS)


def ddp_static_graph() -> list[float]:
    return _ddp(static_graph=True)


def ddp_bucket_view() -> list[float]:
    return _ddp(gradient_as_bucket_view=True)


def ddp_find_unused() -> list[float]:
    return _ddp(find_unused_parameters=True)


def ddp_join() -> list[float]:
    """Ranks with unequal numbers of batches."""
    module = DistributedDataParallel(Model())
    with module.join():
        losses = train(module, sgd(module), batches(STEPS + dist.get_rank()))
    replicas_agree(module)
    return losses


def ddp_no_sync() -> list[float]:
    """Gradients of two batches are accumulated before they are reduced."""
    module = DistributedDataParallel(Model())
    optimizer = sgd(module)
    losses = []
    feed = batches(2 * STEPS)
    for first, second in zip(feed, feed, strict=True):
        optimizer.zero_grad()
        with module.no_sync():
            loss_of(module, first).backward()
        loss = loss_of(module, second)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    replicas_agree(module)
    return losses


class Bag(nn.Module):
    """Rows of an embedding table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, FEATURES, sparse=True)
        self.head = nn.Linear(FEATURES, FEATURES)
        placed(self)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.table((inputs.abs() * 20).long().clamp(max=49)).mean(dim=1))


def ddp_sparse_embeddings() -> list[float]:
    module = DistributedDataParallel(Bag())
    losses = train(module, torch.optim.SGD(module.parameters(), lr=0.1), batches())
    replicas_agree(module)
    return losses


def ddp_batch_norm_buffers() -> list[float]:
    """Buffers are broadcast before each forward pass."""
    torch.manual_seed(0)
    layers = placed(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)))
    module = DistributedDataParallel(layers)
    return train(module, sgd(module), batches())


def ddp_fp16_hook() -> list[float]:
    module = DistributedDataParallel(Model())
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(module, sgd(module), batches())


def _averaged(_: object, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and not those that are strings
    """A communication hook in Python: the sum is divided in a callback of its future."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(dist.get_world_size()))


def ddp_python_hook() -> list[float]:
    module = DistributedDataParallel(Model(), bucket_cap_mb=SMALL_BUCKETS)
    module.register_comm_hook(None, _averaged)
    losses = train(module, sgd(module), batches())
    replicas_agree(module)
    return losses


def _power_sgd(**options: Any) -> list[float]:
    module = DistributedDataParallel(Model(), **options)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(module, sgd(module), batches(2 * STEPS))
    replicas_agree(module)
    return losses


def ddp_power_sgd() -> list[float]:
    return _power_sgd()


def ddp_power_sgd_several_buckets() -> list[float]:
    """Deadlocks stock Gloo: hooks of two buckets wait for collectives started in each other's callbacks."""
    return _power_sgd(bucket_cap_mb=SMALL_BUCKETS)


def ddp_compiled() -> list[float]:
    torch._dynamo.reset()
    module = DistributedDataParallel(Model())
    compiled = torch.compile(module, backend="aot_eager")
    losses = train(compiled, sgd(module), batches())
    replicas_agree(module)
    return losses


def ddp_compiled_by_inductor() -> list[float]:
    torch._dynamo.reset()
    module = DistributedDataParallel(Model())
    losses = train(torch.compile(module), sgd(module), batches())
    replicas_agree(module)
    return losses


def zero() -> list[float]:
    module = DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(module, optimizer, batches())
    replicas_agree(module)
    optimizer.consolidate_state_dict()
    return losses


AVERAGED = 5  # steps: torch's averagers average after the first, and after each of their period


def averaged_periodically() -> list[float]:
    """torch's averager of models, unmodified."""
    module = Model()
    optimizer = PostLocalSGDOptimizer(sgd(module), PeriodicModelAverager(period=2))
    losses = train(module, optimizer, batches(AVERAGED))
    replicas_agree(module)
    return losses


def averaged_in_a_hierarchy() -> list[float]:
    """Pairs of workers after two steps, all of them after four."""
    module = Model()
    optimizer, averager = sgd(module), HierarchicalModelAverager({2: 2, 4: 4})
    losses = []
    for batch in batches(AVERAGED):
        losses += train(module, optimizer, iter([batch]))
        averager.average_parameters(module.parameters())
    replicas_agree(module)
    return losses


def post_local_sgd() -> list[float]:
    """DDP reduces gradients of all workers twice, then those of pairs, while an averager averages models."""
    module = DistributedDataParallel(Model())
    pair, _ = dist.new_subgroups(2)
    state = PostLocalSGDState(process_group=None, subgroup=pair, start_localSGD_iter=2)
    module.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(sgd(module), PeriodicModelAverager(period=2, warmup_steps=2))
    losses = train(module, optimizer, batches(AVERAGED))
    replicas_agree(module)
    return losses
