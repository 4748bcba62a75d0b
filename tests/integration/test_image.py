"""The image of the Containerfile, built and run by buildah without a registry and without a daemon.

Its base is Debian as mmdebstrap makes it. pip, inside the build, finds the wheels that this machine's pip has downloaded
before, so no index and no certificate has to be known there. Needs root, and .ci/packages for the two commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.config.private_files import new_secret_file
from tests.integration.netns import ADDRESSES, Hosts
from tests.integration.test_readme import ROOT
from tests.limits import HANG

SECONDS = 3000  # of one step of the build: layers of the driver vfs are whole copies
USER = 1000  # of the image
PYTHON = "3.11"  # of Debian bookworm: the wheels have to fit it

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3 * SECONDS)]


def completed(*command: str | Path) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


class Buildah:
    """Storage of its own, and containers of the image in it."""

    def __init__(self, folder: Path) -> None:
        self.words = ["buildah", "--storage-driver", "vfs", "--root", f"{folder}/storage", "--runroot", f"{folder}/run"]

    def __call__(self, *words: str | Path) -> str:
        return completed(*self.words, *words)

    def build(self, tag: str, context: Path, *options: str) -> None:
        self("bud", "--isolation", "chroot", "--network", "host", "--layers=false", "--tag", tag, *options, context)

    def container(self) -> str:
        return self("from", "--pull-never", "localhost/ringfence").split()[-1]

    def inside(self, container: str, *words: str, volume: str = "") -> list[str]:
        """The command line that runs this one in the container, as the image's user."""
        volumes = ["--volume", volume] if volume else []
        return [*self.words, "run", "--isolation", "chroot", *volumes, container, "--", *words]

    def entry_point(self) -> list[str]:
        image = json.loads(self("inspect", "--type", "image", "localhost/ringfence"))
        return list(image["OCIv1"]["config"]["Entrypoint"])


def download_wheels(folder: Path) -> None:
    """What the build installs, from where this machine's pip finds packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"], "numpy"]
    torch = ["--requirement", "scripts/constraints/oldest.txt"]
    options = ["--quiet", "--only-binary", ":all:", "--python-version", PYTHON, "--dest", str(folder)]
    completed(sys.executable, "-m", "pip", "download", *options, *torch, *wanted)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    assert not missing, f"{missing} not found: .ci/packages installs what this needs"
    folder = tmp_path_factory.mktemp("image")
    base, wheels = folder / "base", folder / "wheels"
    base.mkdir()
    made = Buildah(folder)
    completed("mmdebstrap", "--quiet", "--variant=minbase", "--include=python3", "bookworm", base / "base.tar")
    (base / "Containerfile").write_text("FROM scratch\nADD base.tar /\n")
    made.build("localhost/base", base)
    download_wheels(wheels)
    options = {"BASE": "localhost/base", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/given"}
    arguments = [word for name, value in options.items() for word in ("--build-arg", f"{name}={value}")]
    made.build("localhost/ringfence", ROOT, *arguments, "--volume", f"{wheels}:/given:ro")
    yield made
    made("rm", "--all")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def container(buildah: Buildah) -> str:
    return buildah.container()


def test_the_image_has_a_user_and_no_compiler(buildah: Buildah, container: str) -> None:
    command = "id -u; for name in gcc cc g++ clang; do command -v $name; done; ls /train/examples; ls -A /src"
    done = subprocess.run(buildah.inside(container, "sh", "-c", command), capture_output=True, text=True, timeout=HANG)
    assert done.stdout.split() == [str(USER), "ddp.py"]
    assert "/src" in done.stderr  # which is only in the stage that builds


def test_doctor_finds_the_compiled_data_plane_and_forms_a_group(buildah: Buildah, container: str) -> None:
    script = "ringfence secret new /tmp/run.secret && RINGFENCE_SECRET_FILE=/tmp/run.secret ringfence doctor"
    printed = completed(*buildah.inside(container, "sh", "-c", script))
    assert re.search(r"^ok +data plane +compiled$", printed, re.MULTILINE), printed
    assert re.search(r"^ok +group +one worker formed a group", printed, re.MULTILINE), printed


def test_the_demo_passes_as_the_entry_point_runs_it(buildah: Buildah, container: str) -> None:
    printed = completed(*buildah.inside(container, *buildah.entry_point(), "demo"))
    assert printed.endswith("All checks passed.\n") and "NumPy" not in printed


def test_two_containers_in_two_network_namespaces_train_as_one_run(buildah: Buildah, tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir(mode=0o700)
    new_secret_file(credentials / "run.secret")
    for owned in (credentials, credentials / "run.secret"):
        os.chown(owned, USER, USER)
    options = ["--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint={ADDRESSES['near']}:29400", "--rdzv-id=image"]
    started = []
    with Hosts() as hosts:
        try:
            for rank, side in enumerate(ADDRESSES):
                variables = ["env", "RINGFENCE_SECRET_FILE=/credentials/run.secret", "OMP_NUM_THREADS=1"]
                node = [*variables, *buildah.entry_point(), "run", f"--node-rank={rank}", *options, "examples/ddp.py"]
                inside = buildah.inside(buildah.container(), *node, volume=f"{credentials}:/credentials:ro")
                with (tmp_path / f"{rank}.log").open("w") as log:
                    started.append(
                        subprocess.Popen([*hosts.prefix(side), *inside], stdout=log, stderr=subprocess.STDOUT)
                    )
            codes = [process.wait(HANG) for process in started]
        finally:
            for process in started:
                process.terminate()
                process.wait(HANG)
    first, second = ((tmp_path / f"{rank}.log").read_text() for rank in range(2))
    assert codes == [0, 0], first + second
    assert "4 workers, run image" in first and "admitted by shared secret" in first
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "loss" not in second
    print(first, second, sep="\n")
