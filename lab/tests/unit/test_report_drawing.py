"""The figures: no text is clipped or covered, and the same numbers give the same bytes."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.text import Text

from lab.tests.unit import tee_samples
from lab.tests.unit.report_samples import everything
from lab.tests.unit.test_report_figures import figures_of, study_of
from ringfence_lab.report.charts import chart_of, draw
from ringfence_lab.report.figure import Picture
from ringfence_lab.report.style import STYLE
from ringfence_lab.report.write import TEE_BUILDERS

FIGURES = {figure.name: figure for figure in figures_of(study_of(everything())) if isinstance(figure, Picture)}
FIGURES |= {
    figure.name: figure
    for build in TEE_BUILDERS
    for figure in build(study_of(tee_samples.everything()))
    if isinstance(figure, Picture)
}
SLACK = 1.0  # pixels


def unscored(figure: Picture) -> Picture:
    """The figure as if no cell were scored: all markers are hollow, and the legend says what that means."""

    def hollow(numbers: Any) -> Any:
        if isinstance(numbers, list):
            return [{**point, "scored": False} for point in numbers]
        return {name: hollow(some) for name, some in numbers.items()}

    return replace(figure, numbers=hollow(figure.numbers))


FIGURES |= {
    f"{name}-unscored": unscored(figure) for name, figure in FIGURES.items() if figure.chart in ("across", "panels")
}


def texts_of(picture: Drawing) -> list[Text]:
    found = [text for text in picture.findobj(Text) if isinstance(text, Text)]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def beyond(axes: Axes) -> set[Text]:
    """Labels of ticks outside of what an axis shows: matplotlib makes them and does not draw them."""
    found = set()
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = (*axis.get_major_ticks(), *axis.get_minor_ticks())
        found |= {label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_no_word_is_cut_off_and_the_legend_covers_nothing(name: str) -> None:
    with plt.rc_context(STYLE):
        picture = chart_of(FIGURES[name])(FIGURES[name].numbers)
        picture.set_layout_engine("constrained")
        picture.draw_without_rendering()
        edge, renderer = picture.bbox, picture.canvas.get_renderer()  # type: ignore[attr-defined]
        hidden = {text for axis in picture.axes if not axis.get_visible() for text in axis.findobj(Text)}
        hidden |= {text for axis in picture.axes for text in beyond(axis)}
        for text in texts_of(picture):
            box = text.get_window_extent(renderer)
            if text in hidden or box.width == 0:
                continue
            words = f"{text.get_text()!r} of {name}"
            assert box.x0 >= edge.x0 - SLACK and box.x1 <= edge.x1 + SLACK, f"{words} leaves the picture sideways"
            assert box.y0 >= edge.y0 - SLACK and box.y1 <= edge.y1 + SLACK, f"{words} leaves the picture"
        for legend in picture.legends:
            box = legend.get_window_extent(renderer)
            for axis in picture.axes:
                assert not axis.get_visible() or not box.overlaps(axis.get_tightbbox(renderer).padded(-SLACK))  # type: ignore[union-attr]
        plt.close(picture)


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    figure = FIGURES["models"]
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        draw(figure, folder)
        found.append([(folder / f"models.{kind}").read_bytes() for kind in ("svg", "png")])
    assert found[0] == found[1]


def test_a_figure_is_given_to_the_page_as_the_svg_that_is_in_the_folder(tmp_path: Path) -> None:
    kind, _, content = draw(FIGURES["models"], tmp_path).partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content) == (tmp_path / "models.svg").read_bytes()


@pytest.mark.parametrize("name", ["", "../models", "models 2", 'a"><b>', "Models", "models-\\g<1>", "variants-2\n"])
def test_what_could_be_more_than_a_name_draws_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="names no figure"):
        draw(replace(FIGURES["models"], name=name), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_chart_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError, match="pie"):
        chart_of(Picture("x", "pie", "", "", "", {}, ()))
