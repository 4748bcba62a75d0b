"""The wheels of scripts/wheels: their names and contents, and that both work in an otherwise empty virtualenv.

Each virtualenv reads torch and the other dependencies from the one that runs the tests, which comes after its own packages.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from ringfence import __version__
from scripts import wheel_build
from scripts.wheel_contents import check_wheel
from tests import ports
from tests.integration.test_readme import ROOT, completed
from tests.limits import HANG

COMPILED = f"ringfence-{__version__}-cp311-abi3-manylinux_2_28_{platform.machine()}.whl"
PURE = f"ringfence-{__version__}-py3-none-any.whl"
ARCHIVE = f"ringfence-{__version__}.tar.gz"
LAB = f"ringfence_lab-{__version__}-py3-none-any.whl"
WHEELS = {"compiled": COMPILED, "pure": PURE}

pytestmark = pytest.mark.nightly  # and when packaging changes: .ci/due


def clean_environment(home: Path) -> dict[str, str]:
    """The environment of a user who has configured nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RINGFENCE_", "PYTHON"))}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1"}


def run(*command: str | Path, folder: Path) -> str:
    done = completed(command, folder, clean_environment(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(ROOT / "scripts/wheels", "--out", folder, folder=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A virtualenv for each wheel."""
    made = {}
    for kind, wheel in WHEELS.items():
        venv = tmp_path_factory.mktemp(kind) / "venv"
        run(sys.executable, "-m", "venv", "--without-pip", venv, folder=built)
        pip = (sys.executable, "-m", "pip", "--python", venv, "install", "--no-index", "--no-deps", "--no-compile")
        run(*pip, built / wheel, folder=built)
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        made[kind] = venv
    return made


def test_build_creates_three_wheels_and_a_source_archive(built: Path) -> None:
    assert {file.name for file in built.glob("ringfence*")} == {COMPILED, PURE, LAB, ARCHIVE}


@pytest.mark.parametrize("kind", WHEELS)
def test_wheel_contains_only_the_package(built: Path, kind: str) -> None:
    with zipfile.ZipFile(built / WHEELS[kind]) as wheel:
        names = set(wheel.namelist())
    assert "ringfence/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"ringfence", f"ringfence-{__version__}.dist-info"}
    assert {"ringfence/admission/roots/amd-milan.pem", f"ringfence-{__version__}.dist-info/licenses/LICENSE"} <= names
    assert [
        name for name in names if name.endswith((".c", ".h", ".pyc")) or name.startswith(("tests/", "scripts/"))
    ] == []
    assert [name for name in names if name.endswith(".so")] == ["ringfence/dataplane/_core.abi3.so"] * (
        kind == "compiled"
    )


def test_check_of_contents_finds_errors(built: Path, tmp_path: Path) -> None:
    """The check names added files, missing files, and files that contain a path of the build machine."""
    changed = tmp_path / PURE
    with zipfile.ZipFile(built / PURE) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "ringfence/py.typed":
                new.writestr(name, old.read(name) + (b"# in /somewhere/else" if name == "ringfence/keys.py" else b""))
        new.writestr("ringfence/extra.py", "")
    files = wheel_build.tracked_files()
    assert list(check_wheel(built / PURE, files, "py3-none-any", {"/somewhere/"})) == []
    assert sorted(check_wheel(changed, files, "py2-none-any", {"/somewhere/"})) == [
        f"{PURE}: RECORD has another digest of ringfence/keys.py",
        f"{PURE}: RECORD: ringfence/extra.py is missing",
        f"{PURE}: RECORD: ringfence/py.typed should not be there",
        f"{PURE}: ringfence/extra.py should not be there",
        f"{PURE}: ringfence/keys.py names /somewhere/ of this machine",
        f"{PURE}: ringfence/py.typed is missing",
        f"{PURE}: the name should end with py2-none-any",
    ]


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [(f"manylinux_2_28_{platform.machine()}", COMPILED), (f"musllinux_1_2_{platform.machine()}", PURE)],
    ids=["fits", "does not fit"],
)
def test_pip_prefers_the_compiled_wheel(built: Path, tmp_path: Path, machine: str, chosen: str) -> None:
    options = ["--no-index", "--no-deps", "--find-links", str(built), "--dest", str(tmp_path)]
    options += ["--only-binary", ":all:", "--platform", machine, "--python-version", "3.13"]
    run(sys.executable, "-m", "pip", "download", *options, "ringfence", folder=tmp_path)
    assert [file.name for file in tmp_path.glob("ringfence*")] == [chosen]


@pytest.mark.parametrize("kind", WHEELS)
def test_the_command_works_from_an_installed_wheel(installed: dict[str, Path], kind: str, tmp_path: Path) -> None:
    command = installed[kind] / "bin/ringfence"
    assert "usage: ringfence" in run(command, "--help", folder=tmp_path)


def test_the_lab_holds_the_engine_without_sealing_and_its_commands_work(
    built: Path, installed: dict[str, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(built / LAB) as wheel:
        names = set(wheel.namelist())
    assert {
        "ringfence_lab/bench/unsealed.py",
        "ringfence_lab/accelerator/csrc/streams.cpp",
        "ringfence_lab/accelerator/csrc/streams.hpp",
        "ringfence_lab/bench/csrc/relay.cpp",
        "ringfence_lab/report/templates/page.html",
        "ringfence_lab/study/grids/default.toml",
    } <= names
    pip = (sys.executable, "-m", "pip", "--python", installed["pure"], "install", "--no-index", "--no-deps")
    run(*pip, built / LAB, folder=built)
    command = installed["pure"] / "bin/ringfence"
    assert "gpt2" in run(command, "plan", "--model", "gpt2", "--hardware", "tdx-100g", folder=tmp_path)


WORKER = """
import sys, torch, torch.distributed as dist
dist.init_process_group("ringfence", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2)
tensor = torch.arange(10_000.0)
dist.all_reduce(tensor)
import ringfence
from ringfence.dataplane import native as core
print(ringfence.__file__, core.COMPILED, torch.equal(tensor, 2 * torch.arange(10_000.0)))
dist.destroy_process_group()
"""


def test_workers_of_both_wheels_form_a_group(installed: dict[str, Path], tmp_path: Path) -> None:
    """Rank 0 is installed from the compiled wheel, rank 1 from the pure one."""
    run(installed["pure"] / "bin/ringfence", "secret", "new", "run.secret", folder=tmp_path)
    port = str(ports.port())
    environment = clean_environment(tmp_path) | {"RINGFENCE_SECRET_FILE": "run.secret", "RINGFENCE_RUN_ID": "wheels"}
    started = [
        subprocess.Popen(
            [installed[kind] / "bin/python", "-c", WORKER, str(rank), port],
            cwd=tmp_path,
            env=environment | ({"RINGFENCE_DATAPLANE": "python"} if kind == "pure" else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, kind in enumerate(WHEELS)
    ]
    try:
        said = [process.communicate(timeout=HANG)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for output, (kind, venv) in zip(said, installed.items(), strict=True):
        file, compiled, right = output.split()[-3:]
        assert Path(file).is_relative_to(venv) and (compiled, right) == (str(kind == "compiled"), "True"), said


ALONE = """
import torch.distributed as dist
dist.init_process_group("ringfence", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_a_worker_without_the_compiled_data_plane_refuses_and_says_what_to_do(
    installed: dict[str, Path], tmp_path: Path
) -> None:
    command = [str(installed["pure"] / "bin/python"), "-c", ALONE]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(tmp_path), capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 1
    assert "ConfigurationError: this installation lacks the compiled data plane: install a C compiler" in done.stderr


@pytest.mark.long
def test_build_is_reproducible(built: Path, tmp_path: Path, full: bool) -> None:
    """In the short form, it builds only the wheel that needs no compiler."""
    session = wheel_build.time_of_sources()
    again = wheel_build.build_archive(wheel_build.tracked_files(), tmp_path, session)
    assert again.read_bytes() == (built / ARCHIVE).read_bytes()
    for kind in WHEELS if full else ("pure",):
        wheel = wheel_build.build_wheel(again, tmp_path, kind, session)
        assert wheel.read_bytes() == (built / WHEELS[kind]).read_bytes()
