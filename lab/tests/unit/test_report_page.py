"""The page: its words as they are (a snapshot), and that it needs nothing but itself.

`python -m lab.tests.unit.test_report_page` writes the snapshot anew; look at the difference before you keep it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from lab.tests.unit.report_samples import everything
from lab.tests.unit.test_report_figures import figures_of, study_of
from ringfence_lab.report.figure import Missing, Picture
from ringfence_lab.report.page import page
from ringfence_lab.report.summary_text import chapter

SNAPSHOT = Path(__file__).with_name("report_page.html")
EMPTY = {"meta", "br", "hr", "img", "link", "input"}


def rendered() -> str:
    """The page of the study with every kind of cell, without style and pictures, which other tests look at."""
    study = study_of(everything())
    figures = [*figures_of(study), Missing("nothing", "A figure that is not there", "nobody measured it")]
    pictures = {each.name: f"data:{each.name}" for each in figures if isinstance(each, Picture)}
    text = page(study, chapter(study, figures), pictures)
    return re.sub(r"<style>.*?</style>", "<style></style>", text, flags=re.DOTALL)


class Structure(HTMLParser):
    """Tags that are opened and closed in order, ids, and everything that is fetched or linked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag not in EMPTY:
            self.open.append(tag)
        if found.get("id"):
            self.ids[str(found["id"])] += 1
        if tag == "a":
            self.links.append(str(found["href"]))
        self.fetched += [str(found[name]) for name in ("src", "data", "poster") if name in found]
        assert tag not in ("script", "link", "iframe", "object")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_words_of_the_page_are_those_that_were_looked_at() -> None:
    assert rendered() == SNAPSHOT.read_text(), "if this is meant: python -m lab.tests.unit.test_report_page"


def test_the_page_is_whole_and_fetches_nothing() -> None:
    found = Structure(rendered())
    assert found.fetched
    assert all(address.startswith("data:") for address in found.fetched)
    assert [name for name, count in found.ids.items() if count > 1] == []
    inside = {link.removeprefix("#") for link in found.links if link.startswith("#")}
    assert inside <= set(found.ids)
    assert all(link.startswith(("#", "https://")) for link in found.links)


def test_the_style_fetches_nothing_and_knows_paper_and_phones() -> None:
    study = study_of(everything())
    style = re.findall(r"<style>(.*?)</style>", page(study, chapter(study, []), {}), flags=re.DOTALL)[0]
    assert "@media print" in style
    assert "max-width: 34rem" in style
    assert "url(" not in style
    assert "@import" not in style


def test_what_the_machine_says_of_itself_is_escaped() -> None:
    assert "<of some kind>" not in rendered()
    assert "&lt;of some kind&gt;" in rendered()


def test_the_name_of_a_figure_is_escaped() -> None:
    study = study_of(everything())
    figure = replace(next(each for each in figures_of(study) if isinstance(each, Picture)), name='x"><script>')
    text = page(study, chapter(study, [figure]), {figure.name: "data:"})
    assert "<script>" not in text
    assert text.count("x&#34;&gt;&lt;script&gt;") == 2  # the link and what it leads to


def test_a_cell_with_too_few_rounds_says_so_in_its_heading() -> None:
    rows = [{**row, "rounds": 2} if row["cell"] == "gpt2-2w" else row for row in everything()]
    study = study_of(rows)
    text = page(study, chapter(study, []), {})
    assert "gpt2, 2 workers · Gloo / Gloo ±0.05: too few rounds to count</th>" in text
    assert "1 more cell has too few rounds to count." in text


def test_every_variant_of_every_cell_is_in_the_table() -> None:
    rows, text = everything(), rendered()
    table = text[text.index('id="cells"') : text.index('id="machine"')]
    assert table.count("<tr><td>") == len(rows)
    assert table.count('scope="rowgroup"') == len({row["cell"] for row in rows})


def test_a_figure_that_is_missing_is_named_with_the_reason() -> None:
    assert "A figure that is not there: nobody measured it." in rendered()


if __name__ == "__main__":
    SNAPSHOT.write_text(rendered())
