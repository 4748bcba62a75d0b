"""What leaves a clone and what stays: the source archive has all of the repository, and git takes no keys."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import ringfence
from tests.limits import HANG
from tests.unit.test_documents import ROOT, files_of_the_project, name_of, recorded


@pytest.mark.processes
def test_the_source_archive_is_the_repository(tmp_path: Path) -> None:
    """As the build backend lists it. Documents link to each other, and tests read documents, scripts and records."""
    command = [sys.executable, "-W", "ignore", "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=HANG)
    listed = (tmp_path / "ringfence.egg-info" / "SOURCES.txt").read_text().splitlines()
    made = ("setup.cfg", str(tmp_path))  # the build backend's own: in an archive that was unpacked, and here
    sources = {name for name in listed if not name.startswith(made)}
    others = {"LICENSE", "MANIFEST.in", ".clang-format", ".dockerignore", ".gitignore", "mkdocs.yml"}
    assert sources == {name_of(file) for file in (*files_of_the_project(), *recorded())} | others


@pytest.mark.processes
def test_git_takes_neither_secrets_nor_keys(tmp_path: Path) -> None:
    """The commands of the guides are run beside the examples, in a clone."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    assert ringfence("secret", "new", "run.secret", folder=tmp_path).returncode == 0
    assert ringfence("certificate", "new", "site", "node-0", folder=tmp_path).returncode == 0
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    listing = ["git", "ls-files", "--others", "--exclude-standard"]
    shown = subprocess.run(listing, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert shown == [".gitignore", "site/ca.pem", "site/node-0.pem"]
