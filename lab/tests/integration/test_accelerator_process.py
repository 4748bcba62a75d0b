"""The simulated accelerator and its process: build, host access, failed kernels, exit and fork."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringfence.errors import ConfigurationError
from ringfence_lab.accelerator import build
from tests.pool import ROOT

TORCH = Path(torch.__file__).parent
LIMIT = 240  # seconds: of a process that hangs
LOADED = """
import ctypes, os, sys, torch
from ringfence_lab import accelerator
accelerator.load()
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own that has loaded the device."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", LOADED + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=variables, cwd=ROOT)


def completed(program: str, **environment: str) -> str:
    done = run(program, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_host_access_to_device_memory_faults() -> None:
    done = run("print(ctypes.c_float.from_address(torch.zeros(4, device='sim').data_ptr()).value)")
    assert done.returncode == -signal.SIGSEGV


def test_a_process_exits_while_its_streams_work() -> None:
    """It waits for the running kernel only, drops what is queued, and does not crash."""
    program = """
with torch.Stream("sim"):
    matrix = torch.ones(1000, 1000, device="sim")
    for _ in range(1000):
        matrix = matrix @ matrix
with torch.Stream("sim:1"):
    accelerator.sleep(1000)
    torch.ones(3, device="sim:1")
blocked = torch.Stream("sim")
event = torch.Event("sim")
accelerator.sleep(1000)
event.record()
blocked.wait_event(event)
kept = torch.ones(3, device="sim")  # freed while the interpreter ends
"""
    completed(program)  # within its limit, which is shorter than what is queued


def test_a_forked_child_can_use_cpu_tensors() -> None:
    """It can also drop the device tensors that it inherits; it cannot use the device."""
    program = """
kept, memory = torch.ones(1000, device="sim"), torch.ones(10).pin_memory()
torch.accelerator.synchronize()  # the other stream reads what this one wrote
with torch.Stream("sim"):
    for _ in range(300):  # streams work while the process forks
        kept = kept + 1
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        assert (torch.ones(5) + memory[:5]).sum().item() == 10
        assert not torch.ones(5).is_pinned()
        assert torch.sim._is_in_bad_fork()
        torch.manual_seed(1)
        try:
            kept.cpu()
        except RuntimeError as error:
            assert "forked child" in str(error)
        else:
            os._exit(2)
        del kept, memory
        sys.exit(0)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
torch.accelerator.synchronize()
assert kept[0].item() == 301
"""
    completed(program)


DEVICES = """
from ringfence.errors import ConfigurationError
assert torch.accelerator.device_count() == 3
accelerator.load()
accelerator.load(3)
try:
    accelerator.load(2)
except ConfigurationError as error:
    assert "has 3 simulated devices already, not 2" in str(error)
else:
    raise SystemExit("there are two numbers of devices")
try:
    torch.ones(1, device="sim:3")
except RuntimeError as error:
    assert "there is no device sim:3" in str(error)
else:
    raise SystemExit("there is a fourth device")
assert len(accelerator.stats().device_bytes) == 3
"""
FAILURE = """
event = torch.Event("sim")
tensor = torch.ones(3, device="sim")
with accelerator.hold():  # so that the failure is not known when the event is recorded
    torch.ops.ringfence_sim.fail()
    event.record()
calls = [torch.accelerator.synchronize, event.synchronize, tensor.cpu, lambda: tensor.add_(1),
         lambda: torch.ones(3, device="sim")]
for call in calls:
    try:
        call()
    except RuntimeError as error:
        assert "this kernel fails on purpose" in str(error), error
        continue
    raise SystemExit("the failure was silent")
"""


def test_a_wrong_number_of_devices_and_a_failed_kernel_raise() -> None:
    """After a failed kernel the next call that waits raises, and so does everything after it."""
    done = run(DEVICES + FAILURE, RINGFENCE_SIM_DEVICES="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a task failed: this kernel fails on purpose" in done.stderr


# -- build ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ringfence" / "accelerator"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder of sources that compile quickly."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "two.hpp"\nint one() { return two; }\n')
    (folder / "two.hpp").write_text("const int two = 2;\n")
    return folder


def make(sources: Path) -> Path:
    return build.library(TORCH, torch.__version__, torch.compiled_with_cxx11_abi(), sources)


def test_one_of_several_processes_builds(cache: Path, small: Path, tmp_path: Path) -> None:
    compiler, log = tmp_path / "g++", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    program = f"""
import sys
from pathlib import Path
from ringfence_lab.accelerator import build
print("ready", flush=True)
sys.stdin.readline()
print(build.library(Path({str(TORCH)!r}), "2", True, Path({str(small)!r})))
"""
    environment = {**os.environ, "CXX": str(compiler)}
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(4)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    found = set()
    for process in started:  # all of them wait for this line
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        found.add(process.communicate(timeout=LIMIT)[0].strip())
        assert process.returncode == 0
    assert len(found) == 1
    (library,) = map(Path, found)
    assert library.is_relative_to(cache)
    assert {file.name for file in library.parent.iterdir()} == {build.LIBRARY, build.MESSAGES, "lock"}
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1


@pytest.mark.usefixtures("cache")
def test_a_change_of_a_source_builds_again(small: Path) -> None:
    first = make(small)
    assert make(small) == first
    (small / "two.hpp").write_text("const int two = 3;\n")
    assert make(small) != first


def test_a_folder_that_others_can_change_is_refused(cache: Path, small: Path) -> None:
    library = make(small)
    for folder, mode in ((library.parent, 0o755), (cache, 0o750), (cache.parent, 0o775)):
        folder.chmod(mode)
        with pytest.raises(ConfigurationError, match=re.escape(f"chmod 700 {folder}`")):
            make(small)
        folder.chmod(0o700)
    moved = library.parent.rename(cache / "moved")
    library.parent.symlink_to(moved)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        make(small)


@pytest.mark.usefixtures("cache")
def test_what_is_missing_is_named(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="needs torch's C"):
        build.library(tmp_path, "2", True, small)
    (small / "one.cpp").write_text("int one() { return }\n")
    with pytest.raises(ConfigurationError, match=r"(?s)could not be built; g\+\+ says:.*one.cpp:1"):
        make(small)
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match=r"install g\+\+"):
        make(small)


def test_the_device_compiles_without_warnings() -> None:
    """The folder of the library has what the compiler said."""
    library = build.library(TORCH, torch.__version__, torch.compiled_with_cxx11_abi())
    assert {"-Wall", "-Wextra"} <= set(build.FLAGS)
    assert (library.parent / build.MESSAGES).read_text() == ""
