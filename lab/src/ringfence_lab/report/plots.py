"""Charts that only the report draws: sweeps, pairs, the roofline, predictions against measurements."""

from __future__ import annotations

import math
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ringfence_lab.bench.units import size_text
from ringfence_lab.report.style import COLOURS, DASHES, HATCHES, LOOKS, MARKERS, Chart, legend_below, whiskers

_BRIEFLY: Final = {
    "plaintext Gloo": "Gloo",
    "ringfence, unsealed": "un-\nsealed",
    "sealed hop by hop": "hop by\nhop",
    "TLS 1.3 ring": "TLS",
    "no communication": "alone",
}
_SPEEDS: Final = [figure * 10.0**power for power in range(-4, 4) for figure in (1, 2, 5)]
_COLUMNS: Final = 2


def sweep(title: str, width: float) -> Chart:
    """Seconds of a step by the size of buckets: a panel for each model, a line for each variant."""

    def draw(series: dict[str, Any]) -> Figure:
        figure, axes = _grid(len(series), width, 2.7)
        for axis, (name, lines) in zip(axes, series.items(), strict=False):
            labels = list(dict.fromkeys(point["label"] for points in lines.values() for point in points))
            for variant, points in lines.items():
                look = LOOKS[variant]
                places = [labels.index(point["label"]) + (look - 2) * 0.05 for point in points]
                middle, around = whiskers(points, "seconds")
                style: dict[str, Any] = {"color": COLOURS[look], "marker": MARKERS[look], "ls": DASHES[look]}
                axis.errorbar(places, middle, around, capsize=3, lw=1.4, ms=5, label=variant, **style)
            axis.set_xticks(range(len(labels)), labels, **_turned(labels))
            axis.set_ylim(bottom=0)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("bucket_cap_mb")
        _finish(figure, axes, title, "seconds a step")
        return figure

    return draw


def pairs(title: str, width: float) -> Chart:
    """Seconds of a step, float32 beside bfloat16 for each variant: a panel for each case."""

    def draw(series: dict[str, Any]) -> Figure:
        figure, axes = _grid(len(series), width, 2.5)
        for axis, (name, lines) in zip(axes, series.items(), strict=False):
            wires = list(dict.fromkeys(point["label"] for points in lines.values() for point in points))
            for index, wire in enumerate(wires):
                points = [next((p for p in some if p["label"] == wire), None) for some in lines.values()]
                known = [(place, point) for place, point in enumerate(points) if point is not None]
                places = [place + (index - (len(wires) - 1) / 2) * 0.38 for place, _ in known]
                middle, around = whiskers([point for _, point in known], "seconds")
                bars: dict[str, Any] = {"color": COLOURS[index], "hatch": HATCHES[index], "ec": "black", "lw": 0.5}
                axis.bar(places, middle, 0.36, yerr=around, capsize=3, label=wire, alpha=0.85, **bars)
            axis.set_xticks(range(len(lines)), [_BRIEFLY.get(variant, variant) for variant in lines], fontsize=8.5)
            axis.set_title(name, fontsize=9)
        _finish(figure, axes, title, "seconds a step")
        return figure

    return draw


def roofline(title: str, width: float) -> Chart:
    """GB/s by the size of the tensor, under the roofs of the stages: a panel for each number of workers."""

    def draw(series: dict[str, Any]) -> Figure:
        figure, axes = _grid(len(series), width, 2.9)
        speeds = [p["speed"] for each in series.values() for points in each["lines"].values() for p in points]
        top = max(max(each["roofs"].values()) for each in series.values())
        bottom = min(speed[0] for speed in speeds)
        for axis, (name, each) in zip(axes, series.items(), strict=False):
            axis.axhline(each["roofs"]["sealed"], color="black", ls="--", lw=1.2, label="roof, sealed")
            axis.axhline(each["roofs"]["unsealed"], color="black", ls=":", lw=1.2, label="roof, without seal and open")
            for variant, points in each["lines"].items():
                look = LOOKS[variant]
                middle, around = whiskers(points, "speed")
                style: dict[str, Any] = {"color": COLOURS[look], "marker": MARKERS[look], "ls": DASHES[look]}
                axis.errorbar(
                    [p["size"] for p in points], middle, around, capsize=2, lw=1.3, ms=4.5, label=variant, **style
                )
            _roof_axes(axis, sorted({p["size"] for points in each["lines"].values() for p in points}))
            axis.set_ylim(bottom / 1.6, top * 1.8)
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("size of the tensor")
        _finish(figure, axes, title, "GB/s, all workers")
        return figure

    return draw


def _roof_axes(axis: Axes, sizes: list[int]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator(sizes))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    axis.yaxis.set_major_locator(FixedLocator(_SPEEDS))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())
    for label in axis.get_xticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")


def scatter(title: str, width: float) -> Chart:
    """Predicted against measured: on the line is right, between the thin lines within 10 %."""

    def draw(series: dict[str, Any]) -> Figure:
        figure, axis = plt.subplots(figsize=(width, width * 0.82))
        points = [point for some in series.values() for point in some]
        low = min(min(point["measured"], point["predicted"]) for point in points) / 1.5
        high = max(max(point["measured"], point["predicted"]) for point in points) * 1.5
        axis.plot([low, high], [low, high], color="black", lw=1, label="right")
        for factor in (0.9, 1.1):
            words = "10 % off" if factor < 1 else None
            axis.plot([low, high], [low * factor, high * factor], color="black", lw=0.6, ls=":", label=words)
        for index, (name, some) in enumerate(series.items()):
            _cloud(axis, name, some, LOOKS.get(name, index))
        for scale in (axis.set_xscale, axis.set_yscale):
            scale("log")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(FuncFormatter(_seconds))
        axis.set_xlim(low, high)
        axis.set_ylim(low, high)
        axis.set_aspect("equal")
        axis.set_xlabel("measured")
        axis.set_ylabel("predicted")
        axis.set_title(title, fontsize=11, loc="left")
        handles = axis.get_legend_handles_labels()[0]
        if any(not point.get("scored", True) for point in points):
            handles.append(
                Line2D([], [], marker="o", mfc="white", mec="black", ls="", label="hollow: too noisy to count")
            )
        legend_below(figure, handles, 2, fontsize=9)
        return figure

    return draw


def _cloud(axis: Axes, name: str, points: list[dict[str, Any]], style: int) -> None:
    """The points of one variant; those that do not count are hollow."""
    for scored, face in ((True, COLOURS[style]), (False, "white")):
        chosen = [point for point in points if point.get("scored", True) is scored]
        across, up = [point["measured"] for point in chosen], [point["predicted"] for point in chosen]
        look: dict[str, Any] = {"marker": MARKERS[style], "mec": COLOURS[style], "mfc": face, "ls": "", "ms": 5}
        axis.plot(across, up, label=name if scored else None, **look)


def _seconds(value: float, _: object) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit * 0.999:
            return f"{value / unit:g} {name}"
    return f"{value:g} s"


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Panels in two columns, since they must be read on a phone; one alone gets the whole width."""
    columns = min(_COLUMNS, count)
    rows = math.ceil(count / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(width, 0.9 + height * rows), squeeze=False)
    axes = [axis for line in grid for axis in line]
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes


def _finish(figure: Figure, axes: list[Axes], title: str, left: str) -> None:
    """What all panels share: the title, the words on the left, one legend for all."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
        if axis.get_subplotspec() is not None and axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axis.set_ylabel(left)
    figure.suptitle(title, fontsize=11)
    legend_below(figure, list(handles.values()), 2, fontsize=9)


def _turned(labels: list[str]) -> dict[str, Any]:
    return {"rotation": 40, "ha": "right"} if len(labels) > 4 or max(map(len, labels)) > 7 else {}
