"""Charts of GPU TEEs: times over those without a TEE, beside what others published."""

from __future__ import annotations

import math
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ringfence_lab.report.style import COLOURS, DASHES, HATCHES, MARKERS, WHITE, Chart, legend_below, whiskers
from ringfence_lab.report.tee_cells import brief

LOOKS: Final = {  # the colour, shape and dash of a variant in every picture of this page
    "ringfence": 0,
    "confidential, hop by hop": 1,
    "all three": 2,
    "direct channel": 3,
    "parallel authentication": 5,
    "overlap": 4,
}
UNDER: Final = "time over the same step without a TEE"
_PUBLISHED: Final = "#6a6a6a"
_TICKS: Final = (0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500)
_SMALL: Final = 8
_DEEP: Final = 0.25  # of the highest bar: what is left under a bar that a number has no room under
_LINE: Final = 0.19  # inches
_GAP: Final = 0.22


def factors(title: str, width: float, under: str = UNDER) -> Chart:
    """Points from left to right, a row for each label and a line in it for each series; published figures as dashed lines."""

    def draw(numbers: dict[str, Any]) -> Figure:
        series = numbers["series"]
        labels = list(dict.fromkeys(point["label"] for points in series.values() for point in points))
        middles, lines, height = _rows(series, labels)
        figure, axis = plt.subplots(figsize=(width, 1.4 + height))
        for index, (name, points) in enumerate(series.items()):
            look = LOOKS.get(name, index)
            places = [lines[point["label"], name] for point in points]
            middle, around = whiskers(points)
            style: dict[str, Any] = {"fmt": MARKERS[look], "color": COLOURS[look], "capsize": 3, "lw": 1.5}
            axis.errorbar(middle, places, xerr=around, label=name, **style)
            for place, point in zip(places, points, strict=True):
                text: dict[str, Any] = {
                    "textcoords": "offset points",
                    "va": "center",
                    "fontsize": _SMALL,
                    "bbox": WHITE,
                }
                axis.annotate(brief(point["ratio"][1]), (point["ratio"][2], place), (6, 0), **text)
        low, high = _span(series, numbers["published"])
        _published(axis, numbers["published"], "x")
        axis.axvline(1, color="black", lw=0.8)
        axis.set_xscale("log")
        axis.set_xlim(low, high)
        _log_axis(axis.xaxis, low, high)
        axis.set_yticks(middles, labels)
        axis.set_ylim(height, 0)
        axis.set_xlabel(under)
        axis.set_title(title, fontsize=11, loc="left")
        handles: list[Artist] = [*axis.get_legend_handles_labels()[0], *_legend(numbers["published"])]
        legend_below(figure, handles, 2, fontsize=9)
        return figure

    return draw


def growth(title: str, width: float, under: str) -> Chart:
    """Lines over a number, both axes logarithmic: a panel for each group, a line for each series."""

    def draw(numbers: dict[str, Any]) -> Figure:
        groups = numbers["panels"]
        columns = min(2, len(groups))
        rows = math.ceil(len(groups) / columns)
        size = (width, 1.3 + 2.6 * rows)
        figure, grid = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False)
        axes = [axis for line in grid for axis in line]
        every = {f"{group} {name}": points for group, some in groups.items() for name, points in some.items()}
        limits = _span(every, numbers["published"])
        for axis, (group, series) in zip(axes, groups.items(), strict=False):
            _lines(axis, series)
            _published(axis, numbers["published"], "y")
            axis.set_ylim(*limits)
            axis.set_yscale("log")
            _log_axis(axis.yaxis, *limits)
            axis.set_title(group, fontsize=10)
            axis.set_xlabel(under)
        for axis in axes[len(groups) :]:
            axis.set_visible(False)
        for line in grid:
            line[0].set_ylabel("time over no TEE")
        figure.suptitle(title, fontsize=11)
        found: dict[str, Artist] = {}
        for axis in axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                found.setdefault(label, handle)
        legend_below(figure, [*found.values(), *_legend(numbers["published"])], 2, fontsize=9)
        return figure

    return draw


def _lines(axis: Axes, series: dict[str, Any]) -> None:
    marks = sorted({point["x"] for points in series.values() for point in points})
    for index, (name, points) in enumerate(series.items()):
        look = LOOKS.get(name, index)
        middle, around = whiskers(points)
        style: dict[str, Any] = {"color": COLOURS[look], "marker": MARKERS[look], "ls": DASHES[look]}
        axis.errorbar([p["x"] for p in points], middle, around, capsize=3, lw=1.4, ms=5, label=name, **style)
        for p in points:
            here = [q["ratio"][1] for some in series.values() for q in some if q["x"] == p["x"]]
            below = p["ratio"][1] < max(here)  # where lines are close, the number of the highest stands over it
            text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": _SMALL, "bbox": WHITE}
            side: dict[str, Any] = {"va": "top", "xytext": (0, -6)} if below else {"va": "bottom", "xytext": (0, 6)}
            axis.annotate(brief(p["ratio"][1]), (p["x"], p["ratio"][0 if below else 2]), **side, **text)
    axis.set_xscale("log")
    axis.set_xlim(marks[0] / 1.35, marks[-1] * 1.35)
    axis.xaxis.set_major_locator(FixedLocator(marks))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def waterfall(title: str, width: float) -> Chart:
    """From the confidential step down: what each switch saves alone, and what is left with all of them."""

    def draw(numbers: dict[str, Any]) -> Figure:
        figure, grid = plt.subplots(
            len(numbers["panels"]), 1, figsize=(width, 0.9 + 2.3 * len(numbers["panels"])), squeeze=False
        )
        for axis, (name, bars) in zip((line[0] for line in grid), numbers["panels"].items(), strict=True):
            top = bars[0]["ratio"]
            for place, bar in enumerate(bars):
                alone = bar["alone"]
                bottom = bar["ratio"] if alone else 0.0
                height = top - bar["ratio"] if alone else bar["ratio"]
                look = LOOKS[bar["label"]]
                axis.bar(
                    place,
                    max(height, 0.004 * top),
                    0.62,
                    bottom=bottom,
                    color=COLOURS[look],
                    hatch=HATCHES[look],
                    ec="black",
                    lw=0.5,
                    alpha=0.85,
                )
                saved = f"\n−{bar['saved']:.0%}".replace("%", " %") if place else ""
                spot = (place, bottom if alone else bar["ratio"])
                text: dict[str, Any] = {
                    "textcoords": "offset points",
                    "ha": "center",
                    "fontsize": _SMALL,
                    "bbox": WHITE,
                }
                shift, side = ((0, -3), "top") if alone else ((0, 3), "bottom")
                if alone and bar["ratio"] < _DEEP * top:  # no room under the bar
                    spot, shift, side = (place, (top + bottom) / 2), (0, 0), "center"
                axis.annotate(f"{brief(bar['ratio'])}{saved}", spot, shift, va=side, **text)
            for value in numbers["published"].values():
                axis.axhline(top * (1 - value), color=_PUBLISHED, ls="--", lw=1.3)
            axis.axhline(1, color="black", lw=0.8)
            axis.set_ylim(0, top * 1.22)
            axis.set_xticks(range(len(bars)), [bar["label"].replace(" ", "\n", 1) for bar in bars], fontsize=8)
            axis.set_ylabel("time over no TEE")
            axis.set_title(name, fontsize=10, loc="left")
        figure.suptitle(title, fontsize=11)
        lines: list[Artist] = [
            Line2D([], [], color=_PUBLISHED, ls="--", lw=1.3, label=f"{name}: {100 * value:.1f} % saved")
            for name, value in numbers["published"].items()
        ]
        legend_below(figure, lines, 2, fontsize=9)
        return figure

    return draw


def tornado(title: str, width: float) -> Chart:
    """How far the result moves when an input is halved and doubled: a panel for each preset and variant."""

    def draw(numbers: dict[str, Any]) -> Figure:
        counts = [len(bars["inputs"]) for bars in numbers["panels"].values()]
        figure, grid = plt.subplots(
            len(counts),
            1,
            figsize=(width, 1.2 + sum(0.9 + 0.27 * count for count in counts)),
            squeeze=False,
            height_ratios=[0.9 + 0.27 * count for count in counts],
        )
        for axis, (name, bars) in zip((line[0] for line in grid), numbers["panels"].items(), strict=True):
            base = bars["base"]
            for place, each in enumerate(bars["inputs"]):
                for index, end in enumerate(("halved", "doubled")):
                    if each[end] is not None:
                        look: dict[str, Any] = {
                            "color": COLOURS[index],
                            "hatch": HATCHES[index],
                            "ec": "black",
                            "lw": 0.5,
                        }
                        axis.barh(place, each[end] - base, 0.6, left=base, alpha=0.85, **look)
            axis.axvline(base, color="black", lw=1)
            axis.set_yticks(range(len(bars["inputs"])), [each["label"] for each in bars["inputs"]], fontsize=9)
            axis.set_ylim(len(bars["inputs"]) - 0.5, -0.5)
            axis.set_title(f"{name}:\n{brief(base)} with the preset's inputs", fontsize=9.5, loc="left")
            axis.margins(x=0.15)
        grid[-1][0].set_xlabel(UNDER)
        figure.suptitle(title, fontsize=11)
        patches: list[Artist] = [
            Patch(fc=COLOURS[index], hatch=HATCHES[index], ec="black", lw=0.5, label=f"input {end}")
            for index, end in enumerate(("halved", "doubled"))
        ]
        legend_below(figure, patches, 2, fontsize=9)
        return figure

    return draw


def _rows(series: dict[str, Any], labels: list[str]) -> tuple[list[float], dict[tuple[str, str], float], float]:
    middles, lines, top = [], {}, _GAP / 2
    for label in labels:
        here = [name for name, points in series.items() if any(point["label"] == label for point in points)]
        for number, name in enumerate(here):
            lines[label, name] = top + (number + 0.5) * _LINE
        middles.append(top + len(here) * _LINE / 2)
        top += len(here) * _LINE + _GAP
    return middles, lines, top - _GAP / 2


def _span(series: dict[str, Any], published: dict[str, Any]) -> tuple[float, float]:
    points = [point for some in series.values() for point in some]
    others = [end for ends in published.values() for end in ends]
    low = min([point["ratio"][0] for point in points] + others + [1.0])
    high = max([point["ratio"][2] for point in points] + others + [1.0])
    return low / 1.15, high * 1.55


def _published(axis: Axes, published: dict[str, Any], along: str) -> None:
    for index, ends in enumerate(published.values()):
        line, band = (axis.axvline, axis.axvspan) if along == "x" else (axis.axhline, axis.axhspan)
        if len(ends) == 2:
            band(*ends, color="#BBBBBB", alpha=0.4, lw=0)
        else:
            line(ends[0], color=_PUBLISHED, ls=DASHES[1 + index], lw=1.3)


def _legend(published: dict[str, Any]) -> list[Artist]:
    found: list[Artist] = []
    for index, (name, ends) in enumerate(published.items()):
        if len(ends) == 2:
            found.append(Patch(color="#BBBBBB", alpha=0.4, label=name))
        else:
            found.append(Line2D([], [], color=_PUBLISHED, ls=DASHES[1 + index], lw=1.3, label=name))
    return found


def _log_axis(axis: Any, low: float, high: float) -> None:
    axis.set_major_locator(FixedLocator([mark for mark in _TICKS if low <= mark <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
