"""Refused, tested and untested versions of torch, and the script that tests several versions."""

from __future__ import annotations

import re

import pytest

from ringfence.backend import torch_versions
from scripts import torch_versions as script


@pytest.mark.parametrize(
    ("version", "too_old", "untested"),
    [
        ("2.9.1", True, False),
        ("2.12.1+cu130", True, False),
        ("2.13.0+cpu", False, False),
        ("2.15.9", False, False),
        ("2.16.0a0+git1234567", False, True),
        ("3.0.0", False, True),
    ],
)
def test_the_range_of_releases(version: str, too_old: bool, untested: bool) -> None:
    assert torch_versions.too_old(version) is too_old
    assert torch_versions.untested(version) is untested


def test_invalid_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not a version of torch"):
        torch_versions.release("main")


def test_messages_name_the_tested_range() -> None:
    assert torch_versions.TESTED == "2.13 to 2.15"
    assert torch_versions.INSTALL == 'python -m pip install "torch>=2.13,<2.16"'


# -- scripts/torch-versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("58 passed, 12 deselected in 31.02s", (58, 58)),
        ("1 failed, 3 passed, 2 skipped, 1 error in 3.10s (0:00:03)", (3, 7)),
        ("4 deselected in 0.10s", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_failed_or_skipped_test_has_not_passed(last: str, expected: tuple[int, int]) -> None:
    assert script.counts(f"9 passed\n{last}\n" if last else "") == expected


def test_a_release_is_a_row_of_the_table() -> None:
    parts = dict.fromkeys(script.SET, (3, 4)) | {"`doctor`": (1, 1)}
    row = script.as_table([{"torch": "2.13.0", "python": "3.11.7", "parts": parts}]).splitlines()[-1]
    assert row == "| 2.13.0 | 3.11.7 | 3 of 4 | 3 of 4 | passed | 3 of 4 | 3 of 4 | 3 of 4 | 3 of 4 | 3 of 4 |"


def pinned(name: str) -> tuple[int, int]:
    """The release of torch that a constraints file pins."""
    lines = (script.ROOT / "scripts" / "constraints" / name).read_text().splitlines()
    (version,) = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    return torch_versions.release(version)


def test_ci_installs_the_oldest_and_the_newest_release() -> None:
    assert (pinned("oldest.txt"), pinned("newest.txt")) == (torch_versions.OLDEST, torch_versions.NEWEST)


def test_page_has_a_row_for_every_passing_release() -> None:
    page = (script.ROOT / "docs" / "reference" / "compatibility.md").read_text()
    rows = re.findall(r"^\| (\d[^ ]*) \| [\d.]+ \| (.*) \|$", page, flags=re.MULTILINE)
    assert {torch_versions.release(version) for version, _ in rows} == {
        (major, minor)
        for major in range(torch_versions.OLDEST[0], torch_versions.NEWEST[0] + 1)
        for minor in range(torch_versions.OLDEST[1], torch_versions.NEWEST[1] + 1)
    }
    for version, cells in rows:
        for cell in cells.split(" | "):
            passed, _, count = cell.partition(" of ")
            assert cell == "passed" or passed == count, f"torch {version}: {cell}"
