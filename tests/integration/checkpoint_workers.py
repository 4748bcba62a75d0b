"""What the workers of tests/integration/test_checkpoint.py do."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ringfence import checkpoint
from ringfence.checkpoint import LocalStorage, Output
from ringfence.errors import CheckpointError
from tests.limits import HANG
from tests.unit.checkpoint_samples import empty_state, is_same, small_state

SIZES = (301, 517, 33)  # that no number of workers divides


class Training:
    """FSDP2 with AdamW and a scheduler, after two steps."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        inner = [nn.Linear(SIZES[0], SIZES[1]), nn.ReLU(), nn.Linear(SIZES[1], SIZES[2])]
        self.model = nn.Sequential(*inner).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 * (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 7], 0.5)
        self.random = random.Random(seed)
        for _ in range(2):
            self.model(torch.ones(2, SIZES[0], device=device)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.random.random()

    def state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {
            "weights": weights,
            "moments": moments,
            "scheduler": self.scheduler.state_dict(),
            "generator": torch.get_rng_state(),
            "random": self.random.getstate(),
        }

    def set(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["weights"], optim_state_dict=state["moments"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.random.setstate(state["random"])
        torch.set_rng_state(state["generator"])

    def digest(self) -> str:
        """Everything, as one digest that does not depend on the number of workers."""
        found, state = hashlib.sha256(), self.state()
        for name, value in sorted(flat(state).items()):
            if isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                value = whole.cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            found.update(f"{name} {value!r}".encode())
        return found.hexdigest()


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """A nested state with one name for each leaf."""
    if not isinstance(value, dict):
        return {name: value}
    return {inner: leaf for key in value for inner, leaf in flat(value[key], f"{name}.{key}").items()}


def save(path: str, key: str, in_background: bool = False) -> tuple[str, str]:
    """Train and save; the anchor and the digest."""
    training = Training(0)
    if not in_background:
        return checkpoint.save(training.state(), path, key=key, step=2), training.digest()
    saved = training.digest()
    pending = checkpoint.async_save(training.state(), path, key=key, step=2)
    with torch.no_grad():
        for parameter in training.model.parameters():  # what follows must not reach the checkpoint
            parameter.add_(1)
    assert training.digest() != saved
    return pending.result(timeout=HANG), saved


def load(path: str, key: str, anchor: str) -> tuple[str, str]:
    """Load into a training that began otherwise; its digest before and after."""
    training = Training(1)
    before, state = training.digest(), training.state()
    info = checkpoint.load(state, path, key=key if dist.get_rank() == 0 else "no such file", anchor=anchor)
    assert info.step == 2 and info.anchor == anchor
    training.set(state)
    return before, training.digest()


def refusal(what: str, path: str, key: str) -> str:
    """Save or load something that fails on one rank; the message, which every rank must get."""
    state: dict[str, Any] = {"weight": torch.zeros(4), "mine": {"value": 1}}
    try:
        if what == "value" and dist.get_rank() == 1:
            state["mine"]["value"] = {1, 2}
        if what == "save" or what == "value":
            checkpoint.save(state, path, key=key)
        elif what == "key":
            checkpoint.save(state, path, key=key + "-missing")
        elif what == "load":
            checkpoint.load(state, path, key=key)
        elif what == "shape":
            checkpoint.load({"weight": torch.zeros(4 + (dist.get_rank() == 1))}, path, key=key)
        elif what == "background":
            checkpoint.async_save(state, path, key=key).result(timeout=HANG)
        else:
            raise AssertionError(what)
    except CheckpointError as error:
        return str(error)
    return "accepted"


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("the service is down")
        self.lock = threading.Lock()


class Broken:
    """A key service that is down, and an object that has no state."""

    name = "broken"

    def wrap(self, key: bytes, context: bytes) -> bytes:
        raise LockedError

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        raise LockedError

    def state_dict(self) -> dict[str, Any]:
        raise LockedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise LockedError


class BrokenStorage(LocalStorage):
    def create(self, place: str, name: str, size: int) -> Output:
        raise LockedError


def refusal_of_one(what: str, rank: int, in_background: bool, path: str, key: str) -> str:
    """Save with something that is wrong on one rank only; the message, which every rank must get. Then save again."""
    state: dict[str, Any] = {"weight": torch.zeros(4), "mine": {f"of {dist.get_rank()}": 1}}
    wrong: dict[str, Any] = {
        "metadata": {"metadata": {"a": torch.zeros(1)}},
        "empty": {"state": {}},
        "threads": {"threads": 0},
        "object": {"state": {**state, "mine": Broken()}},
        "copy": {"state": {**state, "mine": threading.Lock()}},
        "wrap": {"key": Broken()},
        "create": {"storage": BrokenStorage()},
    }
    given = {"state": state, "path": path, "key": key} | (wrong[what] if dist.get_rank() == rank else {})

    def run(given: dict[str, Any]) -> str:
        if in_background:
            return checkpoint.async_save(**given).result(timeout=HANG)
        return checkpoint.save(**given)

    try:
        run(given)
    except CheckpointError as error:
        assert len(run({"state": state, "path": path, "key": key})) == 64
        return str(error)
    return "accepted"


def save_columns(path: str, key: str) -> None:
    """A tensor that is sharded by columns, another one by rows and columns, and one that is replicated."""
    checkpoint.save(columns(torch.arange(24 * 36, dtype=torch.float64).view(24, 36)), path, key=key)


def load_columns(path: str, key: str) -> bool:
    """Load them by other ranks, sharded in other ways; whether all is there."""
    expected = torch.arange(24 * 36, dtype=torch.float64).view(24, 36)
    state = columns(torch.zeros(24, 36, dtype=torch.float64))
    checkpoint.load(state, path, key=key)
    return all(torch.equal(each.full_tensor(), expected) for each in state.values())


def save_parts(path: str, key: str) -> None:
    """Save a state of which each rank has another part, as the stages of a pipeline do."""
    rank = dist.get_rank()
    opt = {"state": {rank: {"momentum": torch.full((2,), float(rank))}}, "groups": {} if rank == 0 else {rank: {}}}
    checkpoint.save({"opt": opt}, path, key=key)


def columns(whole: torch.Tensor) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    by_two = dist.get_world_size() == 2
    return {
        "columns": distribute_tensor(whole, mesh, [Shard(0 if by_two else 1)]),
        "rows": distribute_tensor(whole, mesh, [Shard(1 if by_two else 0)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
    }


# -- nothing is unpickled ---------------------------------------------------------------------------------------------


def load_without_pickle(path: str, key: str) -> bool:
    """Load where every unpickling raises an error; whether the numbers are right."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is unpickled")

    kept = pickle.load, pickle.loads, pickle.Unpickler, torch.load
    state = empty_state()
    try:
        pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse  # type: ignore
        checkpoint.load(state, path, key=key)
        checkpoint.verify(path, key=key)
    finally:
        pickle.load, pickle.loads, pickle.Unpickler, torch.load = kept  # type: ignore
    return is_same(state, small_state())


# -- devices ----------------------------------------------------------------------------------------------------------


def device_cost(folder: str, key: str, mebibytes: int) -> tuple[int, int, bool]:
    """Save and load tensors of the simulated device; how many bytes of host memory either needs, and whether all is right."""
    from tests import device

    where = device.load()
    count = mebibytes * (1 << 20) // 8
    state = {
        "flat": torch.arange(count, dtype=torch.float32, device=where),
        "turned": torch.arange(count, dtype=torch.float32, device=where).view(256, -1).t(),
        "small": [torch.full((3,), float(each), device=where) for each in range(50)],
    }
    checkpoint.save({"small": torch.ones(3, device=where)}, f"{folder}/first", key=key)  # what is allocated once
    target = {
        "flat": torch.zeros(count, device=where),
        "turned": torch.zeros(256, count // 256, device=where).t(),
        "small": [torch.zeros(3, device=where) for _ in range(50)],
    }
    torch.accelerator.synchronize()
    before = host_bytes()
    checkpoint.save(state, f"{folder}/second", key=key)
    saved = host_peak() - before
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = host_bytes()
    checkpoint.load(target, f"{folder}/second", key=key)
    loaded = host_peak() - before
    same = torch.equal(target["flat"].cpu(), state["flat"].cpu())  # type: ignore[attr-defined]
    same &= torch.equal(target["turned"].cpu(), state["turned"].cpu())  # type: ignore[attr-defined]
    return saved, loaded, same and all(float(each.sum()) == 3 * place for place, each in enumerate(target["small"]))


def host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def host_peak() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024


# -- killed -----------------------------------------------------------------------------------------------------------


def kill_saves(folder: str, key: str, count: int) -> int:
    """Fork a process that saves, kill it at a random moment, check what it left; `count` times.

    Complete checkpoints load with their own numbers, the one that was being saved is not there, and saving it again works and
    removes what was left. Returns how many of the kills left something.
    """
    chance, left = random.Random(3), 0
    for number in range(count):
        place = f"{folder}/run-{number}"
        os.mkdir(place)
        last = _kill_a_save(place, key, chance.random() * 0.25)
        names = [name for name in os.listdir(place) if ".partial-" not in name]
        left += len(names) < len(os.listdir(place))
        steps = sorted(int(name.removeprefix("step-")) for name in names)
        assert steps in ([*range(1, last + 1)], [*range(1, last + 2)])  # the last one may not have been reported
        for step in steps[-2:]:
            state = empty_state()
            checkpoint.load(state, f"{place}/step-{step}", key=key, anchor=step)
            assert is_same(state, small_state(float(step)))
        following = f"{place}/step-{steps[-1] + 1}"
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            checkpoint.load(empty_state(), following, key=key)
        checkpoint.save(small_state(), following, key=key)
        assert not [name for name in os.listdir(place) if ".partial-" in name]
        shutil.rmtree(place)
    return left


def _kill_a_save(folder: str, key: str, delay: float) -> int:
    """Return the last step that the killed process has reported."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            for step in range(1, 1000):
                checkpoint.save(small_state(float(step)), f"{folder}/step-{step}", key=key, step=step)
                os.write(writer, f"{step} ".encode())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as reports:
        first = reports.read(2)
        time.sleep(delay)  # to the random moment
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return int((first + reports.read()).split()[-1])
