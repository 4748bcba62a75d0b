"""The charts of the report and of the project's own pages. Each takes the numbers of a figure and returns a picture.

A point is {"label", "ratio": [low, median, high], "resolution"} and, where its cell is too noisy or has too few rounds,
"scored": false: it is drawn hollow. Panels may show another quantity in the place of "ratio".
"""

from __future__ import annotations

import base64
import functools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ringfence_lab.report import figure as report
from ringfence_lab.report.labels import ratio_text
from ringfence_lab.report.style import (
    BAND,
    COLOURS,
    DASHES,
    LOOKS,
    MARKERS,
    STAGES,
    WHITE,
    WIDTH,
    Chart,
    legend_below,
    number_axis,
    save,
    span,
    whiskers,
)

OVER_GLOO: Final = "time over plaintext Gloo"
_FASTER: Final = f"{OVER_GLOO} (1: as fast; left of it: faster)"
_ITSELF: Final = "Gloo against itself"
_TEXT: Final[dict[str, Any]] = {"textcoords": "offset points", "fontsize": 8, "bbox": WHITE}
_LINE: Final = 0.18  # inches
_GAP: Final = 0.2

Points = list[dict[str, Any]]


def across(
    series: dict[str, Points], title: str, width: float = WIDTH, under: str = _FASTER, band: str = _ITSELF
) -> Figure:
    """Ratios from left to right: one row for each label, with one line in it for each series."""
    labels = list(dict.fromkeys(point["label"] for points in series.values() for point in points))
    middles, lines, height = _rows(series, labels)
    figure, axis = plt.subplots(figsize=(width, 1.3 + height))
    limits = span(series.values())
    for index, (name, points) in enumerate(series.items()):
        look = LOOKS.get(name, index)
        places = [lines[point["label"], name] for point in points]
        for place, point in zip(places, points, strict=True):
            low = max(0.01, 1 - point["resolution"])
            axis.barh(place, 1 + point["resolution"] - low, height=0.9 * _LINE, left=low, color=BAND, alpha=0.5, lw=0)
            spot = (point["ratio"][2], place)
            axis.annotate(ratio_text(point["ratio"][1]), spot, (5, 0), va="center", **_TEXT)
        middle, around = whiskers(points)
        marks: dict[str, Any] = {"fmt": MARKERS[look], "color": COLOURS[look], "capsize": 3, "lw": 1.5}
        axis.errorbar(middle, places, xerr=around, label=name, **marks)
        _hollow(axis, zip(middle, places, points, strict=True), look)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_xscale("log")
    axis.set_xlim(*limits)
    number_axis(axis.xaxis, *limits)
    axis.set_yticks(middles, labels)
    axis.set_ylim(height, 0)
    axis.set_xlabel(under if width >= WIDTH else under.replace(" (", "\n("))
    axis.set_title(title, fontsize=11, loc="left")
    handles = [*axis.get_legend_handles_labels()[0], *_legend(series.values(), band)]
    legend_below(figure, handles, len(handles) if len(handles) <= 3 else 2 if width < WIDTH else 4)
    return figure


def _rows(series: dict[str, Points], labels: list[str]) -> tuple[list[float], dict[tuple[str, str], float], float]:
    """In inches from the top: the middle of each label's row, the place of each of its lines, and all of it."""
    middles, lines, top = [], {}, _GAP / 2
    for label in labels:
        here = [name for name, points in series.items() if any(point["label"] == label for point in points)]
        for number, name in enumerate(here):
            lines[label, name] = top + (number + 0.5) * _LINE
        middles.append(top + len(here) * _LINE / 2)
        top += len(here) * _LINE + _GAP
    return middles, lines, top - _GAP / 2


def panels(
    series: dict[str, dict[str, Points]],
    title: str,
    width: float = WIDTH,
    columns: int = 2,
    under: str = "",
    what: str = "ratio",
    left: str = OVER_GLOO,
    log: bool = True,
) -> Figure:
    """Lines over labels: a panel for each group. Ratios have their numbers, and the band that Gloo draws around itself."""
    wide = min(columns, len(series))
    rows = math.ceil(len(series) / wide)
    size = (width, 3.6 if rows == 1 else 0.9 + 2.6 * rows)
    figure, grid = plt.subplots(rows, wide, figsize=size, sharey=log, squeeze=False)
    every = [points for lines in series.values() for points in lines.values()]
    for axis, (name, lines) in zip(grid.flat, series.items(), strict=False):
        labels = list(dict.fromkeys(point["label"] for points in lines.values() for point in points))
        for index, (variant, points) in enumerate(lines.items()):
            _line(axis, labels, variant, points, what, LOOKS.get(variant, index), len(lines) > 1)
        turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if max(map(len, labels)) > 3 else {}
        axis.set_xticks(range(len(labels)), labels, **turned)
        axis.set_xlim(-0.5, len(labels) - 0.5)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(under)
        if log:
            limits = span(every, what)
            axis.set_yscale("log")
            axis.set_ylim(*limits)
            number_axis(axis.yaxis, *limits)
        else:
            axis.set_ylim(bottom=0)
    for axis in grid.flat[len(series) :]:
        axis.set_visible(False)
    for line in grid:
        line[0].set_ylabel(left)
    figure.suptitle(title, fontsize=11)
    found: dict[str, Artist] = {}
    for axis in grid.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    legend_below(figure, [*found.values(), *_legend(every, _ITSELF)], 2, fontsize=9)
    return figure


def _line(axis: Axes, labels: list[str], name: str, points: Points, what: str, look: int, several: bool) -> None:
    """One line of a panel; where there are several, they stand a little apart and the legend names them."""
    places = [labels.index(point["label"]) + ((look - 2) * 0.05 if several else 0.0) for point in points]
    middle, around = whiskers(points, what)
    marks: dict[str, Any] = {"color": COLOURS[look], "marker": MARKERS[look], "ls": DASHES[look]}
    axis.errorbar(places, middle, around, capsize=3, lw=1.4, ms=5, label=name if several else None, **marks)
    if what == "ratio":
        axis.axhline(1, color="black", lw=0.8)
        for place, point in zip(places, points, strict=True):
            low = max(0.01, 1 - point["resolution"])
            axis.bar(place, 1 + point["resolution"] - low, 1.0, bottom=low, color=BAND, alpha=0.5, lw=0)
            spot = (place, point["ratio"][2])
            axis.annotate(ratio_text(point["ratio"][1]), spot, (0, 5), ha="center", **_TEXT)
    _hollow(axis, zip(places, middle, points, strict=True), look)


def _hollow(axis: Axes, marks: Iterable[tuple[float, float, dict[str, Any]]], look: int) -> None:
    """White over the markers of cells that are shown and not counted."""
    for x, y, point in marks:
        if not point.get("scored", True):
            axis.plot([x], [y], marker=MARKERS[look], mfc="white", mec=COLOURS[look], ls="", zorder=5)


def _legend(every: Iterable[Points], band: str) -> list[Artist]:
    """The legend of bands and of hollow markers, where any is drawn."""
    points = [point for some in every for point in some]
    found: list[Artist] = []
    if any(point.get("resolution", 0) > 0 for point in points):
        found.append(Patch(color=BAND, alpha=0.5, label=band))
    if not all(point.get("scored", True) for point in points):
        found.append(Line2D([], [], marker="o", mfc="white", mec="black", ls="", label="hollow: shown, not counted"))
    return found


def stacked(
    series: dict[str, dict[str, float]],
    title: str,
    width: float = WIDTH,
    under: str = "share of all workers' wall time",
) -> Figure:
    """Where the time goes: one bar for each case, one piece for each stage. Beyond 1 lies what was done at the same time."""
    figure, axis = plt.subplots(figsize=(width, 1.6 + 0.45 * len(series)))
    longest = max(sum(shares.values()) for shares in series.values())
    for place, shares in enumerate(series.values()):
        left = 0.0
        for stage, share in shares.items():
            colour, hatch = STAGES[stage]
            axis.barh(place, share, left=left, color=colour, hatch=hatch, edgecolor="black", lw=0.5, height=0.65)
            if share >= longest * 0.45 / width:  # the percentage has room
                spot = (left + share / 2, place)
                axis.annotate(f"{share:.0%}", spot, (0, 0), ha="center", va="center", **_TEXT)
            left += share
    if longest > 1.005:
        axis.axvline(1, color="black", lw=1.5, ls="--")
    axis.set_yticks(range(len(series)), list(series), fontsize=10 if width >= WIDTH else 8.5)
    axis.set_ylim(len(series) - 0.5, -0.5)
    axis.set_xlim(0, max(1.0, longest))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.set_xlabel(under)
    axis.set_title(title, fontsize=11, loc="left")
    names = list(dict.fromkeys(stage for shares in series.values() for stage in shares))
    pieces = [Patch(fc=STAGES[name][0], hatch=STAGES[name][1], ec="black", lw=0.5, label=name) for name in names]
    legend_below(figure, pieces, 4, handlelength=1.6)
    return figure


CHARTS: Final[dict[str, Callable[..., Figure]]] = {"across": across, "panels": panels, "stacked": stacked}
NAME: Final = re.compile(r"[a-z0-9-]+")  # it names files and sections of the page
PHONE: Final = 5.4  # inches: on a phone the words of the picture are still read


def chart_of(figure: report.Picture) -> Chart:
    """Return the function that draws a figure."""
    return functools.partial(CHARTS[figure.chart], **{"title": figure.title, "width": PHONE, **figure.options})


def draw(figure: report.Picture, folder: Path) -> str:
    """Draw a figure into `folder` as SVG and PNG.

    Returns the SVG as a `data:` URI. In an `<img>` element its ids are its own, so that several figures share a page.
    """
    if not NAME.fullmatch(figure.name):
        raise ValueError(f"{figure.name!r} names no figure: small letters, digits and hyphens do")
    save(figure.name, figure.numbers, chart_of(figure), folder, folder)
    return f"data:image/svg+xml;base64,{base64.b64encode((folder / f'{figure.name}.svg').read_bytes()).decode()}"
