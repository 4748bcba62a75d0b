"""Training steps of real models, built from their configurations with random weights: nothing is downloaded.

Every variant has a copy of the model whose parameters share one memory, and what its strategy keeps beside it (the
buckets of DDP, the shards of FSDP2). So variants can take turns step by step, on the same data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringfence.errors import ConfigurationError
from ringfence_lab.bench.operations import type_of
from ringfence_lab.bench.variants import AloneVariant, RingVariant, WorkerVariant

_SEED: Final = 17
_RATE: Final = 1e-5  # the steps are about time; weights must only stay finite

Batch = dict[str, torch.Tensor]


def prepare(
    name: str, strategy: str, bucket_mb: float | None, variants: Mapping[str, WorkerVariant], wire: str = "float32"
) -> tuple[dict[str, Callable[[], None]], dict[str, Any]]:
    """Return a function for each variant that executes one step, and facts about the model."""
    torch.manual_seed(_SEED)
    model, batch = _build(name)
    facts = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": {key: list(value.shape) for key, value in batch.items()},
    }
    steps = {}
    for name, variant in variants.items():
        if isinstance(variant, AloneVariant):  # its gradients are its own: they must not move what all ranks share
            steps[name] = _step(_sharing(model), batch, rate=0.0)
        elif strategy == "fsdp2":
            steps[name] = _step(_sharded(copy.deepcopy(model), variant), batch)
        else:
            steps[name] = _step(_replicated(_sharing(model), variant, bucket_mb, wire), batch)
    return steps, facts


def _build(name: str) -> tuple[nn.Module, Batch]:
    import transformers

    if name == "resnet50":
        images = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(1000, (4,))}
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)), images
    if name == "bert-base":
        tokens = torch.randint(30_000, (1, 128))
        return transformers.BertForMaskedLM(transformers.BertConfig()), {"input_ids": tokens, "labels": tokens}
    tiny = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000} if name == "gpt2-tiny" else {}
    gpt2 = transformers.GPT2Config(**tiny)
    tokens = torch.randint(gpt2.vocab_size, (1, 128))
    return transformers.GPT2LMHeadModel(gpt2), {"input_ids": tokens, "labels": tokens}


def _sharing(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that shares the memory of the parameters."""
    other = copy.deepcopy(model)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return other


def _replicated(model: nn.Module, variant: WorkerVariant, bucket_mb: float | None, wire: str) -> nn.Module:
    """None is DDP's own default: 25 MiB after a first bucket of 1 MiB, which no single number asks for."""
    parallel = DistributedDataParallel(model, process_group=variant.group, bucket_cap_mb=bucket_mb)
    if isinstance(variant, RingVariant):  # gradients through the ring; DDP's few other messages through Gloo
        # Through a lambda, because DDP compares a hook's annotations with types, and here they are strings.
        parallel.register_comm_hook(variant, lambda ring, bucket: _through_ring(ring, bucket, wire))
    elif wire == "bfloat16":  # by its own name, DDP refuses this hook on anything but NCCL, though it works
        parallel.register_comm_hook(variant.group, lambda group, bucket: bf16_compress_hook(group, bucket))
    return parallel


def _through_ring(variant: RingVariant, bucket: dist.GradBucket, wire: str) -> torch.futures.Future[torch.Tensor]:
    """Reduce the buckets one after the other on a thread of the ring, during the backward pass."""
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def reduce() -> None:
        with torch.no_grad():
            gradients = bucket.buffer()
            sent = gradients if wire == "float32" else gradients.to(type_of(wire))
            variant.ring.all_reduce(sent)
            result.set_result(gradients.copy_(sent).div_(variant.ring.size))

    variant.thread.submit(reduce)
    return result


def _sharded(model: nn.Module, variant: WorkerVariant) -> nn.Module:
    """Shard the blocks of the model one by one, then the rest, as FSDP2 recommends."""
    if isinstance(variant, RingVariant):
        raise ConfigurationError("FSDP2 needs process groups: leave the rings out of --variants")
    mesh = DeviceMesh.from_group(variant.group, "cpu")
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step(model: nn.Module, batch: Batch, rate: float = _RATE) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # gradients of variants that wait for their turn take no memory

    return step
