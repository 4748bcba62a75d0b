"""Draws figures into a folder, as SVG and as PNG."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Final

from ringfence_lab.report import tee_charts
from ringfence_lab.report.charts import across, panels, stacked
from ringfence_lab.report.figure import Figure
from ringfence_lab.report.plots import pairs, roofline, scatter, sweep
from ringfence_lab.report.style import Chart, save

NAME: Final = re.compile(r"[a-z0-9-]+")  # it names files and sections of the page
WIDTH: Final = 5.4  # inches: on a phone the words of the picture are still read


def chart_of(figure: Figure) -> Chart:
    """Return the function that draws a figure."""
    match figure.chart:
        case "across":
            return across(figure.title, width=WIDTH)
        case "panels":
            columns = 3 if max(map(len, figure.numbers.values())) < 5 else 2  # the numbers over the points need room
            return panels(figure.title, width=WIDTH, columns=columns, under=figure.axis)
        case "stacked":
            return stacked(figure.title, width=WIDTH, under="share of the time it took", least=0.09)
        case "sweep":
            return sweep(figure.title, WIDTH)
        case "pairs":
            return pairs(figure.title, WIDTH)
        case "roofline":
            return roofline(figure.title, WIDTH)
        case "scatter":
            return scatter(figure.title, WIDTH)
        case "tee-factors":
            return tee_charts.factors(figure.title, WIDTH)
        case "tee-growth":
            return tee_charts.growth(figure.title, WIDTH, figure.axis)
        case "tee-waterfall":
            return tee_charts.waterfall(figure.title, WIDTH)
        case "tee-tornado":
            return tee_charts.tornado(figure.title, WIDTH)
        case other:
            raise ValueError(f"no chart is called {other}")


def draw(figure: Figure, folder: Path) -> str:
    """Draw a figure into `folder` as SVG and PNG.

    Returns the SVG as a `data:` URI. In an `<img>` element its ids are its own, so that several figures share a page.
    """
    if not NAME.fullmatch(figure.name):
        raise ValueError(f"{figure.name!r} names no figure: small letters, digits and hyphens do")
    save(figure.name, figure.numbers, chart_of(figure), folder, folder)
    return f"data:image/svg+xml;base64,{base64.b64encode((folder / f'{figure.name}.svg').read_bytes()).decode()}"
