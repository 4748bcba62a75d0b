"""The tables of how runs recover: written from results, and the page shows the results that lie beside it."""

from __future__ import annotations

import copy

from scripts.page import RESULTS, recovery
from scripts.page.__main__ import filled
from scripts.page.recovery import CASES, MODES, PAGES, read

(PAGE,) = PAGES


def test_the_page_shows_the_results_that_lie_beside_it() -> None:
    assert PAGE.read_text() == filled(recovery, PAGE.read_text(), read(RESULTS)), "run scripts/figures"


def test_other_results_make_the_page_stale() -> None:
    """So that the check can fail."""
    page, rows = PAGE.read_text(), read(RESULTS)
    for name, value in {"identical": False, "never": True}.items():
        changed = copy.deepcopy(rows)
        next(row for row in changed if "case" in row)[name] = value
        assert filled(recovery, page, changed) != page, name


def test_every_case_was_tried_in_every_mode() -> None:
    tried = {(row["mode"], row["case"]) for row in read(RESULTS) if "case" in row}
    assert tried >= {(mode, case) for mode in MODES for case in ("worker", "agent", "host")}
    assert {case for _, case in tried} == set(CASES)
