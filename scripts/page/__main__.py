"""`scripts/figures`: write the tables and draw the pictures of the documents, or say with --check what is stale."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ringfence_lab.report.figure import Picture, digest
from scripts import generated
from scripts.page import FIGURES, RESULTS, admission, costs, gpu_tee, plan, printed, recovery

MODULES: Final = (costs, gpu_tee, admission, recovery, plan, printed)


def filled(module: ModuleType, text: str, found: Any) -> str:
    """The text of a page with fresh tables at the markers of a module; a marker that names no table is a mistake."""
    return generated.filled(text, module.KIND, lambda name: module.TABLES[name](found))


def stale(module: ModuleType, found: Any) -> list[str]:
    """What does not show these results: documents by their text, pictures by the digest they carry."""
    names = [page.name for page in module.PAGES if page.read_text() != filled(module, page.read_text(), found)]
    for figure in pictures(module, found):
        path = FIGURES / f"{figure.name}.svg"
        if not path.exists() or f"samples {digest(figure.numbers)}" not in path.read_text():
            names.append(path.name)
    return names


def pictures(module: ModuleType, found: Any) -> list[Picture]:
    """The pictures of a module that these results have numbers for."""
    return [figure for figure in module.pictures(found) if figure.numbers] if hasattr(module, "pictures") else []


def draw(figures: list[Picture], vectors: Path, pixels: Path) -> None:
    """Draw pictures as SVG for the documents and as PNG for eyes."""
    from ringfence_lab.report.charts import chart_of  # late: --check needs no matplotlib
    from ringfence_lab.report.style import save

    for figure in figures:
        save(figure.name, figure.numbers, chart_of(figure), vectors, pixels)
        print(f"drew {vectors / figure.name}.svg")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything is stale")
    options = parser.parse_args()
    results = {module: module.read(RESULTS) for module in MODULES}
    if options.check:
        names = [name for module, found in results.items() for name in stale(module, found)]
        print("\n".join(f"{name} is stale: run scripts/figures" for name in names) or "all is fresh")
        return 1 if names else 0
    for module, found in results.items():
        for page in module.PAGES:
            page.write_text(filled(module, page.read_text(), found))
            print(f"wrote {page.name}")
        with tempfile.TemporaryDirectory() as pixels:
            draw(pictures(module, found), FIGURES, Path(pixels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
