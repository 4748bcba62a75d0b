"""What DCP's names lose of a state, and a checkpoint keeps: integer keys and empty dicts."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import checkpoint
from ringfence.checkpoint import nested_keys
from ringfence.errors import CheckpointError
from tests.limits import HANG
from tests.unit.checkpoint_samples import is_same, key_file

NESTED: dict[str, Any] = {
    "both": {1: torch.ones(2), "0": torch.zeros(2), -3: {"0": 5}},
    "texts": {"0": torch.ones(1), "1": {0: "deep"}},
    "empty": {},
    "nested": {7: {8: {}, "9": [{10: 1}]}, "none": None},
    "lists": [{}, torch.ones(3), [], [{}], [{"a": {}}, {2: {}}], (1, {3: ()})],
    "at the end": [1, {}],
    "long": [{number: torch.tensor(number)} for number in range(12)],
    "tuple": (1, 2.5, [{4: {}}], ()),
}


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


class Texts(str, enum.Enum):  # noqa: UP042
    """Its members are texts, and their names are others."""

    ONE = "one"


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with momentum, after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("in_background", [False, True])
def test_load_all_returns_an_optimizer_s_state(tmp_path: Path, key: str, in_background: bool) -> None:
    _, optimizer = trained()
    if in_background:
        checkpoint.async_save({"opt": optimizer.state_dict()}, tmp_path / "saved", key=key).result(timeout=HANG)
    else:
        checkpoint.save({"opt": optimizer}, tmp_path / "saved", key=key)
    found, info = checkpoint.load_all(tmp_path / "saved", key=key)
    assert is_same(found["opt"], optimizer.state_dict())
    assert info.metadata == {}
    model, other = trained(1)
    other.load_state_dict(found["opt"])
    momenta = [other.state[each]["momentum_buffer"] for each in model.parameters()]
    assert is_same(momenta, [each["momentum_buffer"] for each in optimizer.state_dict()["state"].values()])


@pytest.mark.parametrize("name", NESTED)
def test_load_all_returns_each_nested_state(tmp_path: Path, key: str, name: str) -> None:
    state = {name: NESTED[name]}
    checkpoint.save(state, tmp_path / "saved", key=key)
    assert is_same(checkpoint.load_all(tmp_path / "saved", key=key)[0], state)


def test_load_all_returns_integer_keys_of_the_state_itself(tmp_path: Path, key: str) -> None:
    state: Any = {0: torch.ones(2), "1": 2, **NESTED}
    checkpoint.save(state, tmp_path / "saved", key=key)
    assert is_same(checkpoint.load_all(tmp_path / "saved", key=key)[0], state)


keys = st.integers(-3, 12) | st.sampled_from(["0", "7", "a", "a.b", ""])
leaves: st.SearchStrategy[Any] = (
    st.none() | st.integers() | st.just(()) | st.just((1, {2: {}})) | st.just(torch.ones(2))
)


@given(
    st.dictionaries(
        st.sampled_from("xyz"),
        st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)),
        min_size=1,
    )
)
@settings(max_examples=30)
@pytest.mark.slow
def test_any_state_survives_or_is_refused(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    key = key_file(folder)
    try:
        checkpoint.save(state, folder / "saved", key=key)
    except CheckpointError as error:
        if "both as a text and as an integer" in str(error) or "duplicated flatten key" in str(error):
            return
        raise
    assert is_same(checkpoint.load_all(folder / "saved", key=key)[0], state)


@pytest.mark.parametrize("bad", [{1: 2, "1": 3}, {0.5: 1}, {(1, 2): torch.ones(2)}, {True: 1}, {Texts.ONE: 1}], ids=str)
def test_a_save_refuses_keys_that_cannot_be_kept(tmp_path: Path, key: str, bad: dict[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"a\.bad has "):
        checkpoint.save({"weights": torch.ones(2), "a": {"bad": bad}}, tmp_path / "saved", key=key)


def test_the_parts_of_several_ranks_make_one_note() -> None:
    parts: list[dict[str, Any]] = [{"opt": {0: {}, "b": 1}, "x": {}}, {"opt": {1: {2: 1}, "c": {}}, "x": {5: 1}}]
    note = nested_keys.merged(map(nested_keys.note_of, parts))
    assert nested_keys.noted(note.in_metadata({})) == note
    state: dict[str, Any] = {"opt": {"b": 1, "1": {"2": 1}}, "x": {"5": 1}}
    note.add_empty(state)
    note.restore_integers(state)
    assert state == {"opt": {0: {}, 1: {2: 1}, "b": 1, "c": {}}, "x": {5: 1}}


# -- reserved metadata ------------------------------------------------------------------------------------------------


def test_the_note_of_another_save_is_replaced(tmp_path: Path, key: str) -> None:
    old = nested_keys.note_of({"gone": {1: 2}, "lost": {}}).in_metadata({"run": 7})
    states: list[dict[str, Any]] = [{"a": {"0": 1}}, {"a": {0: 1}, "b": {}}]
    for number, state in enumerate(states):
        checkpoint.save(state, tmp_path / str(number), key=key, metadata=old)
        found, info = checkpoint.load_all(tmp_path / str(number), key=key)
        assert is_same(found, state)
        assert info.metadata == {"run": 7}


@pytest.mark.parametrize(
    "note",
    [
        5,
        {},
        {"integers": [], "empty": [[]]},
        {"integers": [], "empty": [["a", "b", "c"]]},
        {"integers": [], "empty": [["a", 0]]},
        {"integers": [], "empty": [[0]]},
        {"integers": [], "empty": [["x", 1 << 40]]},
        {"integers": [], "empty": [[None]]},
        {"integers": [[["gone"], [1]]], "empty": []},
        {"integers": [[["a"], [1]]], "empty": []},
        {"integers": [[["a"], ["b"]]], "empty": []},
        {"integers": [[["a", "b"], [1]]], "empty": []},
        {"integers": [[["a"]]], "empty": []},
    ],
    ids=str,
)
def test_a_note_that_does_not_fit_is_refused(note: Any) -> None:
    def restore() -> None:
        found, state = nested_keys.noted({nested_keys.NOTE: note}), {"a": {"b": 1}}
        found.add_empty(state)
        found.restore_integers(state)

    with pytest.raises(CheckpointError, match=r"the note of keys .* does not fit"):
        restore()
