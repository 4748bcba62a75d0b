"""Draws figures into a folder, as SVG and as PNG, and makes an SVG fit to stand inside a page."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Final

from ringfence.lab.report.charts import across, panels, stacked
from ringfence.lab.report.figure import Figure
from ringfence.lab.report.plots import pairs, roofline, scatter, sweep
from ringfence.lab.report.style import Chart, save

NAME: Final = re.compile(r"[a-z0-9-]+")  # it names files, ids in the page, and stands in patterns
WIDTH: Final = 5.4  # inches: on a phone the words of the picture are still read


def chart_of(figure: Figure) -> Chart:
    """How this figure is drawn."""
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
        case other:
            raise ValueError(f"no chart is called {other}")


def draw(figure: Figure, folder: Path) -> str:
    """Both files of a figure; its SVG for the page."""
    if not NAME.fullmatch(figure.name):
        raise ValueError(f"{figure.name!r} names no figure: small letters, digits and hyphens do")
    save(figure.name, figure.numbers, chart_of(figure), folder, folder)
    return inline((folder / f"{figure.name}.svg").read_text(), figure.name, figure.title, figure.says)


def inline(svg: str, name: str, title: str, description: str) -> str:
    """The picture alone, with names of its own: several pictures in one page must not share an id."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<title>.*?</title>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{name}-\2"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    head, _, rest = body.partition(">")
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    told = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    return f'{head} role="img" aria-labelledby="{name}-title {name}-desc">{told}{rest}'.strip()
