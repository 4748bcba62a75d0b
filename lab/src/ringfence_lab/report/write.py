"""Writes the report of a study: reads the results, draws the figures, renders the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ringfence.config.private_files import replace_file
from ringfence.errors import ConfigurationError
from ringfence_lab.report import overhead, steps, summary_text, tee, tee_page
from ringfence_lab.report.figure import Builder, Missing, Picture
from ringfence_lab.report.page import Chapter, page
from ringfence_lab.report.study import Study, read

PAGE: Final = "report.html"
TEE_PAGE: Final = "gpu-tee.html"
FIGURES: Final = "figures"
_BESIDE: Final = {PAGE: "The other cells of this study", TEE_PAGE: "GPU TEEs, on a page of their own"}
BUILDERS: Final[tuple[Builder, ...]] = (
    overhead.models,
    overhead.variants,
    steps.stages,
    steps.buckets,
    steps.wires,
    overhead.rates,
    overhead.sizes,
)
TEE_BUILDERS: Final[tuple[Builder, ...]] = (tee.models, tee.switches, tee.ringfence)


@dataclass(frozen=True)
class Report:
    """The pages and figures that were written, and the figures that the study has no numbers for."""

    pages: list[Path]
    figures: list[Picture]
    missing: list[Missing]


def write(source: Path, target: Path, say: Callable[[str], None] = lambda _: None) -> Report:
    """Write the report of the study in `source` to `target`. `say` is called with each step.

    Raises ConfigurationError if the report cannot be written.
    """
    found = read(source)
    on_tees, others = found.part(lambda kind: kind == tee.KIND), found.part(lambda kind: kind != tee.KIND)
    pages: dict[str, tuple[Study, Chapter]] = {}
    if others.cells or not on_tees.cells:
        figures = [figure for build in BUILDERS for figure in build(others)]
        pages[PAGE] = others, summary_text.chapter(others, figures)
    if on_tees.cells:
        figures = [figure for build in TEE_BUILDERS for figure in build(on_tees)]
        pages[TEE_PAGE] = on_tees, tee_page.chapter(on_tees, figures)
    try:
        (target / FIGURES).mkdir(parents=True, exist_ok=True)
        for name, (study, chapter) in pages.items():
            beside = {address: words for address, words in _BESIDE.items() if address in pages and address != name}
            text = page(study, chapter, _draw(chapter, target / FIGURES, say), beside)
            replace_file(target / name, text.encode(), 0o644)
    except OSError as error:
        raise ConfigurationError(f"cannot write the report to {target}: {error.strerror}") from error
    chapters = [chapter for _, chapter in pages.values()]
    return Report(
        pages=[target / name for name in pages],
        figures=[figure for chapter in chapters for figure in chapter.drawn],
        missing=[figure for chapter in chapters for figure in chapter.missing],
    )


def _draw(chapter: Chapter, folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    """Draw the figures of a page into `folder`, and return them as `data:` URIs by name."""
    from ringfence_lab.report.charts import draw  # late: it imports matplotlib, which takes a second

    found = {}
    for figure in chapter.drawn:
        say(f"drawing: {figure.title}")
        found[figure.name] = draw(figure, folder)
    return found
