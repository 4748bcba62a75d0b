"""Draws figures into a folder, as SVG and as PNG."""

from __future__ import annotations

import base64
import functools
import re
from pathlib import Path
from typing import Final

from ringfence_lab.report.charts import CHARTS
from ringfence_lab.report.figure import Figure
from ringfence_lab.report.style import Chart, save

NAME: Final = re.compile(r"[a-z0-9-]+")  # it names files and sections of the page
WIDTH: Final = 5.4  # inches: on a phone the words of the picture are still read


def chart_of(figure: Figure) -> Chart:
    """Return the function that draws a figure."""
    return functools.partial(CHARTS[figure.chart], **{"title": figure.title, "width": WIDTH, **figure.options})


def draw(figure: Figure, folder: Path) -> str:
    """Draw a figure into `folder` as SVG and PNG.

    Returns the SVG as a `data:` URI. In an `<img>` element its ids are its own, so that several figures share a page.
    """
    if not NAME.fullmatch(figure.name):
        raise ValueError(f"{figure.name!r} names no figure: small letters, digits and hyphens do")
    save(figure.name, figure.numbers, chart_of(figure), folder, folder)
    return f"data:image/svg+xml;base64,{base64.b64encode((folder / f'{figure.name}.svg').read_bytes()).decode()}"
