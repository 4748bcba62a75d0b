"""How pictures look: Okabe and Ito's colours, which the colour-blind can tell apart, and a shape or hatch of its own for
each, so that a black and white print says the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ringfence_lab.report.figure import digest

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
MARKERS: Final = ("o", "s", "D", "^", "v", "P")
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
LOOKS: Final = {  # a variant has the same colour, shape and dash in every picture
    "ringfence": 0,
    "ringfence, unsealed": 1,
    "sealed hop by hop": 2,
    "TLS 1.3 ring": 3,
    "plaintext Gloo": 4,
    "no communication": 5,
    "confidential, hop by hop": 1,
    "all three": 2,
    "direct channel": 3,
    "overlap": 4,
    "parallel authentication": 5,
    "published": 4,
}
STAGES: Final = {
    "compute": ("#FFFFFF", "--"),
    "seal": ("#0072B2", ""),
    "open": ("#56B4E9", "//"),
    "lock": ("#D55E00", ".."),
    "reduce": ("#009E73", ""),
    "send": ("#E69F00", ""),
    "receive": ("#F0E442", "\\\\"),
    "wire": ("#E69F00", "\\\\"),
    "wait": ("#DDDDDD", ""),
    "rest": ("#999999", "xx"),
}
WHITE: Final = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
BAND: Final = "#BBBBBB"
WIDTH: Final = 7.4  # inches; the report draws narrower ones, which a phone can show
STYLE: Final[dict[Any, Any]] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "ringfence",
    "svg.fonttype": "path",
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
}
_TICKS: Final = {
    4: (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3),
    12: (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7),
}
_WIDE_TICKS: Final = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

Chart = Callable[[dict[str, Any]], Figure]


def save(name: str, series: dict[str, Any], chart: Chart, vectors: Path, pixels: Path) -> None:
    """One picture, as SVG for documents and as PNG for everything else; the same numbers give the same bytes."""
    with plt.rc_context(STYLE):
        figure = chart(series)
        figure.set_layout_engine("constrained")
        about = {"Date": None, "Title": f"ringfence: {name}", "Description": f"samples {digest(series)}"}
        figure.savefig(vectors / f"{name}.svg", metadata=about)
        figure.savefig(pixels / f"{name}.png", dpi=150, metadata={"Software": None})
        plt.close(figure)


def number_axis(axis: Any, low: float, high: float) -> None:
    """Twice as slow and twice as fast are equally far from 1."""
    marks = next((marks for most, marks in _TICKS.items() if high / low < most), _WIDE_TICKS)
    axis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def span(every: Iterable[list[dict[str, Any]]], what: str = "ratio") -> tuple[float, float]:
    """Room for every interval. Of ratios, a band that is wider than half to twice runs out of the picture."""
    points = [point for some in every for point in some]
    low, high = min(point[what][0] for point in points), max(point[what][2] for point in points)
    if what == "ratio":
        widest = max(point["resolution"] for point in points)
        low, high = min(low, max(0.5, 1 - widest), 0.8), max(high, min(2.0, 1 + widest), 1.25)
    return low / 1.15, high * 1.3


def whiskers(points: list[dict[str, Any]], what: str = "ratio") -> tuple[list[float], list[list[float]]]:
    """The medians, and how far the intervals reach below and above them."""
    middle = [point[what][1] for point in points]
    below = [max(0.0, point[what][1] - point[what][0]) for point in points]
    above = [max(0.0, point[what][2] - point[what][1]) for point in points]
    return middle, [below, above]


def legend_below(figure: Figure, handles: Sequence[Artist], columns: int, **look: Any) -> None:
    """Add a legend under the axes, in at most `columns` columns and in no more than the figure is wide for."""
    for count in range(columns, 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=count, frameon=False, **look)
        if count == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()
