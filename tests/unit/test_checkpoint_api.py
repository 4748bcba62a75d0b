"""`save`, `load` and `verify` in one process."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringfence
from ringfence import checkpoint
from ringfence.checkpoint import tensors
from ringfence.checkpoint.folder import LocalStorage
from ringfence.checkpoint.index import ITEM_BYTES
from ringfence.checkpoint.storage import INDEX_NAME, Input, Output
from ringfence.checkpoint.writer import Assignment
from ringfence.errors import CheckpointError
from ringfence.keys import Secret
from tests.limits import HANG
from tests.unit.checkpoint_samples import empty_state, is_same, key_file, saved_and_loaded, small_state


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_state_survives(tmp_path: Path, key: str, threads: int) -> None:
    notes = {"configuration": {"layers": 3}, "data": [1, 2]}
    anchor = checkpoint.save(small_state(), tmp_path / "a" / "b", key=key, step=3, metadata=notes, threads=threads)
    target = empty_state()
    info = checkpoint.load(target, tmp_path / "a" / "b", key=key, anchor=anchor, threads=threads)
    assert is_same(target, small_state())
    assert (info.step, info.metadata, info.anchor) == (3, notes, anchor)
    everything, _ = checkpoint.load_all(tmp_path / "a" / "b", key=key)
    assert is_same(everything, small_state())


def test_every_dtype_survives(tmp_path: Path, key: str) -> None:
    raw = torch.frombuffer(bytearray(random.Random(1).randbytes(48)), dtype=torch.uint8)
    state = {name: raw.clone().view(getattr(torch, name)) for name in ITEM_BYTES if name != "bool"}
    state["bool"] = raw > 100
    target = saved_and_loaded(tmp_path, key, state, {name: torch.zeros_like(each) for name, each in state.items()})
    assert all(torch.equal(target[name].view(torch.uint8), state[name].view(torch.uint8)) for name in state)


def test_tensors_of_any_form_survive(tmp_path: Path, key: str) -> None:
    torch.manual_seed(0)
    state = {
        "turned": torch.randn(1100, 1000).t(),
        "cut": torch.randn(40, 50)[3:30:2, ::3],
        "channels": torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(9, dtype=torch.complex64).conj(),
        "expanded": torch.randn(1).expand(1000),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "gradient": torch.nn.Parameter(torch.randn(5)),
    }
    target = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in state.items()}
    target["turned"] = torch.zeros(1100, 1000).t()
    saved_and_loaded(tmp_path, key, state, target)
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_the_state_of_a_training_survives(tmp_path: Path, key: str) -> None:
    """Without `get_state_dict`: keys that are numbers, a Counter, tuples, lists of lists, an OrderedDict."""

    def parts(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(30, 7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed, betas=(0.1 * seed, 0.9))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5 + seed])
        for _ in range(seed):
            model(torch.ones(2, 30)).sum().backward()
            optimizer.step()
            scheduler.step()
        generator = random.Random(seed)
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "milestones"},
            "milestones": {30: 1, 60: seed},
            "generator": torch.get_rng_state(),
            "random": generator.getstate(),
            "losses": [[1.0, 2.0 * seed], [3.0]],
        }

    target = saved_and_loaded(tmp_path, key, parts(2), parts(1))
    expected = parts(2)
    assert isinstance(target["model"], OrderedDict)
    for name in expected:
        left, right = target[name], expected[name]
        assert is_same(dict(left) if name == "model" else left, dict(right) if name == "model" else right), name


class Counted:
    """A Stateful object, such as a data loader."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_objects_with_a_state_dict_are_saved_and_loaded(tmp_path: Path, key: str) -> None:
    loaded = Counted(0)
    saved_and_loaded(tmp_path, key, {"loader": Counted(12)}, {"loader": loaded})
    assert loaded.count == 12


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"missing": torch.zeros(3)}, "Missing key"),
        ({"weight": torch.zeros(4)}, "Size mismatch"),
        ({"weight": torch.zeros(3, dtype=torch.int64)}, "does not convert to torch.int64"),
        ({"number": torch.zeros(3)}, "is a tensor in the state"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, key: str, target: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        saved_and_loaded(tmp_path, key, {"weight": torch.ones(3), "number": 1}, target)


def test_a_save_removes_only_what_a_killed_save_left(tmp_path: Path, key: str) -> None:
    left, others = "saved.partial-0123456789abcdef", ("saved.partial-results", "saved.partial-0123456789abcdef.bak")
    for name in (left, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("mine")
    checkpoint.save(small_state(), tmp_path / "saved", key=key)
    assert not (tmp_path / left).exists()
    assert all((tmp_path / name / "data").read_text() == "mine" for name in others)


def test_a_running_save_keeps_its_folder_when_another_one_begins(tmp_path: Path, key: str) -> None:
    class Overlapped(LocalStorage):
        def create(self, place: str, name: str, size: int) -> Output:
            if name == INDEX_NAME:
                other = LocalStorage()
                other.discard(other.begin(path), [])
            return super().create(place, name, size)

    path = str(tmp_path / "saved")
    anchor = checkpoint.save(small_state(), path, key=key, storage=Overlapped())
    assert checkpoint.verify(path, key=key).anchor == anchor
    assert sorted(os.listdir(tmp_path)) == ["key", "saved"]


def test_a_partial_load_leaves_the_rest(tmp_path: Path, key: str) -> None:
    checkpoint.save({"weight": torch.ones(3)}, tmp_path / "saved", key=key)
    target = {"weight": torch.zeros(3, dtype=torch.float16), "other": torch.zeros(2)}
    checkpoint.load(target, tmp_path / "saved", key=key, partial=True)
    assert target["weight"].sum() == 3 and target["other"].sum() == 0


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "a.b"),
        (torch.ones(3).to_sparse(), "a.b"),
        ((torch.ones(1),), r"a.b\[0\]"),
        (print, "a.b"),
        (Counted(1), "a.b"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path, key: str, value: Any, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is a"):
        checkpoint.save({"a": {"b": value}, "c": torch.ones(2)}, tmp_path / "saved", key=key)
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": True}, {"threads": 0}, {"metadata": {"a": {1}}}])
def test_invalid_arguments_are_refused(tmp_path: Path, key: str, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, CheckpointError)):
        checkpoint.save({"a": 1}, tmp_path / "saved", key=key, **arguments)
    with pytest.raises(ValueError, match="not empty"):
        checkpoint.save({}, tmp_path / "saved", key=key)


def test_verify_reads_everything(tmp_path: Path, key: str) -> None:
    checkpoint.save(small_state(), tmp_path / "saved", key=key, step=5)
    seen: list[int] = []
    info = checkpoint.verify(tmp_path / "saved", key=key, anchor=5, progress=seen.append)
    assert sum(seen) == info.size and info.items == 9 and info.shards == 1
    shard = next((tmp_path / "saved").glob("*.shard"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged or changed"):
        checkpoint.verify(tmp_path / "saved", key=key)


def test_a_save_and_a_load_report_their_progress(tmp_path: Path, key: str) -> None:
    state, sealed, opened = {"a": torch.rand(6 << 18), "b": torch.rand(5, 7).t(), "c": "text"}, [0], [0]
    checkpoint.save(state, tmp_path / "saved", key=key, progress=sealed.append)
    _, info = checkpoint.load_all(tmp_path / "saved", key=key, progress=opened.append)
    assert sum(sealed) == sum(opened) == info.size
    assert max(sealed + opened) < info.size, "it is reported while it goes on"


def test_a_save_in_the_background_fails_in_its_future(tmp_path: Path, key: str) -> None:
    anchor = checkpoint.async_save(small_state(), tmp_path / "saved", key=key).result(timeout=HANG)
    assert checkpoint.load(empty_state(), tmp_path / "saved", key=key).anchor == anchor
    again = checkpoint.async_save(small_state(), tmp_path / "saved", key=key)
    with pytest.raises(CheckpointError, match="never overwritten"):
        again.result(timeout=HANG)


def test_a_save_in_the_background_has_the_values_of_the_call(tmp_path: Path, key: str) -> None:
    entered, released = threading.Event(), threading.Event()

    class Waiting(LocalStorage):
        def begin(self, path: str) -> str:
            entered.set()
            assert released.wait(HANG)
            return super().begin(path)

    notes: dict[str, Any] = {"data": [1, {"version": 2}]}
    state = {"weight": torch.ones(3), "losses": {"all": (1.0, [2.0])}}
    saving = checkpoint.async_save(state, tmp_path / "saved", key=key, metadata=notes, storage=Waiting())
    assert entered.wait(HANG)
    notes["data"][1]["version"] = 3
    notes["data"].append(4)
    state["losses"]["all"][1].append(3.0)  # type: ignore[index]
    state["weight"].add_(1)  # type: ignore[attr-defined]
    released.set()
    saving.result(timeout=HANG)
    found, info = checkpoint.load_all(tmp_path / "saved", key=key)
    assert info.metadata == {"data": [1, {"version": 2}]}
    assert is_same(found, {"weight": torch.ones(3), "losses": {"all": (1.0, [2.0])}})


class Unreadable(LocalStorage):
    """Fails at the shards."""

    def create(self, place: str, name: str, size: int) -> Output:
        raise OSError("no space left")

    def open(self, path: str, name: str) -> Input:
        if name != INDEX_NAME:
            raise CheckpointError("no answer")
        return super().open(path, name)


def test_a_failed_save_or_load_keeps_no_data_key(tmp_path: Path, key: str) -> None:
    class Service:
        """A key service that has seen the data keys, as every one does."""

        name, seen = "service", []  # type: ignore[var-annotated]

        def wrap(self, key: bytes, context: bytes) -> bytes:
            self.seen.append(key)
            return bytes(each ^ 1 for each in key)

        def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
            self.seen.append(bytes(each ^ 1 for each in wrapped))
            return self.seen[-1]  # type: ignore[no-any-return]

    path, service = tmp_path / "saved", Service()
    checkpoint.save({"weight": torch.ones(3)}, path, key=service)
    errors = []  # which keep what the failed calls had
    for call in (
        lambda: checkpoint.load({"weight": torch.ones(3)}, path, key=service, storage=Unreadable()),
        lambda: checkpoint.load_all(path, key=service, storage=Unreadable()),
        lambda: checkpoint.save({"weight": torch.ones(3)}, tmp_path / "other", key=service, storage=Unreadable()),
    ):
        with pytest.raises(CheckpointError, match=r"no answer|no space left") as caught:
            call()
        errors.append(caught)
    assert len(service.seen) == 4
    held = [each.reveal() for each in gc.get_objects() if type(each) is Secret]
    held += [each.data_key for each in gc.get_objects() if type(each) is Assignment]
    assert held and not set(held) & set(service.seen)


# -- pieces -----------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=200)
def test_pieces_make_up_any_box(data: st.DataObject) -> None:
    """Whatever the staging holds, and whether the target is contiguous or of another dtype."""
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [data.draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [data.draw(st.integers(1, size - at)) for size, at in zip(sizes, offsets, strict=True)]
    stored = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
    target = torch.zeros(lengths, dtype=data.draw(st.sampled_from([torch.float32, torch.float64])))
    if len(lengths) > 1 and data.draw(st.booleans()):
        target = torch.zeros([*lengths[:-2], lengths[-1], lengths[-2]], dtype=target.dtype).transpose(-1, -2)
    limit = data.draw(st.integers(1, 20))
    for piece in tensors.pieces(sizes, offsets, target, torch.float32, limit):
        part = stored.reshape(-1)[piece.start : piece.start + piece.elements]
        if piece.shape is None:
            piece.target.reshape(-1).copy_(part)
            assert piece.target.is_contiguous()
        else:
            assert piece.elements <= limit or not piece.shape
            piece.copy_from(part.view(piece.shape))
    box = tuple(slice(at, at + length) for at, length in zip(offsets, lengths, strict=True))
    assert torch.equal(target.float(), stored[box])


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(4, 60))
def test_blocks_make_up_a_tensor(sizes: list[int], limit: int) -> None:
    tensor = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes[::-1]).permute(tuple(range(len(sizes)))[::-1])
    parts = list(tensors.blocks(tensor, limit))
    assert all(part.nbytes <= limit for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))


# -- imports ----------------------------------------------------------------------------------------------------------


def test_the_package_offers_it() -> None:
    assert ringfence.checkpoint is checkpoint
    assert all(getattr(checkpoint, name) is not None for name in checkpoint.__all__)
    with pytest.raises(AttributeError):
        _ = checkpoint.nothing


@pytest.mark.processes
def test_verifying_needs_no_torch(tmp_path: Path, key: str) -> None:
    checkpoint.save(small_state(), tmp_path / "saved", key=key)
    program = (
        "import sys, ringfence\n"
        f"ringfence.checkpoint.verify({str(tmp_path / 'saved')!r}, key={key!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG).returncode == 0
