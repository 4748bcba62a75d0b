"""docs/benchmarks/gpu-tee.md: every figure on it is of the published samples, and none is typed by hand."""

from __future__ import annotations

import re

from scripts.page import FIGURES, RESULTS, gpu_tee
from scripts.page.__main__ import stale

(PAGE,) = gpu_tee.PAGES


def test_the_page_and_its_pictures_are_of_the_published_samples() -> None:
    assert stale(gpu_tee, gpu_tee.read(RESULTS)) == [], "run scripts/figures"


def test_every_figure_of_the_study_is_on_the_page() -> None:
    shown = re.findall(r"\(\.\./figures/([a-z-]+)\.svg\)", PAGE.read_text())
    assert shown == [figure.name for figure in gpu_tee.pictures(gpu_tee.read(RESULTS))]
    assert sorted(path.stem for path in FIGURES.glob("tee-*.svg")) == sorted(shown)


def test_no_figure_stands_outside_of_the_generated_parts() -> None:
    prose = re.sub(r"<!-- gpu-tee: .*?<!-- end of gpu-tee -->", "", PAGE.read_text(), flags=re.DOTALL)
    assert re.findall(r"\b\d+\.\d+|\d+ ?%|\d+ times\b", prose) == []
