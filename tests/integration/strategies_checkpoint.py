"""Distributed checkpoints: saved by one world, loaded by a smaller one, saved while training goes on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.integration.strategies import batches, sgd, train
from tests.integration.strategies_sharded import _fully_sharded, world_mesh


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _fully_sharded(world_mesh())
    return model, sgd(model)


def _full(model: nn.Module) -> list[float]:
    return [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]  # type: ignore[operator]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"weights": weights, "moments": moments, "steps": 4}


def save(path: str, asynchronously: bool) -> list[float]:
    """Train and save; the weights' sums."""
    model, optimizer = _model()
    train(model, optimizer, batches(same_on_all_ranks=True))
    if asynchronously:
        # A group of its own: the saving thread's collectives must not fall between those of the training.
        group = dist.new_group()
        pending = checkpoint.async_save(_state(model, optimizer), checkpoint_id=path, process_group=group)
        saved = _full(model)
        train(model, optimizer, batches(same_on_all_ranks=True))  # what follows must not reach the checkpoint
        pending.result()
        return saved
    checkpoint.save(_state(model, optimizer), checkpoint_id=path)
    return _full(model)


def load(path: str) -> tuple[list[float], list[float]]:
    """Load into fresh parts; the weights' sums, and the losses of going on from there."""
    model, optimizer = _model()
    state = _state(model, optimizer)
    state["steps"] = 0
    checkpoint.load(state, checkpoint_id=path)
    assert state["steps"] == 4
    set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    return _full(model), train(model, optimizer, batches(same_on_all_ranks=True))
