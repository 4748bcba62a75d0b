"""Puts tables between the markers of the documents, and finds what is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from scripts import generated
from scripts.page.edition import Edition
from scripts.page.series import SERIES, digest
from scripts.page.tables import TABLES

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / "docs" / "results"
FIGURES: Final = ROOT / "docs" / "figures"
PAGE: Final = ROOT / "docs" / "benchmarks" / "what-it-costs.md"
TARGETS: Final = ROOT / "docs" / "benchmarks" / "targets.md"
HOME: Final = ROOT / "docs" / "index.md"
README: Final = ROOT / "README.md"


def documents(edition: Edition) -> list[Path]:
    """The README and the home page show full measurements only; a trial run does not reach them."""
    return [PAGE, TARGETS, README, HOME] if edition.full else [PAGE, TARGETS]


def filled(text: str, edition: Edition) -> str:
    """The text with a fresh table at each marker; a marker that names no table is a mistake."""
    return generated.filled(text, "figures", lambda name: TABLES[name](edition))


def stale(edition: Edition) -> list[str]:
    """What does not show these samples: documents by their text, pictures by the digest they carry."""
    found = [path.name for path in documents(edition) if path.read_text() != filled(path.read_text(), edition)]
    for name, series in SERIES.items():
        path, numbers = FIGURES / f"{name}.svg", series(edition)
        if numbers and (not path.exists() or f"samples {digest(numbers)}" not in path.read_text()):
            found.append(path.name)
    return found
