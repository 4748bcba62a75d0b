"""ringfence.init() creates the default group or refuses an existing other one; assert_sealed() names unsealed groups."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringfence
from ringfence.errors import ConfigurationError
from tests.limits import HANG
from tests.pool import Pool


def answer(call: Any) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


def ask_twice() -> list[str]:
    return [answer(ringfence.init), answer(ringfence.assert_sealed)]


def test_init_keeps_an_existing_ringfence_group(pool: Pool) -> None:
    assert pool.check(ask_twice, 2, "ringfence") == [["", ""]] * 2


@pytest.mark.promise("`ringfence.assert_sealed()` names a group of another backend.")
def test_init_and_assert_sealed_refuse_a_gloo_default_group(pool: Pool) -> None:
    for answers in pool.check(ask_twice, 2, "gloo"):
        for text in answers:
            assert "the default process group is of backend gloo" in text
            assert "call ringfence.init() before the code that created it" in text


PROGRAM = """
import ringfence, sys
from datetime import timedelta
assert "torch" not in sys.modules
ringfence.init(timeout=timedelta(seconds=77))
import torch.distributed as dist
group = dist.group.WORLD
print(type(group).__name__, group._timeout.total_seconds(), dist.get_world_size())
ringfence.assert_sealed()
"""
ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_init_works_without_torch_imported_or_autoload(pool: Pool, autoload: str) -> None:
    environment = os.environ | ENVIRONMENT | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    environment |= {"RINGFENCE_SECRET_FILE": str(pool.secret_file)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout == "RingfenceProcessGroup 77.0 1\n", done.stderr


def test_init_names_the_missing_torchrun_variables() -> None:
    bare = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT} | {"RANK": "0"}
    with patch.dict(os.environ, bare, clear=True), pytest.raises(ConfigurationError) as caught:
        ringfence.init()
    assert str(caught.value) == "WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set: start the script with torchrun"


def test_assert_sealed_raises_without_a_group() -> None:
    with pytest.raises(ConfigurationError, match="there is no process group"):
        ringfence.assert_sealed()


def beside() -> tuple[str, str, str]:
    """Groups that torch creates in ours are sealed. One that a library creates by an internal function need not be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dist.new_group(backend="gloo")
    before = answer(ringfence.assert_sealed)
    c10d = dist.distributed_c10d
    store = dist.PrefixStore("beside", c10d._get_default_store())
    group, _ = c10d._new_process_group_helper(
        dist.get_world_size(), dist.get_rank(), [], "gloo", store, "beside", timeout=timedelta(seconds=60)
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(dist.get_world_size())}
    try:
        return before, answer(ringfence.assert_sealed), type(mesh.get_group()).__name__
    finally:
        dist.barrier()  # the other worker may still be connecting
        dist.destroy_process_group(group)


@pytest.mark.promise("`ringfence.assert_sealed()` names a group of another backend.")
def test_an_additional_gloo_group_is_named(pool: Pool) -> None:
    for before, after, kind in pool.check(beside, 2, "ringfence"):
        assert (before, kind) == ("", "RingfenceProcessGroup")
        assert after.startswith("the process group beside is of backend gloo: its traffic is not protected")
