"""The pictures. Okabe and Ito's colours, which the colour-blind can tell apart, and a shape or hatch of its own for each,
so that a black and white print says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from scripts.page.series import digest

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_STAGES: Final = {
    "seal": ("#0072B2", ""),
    "open": ("#56B4E9", "//"),
    "lock": ("#D55E00", ".."),
    "reduce": ("#009E73", ""),
    "send": ("#E69F00", ""),
    "receive": ("#F0E442", "\\\\"),
    "wait": ("#DDDDDD", ""),
    "rest": ("#999999", "xx"),
}
_MARKERS: Final = ("o", "s", "D", "^")
_WHITE: Final = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
_BAND: Final = "#BBBBBB"
_BAND_WORDS: Final = "Gloo against itself"
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "ringfence",
    "svg.fonttype": "path",
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
}
_TICKS: Final = {4: (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3), 12: (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7)}
_WIDE_TICKS: Final = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def _ratio_axis(axis: Any, low: float, high: float) -> None:
    """Twice as slow and twice as fast are equally far from 1."""
    marks = next((marks for most, marks in _TICKS.items() if high / low < most), _WIDE_TICKS)
    axis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _span(series: dict[str, Any]) -> tuple[float, float]:
    """Room for every interval. A band that is wider than half to twice runs out of the picture."""
    points = [point for some in series.values() for point in some]
    lows = [min(point["ratio"][0], max(0.5, 1 - point["resolution"]), 0.8) for point in points]
    highs = [max(point["ratio"][2], min(2.0, 1 + point["resolution"]), 1.25) for point in points]
    return min(lows) / 1.15, max(highs) * 1.3


def by_size(series: dict[str, Any]) -> Figure:
    """A panel for each number of workers: the ratio by size, over the band that Gloo draws around itself."""
    figure, axes = plt.subplots(1, len(series), figsize=(3.1 * len(series) + 0.6, 3.6), sharey=True, squeeze=False)
    low, high = _span(series)
    for index, (axis, (name, points)) in enumerate(zip(axes[0], series.items(), strict=True)):
        places = range(len(points))
        bottom = [max(0.01, 1 - point["resolution"]) for point in points]
        axis.fill_between(places, bottom, [1 + point["resolution"] for point in points], color=_BAND, alpha=0.5, lw=0)
        axis.axhline(1, color="black", lw=0.8)
        axis.errorbar(places, *_bars(points), color=_COLOURS[index], marker=_MARKERS[index], capsize=3, lw=1.5)
        axis.set_yscale("log")
        axis.set_ylim(low, high)
        _ratio_axis(axis.yaxis, low, high)
        axis.set_xticks(places, [point["label"] for point in points], rotation=40, ha="right")
        axis.set_xlim(-0.5, len(points) - 0.5)
        axis.set_title(name, fontsize=10)
        for place, point in zip(places, points, strict=True):
            words = f"{point['ratio'][1]:.2f}"
            spot = (place, point["ratio"][2])
            axis.annotate(words, spot, (0, 5), textcoords="offset points", ha="center", fontsize=8, bbox=_WHITE)
    axes[0][0].set_ylabel("time over plaintext Gloo")
    figure.suptitle("Sealed all-reduce, loopback, with 95 % intervals", fontsize=11)
    figure.legend(handles=[Patch(color=_BAND, alpha=0.5, label=_BAND_WORDS)], loc="outside lower right", frameon=False)
    return figure


def _bars(points: list[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    middle = [point["ratio"][1] for point in points]
    below = [point["ratio"][1] - point["ratio"][0] for point in points]
    above = [point["ratio"][2] - point["ratio"][1] for point in points]
    return middle, [below, above]


def across(title: str) -> Callable[[dict[str, Any]], Figure]:
    """Points with intervals from left to right, one row for each label, side by side for each number of workers."""

    def draw(series: dict[str, Any]) -> Figure:
        labels = list(dict.fromkeys(point["label"] for points in series.values() for point in points))
        figure, axis = plt.subplots(figsize=(7.4, 1.5 + 0.42 * len(labels)))
        low, high = _span(series)
        for index, (name, points) in enumerate(series.items()):
            offset = (index - (len(series) - 1) / 2) * 0.3
            places = [labels.index(point["label"]) + offset for point in points]
            _bands(axis, places, points)
            middle, around = _bars(points)
            axis.errorbar(
                middle, places, xerr=around, fmt=_MARKERS[index], color=_COLOURS[index], capsize=3, lw=1.5, label=name
            )
            for place, point in zip(places, points, strict=True):
                words, spot = f"{point['ratio'][1]:.2f}", (point["ratio"][2], place)
                axis.annotate(words, spot, (5, 0), textcoords="offset points", va="center", fontsize=8)
        axis.axvline(1, color="black", lw=0.8)
        axis.set_xscale("log")
        axis.set_xlim(low, high)
        _ratio_axis(axis.xaxis, low, high)
        axis.set_yticks(range(len(labels)), labels)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.set_xlabel("time over plaintext Gloo (1: as fast; left of it: faster)")
        axis.set_title(title, fontsize=11, loc="left")
        handles, _ = axis.get_legend_handles_labels()
        handles.append(Patch(color=_BAND, alpha=0.5, label=_BAND_WORDS))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        return figure

    return draw


def _bands(axis: Axes, places: list[float], points: list[dict[str, Any]]) -> None:
    for place, point in zip(places, points, strict=True):
        low = max(0.01, 1 - point["resolution"])
        axis.barh(place, 1 + point["resolution"] - low, height=0.28, left=low, color=_BAND, alpha=0.5, lw=0)


def stacked(series: dict[str, Any]) -> Figure:
    """Where the time goes: one bar for each case, one piece for each stage."""
    figure, axis = plt.subplots(figsize=(7.4, 1.6 + 0.45 * len(series)))
    for row, shares in enumerate(series.values()):
        left = 0.0
        for stage, share in shares.items():
            colour, hatch = _STAGES[stage]
            axis.barh(row, share, left=left, color=colour, hatch=hatch, edgecolor="black", lw=0.5, height=0.65)
            if share >= 0.06:
                axis.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=8, bbox=_WHITE)
            left += share
    axis.set_yticks(range(len(series)), list(series))
    axis.set_ylim(len(series) - 0.5, -0.5)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.set_xlabel("share of all workers' wall time")
    axis.set_title("Where the time of a sealed collective goes", fontsize=11, loc="left")
    names = list(next(iter(series.values())))
    pieces = [Patch(fc=_STAGES[name][0], hatch=_STAGES[name][1], ec="black", lw=0.5, label=name) for name in names]
    figure.legend(handles=pieces, loc="outside lower center", ncols=4, frameon=False, handlelength=1.6)
    return figure


def side_by_side(series: dict[str, Any]) -> Figure:
    """Seconds of a step by the size of DDP's buckets, both ways."""
    labels = list(dict.fromkeys(point["label"] for points in series.values() for point in points))
    figure, axis = plt.subplots(figsize=(7.4, 3.3))
    for index, (name, points) in enumerate(series.items()):
        places = [labels.index(point["label"]) + (index - 0.5) * 0.36 for point in points]
        seconds = [point["seconds"] for point in points]
        hatch = "" if index else "//"
        axis.bar(places, seconds, 0.34, color=_COLOURS[index], alpha=0.85, hatch=hatch, ec="white", label=name)
        for place, value in zip(places, seconds, strict=True):
            axis.text(place, value, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_xlabel("bucket_cap_mb of DDP")
    axis.set_ylabel("seconds a step")
    axis.margins(y=0.12)
    axis.set_title("GPT-2, 2 workers: larger buckets", fontsize=11, loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


PICTURES: Final[dict[str, Callable[[dict[str, Any]], Figure]]] = {
    "all-reduce": by_size,
    "contenders": across("All-reduce of 25 MiB, loopback: ways to seal, and not to"),
    "collectives": across("Collectives of 25 MiB, loopback, sealed"),
    "training": across("Training steps, loopback, sealed"),
    "rates": across("All-reduce between hosts with limited links, sealed"),
    "stages": stacked,
    "buckets": side_by_side,
}


def draw(name: str, series: dict[str, Any], vectors: Path, pixels: Path) -> None:
    """One picture, as SVG for the documents and as PNG for eyes."""
    with plt.rc_context(_STYLE):
        figure = PICTURES[name](series)
        figure.set_layout_engine("constrained")
        about = {"Date": None, "Title": f"ringfence: {name}", "Description": f"samples {digest(series)}"}
        figure.savefig(vectors / f"{name}.svg", metadata=about)
        figure.savefig(pixels / f"{name}.png", dpi=150)
        plt.close(figure)
