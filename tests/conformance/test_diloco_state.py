"""The state of DiLoCo in checkpoints, sealed and of torch: training goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ringfence
from ringfence import checkpoint
from ringfence.config.private_files import new_secret_file
from tests.conformance.test_diloco import (
    EVERY,
    Model,
    batch,
    begin,
    groups,
    inner_of,
    mesh_of_sites,
    outer_of,
    shards,
    take,
    train_a_round,
    trained_weights,
)
from tests.pool import Pool


def trained_and_saved(folder: str, int8: bool) -> tuple[list[list[float]], str]:
    """Save in the middle of training, sealed and with torch, and train on."""
    model = Model()
    with begin(model, int8=int8) as averaged:
        train_a_round(model, averaged)
        state = {"averaged": averaged, "buffers": dict(model.named_buffers())}
        anchor = checkpoint.save(state, f"{folder}/sealed", key=f"{folder}/key")
        dcp.save(state, checkpoint_id=f"{folder}/plain")
        averaged.inner.state.clear()
        train_a_round(model, averaged)
        return trained_weights(model), anchor


def loaded_and_trained(folder: str, int8: bool, anchor: str) -> list[list[float]]:
    """Load into a new model, after an inner step that the checkpoint undoes, and train on."""
    model = Model()
    with begin(model, int8=int8) as averaged:
        take(model, averaged.inner, batch(7, dist.get_rank()))
        state = {"averaged": averaged, "buffers": dict(model.named_buffers())}
        if anchor:
            checkpoint.load(state, f"{folder}/sealed", key=f"{folder}/key", anchor=anchor)
        else:
            dcp.load(state, checkpoint_id=f"{folder}/plain")
        assert (averaged.outer_steps, averaged.steps) == (1, 0)
        averaged.inner.state.clear()
        train_a_round(model, averaged)
        return trained_weights(model)


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
def test_a_checkpoint_goes_on_with_the_same_bits(pool: Pool, tmp_path: Path, int8: bool) -> None:
    new_secret_file(tmp_path / "key")
    saved = pool.check(trained_and_saved, 2, args=(str(tmp_path), int8))
    for anchor in (saved[0][1], ""):
        assert pool.check(loaded_and_trained, 2, args=(str(tmp_path), int8, anchor)) == [saved[0][0]] * 2


def asked_for_its_state(kind: type[torch.optim.Optimizer]) -> tuple[list[list[float]], list[list[float]]]:
    """Train, and train again with a state that was saved and loaded before the first outer step."""
    found = []
    for asked in (False, True):
        model = Model()
        outer = kind([each for each in model.parameters() if each.requires_grad])
        with ringfence.DiLoCo(model, inner_of(model), outer, EVERY) as averaged:
            if asked:
                averaged.load_state_dict(averaged.state_dict())
            for _ in range(2):
                train_a_round(model, averaged)
        found.append(trained_weights(model))
    return found[0], found[1]


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD], ids=lambda kind: kind.__name__
)
def test_state_before_the_first_outer_step_changes_nothing(pool: Pool, kind: type[torch.optim.Optimizer]) -> None:
    """Although the first step of these optimizers leaves numbers that are not zero."""
    for plain, asked in pool.check(asked_for_its_state, 2, args=(kind,)):
        assert plain == asked


def sharded(folder: str, saved: bool) -> list[list[float]]:
    """Two sites of two workers save or load."""
    mesh = mesh_of_sites()
    model = shards(mesh)
    inner = inner_of(model)
    with ringfence.DiLoCo(model, inner, outer_of(model), EVERY, **groups(mesh)) as averaged:
        if saved:
            train_a_round(model, averaged)
            checkpoint.save({"averaged": averaged}, f"{folder}/sealed", key=f"{folder}/key")
        else:
            checkpoint.load({"averaged": averaged}, f"{folder}/sealed", key=f"{folder}/key")
        averaged.inner.state.clear()
        train_a_round(model, averaged)
        return trained_weights(model)


def test_a_checkpoint_of_shards_goes_on_with_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    new_secret_file(tmp_path / "key")
    before, after = (pool.check(sharded, 4, args=(str(tmp_path), saved)) for saved in (True, False))
    assert before == after
    assert before[:2] == before[2:]
