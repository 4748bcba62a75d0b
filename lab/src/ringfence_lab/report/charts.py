"""Charts of ratios and of stages, which the report shares with the project's own page of figures.

A point is {"label", "ratio": [low, median, high], "resolution"} and, where its cell is too noisy or has too few rounds,
"scored": false: it is drawn hollow.
"""

from __future__ import annotations

import math
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ringfence_lab.report.style import (
    BAND,
    COLOURS,
    LOOKS,
    MARKERS,
    STAGES,
    WHITE,
    WIDTH,
    Chart,
    band_patch,
    legend_below,
    ratio_axis,
    span,
    whiskers,
)

_FASTER: Final = "time over plaintext Gloo (1: as fast; left of it: faster)"
_SMALL: Final = 8
_LINE: Final = 0.17  # inches
_GAP: Final = 0.2


def panels(title: str, *, width: float | None = None, columns: int | None = None, under: str = "") -> Chart:
    """A panel for each series: the ratio from left to right, over the band that Gloo draws around itself."""

    def draw(series: dict[str, Any]) -> Figure:
        wide = min(columns or len(series), len(series))
        rows = math.ceil(len(series) / wide)
        size = (width or 3.1 * wide + 0.6, 3.6 if rows == 1 else 0.7 + 2.4 * rows)
        figure, grid = plt.subplots(rows, wide, figsize=size, sharey=True, squeeze=False)
        axes = [axis for line in grid for axis in line]
        limits = span(series)
        for index, (axis, (name, points)) in enumerate(zip(axes, series.items(), strict=False)):
            _panel(axis, points, limits, index if columns is None else 0)
            axis.set_title(name, fontsize=10)
            if under:
                axis.set_xlabel(under)
        for axis in axes[len(series) :]:
            axis.set_visible(False)
        for line in grid:
            line[0].set_ylabel("time over plaintext Gloo")
        figure.suptitle(title, fontsize=11)
        handles: list[Artist] = [band_patch(), *_hollow(series)]
        legend_below(figure, handles, len(handles), "right")
        return figure

    return draw


def _panel(axis: Axes, points: list[dict[str, Any]], limits: tuple[float, float], style: int) -> None:
    places = range(len(points))
    bottom = [max(0.01, 1 - point["resolution"]) for point in points]
    top = [1 + point["resolution"] for point in points]
    if len(points) == 1:
        axis.bar(0, top[0] - bottom[0], 0.5, bottom=bottom[0], color=BAND, alpha=0.5, lw=0)
    axis.fill_between(places, bottom, top, color=BAND, alpha=0.5, lw=0)
    axis.axhline(1, color="black", lw=0.8)
    colour = COLOURS[style % len(COLOURS)]
    middle, around = whiskers(points)
    axis.errorbar(places, middle, around, color=colour, marker=MARKERS[style % len(MARKERS)], capsize=3, lw=1.5)
    _empty(axis, list(places), middle, points, style)
    axis.set_yscale("log")
    axis.set_ylim(*limits)
    ratio_axis(axis.yaxis, *limits)
    labels = [point["label"] for point in points]
    turned: dict[str, Any] = {"rotation": 40, "ha": "right"} if max(map(len, labels)) > 3 else {}
    axis.set_xticks(places, labels, **turned)
    axis.set_xlim(-0.5, len(points) - 0.5)
    for place, point in zip(places, points, strict=True):
        words, spot = f"{point['ratio'][1]:.2f}", (place, point["ratio"][2])
        axis.annotate(words, spot, (0, 5), textcoords="offset points", ha="center", fontsize=_SMALL, bbox=WHITE)


def _empty(axis: Axes, across: list[Any], up: list[Any], points: list[dict[str, Any]], style: int) -> None:
    """White over the markers of cells that are shown and not counted."""
    for x, y, point in zip(across, up, points, strict=True):
        if not point.get("scored", True):
            axis.plot(
                [x],
                [y],
                marker=MARKERS[style % len(MARKERS)],
                mfc="white",
                mec=COLOURS[style % len(COLOURS)],
                ls="",
                zorder=5,
            )


def _band(series: dict[str, Any]) -> list[Patch]:
    """The legend of the bands, where any is drawn."""
    drawn = any(point["resolution"] > 0 for points in series.values() for point in points)
    return [band_patch()] if drawn else []


def _hollow(series: dict[str, Any]) -> list[Line2D]:
    """The legend of hollow markers, where there are any."""
    if all(point.get("scored", True) for points in series.values() for point in points):
        return []
    return [Line2D([], [], marker="o", mfc="white", mec="black", ls="", label="hollow: shown, not counted")]


def across(title: str, *, width: float = WIDTH, under: str = _FASTER) -> Chart:
    """Points with intervals from left to right: one row for each label, with one line in it for each series."""

    def draw(series: dict[str, Any]) -> Figure:
        labels = list(dict.fromkeys(point["label"] for points in series.values() for point in points))
        middles, lines, height = _rows(series, labels)
        figure, axis = plt.subplots(figsize=(width, 1.3 + height))
        low, high = span(series)
        for index, (name, points) in enumerate(series.items()):
            style = LOOKS.get(name, index)
            places = [lines[point["label"], name] for point in points]
            _bands(axis, places, points)
            middle, around = whiskers(points)
            look: dict[str, Any] = {"fmt": MARKERS[style], "color": COLOURS[style], "capsize": 3, "lw": 1.5}
            axis.errorbar(middle, places, xerr=around, label=name, **look)
            _empty(axis, middle, places, points, style)
            for place, point in zip(places, points, strict=True):
                words, spot = f"{point['ratio'][1]:.2f}", (point["ratio"][2], place)
                look = {"textcoords": "offset points", "va": "center", "fontsize": _SMALL, "bbox": WHITE}
                axis.annotate(words, spot, (5, 0), **look)
        axis.axvline(1, color="black", lw=0.8)
        axis.set_xscale("log")
        axis.set_xlim(low, high)
        ratio_axis(axis.xaxis, low, high)
        axis.set_yticks(middles, labels)
        axis.set_ylim(height, 0)
        axis.set_xlabel(under if width >= WIDTH else under.replace(" (", "\n("))
        axis.set_title(title, fontsize=11, loc="left")
        handles: list[Artist] = [*axis.get_legend_handles_labels()[0], *_band(series), *_hollow(series)]
        ncols = len(handles) if len(handles) <= 3 else 2 if width < WIDTH else 4
        legend_below(figure, handles, ncols)
        return figure

    return draw


def _rows(series: dict[str, Any], labels: list[str]) -> tuple[list[float], dict[tuple[str, str], float], float]:
    """In inches from the top: the middle of each label's row, the place of each of its lines, and all of it."""
    middles, lines, top = [], {}, _GAP / 2
    for label in labels:
        here = [name for name, points in series.items() if any(point["label"] == label for point in points)]
        for number, name in enumerate(here):
            lines[label, name] = top + (number + 0.5) * _LINE
        middles.append(top + len(here) * _LINE / 2)
        top += len(here) * _LINE + _GAP
    return middles, lines, top - _GAP / 2


def _bands(axis: Axes, places: list[float], points: list[dict[str, Any]]) -> None:
    for place, point in zip(places, points, strict=True):
        low = max(0.01, 1 - point["resolution"])
        axis.barh(place, 1 + point["resolution"] - low, height=0.9 * _LINE, left=low, color=BAND, alpha=0.5, lw=0)


def stacked(
    title: str, *, width: float = WIDTH, under: str = "share of all workers' wall time", least: float = 0.06
) -> Chart:
    """Where the time goes: one bar for each case, one piece for each stage; pieces of at least `least` say their share.

    Beyond 1 lies what was done at the same time.
    """

    def draw(series: dict[str, Any]) -> Figure:
        figure, axis = plt.subplots(figsize=(width, 1.6 + 0.45 * len(series)))
        longest = max(sum(shares.values()) for shares in series.values())
        for place, shares in enumerate(series.values()):
            left = 0.0
            for stage, share in shares.items():
                colour, hatch = STAGES[stage]
                axis.barh(place, share, left=left, color=colour, hatch=hatch, edgecolor="black", lw=0.5, height=0.65)
                if share >= least * longest:
                    words, spot = f"{share:.0%}", left + share / 2
                    axis.text(spot, place, words, ha="center", va="center", fontsize=_SMALL, bbox=WHITE)
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
        pieces: list[Artist] = [
            Patch(fc=STAGES[name][0], hatch=STAGES[name][1], ec="black", lw=0.5, label=name) for name in names
        ]
        legend_below(figure, pieces, 4, handlelength=1.6)
        return figure

    return draw


def side_by_side(title: str, under: str, *, width: float = WIDTH) -> Chart:
    """Seconds of a step by a setting, a bar for each series."""

    def draw(series: dict[str, Any]) -> Figure:
        labels = list(dict.fromkeys(point["label"] for points in series.values() for point in points))
        figure, axis = plt.subplots(figsize=(width, 3.3))
        for index, (name, points) in enumerate(series.items()):
            places = [labels.index(point["label"]) + (index - 0.5) * 0.36 for point in points]
            seconds = [point["seconds"] for point in points]
            hatch = "" if index else "//"
            axis.bar(places, seconds, 0.34, color=COLOURS[index], alpha=0.85, hatch=hatch, ec="white", label=name)
            for place, value in zip(places, seconds, strict=True):
                axis.text(place, value, f"{value:.2f}", ha="center", va="bottom", fontsize=_SMALL)
        axis.set_xticks(range(len(labels)), labels)
        axis.set_xlabel(under)
        axis.set_ylabel("seconds a step")
        axis.margins(y=0.12)
        axis.set_title(title, fontsize=11, loc="left")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure

    return draw
