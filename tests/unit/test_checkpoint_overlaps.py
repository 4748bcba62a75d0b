"""Tensors of a state that share memory: tied weights are loaded once, any others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import checkpoint
from ringfence.checkpoint import overlaps
from ringfence.errors import CheckpointError
from tests.unit.checkpoint_samples import key_file, saved_and_loaded


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


def test_two_tensors_are_not_loaded_into_one(tmp_path: Path, key: str) -> None:
    state = {"a": torch.full((3_000_000,), 1.0), "b": torch.full((3_000_000,), 2.0)}
    checkpoint.save(state, tmp_path / "saved", key=key)
    weight = torch.zeros(3_000_000)
    with pytest.raises(CheckpointError, match="a and b are one tensor in the state and two different ones"):
        checkpoint.load({"a": weight, "b": weight}, tmp_path / "saved", key=key, threads=4)
    assert not weight.any(), "nothing is written before"
    whole = torch.zeros(3_000_001)
    with pytest.raises(CheckpointError, match="a and b share memory"):
        checkpoint.load({"a": whole[1:], "b": whole[:-1]}, tmp_path / "saved", key=key)
    checkpoint.load({"a": weight, "b": weight.clone()}, tmp_path / "saved", key=key)
    checkpoint.load({"a": weight}, tmp_path / "saved", key=key)
    assert torch.equal(weight, state["a"])


@pytest.mark.parametrize("size", [(), (5,), (1500, 1001)])
def test_tied_weights_are_loaded_into_tied_ones(tmp_path: Path, key: str, size: tuple[int, ...]) -> None:
    saved, loaded = torch.rand(size), torch.zeros(size)
    checkpoint.save({"in": saved, "out": [saved, saved]}, tmp_path / "saved", key=key)
    checkpoint.load({"in": loaded, "out": [loaded, loaded]}, tmp_path / "saved", key=key)
    assert torch.equal(saved, loaded)


def test_parts_of_one_tensor_are_loaded(tmp_path: Path, key: str) -> None:
    """Columns and rows whose ranges of memory overlap, but not their elements, also of several dtypes."""
    whole, chance = torch.rand(40, 12), torch.rand(40, 12)

    def parts(of: torch.Tensor) -> dict[str, Any]:
        columns = {str(place): of[:20, place::3] for place in range(3)}
        return {**columns, "rows": of[20:30], "raw": of[30:, :6].view(torch.uint8), "rest": of[30:, 6:].t()}

    saved_and_loaded(tmp_path, key, parts(chance), parts(whole))
    assert torch.equal(whole, chance)
    with pytest.raises(CheckpointError, match="0 and 2 share memory"):
        checkpoint.load({**parts(whole), "2": whole[:20, 0:8:2]}, tmp_path / "saved", key=key)


@given(st.data())
@settings(max_examples=200)
def test_shared_memory_is_found_exactly(data: st.DataObject) -> None:
    """Against a map of elements."""
    memory = torch.zeros(60, dtype=torch.uint8)
    views, elements = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from([torch.uint8, torch.int16]))
        flat = memory.view(dtype)
        size = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
        stride = tuple(data.draw(st.integers(0, 4)) for _ in size)
        offset = data.draw(st.integers(0, 10))
        views.append(flat.as_strided(size, stride, offset))
        numbers = torch.arange(60).view(-1, dtype.itemsize)
        places = torch.arange(len(numbers)).as_strided(size, stride, offset).reshape(-1)
        elements.append(set(numbers[places].reshape(-1).tolist()))
    forms = [(view.dtype, view.shape, view.stride(), view.data_ptr()) for view in views]
    distinct = [place for place in range(len(views)) if forms.index(forms[place]) == place]
    overlap = any(elements[one] & elements[other] for one in distinct for other in distinct if one < other)
    named = [(str(place), view) for place, view in enumerate(views)]
    if overlap:
        with pytest.raises(CheckpointError, match="share memory"):
            overlaps.tied(named)
    else:
        expected = [(place, forms.index(forms[place])) for place in range(len(views)) if place not in distinct]
        assert overlaps.tied(named) == expected
