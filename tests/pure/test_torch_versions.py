"""Which torch is refused, tested, or newer than what was tested."""

from __future__ import annotations

import pytest

from ringfence import torch_versions


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


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not a version of torch"):
        torch_versions.release("main")


def test_the_texts_name_the_tested_range() -> None:
    assert torch_versions.TESTED == "2.13 to 2.15"
    assert torch_versions.INSTALL == 'python -m pip install "torch>=2.13,<2.16"'
