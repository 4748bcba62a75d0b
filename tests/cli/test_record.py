"""`ringfence record data` and `ringfence record verify-data`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import installation_without, ringfence, ringfence_here
from tests.unit.manifest_samples import FILES, write_folder

ROOT = "8af69e759037e22ac2952b43e6e4741c1e009672ff8bf064b6a4589d94df9b67"

WRITTEN = f"""\
corpus.manifest: 6 files, 13 B, in 0.0 s (0 B/s).
  root  {ROOT}
"""

VERIFIED = f"""\
corpus is the data of corpus.manifest: 6 files, 13 B.
  root  {ROOT}
Compare the root with one from elsewhere: anyone who changes data can write a
manifest of it.
"""

DIFFERENT = """\
ringfence: corpus is not the data of corpus.manifest. Files that differ: 27
  a.b is missing
  b has 2 bytes, not 5
  n00 is not in the manifest
  n01 is not in the manifest
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a data set."""
    write_folder(tmp_path / "corpus", FILES)
    return tmp_path


@pytest.fixture
def written(folder: Path) -> Path:
    """The same with its manifest."""
    assert ringfence_here("record", "data", "corpus", folder=folder).returncode == 0
    return folder


def without_times(text: str) -> str:
    return re.sub(r"in [\d.]+ s \([^)]*\)", "in 0.0 s (0 B/s)", text)


def test_what_is_printed(folder: Path) -> None:
    done = ringfence_here("record", "data", "corpus", folder=folder, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert without_times(done.stdout) == WRITTEN
    assert sorted(file.name for file in folder.iterdir()) == ["corpus", "corpus.manifest"]
    done = ringfence_here("record", "verify-data", "corpus.manifest", "corpus", folder=folder, COLUMNS="80")
    assert (done.returncode, done.stdout, done.stderr) == (0, VERIFIED, "")
    done = ringfence_here("record", "verify-data", "corpus.manifest", "corpus", "--root", ROOT, folder=folder)
    assert (done.returncode, done.stdout) == (0, "\n".join(VERIFIED.split("\n")[:2]) + "\n")


def test_differences_are_listed(written: Path) -> None:
    """The first 20, and how many there are."""
    corpus = written / "corpus"
    (corpus / "a.b").unlink()
    (corpus / "b").write_bytes(b"ab")
    write_folder(corpus, {b"n%02d" % number: b"" for number in range(25)})
    done = ringfence_here("record", "verify-data", "corpus.manifest", "corpus", folder=written, COLUMNS="80")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(DIFFERENT)
    assert done.stderr.endswith("  n17 is not in the manifest\n  and 7 more\n")


@pytest.mark.real_start
def test_it_needs_no_torch(folder: Path) -> None:
    python = installation_without(folder / "environment", "torch")
    done = ringfence("record", "data", "corpus", "-o", "m", folder=folder, python=python)
    assert (done.returncode, without_times(done.stdout)) == (0, WRITTEN.replace("corpus.manifest", "m"))
    done = ringfence("record", "verify-data", "m", "corpus", "--root", ROOT, folder=folder, python=python)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.processes
def test_a_run_that_failed_is_resumed(folder: Path) -> None:
    """A disk that is full after a piece; the next run has room."""
    done = ringfence("record", "data", "corpus", folder=folder, room=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot write corpus.manifest: File too large" in done.stderr
    assert sorted(file.name for file in folder.iterdir()) == ["corpus", "corpus.manifest.part"]
    done = ringfence("record", "data", "corpus", folder=folder)
    assert (done.returncode, without_times(done.stdout)) == (0, WRITTEN)
    assert sorted(file.name for file in folder.iterdir()) == ["corpus", "corpus.manifest"]


def test_a_link_in_the_data_is_refused(written: Path) -> None:
    (written / "corpus/link").symlink_to("a.b")
    done = ringfence_here("record", "data", "corpus", "-o", "other", folder=written)
    assert (done.returncode, done.stdout) == (1, "")
    assert "corpus is refused: link is a symbolic link" in done.stderr
    done = ringfence_here("record", "verify-data", "corpus.manifest", "corpus", folder=written)
    assert (done.returncode, done.stdout) == (1, "")
    assert "link is a symbolic link" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("data", "corpus"), 2, "corpus.manifest exists; a manifest is never overwritten"),
        (("data", "corpus", "-o", "corpus/m"), 2, "would be part of the data"),
        (("data", "nowhere"), 2, "cannot read nowhere/: No such file or directory"),
        (("verify-data", "nowhere", "corpus"), 2, "cannot read nowhere: No such file or directory"),
        (("verify-data", "corpus.manifest", "nowhere"), 2, "cannot read nowhere/: No such file or directory"),
        (("verify-data", "corpus/a.b", "corpus"), 1, "the first line is not that of a data manifest"),
        (("verify-data", "corpus.manifest", "corpus", "--root", "00" * 32), 1, f"the root is {ROOT}, and not"),
        (("verify-data", "corpus.manifest"), 2, "required: DIR"),
    ],
)
def test_what_is_refused(written: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = ringfence_here("record", *arguments, folder=written, COLUMNS="200")
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
