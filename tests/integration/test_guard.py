"""RINGFENCE_REQUIRE=1 refuses every unprotected process group; without it, a worker with credentials logs a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringfence import guard
from ringfence.backend import autoload
from ringfence.config.private_files import new_secret_file
from ringfence.config.settings import KNOWN
from ringfence.errors import ConfigurationError
from tests.limits import HANG

# Every way to create an unprotected group, each in turn, in one process with a world size of one.
PROGRAM = """
import json, logging, sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.device_mesh import init_device_mesh

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("ringfence").addHandler(handler)

def bare(): dist.init_process_group()
def by_name(): dist.init_process_group("gloo")
def by_device(): dist.init_process_group("cpu:gloo")
def ours_and_another(): dist.init_process_group("cpu:ringfence,cuda:gloo")
def mesh(): init_device_mesh("cpu", (1,))
def by_hand(): dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
def dist2():
    from torch.distributed import _dist2
    _dist2.new_group("gloo", timedelta(seconds=10), "cpu")
def remote_calls(): rpc.init_rpc("worker", rank=0, world_size=1)

WAYS = [bare, by_name, by_device, ours_and_another, mesh, by_hand, dist2, remote_calls]
answers = {}
for way in WAYS:
    messages.clear()
    try:
        way()
        answers[way.__name__] = ["made", *messages]
    except Exception as error:
        answers[way.__name__] = [type(error).__name__, str(error)]
    if way is remote_calls and answers["remote_calls"][0] == "made":
        rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()

messages.clear()
dist.init_process_group("ringfence")
sub = dist.new_group([0], backend="gloo")
dist.all_reduce(torch.ones(3), group=sub)
answers["inside ours"] = [type(sub).__name__, *messages]
dist.destroy_process_group()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    new_secret_file(folder / "secret")
    (folder / "train.py").write_text(PROGRAM)
    return folder


def run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("RINGFENCE_", "TORCH_"))}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(
        command, cwd=folder, env=bare | world | variables, capture_output=True, text=True, timeout=HANG
    )


def answers(folder: Path, **variables: str) -> dict[str, list[Any]]:
    done = run(folder, "train.py", RINGFENCE_SECRET_FILE=str(folder / "secret"), **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


UNPROTECTED = ["bare", "by_name", "by_device", "ours_and_another", "mesh", "by_hand", "dist2", "remote_calls"]


@pytest.fixture(scope="module")
def refused(folder: Path) -> dict[str, list[Any]]:
    return answers(folder, RINGFENCE_REQUIRE="1")


@pytest.fixture(scope="module")
def warned(folder: Path) -> dict[str, list[Any]]:
    return answers(folder)


@pytest.mark.promise("`RINGFENCE_REQUIRE=1` refuses process groups of other backends, and RPC agents.")
@pytest.mark.parametrize("way", UNPROTECTED)
def test_refusal_names_the_call_and_the_fix(way: str, refused: dict[str, list[Any]]) -> None:
    kind, message = refused[way]
    assert kind == "ConfigurationError", message
    assert "train.py:" in message and "RINGFENCE_REQUIRE=1 refuses it" in message
    assert ("ringfence does not protect RPC" if way == "remote_calls" else 'backend="ringfence"') in message


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("bare", "init_process_group"),
        ("mesh", "init_device_mesh"),
        ("remote_calls", "init_rpc"),
        ("dist2", "new_group"),
    ],
)
def test_refusal_names_the_call_of_the_script(way: str, call: str, refused: dict[str, list[Any]]) -> None:
    assert refused[way][1].startswith(f"{call}() at ")


@pytest.mark.parametrize("way", [way for way in UNPROTECTED if way != "ours_and_another"])
def test_unprotected_group_is_reported_once_with_credentials(way: str, warned: dict[str, list[Any]]) -> None:
    made, *messages = warned[way]
    assert made == "made"
    message, *more = [each for each in messages if "NOT protected" in each]
    assert len(more) == (1 if way == "remote_calls" else 0)  # RPC creates a Gloo group and its agent
    assert "train.py:" in message and "although RINGFENCE_SECRET_FILE is set" in message


@pytest.mark.parametrize("mode", ["refused", "warned"])
def test_subgroups_are_sealed_without_a_message(mode: str, request: pytest.FixtureRequest) -> None:
    kind, *messages = request.getfixturevalue(mode)["inside ours"]
    assert kind == "RingfenceProcessGroup"
    assert not [each for each in messages if "protected" in each]


def test_no_message_if_protection_is_not_configured(folder: Path) -> None:
    done = run(folder, "-c", "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()")
    assert done.returncode == 0, done.stderr
    assert "ringfence" not in done.stderr


@pytest.mark.promise("`RINGFENCE_REQUIRE=1` refuses process groups of other backends, and RPC agents.")
def test_unsetting_the_variable_in_the_program_has_no_effect(folder: Path) -> None:
    """Nor has it after a group of ringfence's own, which installs the guard again."""
    lines = ["import os, torch.distributed as dist", "del os.environ['RINGFENCE_REQUIRE']"]
    lines += ["dist.init_process_group('ringfence')", "dist.destroy_process_group()", "dist.init_process_group('gloo')"]
    done = run(folder, "-c", "\n".join(lines), RINGFENCE_REQUIRE="1", RINGFENCE_SECRET_FILE=str(folder / "secret"))
    assert done.returncode != 0 and "RINGFENCE_REQUIRE=1 refuses it" in done.stderr


# In a process that was started without a setting: what is guarded, and from when on.
UNCONFIGURED = """
import os, torch.distributed as dist
c10d, gloo = dist.distributed_c10d, dist.ProcessGroupGloo
def guarded():
    return [hasattr(each, "__wrapped__") for each in (c10d._new_process_group_helper, c10d._new_group_with_tag, gloo.__init__)]
print(dist.is_backend_available("ringfence"), guarded())
os.environ["RINGFENCE_SECRET_FILE"] = "secret"
dist.init_process_group("ringfence")
print(guarded())
dist.destroy_process_group()
os.environ["RINGFENCE_REQUIRE"] = "1"
dist.init_process_group("gloo")
"""


@pytest.mark.real_start
def test_torch_is_unchanged_in_a_process_without_settings_until_it_has_a_group(folder: Path) -> None:
    done = run(folder, "-c", UNCONFIGURED)
    assert done.stdout.splitlines() == ["True [False, False, False]", "[True, True, True]"]
    assert done.returncode != 0 and "RINGFENCE_REQUIRE=1 refuses it" in done.stderr


@pytest.mark.parametrize("started", [{}, {"RINGFENCE_STAGE_TIMES": "0"}])
def test_setting_the_variable_in_the_program_works(folder: Path, started: dict[str, str]) -> None:
    """Before `import torch`; after it in a process that was started with any setting, and is guarded."""
    lines = ["import torch.distributed as dist", "import os; os.environ['RINGFENCE_REQUIRE'] = '1'"]
    program = "\n".join([*(lines if started else reversed(lines)), "dist.init_process_group('gloo')"])
    done = run(folder, "-c", program, **started)
    assert done.returncode != 0 and "RINGFENCE_REQUIRE=1 refuses it" in done.stderr


def test_a_value_that_is_neither_1_nor_0_fails_import_torch(folder: Path) -> None:
    done = run(folder, "-c", "import torch; print('imported')", RINGFENCE_REQUIRE="")
    assert done.returncode != 0 and "imported" not in done.stdout
    assert "RINGFENCE_REQUIRE='': write 1" in done.stderr


@pytest.mark.parametrize("value", ["yes", "", "true", "01", " 1"])
def test_only_1_and_0_are_valid(value: str) -> None:
    with pytest.raises(ConfigurationError, match="write 1 to refuse unprotected process groups, or 0"):
        guard.is_required({guard.REQUIRE: value})
    assert [guard.is_required(environ) for environ in ({}, {guard.REQUIRE: "0"}, {guard.REQUIRE: "1"})] == [0, 0, 1]


# Loads plug-ins like the end of `import torch`, after a change to torch that ringfence does not support.
UNKNOWN_TORCH = """
import torch.distributed.distributed_c10d as c10d, torch
def _new_process_group_helper(*anything): pass
c10d._new_process_group_helper = _new_process_group_helper
torch._import_device_backends()
print('imported')
"""


@pytest.mark.promise("`RINGFENCE_REQUIRE=1` refuses process groups of other backends, and RPC agents.")
def test_import_torch_fails_if_it_cannot_be_guarded(folder: Path) -> None:
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run(folder, "-c", UNKNOWN_TORCH, RINGFENCE_REQUIRE="1", **variables)
    assert done.returncode != 0 and "imported" not in done.stdout
    assert "creates process groups in a way that ringfence does not support" in done.stderr
    done = run(folder, "-c", UNKNOWN_TORCH, RINGFENCE_REQUIRE="0", **variables)
    assert done.returncode == 0 and "imported" in done.stdout and "could not be registered" in done.stderr
    done = run(folder, "-c", UNKNOWN_TORCH, **variables)
    assert done.returncode == 0 and "imported" in done.stdout and not done.stderr


TAKEN = """
import torch.distributed as dist
dist.Backend.register_backend("other", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size))
dist.Backend._plugins["RINGFENCE"] = dist.Backend._plugins["OTHER"]
dist.init_process_group("ringfence")
print("made")
"""


TAKEN_FIRST = """
import torch, torch.distributed as dist
dist.Backend.register_backend("ringfence", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size))
torch._import_device_backends()
dist.init_process_group("ringfence")
print("made")
"""


@pytest.mark.promise("A group that other code makes under ringfence's name is refused.")
@pytest.mark.parametrize(
    ("program", "variables"),
    [(TAKEN, {"RINGFENCE_REQUIRE": "0"}), (TAKEN_FIRST, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})],
    ids=["later", "before ringfence, without any setting"],
)
def test_group_of_another_plugin_with_our_name_is_refused(
    folder: Path, program: str, variables: dict[str, str]
) -> None:
    done = run(folder, "-c", program, **variables)
    assert done.returncode != 0 and "made" not in done.stdout
    assert "other code has registered this name" in done.stderr


CHECKPOINT = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
if __name__ == "__main__":
    dist.init_process_group("ringfence")
    try:
        kind = AsyncCheckpointerType.PROCESS
        dcp.async_save({"a": torch.ones(4)}, checkpoint_id="saved", async_checkpointer_type=kind).result(timeout=600)
    finally:
        dist.destroy_process_group()
"""


def test_async_checkpoint_process_creates_no_gloo_group(folder: Path) -> None:
    (folder / "checkpoint.py").write_text(CHECKPOINT)
    done = run(folder, "checkpoint.py", RINGFENCE_REQUIRE="1", RINGFENCE_SECRET_FILE=str(folder / "secret"))
    assert done.returncode != 0 and not list(folder.glob("saved/*.distcp"))
    assert "ConfigurationError" in done.stderr and "RINGFENCE_REQUIRE=1 refuses it" in done.stderr


def test_every_backend_of_torch_is_guarded() -> None:
    from torch._C import _distributed_c10d

    guard.install(autoload._is_ours)
    names = {name for name in vars(_distributed_c10d) if name.startswith("ProcessGroup")} - {"ProcessGroup"}
    assert "ProcessGroupGloo" in names
    for name in names:
        assert hasattr(getattr(_distributed_c10d, name).__init__, "__wrapped__"), name


def test_guard_reads_only_known_settings() -> None:
    assert {guard.REQUIRE, *guard.CONFIGURED} <= set(KNOWN)
