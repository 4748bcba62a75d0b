"""docs/benchmarks/gpu-tee.md: every figure on it is of the published samples, and none is typed by hand."""

from __future__ import annotations

import re

from ringfence_lab.report.study import read
from scripts.gpu_tee_tables import FIGURES, PAGE, RESULTS, figures_of, stale


def test_the_page_and_its_pictures_are_of_the_published_samples() -> None:
    assert stale(read(RESULTS)) == [], "run scripts/gpu-tee"


def test_every_figure_of_the_study_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name in figures_of(read(RESULTS)):
        assert f"../figures/{name}.svg" in text
        assert (FIGURES / f"{name}.svg").exists()


def test_no_figure_stands_outside_of_the_generated_parts() -> None:
    prose = re.sub(r"<!-- gpu-tee: .*?<!-- end of gpu-tee -->", "", PAGE.read_text(), flags=re.DOTALL)
    assert re.findall(r"\b\d+\.\d+|\d+ ?%|\d+ times\b", prose) == []
