"""The tables of what admission costs: written from results, never typed, and the page shows the results that lie beside it."""

from __future__ import annotations

import copy
import re

import pytest

from scripts.page import RESULTS, admission
from scripts.page.__main__ import filled
from scripts.page.admission import PAGES, TABLES, read

(PAGE,) = PAGES


def test_the_page_shows_the_results_that_lie_beside_it() -> None:
    assert PAGE.read_text() == filled(admission, PAGE.read_text(), read(RESULTS)), "run scripts/figures"


def test_every_table_has_its_place_and_every_place_its_table() -> None:
    places = ["groups", "fit", "certificates", "agreement", "everybody"]
    assert re.findall(r"<!-- admission: ([a-z-]+) -->", PAGE.read_text()) == places
    assert set(re.findall(r"<!-- admission: ([a-z-]+) -->", PAGE.read_text())) == set(TABLES)
    with pytest.raises(KeyError, match="nonsense"):
        filled(admission, "<!-- admission: nonsense -->\nold\n<!-- end of admission -->", read(RESULTS))


def test_other_results_make_the_page_stale() -> None:
    """So that the check can fail."""
    page, results = PAGE.read_text(), read(RESULTS)
    for name, change in {
        "admission": lambda found: found["groups"][-1].update(cpu_seconds=99.0),
        "admission-certificate": lambda found: found["predicted"][0].update(critical_path_seconds=99.0),
        "admission-agreement": lambda found: found["groups"][0].update(bytes_go_mean=1.0),
        "admission-everybody": lambda found: found["groups"][0].update(bytes_mean=1.0),
    }.items():
        changed = copy.deepcopy(results)
        change(changed[name])
        assert filled(admission, page, changed) != page, name


def test_everybody_verified_in_the_largest_world() -> None:
    group = read(RESULTS)["admission-everybody"]["groups"][0]
    assert group["verifiers"] == group["workers"] == 4096
