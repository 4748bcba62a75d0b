"""Commands print unwrapped here, so that tests can look for whole sentences; `test_width.py` is about 80 columns."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
