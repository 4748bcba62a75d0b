"""A release as users get it: five commands from its wheel to two sealed nodes, its digests, and what installing it brings.

Each test installs torch, so they are nightly.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ringfence import __version__
from tests import ports
from tests.integration.test_readme import MARKED, ROOT
from tests.integration.test_wheels import COMPILED, run

pytestmark = pytest.mark.nightly


def torch_of(name: str) -> str:
    """What pip is to install, of the oldest or newest torch that ringfence is tested with."""
    found = re.search("^torch==.*", (ROOT / f"scripts/constraints/{name}.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder is what each test may change."""
    folder = tmp_path_factory.mktemp("release")
    run(ROOT / "scripts/wheels", "--out", folder, folder=folder)
    return folder


@pytest.mark.parametrize("torch", [torch_of("oldest"), torch_of("newest")])
def test_five_commands_lead_from_the_wheel_to_two_sealed_nodes(release: Path, torch: str, tmp_path: Path) -> None:
    (commands,) = MARKED.findall((ROOT / "docs/tutorials/getting-started.md").read_text())
    shutil.copy(release / COMPILED, tmp_path)
    written = re.sub("ringfence-.*?whl", COMPILED, commands).replace("29500", str(ports.port()))
    printed = run("bash", "-euo", "pipefail", "-c", written.replace("torch==2.13.0", torch), folder=tmp_path)
    shown = dict(re.findall(r"node (\d): 2 nodes; (\d+) bytes left it, sealed", printed))
    assert {node: int(sealed) >= 2**22 for node, sealed in shown.items()} == {"0": True, "1": True}, printed
    shutil.rmtree(tmp_path / "venv")


def test_a_release_has_digests_and_lists_what_installing_it_brings(release: Path, tmp_path: Path) -> None:
    folder = tmp_path / "release"
    shutil.copytree(release, folder)
    run(ROOT / "scripts/release-files", folder, folder=tmp_path)
    run("sha256sum", "--check", "--strict", "SHA256SUMS", folder=folder)
    named = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert named == {file.name for file in folder.iterdir()} - {"SHA256SUMS"}
    for name in ("ringfence", "ringfence-lab"):
        text = (folder / f"{name}-{__version__}.cdx.json").read_text()
        bill = json.loads(text)
        assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (name, __version__)
        assert {"torch", "cryptography", "pyOpenSSL"} <= {each["name"] for each in bill["components"]}
        assert str(folder) not in text, "a path of the machine that made it"
