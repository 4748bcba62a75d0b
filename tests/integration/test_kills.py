"""Workers that are killed at random moments leave nothing behind, and the others raise an error that names one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import kills
from tests.integration.kills import PLACES
from tests.pool import Pool


@pytest.mark.parametrize(
    "where", [pytest.param(each, marks=pytest.mark.nightly) if each == "channels" else each for each in PLACES]
)
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.promise("A killed worker makes every other worker raise, and the error names it.")
def test_kills_at_random_moments_leave_nothing_behind(tmp_path: Path, full: bool, where: str) -> None:
    with Pool() as pool:
        done = kills.kills(pool, PLACES[where], 300 if full else 6, tmp_path)
    assert not [problem for kill in done for problem in kill.problems]
    assert all(kill.seconds for kill in done)
