"""A command reports what the installation lacks in one line, with what to install, before it starts workers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ringfence import cli
from ringfence.cli.further_commands import LAB
from tests.cli.command import installation_without, ringfence

COLLECTIVES = ("bench", "collectives", "--workers", "2", "--sizes", "4KiB", "--rounds", "1")
MEMORY = ("bench", "memory", "--workers", "2", "--sizes", "4KiB", "--rounds", "1")
TORCH = 'workers need torch: python -m pip install "torch>=2.13,<2.16"'
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", [("doctor",), ("--help",)], ids=" ".join)
def test_without_cryptography_the_command_starts(tmp_path: Path, command: tuple[str, ...]) -> None:
    python = installation_without(tmp_path, "cryptography")
    done = ringfence(*command, python=python)
    assert done.stderr == ""
    assert done.returncode == (1 if command == ("doctor",) else 0)
    if command == ("doctor",):
        assert "cryptography  missing" in done.stdout
        assert done.stdout.count('python -m pip install "cryptography') == 1
        assert "as `settings` says" not in done.stdout  # it can say nothing without cryptography


@pytest.mark.parametrize("command", [COLLECTIVES, MEMORY, ("study", "--quick"), ("demo",)], ids=" ".join)
def test_without_torch_no_worker_is_started(tmp_path: Path, command: tuple[str, ...]) -> None:
    python = installation_without(tmp_path / "environment", "torch")
    done = ringfence(*command, folder=tmp_path, python=python)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ringfence: {TORCH}\n")


class TestWithoutTheLab:
    """An installation of the product alone."""

    @pytest.fixture(scope="class")
    @classmethod
    def python(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return installation_without(tmp_path_factory.mktemp("product"), "ringfence_lab")

    @pytest.mark.parametrize(
        "command", [COLLECTIVES, ("study", "--list"), ("report",), ("plan", "--help"), ("bench",)], ids=" ".join
    )
    def test_its_commands_say_what_to_install(self, python: str, tmp_path: Path, command: tuple[str, ...]) -> None:
        done = ringfence(*command, folder=tmp_path, python=python)
        install = "In a clone of ringfence: pip install . ./lab"
        says = f"ringfence: {command[0]} is a command of the lab, which is not installed. {install}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", says)

    def test_the_help_lists_all_commands(self, python: str) -> None:
        done = ringfence("--help", python=python)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ringfence("--help").stdout
        assert all(f"\n    {name} " in done.stdout for name in LAB)

    def test_commands_of_the_product_work(self, python: str, tmp_path: Path) -> None:
        for command in (("secret", "new", "run.secret"), ("policy", "new", "policy.toml"), ("doctor",)):
            done = ringfence(*command, folder=tmp_path, python=python)
            assert done.stderr == ""
            assert done.returncode == (1 if command == ("doctor",) else 0), done.stdout  # it finds no settings


def test_the_lab_requires_exactly_this_version_of_the_product() -> None:
    product, lab = (
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("pyproject.toml", "lab/pyproject.toml")
    )
    assert lab["version"] == product["version"]
    assert f"ringfence=={product['version']}" in lab["dependencies"]
    assert set(lab["entry-points"]["ringfence.commands"]) == set(LAB)


def test_the_help_of_each_lab_command_is_that_of_its_module() -> None:
    assert cli._parser().format_help() == cli._parser([]).format_help()


@pytest.mark.parametrize("command", [COLLECTIVES, MEMORY, ("demo",)], ids=" ".join)
def test_a_data_plane_that_there_is_not_is_refused_before_workers_start(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = ringfence(*command, folder=tmp_path, RINGFENCE_DATAPLANE="nonsense")
    said = "ringfence: RINGFENCE_DATAPLANE is 'nonsense'; it may be 'compiled' or 'python', or not set\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("name", "value"), [("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"), ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")]
)
def test_a_demo_that_torch_would_not_let_happen_says_why(name: str, value: str) -> None:
    setting: dict[str, Any] = {name: value}
    done = ringfence("demo", **setting)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ringfence: the backend is ")
    assert done.stderr.endswith(f": unset {name}\n")
