"""Hardware profiles: every figure says where it is from, and what is not understood is refused."""

from __future__ import annotations

import pytest

from ringfence.errors import ConfigurationError
from ringfence_lab.plan import hardware
from ringfence_lab.plan.hardware import FIGURES, VARIANT_FIGURES, Hardware, dump, load, names, parse

WANTED = {
    *(f"{kind}-{rate}g" for kind in ("tdx", "snp") for rate in (10, 25, 100, 400)),
    "h100-cc",
    "h100-cc-node",
    "h100-ppcie",
    "blackwell",
}


def test_the_profiles_that_are_promised_are_there() -> None:
    assert set(names()) == WANTED
    assert load("tdx-400g")["network", "rate"] == 50e9
    assert load("h100-ppcie")["node", "workers"] == 8


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_figure_has_an_origin(name: str) -> None:
    profile = load(name)
    assert set(profile.figures) == set(FIGURES)
    assert all(len(figure.origin) > 5 for figure in profile.figures.values())
    assert 0 < len(profile.assumed()) < len(FIGURES)


SOUND = """
extends = "tdx"
title = "mine"
[network]
rate = { value = 1, source = "the bill", date = "2026" }
"""


def test_a_profile_of_ones_own() -> None:
    profile = parse(SOUND, "mine")
    assert profile["network", "rate"] == 1e9 / 8
    assert profile["core", "seal"] == load("tdx-10g")["core", "seal"]
    assert not profile.figures["network", "rate"].assumed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title = ", "Invalid"),
        (SOUND + 'speed = "high"', "unknown figure network.speed"),
        (SOUND + "[turbo]\nx = 1", "unknown turbo"),
        (SOUND.replace('"tdx"', '"../tdx"'), "no profile of this package"),
        (SOUND.replace('"tdx"', '"nothing"'), "no profile of this package"),
        (SOUND.replace('title = "mine"', "title = 3"), "needs a title"),
        (SOUND.replace("value = 1,", ""), "no number"),
        (SOUND.replace("value = 1,", "value = true,"), "no number"),
        (SOUND.replace("value = 1,", "value = -1,"), "no number"),
        (SOUND.replace("value = 1,", "value = nan,"), "no number"),
        (SOUND.replace(', date = "2026"', ""), "a figure is"),
        (SOUND.replace('source = "the bill", date = "2026"', "assumed = true"), "a figure is"),
        (SOUND.replace('source = "the bill"', 'assumed = true, reason = "x", source = "y"'), "a figure is"),
        ('title = "mine"', r"\[network\] is missing"),
        (SOUND.replace('extends = "tdx"', ""), r"\[node\] is missing"),
        (SOUND + "[variants.ringfence]\nfactor = 1", "variants.ringfence needs"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse(text, "mine")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match="tdx-100g"):
        load("cray")


@pytest.mark.parametrize("name", ["tdx-100g", "blackwell"])
def test_what_is_written_reads_the_same(name: str) -> None:
    first = load(name)
    fitted = {"ringfence": {name: 1.25 * number for number, name in enumerate(VARIANT_FIGURES, 1)}}
    wrote = dump(Hardware(first.name, first.title, first.figures, fitted), "a test", "2026-11-15")
    second = parse(wrote, name)
    assert second.values == pytest.approx(first.values)
    assert second.variants == fitted
    assert second.assumed() == first.assumed()
    assert dump(second, "a test", "2026-11-15") == wrote


def test_what_if_questions_leave_the_profile_alone() -> None:
    profile = load("tdx-10g")
    assert profile.with_values(core_seal=0.0)["core", "seal"] == 0
    assert profile["core", "seal"] > 0
    assert hardware.load("tdx-10g") is profile
