"""The table of what channels gain: written from its result, never typed."""

from __future__ import annotations

import copy
import statistics

from scripts.page import RESULTS, channels
from scripts.page.__main__ import filled

(PAGE,) = channels.PAGES
FOUND = channels.read(RESULTS)
VARIANTS = ("1 channel", "2 channels", "1 channel, busy", "2 channels, busy")


def test_the_page_shows_the_result_that_lies_beside_it() -> None:
    assert PAGE.read_text() == filled(channels, PAGE.read_text(), FOUND), "run scripts/figures"


def test_another_result_makes_the_page_stale() -> None:
    changed = copy.deepcopy(FOUND)
    changed["GB/s"]["2 channels"] = [9.0] * FOUND["rounds"]
    assert filled(channels, PAGE.read_text(), changed) != PAGE.read_text()


def test_the_result_has_every_round_of_every_variant() -> None:
    assert {name: len(each) for name, each in FOUND["GB/s"].items()} == dict.fromkeys(VARIANTS, FOUND["rounds"])
    medians = {name: statistics.median(each) for name, each in FOUND["GB/s"].items()}
    assert FOUND["median GB/s"] == medians
