"""What commands of the tests printed: tables of attacks, and blocks of text, each with the machine that it was measured on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from scripts.page import LOG, ROOT
from tests.attack import crowd
from tests.fuzz import cpu

KIND: Final = "printed"
PAGES: Final = tuple(
    ROOT / "docs" / name
    for name in (
        "security/fuzzing.md",
        "benchmarks/what-it-costs.md",
        "guides/across-regions.md",
        "guides/private-sums.md",
    )
)


def _block(path: Path) -> str:
    return f"```text\n{path.read_text().rstrip()}\n```"


# By part of the campaign: its file, and how to show that.
SHOWN: Final[dict[str, tuple[str, Callable[[Path], str]]]] = {
    "costs": ("cpu-before-authentication.jsonl", cpu.table),
    "crowd": ("crowd.jsonl", crowd.table),
    "forwarded": ("forwarded.txt", _block),
    "record": ("record.txt", _block),
    "checkpoints": ("checkpoints.txt", _block),
    "private": ("private.txt", _block),
    "sites": ("sites.txt", _block),
}


def read(results: Path) -> Path:
    return results


def _shown(results: Path, part: str) -> str:
    name, show = SHOWN[part]
    if not (results / name).exists():
        return f"Not measured on this tree yet: `scripts/campaign {part}`."
    lines = map(json.loads, (results / LOG).read_text().splitlines()) if (results / LOG).exists() else ()
    found = {each["part"]: each for each in lines}.get(part)
    where = f"{found['date'][:10]}, {found['cpu']}" if found else "of another tree"
    return f"{show(results / name)}\n\n`scripts/campaign {part}`, {where}."


def _named(part: str) -> Callable[[Path], str]:
    return lambda results: _shown(results, part)


TABLES: Final = {part: _named(part) for part in SHOWN}
