"""Another user can write to the folder in which a run is started: no process of ringfence imports a module from there."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

import ringfence
from ringfence import own_process
from tests.limits import HANG

PACKAGE = Path(ringfence.__file__).parent
LAB = Path(__file__).parents[2] / "lab/src/ringfence_lab"
PLANTED = "open('run-by-the-attacker', 'w').close()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with modules of the attacker, named as those that ringfence and its helpers import."""
    for name in ("json", "grpc", "torch", "dcap_qvl"):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    (tmp_path / "ringfence").mkdir()
    (tmp_path / "ringfence" / "__init__.py").write_text(PLANTED)
    return tmp_path


@pytest.mark.promise("No process that ringfence starts imports a module from the current folder.")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_module_in_the_current_folder_is_not_imported(folder: Path, unbuffered: bool) -> None:
    command = own_process.command("ringfence.cli", "--version", unbuffered=unbuffered)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, f"ringfence {ringfence.__version__}\n"), done.stderr
    assert not (folder / "run-by-the-attacker").exists()


@pytest.mark.promise("No process that ringfence starts imports a module from the current folder.")
def test_the_process_that_fetches_a_certificate_does_not_either(folder: Path) -> None:
    """Its key would be the attacker's."""
    command = own_process.command("ringfence.evidence.workload_api", str(folder / "no.sock"), "1")
    subprocess.run(command, cwd=folder, capture_output=True, timeout=HANG)
    assert not (folder / "run-by-the-attacker").exists()


def test_the_attack_works_without_the_option(folder: Path) -> None:
    """Or the tests above would show nothing."""
    command = [word for word in own_process.command("ringfence.cli", "--version") if word != "-P"]
    subprocess.run(command, cwd=folder, capture_output=True, timeout=HANG, env={**os.environ, "PYTHONSAFEPATH": ""})
    assert (folder / "run-by-the-attacker").exists()


def test_every_module_is_started_by_this_function() -> None:
    """A list that begins with the interpreter and contains -m would start one in another way."""
    found = [
        f"{file.relative_to(package)}:{node.lineno}"
        for package in (PACKAGE, LAB)
        for file in sorted(package.rglob("*.py"))
        if file.name != "own_process.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value == "-m"
    ]
    assert found == ["launch/spares.py:129"], "which compares the arguments of a worker with it"
